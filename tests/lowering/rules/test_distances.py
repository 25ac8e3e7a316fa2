"""Distances and their gradients, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
P = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")]


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_all_pairs(batch, p):
    a, b = torch.randn(*batch, 4, 5).double(), torch.randn(*batch, 3, 5).double()
    check(aten._cdist_forward.default, a, b, p, 0)
    found = aten._cdist_forward(a, b, p, None)
    check(aten._cdist_backward.default, torch.randn_like(found), a, b, p, found, rtol=1e-8)


@pytest.mark.parametrize("p", P)
def test_two_points(p):
    check(aten.dist.default, torch.randn(2, 3).double(), torch.randn(3).double(), p)


def test_equal_points_have_no_slope():
    a = torch.zeros(2, 3).double()
    check(aten._cdist_backward.default, torch.ones(2, 2).double(), a, a, 2.0, torch.zeros(2, 2).double())
