"""Functions that user code puts in place of PyTorch's: each call counts once, as in eager PyTorch."""

import functools

import pytest
import torch
from oracles.step_interpreter import Interpreter
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import relu as imported_relu

from torchedge.tracing.capturing import CaptureRequest, capture_request
from torchedge.tracing.steps import capture_step


class Layers(nn.Module):
    """Calls functions of every kind: of torch.nn.functional, torch and tensors, by layers and by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.LayerNorm(6), nn.Softmax(-1))
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.5)

    def forward(self, x):
        y = self.dropout(imported_relu(self.layers(x)) + F.softmax(x, -1)).exp()
        y = y + F.relu(x) * torch.sigmoid(x) + torch.einsum("ij,kj->ik", x, x).sum()
        y = y + self.pool(x.view(1, 1, -1, 6)).sum() * x.norm() + torch.softmax(y, -1)
        return y + x.clone().relu_().float()


def scaled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.25


def decorated(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs) * 1.25

    return run


class Calling:
    """A callable that no dict takes as a key."""

    def __init__(self, function):
        self.function = function

    __hash__ = None

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs) * 1.25


def scaling(function, *args, **kwargs):
    return function(*args, **kwargs) * 1.25


WRAPPERS = {
    "lambda": scaled,
    "decorator": decorated,
    "partial": lambda function: functools.partial(scaling, function),
    "twice": lambda function: scaled(decorated(function)),
    "object": Calling,
}
PLACES = [
    *[(F, name) for name in ("relu", "layer_norm", "dropout")],
    *[(torch, name) for name in ("sigmoid", "einsum", "relu_", "rsqrt")],
    *[(torch.Tensor, name) for name in ("exp", "norm", "__add__")],
    *[(nn.ReLU, "forward"), (nn.Linear, "__call__"), (nn.Module, "__call__"), (torch.functional, "norm")],
]


CASES = [
    *[pytest.param(home, name, scaled, id=f"{home.__name__}.{name}") for home, name in PLACES],
    *[pytest.param(F, "relu", wrapper, id=kind) for kind, wrapper in WRAPPERS.items()],
]


def results(model, x):
    captured = capture_step(model, x)
    return Interpreter(captured.tensors).run(captured.step, x)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("home", "name", "wrapper"), CASES)
def test_a_step_calls_what_eager_pytorch_calls(monkeypatch, home, name, wrapper):
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(4, 6)
    before = model(x)
    torch.testing.assert_close(results(model, x), before)
    kinds = [op.kind for op in capture_request(CaptureRequest(model, 4, example=x)).ops]
    original = getattr(home, name)
    monkeypatch.setattr(home, name, wrapper(original), raising=False)
    wanted = model(x)
    torch.testing.assert_close(results(model, x), wanted)
    patched = capture_request(CaptureRequest(model, 4, example=x))
    assert not patched.unsupported
    added = len(patched.ops) - len(kinds)
    calls = counted(model, x, home, name, original)
    assert added == calls * (2 if wrapper is WRAPPERS["twice"] else 1)
    monkeypatch.undo()
    torch.testing.assert_close(results(model, x), before)
    assert [op.kind for op in capture_request(CaptureRequest(model, 4, example=x)).ops] == kinds


def counted(model, x, home, name, original):
    """Return the number of calls of a function in an eager run."""
    calls = []

    def run(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, name, run)
        model(x)
    return len(calls)
