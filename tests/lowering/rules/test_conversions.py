"""Copies and conversions, against PyTorch."""

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
DTYPES = [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("new", DTYPES, ids=str)
@pytest.mark.parametrize("old", DTYPES, ids=str)
def test_conversions(old, new):
    x = torch.tensor([[0, 1, 3, 100]]).to(old)
    check(aten._to_copy.default, x, dtype=new)


def test_fractions_become_whole_numbers():
    x = torch.tensor([0.0, 0.9, 1.5, -0.9, -1.5, 300.7], dtype=torch.float64)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.bool):
        check(aten._to_copy.default, x, dtype=dtype)


def test_copies():
    x = torch.randn(2, 3, dtype=torch.float64)
    check(aten.clone.default, x)
    check(aten.copy.default, x, torch.tensor([1, 2, 3]))
    check(aten.copy.default, x, torch.randn(2, 1, dtype=torch.float64))
