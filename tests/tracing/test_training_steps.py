"""Captured training steps, run by PyTorch's own operators, against eager PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from oracles.step_interpreter import Interpreter, philox_uniform
from oracles.step_networks import FSRCNN, SmallCNN, SmallGPT, SmallViT
from torch import nn
from torch.nn import functional as F

from torchedge.errors import CaptureError, InputError
from torchedge.tracing.decompositions import decompositions
from torchedge.tracing.training_steps import capture_step

KEEP = frozenset(
    """
    convolution convolution_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_batch_norm_backward native_layer_norm
    native_layer_norm_backward native_group_norm native_group_norm_backward _softmax _safe_softmax
    _softmax_backward_data _log_softmax _log_softmax_backward_data max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward embedding embedding_dense_backward nll_loss_forward nll_loss_backward
    gelu gelu_backward addmm mm bmm index gather scatter
    """.split()  # noqa: SIM905 - read as the list it is
)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def images(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def classes(count=4, of=5):
    return torch.randint(of, (count,))


def feed_classes(side):
    return lambda: ((images(4, 3, side, side),), (classes(),))


def feed_fsrcnn():
    return (images(2, 1, 6, 6),), (images(2, 1, 12, 12),)


NETWORKS = {
    "cnn": (SmallCNN, feed_classes(8), F.cross_entropy),
    "vit": (SmallViT, feed_classes(16), F.cross_entropy),
    "fsrcnn": (lambda: FSRCNN(features=8, shrunk=4, depth=1), feed_fsrcnn, F.mse_loss),
    "gpt": (
        SmallGPT,
        lambda: ((torch.randint(23, (3, 8)),), (torch.randint(23, (3, 8)),)),
        lambda out, target: F.cross_entropy(out["logits"].transpose(1, 2), target),
    ),
}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_decay": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "dampened": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_maximize": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.5, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam_all": lambda ps: torch.optim.Adam(
        ps, lr=0.01, betas=(0.3, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "adam_betas_0": lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.0, 0.0)),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adamw_amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
}


def double(network):
    torch.manual_seed(0)
    return network().double()


def held_equals(interpreter, model, optimizer=None):
    """Parameters, buffers and the optimizer's tensors are what the interpreter holds."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in interpreter.held:
            torch.testing.assert_close(interpreter.held[name], tensor.detach(), **TOLERANCE, msg=name)
    for name, parameter in model.named_parameters() if optimizer else ():
        for kind, tensor in optimizer.state[parameter].items():
            key = "optimizer.step" if kind == "step" else f"optimizer.{name}.{kind}"
            if kind != "step" or key in interpreter.held:
                found = interpreter.held[key].to(tensor.dtype)
                torch.testing.assert_close(found, tensor, **TOLERANCE, msg=key)


def train(model, optimizer, loss, batch, divisor=1):
    """One eager step (without the update if no optimizer is given)."""
    args, targets = batch
    value = loss(model(*args), *targets)
    (value / divisor).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return value.detach()


