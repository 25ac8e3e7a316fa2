"""Running sums, products and extremes, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
NAN = float("nan")
WHOLE = torch.tensor([[3, -1, 4, 1], [-5, 9, -2, 6], [0, 0, 0, 0]])


@pytest.mark.parametrize("size", [1, 5, 32, 33, 64, 65, 1100])
def test_blocks(size):
    x = torch.randn(2, size, 2, dtype=torch.float64)
    check(aten.cumsum.default, x, 1)
    check(aten.cumprod.default, 1 + x / size, -2, rtol=1e-9)
    check(aten.cummax.default, x, 1)
    check(aten.cummin.default, x, -2)
    check(aten.logcumsumexp.default, x * 100, 1)


def test_other_dimensions():
    x = torch.randn(3, 1, 40, dtype=torch.float64)
    check(aten.cumsum.default, x, 0)
    check(aten.cumsum.default, x, 1)
    check(aten.cumsum.default, torch.tensor(2.5, dtype=torch.float64), 0)
    check(aten.cummax.default, torch.tensor(2.5, dtype=torch.float64), 0)


def test_whole_numbers():
    check(aten.cumsum.default, WHOLE, 1)
    check(aten.cumsum.default, WHOLE > 0, 0)
    check(aten.cumsum.default, WHOLE, 1, dtype=torch.float64)
    check(aten.cummax.default, WHOLE, 1)
    check(aten.cummin.default, WHOLE.to(torch.int32), 0)


def test_equals_nan_and_infinities():
    x = torch.tensor([1.0, 3, 3, 2, NAN, 5, NAN, 1], dtype=torch.float64)
    check(aten.cummax.default, x, 0)
    check(aten.cummin.default, x, 0)
    check(aten.logcumsumexp.default, torch.tensor([-float("inf"), 1.0, -float("inf")]).double(), 0)
