"""Promotion of dtypes, against torch.result_type."""

from itertools import product

import pytest
import torch

from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.promotion import arithmetic_dtype, common_dtype

NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPERANDS = [*product(NAMES, ((2,), ())), True, 3, 2.5]


def tensor_of(item):
    return torch.zeros(item[1], dtype=getattr(torch, item[0])) if isinstance(item, tuple) else item


def node_of(item):
    return Stored(item[1], item[0], "x", 0) if isinstance(item, tuple) else item


@pytest.mark.parametrize("first", [i for i in OPERANDS if isinstance(i, tuple)], ids=str)
def test_promotion(first):
    for second in OPERANDS:
        want = str(torch.result_type(tensor_of(first), tensor_of(second))).removeprefix("torch.")
        assert common_dtype(node_of(first), node_of(second)) == want, second


def test_narrow_dtypes_are_computed_in_wider_ones():
    assert [arithmetic_dtype(n) for n in NAMES] == ["int32"] * 5 + ["int64"] + ["float32"] * 3 + ["float64"]
