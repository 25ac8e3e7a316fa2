"""The simulation against real eager steps on meta tensors (see tests/oracles).

Within 1 % everywhere, mostly to the byte.
"""

import numpy as np
import pytest
import torch
from oracles.checkpointed import CHECKPOINTED
from oracles.custom_functions import FUNCTIONS
from oracles.eager_memory import run_training
from oracles.fake_cpu import run_training_on_fake_cpu
from oracles.networks import FAST, NETWORKS, Network, criterion
from oracles.optimizers import OPTIMIZERS
from torch.utils.checkpoint import checkpoint

from torchedge.prediction.memory.decomposition import decompose
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture

BATCHES = (2, 16)
TOLERANCE = 0.01
KINDS = (
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "regnet_y_400mf",
    "convnext_tiny",
    "swin_t",
    "maxvit_t",
    "deeplabv3_resnet50",
    "r3d_18",
    "mixer_b16_224",
    "levit_128s",
    "mobilevit_s",
    "gpt2-small",
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


def build(network: Network) -> torch.nn.Module:
    with torch.device("meta"):
        return network.build().train()


def check(network: Network, recipe: str = "sgd-momentum") -> None:
    maker = OPTIMIZERS[recipe]
    amp = "amp" in maker.settings
    model = build(network)
    args, kwargs = network.feed(2)
    settings = StepSettings(backend="cpu", attention="fused" if amp else "math", **maker.settings)
    tape = write_tape(capture(model, kwargs or args, method="trace"), settings)
    for batch in BATCHES:
        model.zero_grad()
        if amp:
            oracle = run_training_on_fake_cpu(model, network.feed(batch), criterion, maker.make, **maker.loop)
        else:
            feed = network.feed(batch)
            oracle = run_training(model, lambda f=feed: f, criterion, maker.make, **maker.loop)
        peak = int(tape.peak_bytes(np.array([batch]))[0])
        assert peak == pytest.approx(oracle.peak, rel=TOLERANCE), f"{network.name}, batch {batch}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_peak_of_a_network(name):
    check(NETWORKS[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *[("resnet18", recipe) for recipe in OPTIMIZERS if recipe not in ("sgd-momentum", "bfloat16")],
        *[pytest.param("vit_b_16", r, marks=pytest.mark.slow) for r in ("adamw", "accumulation", "zeroed")],
    ],
)
def test_peak_with_an_optimizer(name, recipe):
    check(NETWORKS[name], recipe)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    ["resnet18", "bert-tiny", *[pytest.param(n, marks=pytest.mark.slow) for n in ("mobilenet_v2", "swin_t")]],
)
def test_peak_under_autocast(name):
    check(NETWORKS[name], "bfloat16")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [n if n != "densenet121-efficient" else pytest.param(n, marks=pytest.mark.slow) for n in CHECKPOINTED],
)
def test_peak_with_activation_checkpointing(name):
    check(CHECKPOINTED[name])


class Experts(torch.nn.Module):
    """Tokens sorted by expert, and two products for all experts, as in the transformers library."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.router = torch.nn.Linear(width, experts)
        self.up = torch.nn.Parameter(torch.empty(experts, 4 * width, width))
        self.down = torch.nn.Parameter(torch.empty(experts, width, 4 * width))
        self.bfloat16()  # PyTorch's rule for meta tensors knows no other

    def forward(self, x):
        experts, x = len(self.up), x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        order, places = chosen.reshape(-1).sort()
        counts = torch.histc(order.float(), bins=experts, min=0, max=experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[places // 2], self.up.transpose(-2, -1), offs=ends)
        y = torch._grouped_mm(torch.nn.functional.gelu(h), self.down.transpose(-2, -1), offs=ends)
        y = y * weights.reshape(-1)[places].unsqueeze(-1)
        back = torch.empty_like(places)
        back[places] = torch.arange(len(places), device=x.device)
        return y[back].view(len(x), 2, -1).sum(1)


class Votes(torch.nn.Module):
    """A product whose result is a view of what PyTorch multiplied: of no argument."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(10, 16))

    def forward(self, x):
        return torch.einsum("oi,bdi->bdo", self.weight, x.relu()).square().mean(1)


