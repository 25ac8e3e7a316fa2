"""Losses in captured steps, and what is refused as a model, a loss or a target."""

import copy

import pytest
import torch
from oracles.eager_steps import KEEP, TOLERANCE, classes, double, held_equals, images
from oracles.step_interpreter import Interpreter
from oracles.step_networks import SmallGPT
from torch import nn
from torch.nn import functional as F

from torchedge.errors import CaptureError, InputError
from torchedge.tracing.steps import capture_step

LOSSES = {
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "weighted": (nn.CrossEntropyLoss(weight=torch.rand(5).double()), classes),
    "ignoring": (nn.CrossEntropyLoss(ignore_index=2), lambda: torch.tensor([0, 2, 2, 4])),
    "soft_targets": (nn.CrossEntropyLoss(), lambda: images(4, 5).softmax(1)),
    "summed": (nn.CrossEntropyLoss(reduction="sum"), classes),
    "nll": (lambda out, y: F.nll_loss(out.log_softmax(1), y), classes),
    "mse": (nn.MSELoss(), lambda: images(4, 5)),
    "l1": (nn.L1Loss(), lambda: images(4, 5)),
    "smooth_l1": (nn.SmoothL1Loss(beta=0.5), lambda: images(4, 5)),
    "huber": (nn.HuberLoss(), lambda: images(4, 5)),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=torch.rand(5).double()), lambda: images(4, 5).sigmoid()),
    "kl": (
        lambda out, y: F.kl_div(out.log_softmax(1), y, reduction="batchmean"),
        lambda: images(4, 5).softmax(1),
    ),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keep", [frozenset(), KEEP], ids=["apart", "whole"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, keep):
    loss, make = LOSSES[name]
    model = double(lambda: nn.Linear(3, 5))
    x, y = images(4, 3), make()
    captured = capture_step(model, x, targets=y, loss=loss, keep=keep)
    found = Interpreter(captured.tensors).run(captured.step, x, y)
    value = loss(model(x), y)
    value.backward()
    for tensor, wanted in zip(found, (value.detach(), model.weight.grad, model.bias.grad), strict=True):
        torch.testing.assert_close(tensor, wanted, **TOLERANCE)


