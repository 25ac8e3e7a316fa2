"""Graphs of ATen operators that AOTAutograd hands to a backend, as Steps; forms that views take in them."""

import pytest
import torch
from oracles.step_interpreter import Interpreter
from oracles.step_networks import SmallCNN, SmallViT
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from torchedge.errors import CaptureError
from torchedge.tracing.aten_graphs import canonical, step_of
from torchedge.tracing.decompositions import decompositions
from torchedge.tracing.steps import capture_step


def converted(module, args):
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return step_of(module, [(node.name, "input") for node in holders])


def check(function, *args):
    """The function's captured graph computes what it does; returns the kinds of its operators."""

    class Wrapped(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    captured = capture_step(Wrapped(), args)
    found = Interpreter(captured.tensors).run(captured.step, *args)
    wanted = function(*args)
    for tensor, expected in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(tensor, expected)
    return [op.kind for op in captured.step.ops]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [SmallCNN, SmallViT])
def test_graphs_of_a_compile_backend_become_steps(build):
    """Forward and backward graphs, split by AOTAutograd, each compute what their module computes."""
    from torch._dynamo.backends.common import aot_autograd

    made = []

    def compiler(module, example):
        step, constants = converted(module, example)

        def run(*args):
            found = Interpreter(constants).run(step, *args)
            graph = module.graph.find_nodes(op="output")[0].args[0]
            results = iter(found)
            return [None if node is None else next(results) for node in graph]

        made.append(step)
        return run

    torch.manual_seed(0)
    model, side = build(), 8 if build is SmallCNN else 16
    x, y = torch.randn(2, 3, side, side), torch.tensor([1, 3])
    F.cross_entropy(model.train()(x), y).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions())
    compiled = torch.compile(model, backend=backend, dynamic=False)
    F.cross_entropy(compiled(x), y).backward()
    torch._dynamo.reset()
    assert len(made) == 2
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_views_of_views_and_idle_operators_go():
    x = torch.randn(2, 3, 4)
    assert check(lambda x: x.permute(2, 0, 1).permute(1, 2, 0) + 1, x) == ["add"]
    assert check(lambda x: x.view(6, 4).view(3, 8).reshape(2, 3, 4) + 1, x) == ["add"]
    assert check(lambda x: x.view(6, 4).unsqueeze(0).view(24) + 1, x) == ["view", "add"]
    assert check(lambda x: x.clone().detach().contiguous().float().expand(2, 3, 4) * 2, x) == ["mul"]
    assert check(lambda x: x + torch.ones(4) * torch.arange(4).clamp(max=0), x) == ["full", "add"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.roll(x, (1, -2), (1, 2)),
        lambda x: torch.roll(x, 5),
        lambda x: x.split([1, 2], 1)[1] + x.chunk(3, 1)[0],
        lambda x: x[:, -2:, ::2],
        lambda x: x[..., -1] * x.select(-2, 0).mean(),
        lambda x: x.as_strided((4, 6), (6, 1)) + 1,
        lambda x: torch.zeros(4, 6).as_strided((2, 3, 4), (12, 4, 1)) + x,
        lambda x: torch.linalg.vector_norm(x, 2, 1, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, 1) + torch.linalg.vector_norm(x, 3, (0, 2)),
        lambda x: torch.linalg.vector_norm(x, float("inf")) - torch.linalg.vector_norm(x, 0, -1),
        lambda x: x.index_put((torch.tensor([0, 1]),), x[:2] * 2),
        lambda x: torch.zeros_like(x).index_add(0, torch.tensor([1, 0]), x),
        lambda x: (x.sum(), x.sum((-1, 0)), x.var(1), x.amax(-2, keepdim=True)),
        lambda x: torch.cat([x, x.flip(1)], -1).tril(),
        lambda x: F.pad(x, (1, -1, 2, 0), value=3.0),
        lambda x: (x.argmax(1), x.topk(2, -1).values, x.cumsum(0)),
    ],
)
def test_functions_keep_their_values(function):
    check(function, torch.randn(2, 3, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:, ::2],
        lambda x: x[..., -2] * x.select(0, 1)[:, 1],
        lambda x: torch.roll(x, (1, -1), (0, 2)),
        lambda x: F.normalize(x, dim=-1),
        lambda x: x.unfold(2, 2, 1),
        lambda x: x.expand(5, 2, 3, 4)[1:4] * x,
        lambda x: F.interpolate(x, scale_factor=2.0),
    ],
)
def test_gradients_keep_their_values(function):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, dtype=torch.float64))

        def forward(self, x):
            return function(self.weight * x)

    model, x = Scaled(), torch.randn(2, 3, 4, dtype=torch.float64)
    captured = capture_step(model, x, loss=lambda out: (out * out * 3 + out).mean())
    found = Interpreter(captured.tensors).run(captured.step, x)[1]
    out = model(x)
    (out * out * 3 + out).mean().backward()
    torch.testing.assert_close(found, model.weight.grad)


