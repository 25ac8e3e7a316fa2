"""Each rule has an entry in `torchedge.ops`, or is of an operator that only captured steps hold."""

import pytest

from torchedge.errors import LoweringError
from torchedge.lowering.rules import all_rules, rule_for
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
