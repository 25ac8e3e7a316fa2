"""Places among sorted boundaries, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
BOUNDARIES = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
VALUES = torch.tensor([[-2.0, 0.0, 0.25], [2.0, 3.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize("right", [False, True])
def test_bins(right):
    check(aten.bucketize.Tensor, VALUES, BOUNDARIES, right=right)
    check(aten.bucketize.Tensor, VALUES, BOUNDARIES, right=right, out_int32=True)
    check(aten.bucketize.Scalar, 0.5, BOUNDARIES, right=right)
    check(aten.searchsorted.Tensor, BOUNDARIES, VALUES, right=right)
    check(aten.searchsorted.Tensor, torch.stack([BOUNDARIES, BOUNDARIES + 1]), VALUES, right=right)
    check(aten.searchsorted.Tensor, torch.arange(5), torch.tensor([2, 7]), side="right" if right else "left")