class TalkingHeads(torch.nn.Module):
    """Layers over the heads of scores, which therefore lie in another order."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        scores = self.before((x @ x.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return (self.after(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ x).mean((1, 2))


class Branches(torch.nn.Module):
    """Values that autograd records for nothing: a branch that ends in `detach`, or in `data`."""

    def __init__(self, cut):
        super().__init__()
        self.student, self.teacher, self.cut = torch.nn.Linear(64, 64), torch.nn.Linear(64, 256), cut

    def forward(self, x):
        taught = self.cut(torch.tanh(self.teacher(x)).exp().sigmoid())
        return self.student(x).tanh() * taught[..., :64]


class Written(torch.nn.Module):
    """A tensor that is filled part by part, by slices: what is written gets a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(64, 128) for _ in range(2)])

    def forward(self, x):
        filled = x.new_zeros(*x.shape[:2], 256)
        for place, part in enumerate(self.parts):
            filled[..., 128 * place : 128 * (place + 1)] = part(x).tanh()
        return filled.sigmoid()


HALF = 128


def scaled_in_half(y, x):
    y[:, :, :HALF] *= x[:, :, HALF:]
    return y


def added(y, x):
    y += x
    return y


def rectified(y, x):
    return torch.relu_(y) + x


def masked_in_half(y, x):
    y[:, :, :HALF].masked_fill_(x[:, :, :HALF] > 0.5, 0.0)
    return y + x


class Writing(torch.nn.Module):
    """Two layers, whose results are views of matrices, and a function that writes into them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 2 * HALF), torch.nn.Linear(64, 2 * HALF)
        self.function = function

    def forward(self, x):
        return self.function(self.first(x), self.second(x)).mean(1)


class Remembering(torch.nn.Module):
    """A layer whose result stays in an attribute until the next step."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x):
        self.features = self.layer(x)
        return self.head(self.features + 1).mean(1)


def spectral():
    return torch.nn.Sequential(*[torch.nn.utils.spectral_norm(torch.nn.Linear(512, 512)) for _ in range(2)])


class Unrolled(torch.nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        state = (x[:, 0], x[:, 0]) if isinstance(self.cell, torch.nn.LSTMCell) else x[:, 0]
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs, 1)).mean(1)


class Einsums(torch.nn.Module):
    """Weights whose gradients arrive in another order of dimensions than theirs: parameters copy them."""

    def __init__(self, equation, *shape):
        super().__init__()
        self.weight, self.equation = torch.nn.Parameter(torch.empty(shape)), equation

    def forward(self, x):
        operands = (x, self.weight) if self.equation.startswith("b") else (self.weight, x)
        return torch.einsum(self.equation, *operands).flatten(1)


class Chain(torch.nn.Module):
    """A product of three operands, and a norm that the CPU runs as several operators."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.empty(64, 64), torch.empty(64, 256)])
        self.norm = torch.nn.RMSNorm(256)

    def forward(self, x):
        return self.norm(torch.einsum("bti,ij,jk->btk", x, *self.weights)).mean(1)


class Transposed(torch.nn.Module):
    """Linear layers whose input's rows do not lie one behind the other."""

    def __init__(self, bias):
        super().__init__()
        self.before = torch.nn.Linear(16, 64)
        self.query, self.key = (torch.nn.Linear(64, 64, bias=bias) for _ in range(2))

    def forward(self, x):
        h = self.before(x).transpose(0, 1)
        return (self.query(h) * self.key(h)).transpose(0, 1)


