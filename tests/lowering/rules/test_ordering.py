"""Sorting: the same as PyTorch's, equal elements and NaN included."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)
DISTINCT = torch.randn(3, 7, 4, dtype=torch.float64, generator=GENERATOR)
TIED = torch.randint(0, 4, (3, 7, 4), generator=GENERATOR)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(dim, descending):
    check(aten.sort.default, DISTINCT, dim, descending, rtol=0, atol=0, device=True)
    for tied in (TIED, TIED.double(), TIED > 1):
        check(aten.sort.stable, tied, stable=True, dim=dim, descending=descending, rtol=0, atol=0)


@pytest.mark.parametrize("largest", [False, True])
def test_topk(largest):
    check(aten.topk.default, DISTINCT, 3, 1, largest, rtol=0, atol=0, device=True)
    check(aten.topk.default, DISTINCT, 4, -1, largest, rtol=0, atol=0)
    check(aten.topk.default, TIED, 3, 1, largest, compare=(0,))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_rank(dim):
    for k in (1, 3):
        check(aten.kthvalue.default, DISTINCT, k, dim, rtol=0, atol=0, device=True)
        check(aten.kthvalue.default, DISTINCT, k, dim, True, rtol=0, atol=0)
    check(aten.median.dim, DISTINCT, dim, rtol=0, atol=0, device=True)
    check(aten.median.default, DISTINCT, rtol=0, atol=0)
    check(aten.median.dim, TIED, dim, compare=(0,))


def test_the_median_of_nan_is_nan():
    x = DISTINCT.clone()
    x[1, 3, 2] = x[1, 5, 2] = float("nan")
    check(aten.median.dim, x, 1, rtol=0, atol=0, device=True)
    check(aten.median.default, x)
    check(aten.median.default, torch.tensor(3.0, dtype=torch.float64))


def test_nan_and_single_elements():
    x = torch.tensor([2.0, float("nan"), -1.0, float("inf"), float("-inf")], dtype=torch.float64)
    for descending in (False, True):
        check(aten.sort.default, x, 0, descending, rtol=0, atol=0, device=True)
    check(aten.sort.default, torch.tensor(3.0, dtype=torch.float64))
    check(aten.topk.default, torch.tensor([3.0], dtype=torch.float64), 1)
