"""Softmax and its logarithm, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
SHAPES = [((2, 3, 4), 1), ((2, 3, 4), -1), ((5,), 0), ((3, 1), 1), ((), 0)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_forward_and_backward(name, shape, dim):
    x, gradient = [torch.randn(shape, dtype=torch.float64) * 10 for _ in range(2)]
    check(getattr(aten, name).default, x, dim, False)
    output = getattr(aten, name)(x, dim, False)
    check(getattr(aten, f"{name}_backward_data").default, gradient, output, dim, torch.float64)


def test_masked_rows():
    x = torch.tensor([[0.0, float("-inf")], [float("-inf"), float("-inf")]], dtype=torch.float64)
    check(aten._softmax.default, x, 1, False)
    check(aten._safe_softmax.default, x, 1)


def test_large_numbers_do_not_overflow():
    check(aten._softmax.default, torch.tensor([[1e4, 1e4 - 1]], dtype=torch.float64), 1, False)