class Own(torch.nn.Module):
    """Layers with a custom autograd function behind each, within checkpoints or not."""

    def __init__(self, function, checkpointed):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(n, 256) for n in (64, 256, 256)])
        self.last, self.function, self.checkpointed = torch.nn.Linear(256, 10), function, checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed == "all":
                x = checkpoint(self.run, layer, x, use_reentrant=False, preserve_rng_state=False)
            elif self.checkpointed == "function":
                x = checkpoint(self.function, layer(x), use_reentrant=False, preserve_rng_state=False)
            else:
                x = self.run(layer, x)
        return self.last(x)

    def run(self, layer, x):
        return self.function(layer(x))


def behind_a_norm():
    layers = torch.nn.Conv2d(3, 16, 1), torch.nn.InstanceNorm2d(16), torch.nn.LeakyReLU(inplace=True)
    return torch.nn.Sequential(*layers, torch.nn.AvgPool2d(32), torch.nn.Flatten())


def written(build, shape, dtype=torch.float32):
    """Return a network of a module and the shape of its samples."""
    return Network("", build, lambda batch: ((torch.empty(batch, *shape, dtype=dtype, device="meta"),), {}))


MODULES = {
    "a mixture of experts": written(Experts, (64, 32), torch.bfloat16),
    "a result of einsum that is saved": written(Votes, (400, 16)),
    "tensors in another order": written(TalkingHeads, (4, 128, 64)),
    "a value that is detached": written(lambda: Branches(torch.detach), (400, 64)),
    "a value's data": written(lambda: Branches(lambda y: y.data), (400, 64)),
    "slices that are written": written(Written, (400, 64)),
    **{
        f.__name__: written(lambda f=f: Writing(f), (256, 64))
        for f in (scaled_in_half, masked_in_half, added, rectified)
    },
    "a result in an attribute": written(Remembering, (64, 64)),
    "a spectral norm": written(spectral, (512,)),
    "GRU cells": written(lambda: Unrolled(torch.nn.GRUCell), (16, 64)),
    "LSTM cells": written(lambda: Unrolled(torch.nn.LSTMCell), (16, 64)),
    "a layer in place behind an instance norm": written(behind_a_norm, (3, 32, 32)),
    "a product of three and a norm": written(Chain, (64, 64)),
    "linear layers that copy their input": written(lambda: Transposed(True), (50, 16)),
    "the same without biases": written(lambda: Transposed(False), (50, 16)),
}
EINSUMS = {"bi,oik->bok": (256, 64, 16), "oi,bi->bo": (4096, 64), "io,bi->bo": (64, 4096)}


@pytest.mark.parametrize("name", MODULES)
def test_peak_of_a_module(name):
    check(MODULES[name])


@pytest.mark.parametrize("equation", EINSUMS)
def test_peak_of_weights_in_einsum(equation):
    check(written(lambda: Einsums(equation, *EINSUMS[equation]), (64,)), "sgd")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_peak_with_a_custom_function(name):
    check_function(name, "sgd", "")


@pytest.mark.parametrize("name", ["saves", "attributes", "scratch"])
def test_peak_with_a_custom_function_in_checkpoints_and_under_autocast(name):
    check_function(name, "sgd", "all")
    check_function(name, "sgd", "function")
    check_function(name, "bfloat16", "")


def check_function(name, recipe, checkpointed):
    check(written(lambda: Own(FUNCTIONS[name], checkpointed), (512, 64)), recipe)


def test_tokens_of_an_image_that_lies_channels_last_are_not_copied():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.conv = torch.nn.Linear(8, 32), torch.nn.Conv2d(32, 32, 3, padding=1)
            self.after = torch.nn.Linear(32, 8)

        def forward(self, x):
            image = self.before(x).transpose(1, 2).view(len(x), 32, 8, 8)
            return self.after(self.conv(image).flatten(2).transpose(1, 2))

    graph = capture(Tokens(), torch.zeros(2, 64, 8), loss=lambda out: out.sum(), method="trace")
    assert "clone" not in [op.kind for op in decompose(graph, StepSettings(backend="cuda")).ops]
