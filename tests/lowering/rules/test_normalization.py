"""Layer, group, batch and RMS normalization with their gradients, against PyTorch."""

from itertools import product

import pytest
import torch
from oracles.rule_checks import apply, check

from torchedge.lowering.nodes import Rows, RowsResult

aten = torch.ops.aten
MASKS = [list(m) for m in product([True, False], repeat=3) if any(m)]


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "normalized"), [((2, 3, 4), [4]), ((2, 3, 4), [3, 4]), ((5, 1), [1]), ((6,), [6])]
)
def test_layer_norm(shape, normalized, affine):
    x, gradient = normal(*shape) + 5, normal(*shape)
    weight, bias = (normal(*normalized), normal(*normalized)) if affine else (None, None)
    check(aten.native_layer_norm.default, x, normalized, weight, bias, 1e-5)
    _, mean, rstd = aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
    masks = MASKS if affine else [[True, False, False]]
    for mask in masks if len(shape) > len(normalized) else [[True, False, False]]:
        check(
            aten.native_layer_norm_backward.default,
            gradient, x, normalized, mean, rstd, weight, bias, mask, rtol=1e-8, atol=1e-9,
        )  # fmt: skip


def test_layer_norm_of_a_single_row_has_gradients_for_its_weights():
    x, weight, bias = normal(6), normal(6), normal(6)
    _, mean, rstd = aten.native_layer_norm(x, [6], weight, bias, 1e-5)
    arguments = (normal(6), x, [6], mean, rstd, weight, bias, [True, True, True])
    check(aten.native_layer_norm_backward.default, *arguments, rtol=1e-8)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 6, 3, 2), 3), ((2, 6, 3, 2), 1), ((3, 4), 4), ((1, 4, 5), 2)]
)
def test_group_norm(shape, groups, affine):
    x, gradient = normal(*shape) + 5, normal(*shape)
    n, c = shape[:2]
    sizes = n, c, x.numel() // (n * c), groups
    weight, bias = (normal(c), normal(c)) if affine else (None, None)
    check(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    for mask in MASKS if affine else [[True, False, False]]:
        check(
            aten.native_group_norm_backward.default,
            gradient, x, mean, rstd, weight, *sizes, mask, rtol=1e-7, atol=1e-8,
        )  # fmt: skip


SHAPES = [(4, 3, 5, 2), (4, 3), (2, 1, 3), (2, 3, 1, 2, 2)]


def tensors(shape, affine=True):
    channels = shape[1]
    x = torch.randn(shape, dtype=torch.float64) * 2 + 30
    weight, bias, mean, var = [torch.rand(channels, dtype=torch.float64) + 0.5 for _ in range(4)]
    return x, *((weight, bias) if affine else (None, None)), mean, var


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [True, False, False]], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape, training, mask):
    x, weight, _, mean, var = tensors(shape)
    gradient = torch.randn(shape, dtype=torch.float64)
    saved = x.transpose(0, 1).flatten(1)
    statistics = saved.mean(1), (saved.var(1, correction=0) + 1e-5).rsqrt()
    for w in (weight, None):
        check(
            aten.native_batch_norm_backward.default,
            gradient, x, w, mean, var, *statistics, training, 1e-5, mask, rtol=1e-8, atol=1e-9,
        )  # fmt: skip


def test_statistics_of_a_channel_are_one_node():
    given = tensors((4, 3, 5, 2))
    target = aten._native_batch_norm_legit_functional.default
    nodes, _ = apply(target, (*given, True, 0.1, 1e-5), {}, target(*given, True, 0.1, 1e-5))
    parts = nodes[1:]
    assert all(isinstance(p, RowsResult) for p in parts) and len({p.rows for p in parts}) == 1
    assert isinstance(parts[0].rows, Rows) and len(parts[0].rows.stages) == 3
