"""Reductions, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
X = torch.randn(2, 3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
WHOLE = torch.tensor([[3, -1, 4, 1], [-5, 9, -2, 6], [0, 0, 0, 0]])
BOOLS = WHOLE > 0
DIMS = [[0], [1, -1], [2], [0, 1, 2, 3], [-2, 0]]
HOLED = torch.tensor([[1.0, NAN, 3.0, NAN], [INF, 2.0, 1.0, -INF], [5.0, 5.0, 1.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "nansum", "logsumexp", "any", "all", "norm"])
def test_dimensions(name, dim, keepdim):
    packet = getattr(aten, name)
    if name == "norm":
        check(aten.norm.ScalarOpt_dim, X, 2, dim, keepdim)
        return
    chosen = {"sum": "dim_IntList", "mean": "dim", "any": "dims", "all": "dims"}.get(name, "default")
    check(getattr(packet, chosen), X, dim, keepdim)


@pytest.mark.parametrize(
    "name", ["sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "nansum"]
)
def test_everything_and_single_numbers(name):
    check(getattr(aten, name).default, X)
    check(getattr(aten, name).default, torch.tensor(2.5, dtype=torch.float64))
    check(getattr(aten, name).default, torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 3, -2])
def test_one_dimension(dim, keepdim):
    check(aten.max.dim, X, dim, keepdim)
    check(aten.min.dim, X, dim, keepdim)
    check(aten.argmax.default, X, dim, keepdim)
    check(aten.argmin.default, X, dim, keepdim)
    check(aten.prod.dim_int, X, dim, keepdim)
    check(aten.aminmax.default, X, dim=dim, keepdim=keepdim)


def test_no_dimension():
    x = torch.tensor(2.5, dtype=torch.float64)
    check(aten.max.dim, x, 0)
    check(aten.sum.dim_IntList, x, [0], True)
    check(aten.amax.default, x, [-1])
    check(aten.logsumexp.default, x, [0])


def test_nan_and_infinities():
    check(aten.max.dim, HOLED, 1)
    check(aten.min.dim, HOLED, 0)
    check(aten.amax.default, HOLED, [1])
    check(aten.argmax.default, HOLED)
    check(aten.nansum.default, HOLED, [1])
    check(aten.logsumexp.default, HOLED[1:], [1])
    check(aten.logsumexp.default, torch.full((2, 3), -INF, dtype=torch.float64), [1])


@pytest.mark.parametrize("x", [WHOLE, WHOLE.to(torch.int32), WHOLE.to(torch.uint8), BOOLS], ids=str)
def test_whole_numbers_and_bools(x):
    check(aten.sum.dim_IntList, x, [1])
    check(aten.prod.default, x)
    check(aten.amax.default, x, [0])
    check(aten.amin.default, x, [0])
    check(aten.max.dim, x, 1)
    check(aten.any.dim, x, 1)
    check(aten.all.dim, x, 1)
    check(aten.count_nonzero.dim_IntList, x, [0])
    check(aten.mean.dim, x, [1], dtype=torch.float64)
    if x.dtype != torch.bool:
        check(aten.argmin.default, x, 1)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, INF, -INF])
def test_norms(order):
    check(aten.linalg_vector_norm.default, X, order)
    check(aten.linalg_vector_norm.default, X, order, [1, 3], True)
    check(aten.norm.Scalar, X, order)