@pytest.mark.slow
def test_a_model_may_bring_its_loss_and_tie_its_weights():
    model = double(SmallGPT)
    eager = copy.deepcopy(model)
    tokens, labels = torch.randint(23, (2, 3, 8))
    captured = capture_step(
        model,
        (tokens,),
        {"labels": labels},
        loss="model",
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    )
    names = [value.name for value in captured.step.parameters]
    assert "words.weight" in names and "head.weight" not in names
    assert [captured.step.values[i].name for i in captured.step.inputs] == ["tokens", "labels"]
    interpreter = Interpreter(captured.tensors)
    optimizer = torch.optim.Adam(eager.parameters(), lr=0.01)
    for _ in range(3):
        (found,) = interpreter.run(captured.step, tokens, labels)
        value = eager(tokens, labels)["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found, value.detach(), **TOLERANCE)
    held_equals(interpreter, eager)


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


def linear_step(**options):
    model = nn.Linear(3, 5)
    given = {"targets": classes(), "loss": F.cross_entropy, **options}
    if callable(given.get("optimizer")):
        given["optimizer"] = given["optimizer"](model)
    return capture_step(model, torch.randn(4, 3), **given)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, InputError, "0-d"),
        ({"loss": lambda out, y: 3.0}, InputError, "0-d tensor"),
        ({"loss": lambda out, y: out.detach().mean()}, InputError, "depend on any parameter"),
        ({"loss": "model", "targets": ()}, InputError, "own loss"),
        ({"loss": None, "optimizer": lambda m: torch.optim.SGD(m.parameters())}, InputError, "a loss"),
        ({"optimizer": lambda m: torch.optim.ASGD(m.parameters())}, InputError, "ASGD"),
        ({"optimizer": lambda m: torch.optim.SGD(nn.Linear(2, 2).parameters())}, InputError, "not the model"),
        ({"optimizer": "sgd"}, InputError, "torch.optim.Optimizer"),
        ({"loss": nn.CrossEntropyLoss(), "targets": (classes(), classes())}, InputError, "argument"),
        ({"targets": torch.randn(4, 7)}, CaptureError, "raised"),
        ({"accumulation": 0}, InputError, "accumulation"),
        ({"accumulation": 2}, InputError, "without an optimizer"),
        ({"loss": 3}, InputError, "loss is 3; expected a function"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        linear_step(**options)
    assert "\n" not in str(caught.value)


def test_a_module_whose_mode_torch_export_fixed_is_named():
    x = torch.randn(2, 3)
    exported = torch.export.export(nn.Linear(3, 3), (x,)).module()
    with pytest.raises(
        CaptureError, match=r"cannot change to evaluation mode.*pass the model that was exported"
    ):
        capture_step(exported, x, training=False)
    assert capture_step(exported, x, training=True).output_names


def test_a_wrong_shape_is_an_error_without_a_log(capfd, caplog):
    with pytest.raises(CaptureError, match="same reduction dim"):
        capture_step(nn.Linear(3, 3), torch.randn(2, 4), targets=classes(2, of=3), loss=F.cross_entropy)
    assert not capfd.readouterr().err and not [r for r in caplog.records if r.levelname == "ERROR"]


def _halved(output, target):
    loss = F.mse_loss(output, target)
    return loss / 2 if loss > 1 else loss


@pytest.mark.parametrize(
    ("loss", "targets", "name", "call"),
    [
        (nn.GaussianNLLLoss(), [torch.ones(2, 3)] * 2, "GaussianNLLLoss", "gaussian_nll_loss: "),
        (lambda o, t: F.ctc_loss(o[:, None], t, t[0], t[0]), torch.tensor([[1]]), "<lambda>", "ctc_loss: "),
        (_halved, torch.ones(2, 3), "_halved", "aten"),
    ],
)  # fmt: skip
def test_a_loss_that_reads_values_is_named_in_place_of_the_model(loss, targets, name, call):
    with pytest.raises(
        CaptureError, match=rf"^the loss {name} decides by values of tensors \({call}.*alone: "
    ):
        capture_step(nn.Linear(3, 3), torch.randn(2, 3), targets=targets, loss=loss)


@pytest.mark.slow
def test_models_that_cannot_be_captured_are_refused():
    x, y = torch.randn(2, 3), classes(2, of=3)
    with pytest.raises(CaptureError, match="decides by values"):
        capture_step(Choosing(), x, targets=y, loss=F.cross_entropy)
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        capture_step(nn.Linear(3, 3).requires_grad_(False), x, targets=y, loss=F.cross_entropy)
    with pytest.raises(CaptureError, match="sparse=True"):
        embedding = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten())
        capture_step(embedding, torch.tensor([[1], [2]]), targets=y, loss=F.cross_entropy)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        capture_step("resnet18", x)


def test_a_refused_capture_leaves_everything_as_found():
    model, x, y = Choosing(), torch.randn(2, 3), classes(2, of=3)
    weight, state = model.linear.weight, torch.get_rng_state()
    flags = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(CaptureError):
        capture_step(model, x, targets=y, loss=F.cross_entropy)
    assert model.linear.weight is weight and type(weight.detach()) is torch.Tensor
    assert not model._forward_hooks and not model.linear._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert not torch.compiler.is_compiling()
    assert (torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()) == flags


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 5), nn.Dropout(0.5)

    def forward(self, x):
        scores = self.linear(self.dropout(x))
        return {"scores": scores, "best": (scores.argmax(1), "name")}


def test_an_inference_rebuilds_what_the_model_returns():
    model, x = Parts().double(), images(4, 3)
    captured = capture_step(model, x, training=False)
    assert model.training and captured.output_names == ("scores", "best_0")
    results = captured.rebuild(Interpreter(captured.tensors).run(captured.step, x))
    expected = model.eval()(x)
    torch.testing.assert_close(results["scores"], expected["scores"], **TOLERANCE)
    assert torch.equal(results["best"][0], expected["best"][0]) and results["best"][1] == "name"


def test_a_loss_alone_is_an_inference():
    model, x, y = double(lambda: nn.Linear(3, 5)).requires_grad_(False), images(4, 3), classes()
    captured = capture_step(model, x, targets=y, loss=F.cross_entropy, gradients=False, training=False)
    (value,) = Interpreter(captured.tensors).run(captured.step, x, y)
    assert captured.output_names == ("loss",) and len(captured.step.outputs) == 1
    torch.testing.assert_close(value, F.cross_entropy(model(x), y), **TOLERANCE)
    with pytest.raises(InputError, match="an optimizer without a loss to differentiate"):
        linear_step(gradients=False, optimizer=lambda m: torch.optim.SGD(m.parameters()))
