"""Reductions joined with the element-wise work that they decide: one launch, PyTorch's results."""

import numpy as np
import pytest
import torch
from oracles.targets import target_here
from torch import nn

import torchedge
from torchedge.lowering.assembly import lower
from torchedge.lowering.joined_rows import LONGEST_ROW
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

KEEP = frozenset(all_rules())


class Applied(nn.Module):
    """Applies a function to its input and a weight."""

    def __init__(self, function, count):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(0.5, 1.5, count))

    def forward(self, x):
        return self.function(x, self.weight)


def rms_norm(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def fused_rms_norm(x, w):
    return nn.functional.rms_norm(x, (x.shape[-1],), w)


def softmax(x, w):
    return (x * w).softmax(-1)


def log_softmax(x, w):
    return (x * w).log_softmax(-1) * w


def residual_rms_norm(x, w):
    total = x + x.flip(-1)
    return total, w * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6))


def unit_norm(x, w):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def hand_made_softmax(x, w):
    shifted = (x - x.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def launches(function, *shape, target="cpu"):
    """The kinds of an inference's launches, its output held against PyTorch's."""
    program = computed(function, *shape, target=target)
    return [program.kernels[launch.kernel].kind for launch in program.launches]


def computed(function, *shape, target="cpu"):
    """The program of an inference, its output held against PyTorch's."""
    torch.manual_seed(0)
    model, x = Applied(function, shape[-1]).eval(), torch.randn(shape)
    captured = capture_step(model, (x,), keep=KEEP)
    program = lower(captured.step, target_here(target))
    with Executor(program, checks=True) as executor, torch.no_grad():
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        expected = model(x)
        for got, one in zip(
            executor.run(x.numpy()), expected if isinstance(expected, tuple) else [expected], strict=True
        ):
            np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-5)
    return program


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 128, 512), (7, 33)])
def test_rms_norm_is_one_launch(target, shape):
    assert launches(rms_norm, *shape, target=target) == ["sum"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_normalizations_of_rows_are_one_launch_each(target):
    assert launches(unit_norm, 6, 48, target=target) == ["sum"]
    assert launches(residual_rms_norm, 4, 64, target=target)[-1] == "sum"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("rows", [1, 3, 7, 24])
def test_the_softmax_of_a_product_takes_its_place(target, rows):
    def function(x, w):
        return (x @ x.t()).softmax(-1) @ x.abs()

    program = computed(function, 24 * rows, 8, target=target)
    (kernel,) = [k for k in program.kernels if "exp" in k.source]
    scores = 4 * (24 * rows) ** 2
    assert (program.arena.live_bytes < 2 * scores) == bool(kernel.in_place)
    assert kernel.in_place or target != "cpu"


def test_reductions_that_read_each_other_stay_right():
    assert launches(hand_made_softmax, 5, 64) != []
    assert launches(lambda x, w: (x - x.mean(-1, keepdim=True)).pow(2).sum(-1, keepdim=True) * x, 5, 64) != []


def test_what_is_no_row_of_the_reduction_stays_apart():
    assert launches(lambda x, w: x * x.sum(0, keepdim=True).exp(), 64, 64) == ["sum", "pointwise"]
    assert launches(lambda x, w: x.t() * x.sum(-1).exp(), 64, 64) == ["sum", "pointwise"]
    assert launches(lambda x, w: x.flip(0) * x.sum(-1, keepdim=True).flip(0).exp(), 64, 64) != []


def test_a_value_that_waits_for_the_reduction_does_not_join_it():
    def twice(x, w):
        total = x.sum(-1, keepdim=True).exp()
        product = (total * w) @ (total * w).t()
        return product * total

    assert launches(twice, 16, 16)[-1] != "sum"


def test_long_rows_are_shared_by_the_whole_device():
    assert launches(rms_norm, 1, 32 * LONGEST_ROW, target="gpu").count("sum") == 2


@pytest.mark.parametrize("function", [rms_norm, fused_rms_norm, softmax, log_softmax])
def test_a_training_step_computes_pytorchs_gradients(function):
    torch.manual_seed(0)
    model, x = Applied(function, 32), torch.randn(4, 32)
    captured = capture_step(model, (x,), loss=lambda y: y.exp().sum(), keep=KEEP)
    with Executor(lower(captured.step)) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        loss, gradient = executor.run(x.numpy())
    expected = model(x).exp().sum()
    expected.backward()
    np.testing.assert_allclose(loss, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(gradient, model.weight.grad, rtol=1e-4)


class Projections(nn.Module):
    """Quantised layers that all read one token: some of the same size, one of another."""

    def __init__(self, sizes):
        super().__init__()
        layers = nn.ModuleList([nn.Linear(64, size, bias=False) for size in sizes])
        self.layers = torchedge.quantize(layers, "int8")

    def forward(self, x):
        return [layer(x) for layer in self.layers]


class Gated(nn.Module):
    """The feed-forward layer of a Llama: two products of one vector, joined element by element."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (torchedge.quantize(nn.Linear(64, 48, bias=False), "int4") for _ in range(2))

    def forward(self, x):
        return nn.functional.silu(self.gate(x)) * self.up(x)


class Chained(nn.Module):
    """Two products of the same size, the second of which needs the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            torchedge.quantize(nn.Linear(64, 64, bias=False), "int8") for _ in range(2)
        )

    def forward(self, x):
        return self.second(x + self.first(x).tanh())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("model", "count"), [(Projections((32, 32, 48, 32)), 2), (Gated(), 1), (Chained(), 2)], ids=str
)
def test_products_of_one_vector_with_matrices_of_one_size_are_one_launch(model, count, target):
    torch.manual_seed(1)
    x = torch.randn(1, 64)
    captured = capture_step(model, (x,), keep=KEEP)
    program = lower(captured.step, target_here(target))
    names = [launch.reference.partition(" over")[0] for launch in program.launches]
    assert names.count("matmul") == count
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        results = executor.run(x.numpy())
    expected = model(x)
    for result, tensor in zip(results, expected if isinstance(expected, list) else [expected], strict=True):
        np.testing.assert_allclose(result, tensor.detach(), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """One token's queries, each with the keys and values of its head."""

    def forward(self, q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_attention_of_one_token_is_reductions_of_rows(target):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 1, 32), torch.randn(1, 3, 70, 32), torch.randn(1, 3, 70, 32)
    captured = capture_step(Attention().eval(), (q, k, v), keep=KEEP)
    program = lower(captured.step, target_here(target))
    assert not [kernel.name for kernel in program.kernels if kernel.name.startswith("contraction")]
    with Executor(program) as executor:
        (result,) = executor.run(q.numpy(), k.numpy(), v.numpy())
    expected = Attention()(q.double(), k.double(), v.double())
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
