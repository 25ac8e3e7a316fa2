"""Batch normalization in training and evaluation, with its gradients, against PyTorch."""

import pytest
import torch
from oracles.rule_checks import apply, check

from torchedge.lowering.nodes import Rows, RowsResult

aten = torch.ops.aten
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