def test_canonical_forms_write_defaults_out():
    def form(kind, attrs, source, made=()):
        return canonical(kind, attrs, source, made)

    assert form("slice", {"dim": -1, "start": -3, "end": 2**63 - 1}, (2, 5)) == {
        "dim": 1, "start": 2, "end": 5, "step": 1,
    }  # fmt: skip
    assert form("slice", {"start": 4, "end": 1}, (5,)) == {"dim": 0, "start": 4, "end": 4, "step": 1}
    assert form("select", {"dim": -2, "index": -1}, (4, 5)) == {"dim": 0, "index": 3}
    assert form("sum", {}, (2, 3)) == {"dim": (0, 1)}
    assert form("mean", {"dim": (-1,), "keepdim": True}, (2, 3)) == {"dim": (1,), "keepdim": True}
    assert form("squeeze", {}, (1, 3, 1)) == {"dim": (0, 2)}
    assert form("squeeze", {"dim": -2}, (1, 3, 1)) == {"dim": ()}
    assert form("unsqueeze", {"dim": -1}, (2,), (2, 1)) == {"dim": 1}
    assert form("view", {"size": (-1, 2)}, (4,), (2, 2)) == {"size": (2, 2)}
    assert form("relu", {"a": 1}, (2,)) == {"a": 1}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.t().as_strided((2, 2), (1, 1)), "through strides"),
        (lambda x: x.to_sparse(), "layout|sparse"),
        (lambda x: torch.fft.fft(x).real * 1, None),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_or_named(function, message):
    class Wrapped(nn.Module):
        def forward(self, x):
            return function(x)

    if message is None:
        capture_step(Wrapped(), torch.randn(3, 3))
        return
    with pytest.raises(CaptureError, match=message) as caught:
        capture_step(Wrapped(), torch.randn(3, 3))
    assert "\n" not in str(caught.value)


def test_mutating_and_symbolic_graphs_are_refused():
    module = make_fx(lambda x: x.add_(1))(torch.zeros(3))
    with pytest.raises(CaptureError, match="writes to its input"):
        converted(module, ())
    module = make_fx(lambda x: x.view(-1) * x.shape[0], tracing_mode="symbolic")(torch.zeros(3, 5))
    with pytest.raises(CaptureError, match="symbolic shape"):
        converted(module, ())


def test_constants_are_stored_without_what_repeats():
    class Masked(nn.Module):
        def forward(self, x):
            allowed = torch.ones(4, 4, dtype=torch.bool).tril().expand(3, 2, 4, 4)
            return x.masked_fill(~allowed & (torch.arange(2).view(2, 1, 1) > -1), -1.0)

    x = torch.randn(3, 2, 4, 4)
    captured = capture_step(Masked(), x)
    assert [tuple(t.shape) for t in captured.tensors.values()] == [(1, 1, 4, 4)]
    (found,) = Interpreter(captured.tensors).run(captured.step, x)
    torch.testing.assert_close(found, Masked()(x))


def test_large_constants_stay_operators():
    class Wide(nn.Module):
        def forward(self, x):
            return x + torch.arange(2_000_000) * 0.5 + torch.arange(7).sum()

    x = torch.zeros(1)
    captured = capture_step(Wide(), x)
    assert "arange" in [op.kind for op in captured.step.ops] and not captured.tensors
    (found,) = Interpreter({}).run(captured.step, x)
    torch.testing.assert_close(found, Wide()(x))


def test_runs_of_whole_numbers_stay_operators():
    class Shifted(nn.Module):
        def forward(self, x):
            return (x.unsqueeze(-1) >> torch.arange(0, 8, 4, dtype=torch.int32)) + torch.tensor([5, 2])

    x = torch.randint(0, 256, (3,), dtype=torch.int32)
    captured = capture_step(Shifted(), x)
    assert [op.kind for op in captured.step.ops].count("arange") == 2 and not captured.tensors
    (found,) = Interpreter({}).run(captured.step, x)
    torch.testing.assert_close(found, Shifted()(x))
