"""Comparisons, logic, bits and choices, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN], dtype=torch.float64)
BOOLS = torch.tensor([[False], [True]]), torch.tensor([False, True])
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name):
    target, scalar = getattr(aten, name).Tensor, getattr(aten, name).Scalar
    whole = torch.tensor([[-1, 0, 1, 2]])
    check(target, SPECIAL[:, None], SPECIAL[None, :])
    check(target, *BOOLS)
    check(target, whole, torch.tensor([0.5, 0.0, 1.0, 3.0], dtype=torch.float64))
    check(target, whole, torch.tensor(1))
    check(scalar, SPECIAL, 1)
    check(scalar, whole, 0.5)
    check(scalar, BOOLS[1], True)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logic(name):
    target = getattr(aten, name).default
    check(target, *BOOLS)
    check(target, SPECIAL[:, None], SPECIAL[None, :])
    check(target, torch.tensor([0, 1, 2]), torch.tensor([True]))


@pytest.mark.parametrize("x", [SPECIAL, BOOLS[0], torch.tensor([0, 5])], ids=["float", "bool", "int"])
def test_logical_not(x):
    check(aten.logical_not.default, x)


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bits(name):
    target, scalar = getattr(aten, name).Tensor, getattr(aten, name).Scalar
    check(target, *BOOLS)
    check(scalar, torch.tensor([5, -3, 12]), 6)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        check(target, torch.tensor([[5], [12]], dtype=dtype), torch.tensor([6, 9, 255]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool], ids=str)
def test_bitwise_not(dtype):
    check(aten.bitwise_not.default, torch.tensor([0, 1, 5, 100]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_shifts(name, dtype):
    x = torch.tensor([[1], [3], [77]]).to(dtype)
    check(getattr(aten, name).Tensor, x, torch.tensor([0, 1, 5, 7]).to(dtype))


@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_shifts_beyond_the_bits(name):
    check(getattr(aten, name).Tensor, torch.tensor([[5], [-7]]), torch.tensor([63, 64, 100]))


def test_choices():
    condition = torch.tensor([[True, False, True]])
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    check(aten.where.self, condition, a, b)
    check(aten.where.self, condition, a, torch.tensor(NAN, dtype=torch.float64))
    check(aten.where.self, condition, torch.tensor([1, 2, 3]), a)
    check(aten.where.self, condition, condition, torch.tensor(False))
    check(aten.where.ScalarSelf, condition, 2, torch.tensor([1, 2, 3]))
    check(aten.where.Scalar, condition, 2.0, -1.0)
    check(aten.masked_fill.Scalar, a, condition, -INF)
    check(aten.masked_fill.Tensor, a, condition, torch.tensor(7.0, dtype=torch.float64))
    check(aten.masked_fill.Scalar, torch.tensor([1, 2, 3]), condition[0], 9)
