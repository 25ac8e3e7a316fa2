"""Running sums, products and extremes, against PyTorch."""

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten


@pytest.mark.parametrize("size", [1, 5, 32, 33, 64, 65, 1100])
def test_blocks(size):
    x = torch.randn(2, size, 2, dtype=torch.float64)
    check(aten.cumsum.default, x, 1)
    check(aten.cumprod.default, 1 + x / size, -2, rtol=1e-9)
    check(aten.cummax.default, x, 1)
    check(aten.cummin.default, x, -2)
    check(aten.logcumsumexp.default, x * 100, 1)
