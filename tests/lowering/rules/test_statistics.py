"""Variances and deviations, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
X = torch.randn(2, 3, 1, 4, dtype=torch.float64) + 100


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("correction", [0, 1, 1.5, None])
@pytest.mark.parametrize("dim", [[0], [1, -1], [0, 1, 2, 3], None], ids=str)
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_corrections(name, dim, correction, keepdim):
    check(getattr(aten, name).correction, X, dim, correction=correction, keepdim=keepdim)


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_other_ways_to_ask(name):
    check(getattr(aten, name).default, X)
    check(getattr(aten, name).default, X, False)
    check(getattr(aten, name).dim, X, [1], True, True)


def test_one_element_has_no_variance():
    check(aten.var.correction, X, [2], correction=1)
    check(aten.var.default, torch.tensor(1.0, dtype=torch.float64))
