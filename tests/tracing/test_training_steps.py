"""Captured training steps, run by PyTorch's own operators, against eager PyTorch in float64."""

import copy

import pytest
import torch
from oracles.eager_steps import (
    KEEP,
    KINDS,
    TOLERANCE,
    classes,
    double,
    feed_classes,
    follow,
    held_equals,
    images,
    train,
)
from oracles.step_interpreter import Interpreter
from oracles.step_networks import FSRCNN, SmallCNN, SmallGPT, SmallViT
from torch import nn
from torch.nn import functional as F

from torchedge.tracing.joint_graphs import _PlainKernels
from torchedge.tracing.objectives import default_loss
from torchedge.tracing.steps import capture_step
from torchedge.tracing.vision import import_torchvision


def sgd(lr, **options):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **options)


NETWORKS = {
    "cnn": (SmallCNN, feed_classes(8), F.cross_entropy),
    "vit": (SmallViT, feed_classes(16), F.cross_entropy),
    "fsrcnn": (
        lambda: FSRCNN(features=8, shrunk=4, depth=1),
        lambda: ((images(2, 1, 6, 6),), (images(2, 1, 12, 12),)),
        F.mse_loss,
    ),
    "gpt": (
        SmallGPT,
        lambda: ((torch.randint(23, (3, 8)),), (torch.randint(23, (3, 8)),)),
        lambda out, target: F.cross_entropy(out["logits"].transpose(1, 2), target),
    ),
}


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        pytest.param(name, keep, id=f"{name}-{kind}", marks=[] if fast else [pytest.mark.slow])
        for name in NETWORKS
        for kind, keep, fast in (("apart", frozenset(), name == "cnn"), ("whole", KEEP, name == "fsrcnn"))
    ],
)
def test_steps_equal_eager_steps(name, keep):
    build, feed, loss = NETWORKS[name]
    follow(double(build), sgd(0.05, momentum=0.9), feed, loss, keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_steps_of_torchvision_models_equal_eager_steps(name):
    models = import_torchvision().models
    dropless = {} if name == "resnet18" else {"dropout": 0.0}
    model = double(lambda: models.get_model(name, weights=None, num_classes=5, **dropless))
    loose = {"rtol": 1e-6, "atol": 1e-8}
    follow(model, sgd(0.01, momentum=0.9), feed_classes(32), steps=2, tolerance=loose, keep=KEEP)


FAMILIES = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet50 resnext50_32x4d
shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16
""".split()  # noqa: SIM905 - read as the list it is


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_torchvision_is_captured(name):
    """Whole training steps, of operators that are known; every parameter is updated, constants are few."""
    side, options = 64, {}
    if name.startswith("vit"):
        side = 2 * int(name.rsplit("_", 1)[1])
        options["image_size"] = side
    side = {"maxvit_t": 224, "inception_v3": 299}.get(name, side)
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    model = import_torchvision().models.get_model(name, weights=None, **options)
    captured = capture_step(
        model,
        torch.empty(2, 3, side, side),
        loss=default_loss,
        keep=KEEP,
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    step = captured.step
    assert {op.kind for op in step.ops} <= KINDS
    updated = {step.values[old].name for old, _ in captured.step.updates}
    assert updated >= {name for name, _ in model.named_parameters()}
    assert sum(value.nbytes[0] for value in step.values if value.role == "constant") < 1 << 22


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = torch.randint(50, (2, 9))
    text = {"input_ids": tokens, "labels": tokens}
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config), {**text, "attention_mask": torch.ones_like(tokens)}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **small)
        return transformers.LlamaForCausalLM(config), text
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=50, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config), text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_steps_of_transformers_equal_eager_steps(name):
    torch.manual_seed(0)
    model, batch = transformers_model(name)
    eager = copy.deepcopy(model.train())
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    captured = capture_step(
        model, (), batch, loss="model", keep=KEEP, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    interpreter = Interpreter(captured.tensors)
    for _ in range(2):
        (found,) = interpreter.run(captured.step, *batch.values())
        value = eager(**batch).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found, value.detach())
    for key, tensor in eager.named_parameters():
        if key in interpreter.held:
            torch.testing.assert_close(interpreter.held[key], tensor.detach(), rtol=1e-4, atol=1e-6, msg=key)


def test_frozen_layers_get_no_gradient():
    model = double(SmallCNN)
    model.first.requires_grad_(False)
    model.norm.eval()
    captured = follow(model, sgd(0.1), feed_classes(8), steps=2, keep=KEEP)
    kinds = [op.kind for op in captured.step.ops]
    assert kinds.count("convolution") == 2
    assert kinds.count("convolution_backward") == 1, "the first convolution is frozen"
    trainable = {v.name for v in captured.step.parameters if v.trainable}
    assert trainable == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not model.norm.training and model.training


def test_without_an_optimizer_the_gradients_are_outputs():
    model = double(SmallCNN)
    (x,), (y,) = feed_classes(8)()
    captured = capture_step(model, x, targets=y, loss=F.cross_entropy)
    loss, *gradients = Interpreter(captured.tensors).run(captured.step, x, y)
    value = F.cross_entropy(model(x), y)
    value.backward()
    step = captured.step
    torch.testing.assert_close(loss, value.detach(), **TOLERANCE)
    names = [step.values[i].name for i in step.outputs]
    assert names == ["loss", *[f"gradient.{name}" for name, _ in model.named_parameters()]]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, **TOLERANCE)


@pytest.mark.parametrize("training", [True, False])
def test_inference_returns_what_the_model_returns(training):
    model = double(SmallCNN).train(training)
    x = images(2, 3, 8, 8)
    captured = capture_step(model, x, keep=KEEP)
    (found,) = Interpreter(captured.tensors).run(captured.step, x)
    written = {captured.step.values[old].name for old, _ in captured.step.updates}
    assert written == (
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} if training else set()
    )
    torch.testing.assert_close(found, model(x).detach(), **TOLERANCE)


def test_a_model_may_return_what_it_was_given_and_the_same_twice():
    class Returning(nn.Linear):
        def forward(self, batch, scale=1.0):
            y = super().forward(batch["x"]) * scale
            return y, batch["x"], {"views": [y.t(), batch["x"].view(-1)], "none": None}, self.weight, y

    model = double(lambda: Returning(4, 4))
    x = images(2, 4)
    captured = capture_step(model, ({"x": x},), {"scale": 2.0})
    y = model({"x": x}, 2.0)[0]
    wanted = [y, x, y.t(), x.view(-1), model.weight, y]
    for tensor, expected in zip(Interpreter(captured.tensors).run(captured.step, x), wanted, strict=True):
        torch.testing.assert_close(tensor, expected.detach(), **TOLERANCE)


def test_a_model_may_change_its_weights_and_its_input():
    class Clipped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
            return super().forward(x.mul_(2.0))

    model = double(lambda: Clipped(4, 5))
    eager = copy.deepcopy(model)
    optimizer, y = torch.optim.SGD(eager.parameters(), lr=0.5), classes(2)
    x = images(2, 4)
    captured = capture_step(
        model, x, targets=y, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)
    )
    interpreter = Interpreter(captured.tensors)
    for _ in range(3):
        (found,) = interpreter.run(captured.step, x, y)
        wanted = train(eager, optimizer, F.cross_entropy, ((x.clone(),), (y,)))
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    held_equals(interpreter, eager)


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
    assert {"full", "flip", "arange"}.isdisjoint(op.kind for op in captured.step.ops)
    (found,) = Interpreter(captured.tensors).run(captured.step, x)
    torch.testing.assert_close(found, model(x).detach(), **TOLERANCE)


def test_names_and_scopes_tell_where_values_come_from():
    model = SmallCNN()
    captured = capture_step(
        model, images(1, 3, 8, 8, dtype=torch.float32), targets=classes(1), loss=F.cross_entropy, keep=KEEP
    )
    scopes = {op.scope for op in captured.step.ops if op.kind.startswith("convolution")}
    assert scopes == {"first", "second"}, "also of the backward"
    assert all(op.known and not op.inplace for op in captured.step.ops)


def test_boolean_masks_of_attention_shut_positions_out():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.rand(2, 1, 4, 4) > 0.5
    mask |= torch.eye(4, dtype=torch.bool)
    captured = capture_step(Masked(), (x, mask), training=False, keep=KEEP)
    (result,) = Interpreter(captured.tensors).run(captured.step, x, mask)
    torch.testing.assert_close(result, Masked()(x, mask))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_padding_of_a_multilabel_margin_loss_is_no_class(reduction):
    scores = torch.randn(3, 4, requires_grad=True)
    target = torch.tensor([[2, -1, 0, 1], [-1, 0, 1, 2], [3, 0, 1, 2]])

    def loss(x, y):
        return torch.nn.functional.multilabel_margin_loss(x, y, reduction=reduction)

    expected = loss(scores, target)
    with _PlainKernels():
        found = loss(scores, target)
    assert found.item() == pytest.approx(expected.item())
    gradients = [torch.autograd.grad(each, scores)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)