@pytest.mark.parametrize("keep", [frozenset(), KEEP], ids=["apart", "whole"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_equal_eager_steps(name, keep):
    build, feed, loss = NETWORKS[name]
    model = double(build)
    eager = copy.deepcopy(model)
    args, targets = feed()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    captured = capture_step(
        model,
        args,
        targets=targets,
        loss=loss,
        keep=keep,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )
    interpreter = Interpreter(captured.tensors)
    for _ in range(4):
        args, targets = feed()
        (found,) = interpreter.run(captured.step, *args, *targets)
        torch.testing.assert_close(found, train(eager, optimizer, loss, (args, targets)), **TOLERANCE)
    held_equals(interpreter, eager, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_pytorch_s(name):
    model = double(SmallCNN)
    eager = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](eager.parameters())
    feed = feed_classes(8)
    args, targets = feed()
    captured = capture_step(
        model, args, targets=targets, loss=F.cross_entropy, optimizer=OPTIMIZERS[name](model.parameters())
    )
    interpreter = Interpreter(captured.tensors)
    for _ in range(4):
        args, targets = feed()
        interpreter.run(captured.step, *args, *targets)
        train(eager, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, eager, optimizer)


@pytest.mark.parametrize("name", ["dampened", "adam", "adam_all"])
def test_a_capture_goes_on_where_the_optimizer_stands(name):
    model = double(SmallCNN)
    optimizer = OPTIMIZERS[name](model.parameters())
    feed = feed_classes(8)
    for _ in range(2):
        train(model, optimizer, F.cross_entropy, feed())
    args, targets = feed()
    captured = capture_step(model, args, targets=targets, loss=F.cross_entropy, optimizer=optimizer)
    interpreter = Interpreter(captured.tensors)
    for _ in range(3):
        args, targets = feed()
        interpreter.run(captured.step, *args, *targets)
        train(model, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, model)


def test_float32_steps_stay_close_to_float64_with_adam():
    """The bias corrections do not cancel: 1 - 0.999^step would have four digits in float32."""
    torch.manual_seed(0)
    model = SmallCNN()
    eager = copy.deepcopy(model).double()
    optimizer = torch.optim.Adam(eager.parameters(), lr=0.01)
    x, y = images(4, 3, 8, 8, dtype=torch.float32), classes()
    captured = capture_step(
        model, x, targets=y, loss=F.cross_entropy, optimizer=torch.optim.Adam(model.parameters(), lr=0.01)
    )
    interpreter = Interpreter(captured.tensors)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    interpreter.run(captured.step, x, y)
    train(eager, optimizer, F.cross_entropy, ((x.double(),), (y,)))
    for name, parameter in eager.named_parameters():
        moved, wanted = interpreter.held[name].double() - before[name], parameter.detach() - before[name]
        assert (moved - wanted).norm() < 2e-5 * wanted.norm() + 1e-6


def test_groups_have_their_own_settings_and_learning_rates():
    def build(model):
        return torch.optim.SGD(
            [
                {"params": model.head.parameters(), "lr": 0.5, "momentum": 0.9},
                {"params": [*model.first.parameters(), *model.norm.parameters()]},
            ],
            lr=0.1,
            weight_decay=0.01,
        )

    model = double(SmallCNN)
    eager = copy.deepcopy(model)
    optimizer, feed = build(eager), feed_classes(8)
    args, targets = feed()
    captured = capture_step(model, args, targets=targets, loss=F.cross_entropy, optimizer=build(model))
    assert list(captured.step.hyperparameters) == ["lr", "lr_1"]
    assert (captured.tensors["lr"].item(), captured.tensors["lr_1"].item()) == (0.5, 0.1)
    interpreter = Interpreter(captured.tensors)
    for rate in (0.1, 0.2):
        args, targets = feed()
        interpreter.held["lr_1"] = torch.tensor(rate, dtype=torch.float64)
        optimizer.param_groups[1]["lr"] = rate
        interpreter.run(captured.step, *args, *targets)
        train(eager, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, eager)
    written = {captured.step.graph.values[old].name for old, _ in captured.step.updates}
    assert not written & {"second.weight", "second.bias"}, "in no group, so not updated"


def test_gradients_accumulate_over_batches():
    model = double(SmallCNN)
    eager = copy.deepcopy(model)
    optimizer, feed = torch.optim.AdamW(eager.parameters(), lr=0.01), feed_classes(8)
    args, targets = feed()
    captured = capture_step(
        model,
        args,
        targets=targets,
        loss=F.cross_entropy,
        accumulate=3,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    assert captured.accumulating is not None
    interpreter = Interpreter(captured.tensors)
    for count in range(1, 7):
        args, targets = feed()
        last = count % 3 == 0
        step = captured.step if last else captured.accumulating
        (found,) = interpreter.run(step, *args, *targets)
        wanted = train(eager, optimizer if last else None, F.cross_entropy, (args, targets), divisor=3)
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    held_equals(interpreter, eager, optimizer)


def test_frozen_layers_get_no_gradient():
    model = double(SmallCNN)
    model.first.requires_grad_(False)
    model.norm.eval()
    eager = copy.deepcopy(model)
    optimizer, feed = torch.optim.SGD(eager.parameters(), lr=0.1), feed_classes(8)
    args, targets = feed()
    captured = capture_step(
        model,
        args,
        targets=targets,
        loss=F.cross_entropy,
        keep=KEEP,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    kinds = [op.kind for op in captured.step.graph.ops]
    assert kinds.count("convolution") == 2
    assert kinds.count("convolution_backward") == 1, "the first convolution is frozen"
    trainable = {v.name for v in captured.step.graph.parameters if v.trainable}
    assert trainable == {n for n, p in model.named_parameters() if p.requires_grad}
    interpreter = Interpreter(captured.tensors)
    for _ in range(2):
        args, targets = feed()
        interpreter.run(captured.step, *args, *targets)
        train(eager, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, eager)
    assert not model.norm.training and model.training


def test_without_an_optimizer_the_gradients_are_outputs():
    model = double(SmallCNN)
    (x,), (y,) = feed_classes(8)()
    captured = capture_step(model, x, targets=y, loss=F.cross_entropy)
    loss, *gradients = Interpreter(captured.tensors).run(captured.step, x, y)
    value = F.cross_entropy(model(x), y)
    value.backward()
    graph = captured.step.graph
    torch.testing.assert_close(loss, value.detach(), **TOLERANCE)
    names = [graph.values[i].name for i in graph.outputs]
    assert names == ["loss", *[f"gradient.{name}" for name, _ in model.named_parameters()]]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **TOLERANCE)


@pytest.mark.parametrize("training", [True, False])
def test_inference_returns_what_the_model_returns(training):
    model = double(SmallCNN).train(training)
    x = images(2, 3, 8, 8)
    captured = capture_step(model, x, keep=KEEP)
    (found,) = Interpreter(captured.tensors).run(captured.step, x)
    written = {captured.step.graph.values[old].name for old, _ in captured.step.updates}
    assert written == (
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} if training else set()
    )
    torch.testing.assert_close(found, model(x).detach(), **TOLERANCE)


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
    names = [value.name for value in captured.step.graph.parameters]
    assert "words.weight" in names and "head.weight" not in names
    assert [captured.step.graph.values[i].name for i in captured.step.graph.inputs] == ["tokens", "labels"]
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


class Noisy(nn.Module):
    """Dropouts and noise; `draw` stands for PyTorch's generator, so that both sides draw the same numbers."""

    draw = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        if self.draw is None:
            x = F.dropout(F.relu(self.first(x)), 0.3)
            x = F.dropout1d(x.unsqueeze(-1), 0.25).squeeze(-1) + torch.rand_like(x)
            return self.last(x * torch.bernoulli(torch.full_like(x, 0.5)))
        x = F.relu(self.first(x))
        x = (self.draw(0, x.shape) > 0.3) * x * (1 / (1 - 0.3))
        kept = (self.draw(1, (*x.shape, 1)) < 1 - 0.25).squeeze(-1)
        x = x * kept / (1 - 0.25) + self.draw(2, x.shape)
        return self.last(x * (self.draw(3, x.shape) < 0.5))


def test_random_operators_draw_by_counter():
    model = double(Noisy)
    eager = copy.deepcopy(model)
    x, y = images(4, 6), classes(of=3)
    captured = capture_step(
        model,
        x,
        targets=y,
        loss=F.cross_entropy,
        seed=77,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    offsets = [op.attrs["offset"] for op in captured.step.graph.ops if op.kind == "random_uniform"]
    assert offsets == [0, 1, 2, 3]
    interpreter = Interpreter(captured.tensors)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses = []
    for count in range(3):
        eager.draw = lambda offset, shape, count=count: philox_uniform(
            77, count, offset, tuple(shape)
        ).double()
        (found,) = interpreter.run(captured.step, x, y)
        torch.testing.assert_close(found, train(eager, optimizer, F.cross_entropy, ((x,), (y,))), **TOLERANCE)
        losses.append(found.item())
    assert interpreter.held["random.counter"].item() == 3
    assert len(set(losses)) == 3
    held_equals(interpreter, eager)


def test_normal_numbers_and_whole_ones():
    class Drawing(nn.Module):
        def forward(self, x):
            noise = torch.randn(20000, dtype=x.dtype) * x[0]
            return noise, torch.randint(2, 7, (20000,)), torch.empty(20000).uniform_(-1, 3)

    x = torch.ones(2, dtype=torch.float64)
    captured = capture_step(Drawing(), x)
    normal, whole, uniform = Interpreter(captured.tensors).run(captured.step, x)
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert sorted(set(whole.tolist())) == [2, 3, 4, 5, 6]
    assert -1 <= uniform.min() < -0.99 and 2.99 < uniform.max() < 3


def test_philox_is_philox():
    """The known answer of Random123 for a counter and a key of zeros: its first word is 6627e8d5."""
    assert philox_uniform(0, 0, 0, (1,)).item() == (0x6627E8D5 >> 8) * 2.0**-24


def test_constants_are_computed_and_the_model_is_left_as_found():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.mask = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = x
            return self.linear(x) * self.mask.flip(0) + (torch.arange(4) * 2 + torch.zeros(4))

    model = double(Masked)
    weight = model.linear.weight
    x = images(2, 4)
    captured = capture_step(model, x)
    assert model.calls == 0 and not hasattr(model, "last") and model.linear.weight is weight
    assert {"full", "flip", "arange"}.isdisjoint(op.kind for op in captured.step.graph.ops)
    (found,) = Interpreter(captured.tensors).run(captured.step, x)
    torch.testing.assert_close(found, model(x).detach(), **TOLERANCE)


def test_names_and_scopes_tell_where_values_come_from():
    model = SmallCNN()
    captured = capture_step(
        model, images(1, 3, 8, 8, dtype=torch.float32), targets=classes(1), loss=F.cross_entropy, keep=KEEP
    )
    scopes = {op.scope for op in captured.step.graph.ops if op.kind.startswith("convolution")}
    assert scopes == {"first", "second"}, "also of the backward"
    assert captured.step.graph.fixed_batch == 1
    assert all(op.known and not op.inplace for op in captured.step.graph.ops)


def test_every_operator_taken_apart_is_one_of_pytorch_s():
    assert not {str(op).split(".")[1] for op in decompositions(KEEP)} & {"convolution", "gelu", "addmm"}


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


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, InputError, "0-d"),
        ({"loss": lambda out, y: 3.0}, InputError, "0-d tensor"),
        ({"loss": lambda out, y: out.detach().mean()}, InputError, "depend on any parameter"),
        ({"loss": "model", "targets": ()}, InputError, "own loss"),
        ({"loss": None, "optimizer": lambda m: torch.optim.SGD(m.parameters())}, InputError, "a loss"),
        ({"optimizer": lambda m: torch.optim.RMSprop(m.parameters())}, InputError, "RMSprop"),
        ({"optimizer": lambda m: torch.optim.SGD(nn.Linear(2, 2).parameters())}, InputError, "not the model"),
        ({"optimizer": "sgd"}, InputError, "torch.optim.Optimizer"),
        ({"loss": nn.CrossEntropyLoss(), "targets": (classes(), classes())}, InputError, "argument"),
        ({"targets": torch.randn(4, 7)}, CaptureError, "raised"),
        ({"accumulate": 0}, InputError, "accumulate"),
        ({"accumulate": 2}, InputError, "without an optimizer"),
        ({"loss": 3}, InputError, "callable"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        linear_step(**options)
    assert "\n" not in str(caught.value)


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
