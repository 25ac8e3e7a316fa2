"""Rules: which operators have one, and the dtypes they compute in, against `torch.result_type`."""

from itertools import product

import pytest
import torch

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules import all_rules, rule_for
from torchedge.lowering.rules.promotion import arithmetic_dtype, common_dtype
from torchedge.lowering.rules.registry import rule
from torchedge.ops import registry

IN_STEPS_ONLY = {
    *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "diagonal_scatter"),
    *("empty_permuted", "new_empty_strided", "random_uniform", "slice_scatter"),
}
"""Forms of an operator that functionalization and autograd make, apart from `..._backward`."""


def test_every_rule_has_an_entry_or_is_found_in_steps_only():
    without_entry = set(all_rules()) - set(registry())
    assert {kind for kind in without_entry if not kind.endswith("_backward")} == IN_STEPS_ONLY


def test_an_operator_has_one_rule():
    all_rules()
    with pytest.raises(LoweringError, match="operator add has two rules"):
        rule("add")(lambda result: None)


def test_an_operator_without_a_rule_names_the_nearest():
    with pytest.raises(LoweringError, match="nearest one known is _softmax"):
        rule_for("softmaxx")


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
