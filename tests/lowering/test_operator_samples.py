import numpy as np
import pytest
import torch

pytest.importorskip("pyopencl")
pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from drivers.test_kernels import FAMILIES
from lowering.test_whole_ranges import OPERATORS
from oracles.operator_samples import Call, all_entries, check_entry, compare, is_named, title_of

ENTRIES = {title_of(entry): entry for entry in all_entries()}
ELEMENTWISE = {name.split(".")[0] for name in OPERATORS}
OTHERS = [
    title
    for title, entry in ENTRIES.items()
    if (is_named(entry) or title.startswith("nn.functional."))
    and not (title in FAMILIES or entry.aten_name in ELEMENTWISE)
]
"""Operators of rules, layers and losses; tests/drivers and test_whole_ranges run the kernels of others."""


@pytest.mark.slow
def test_nearly_all_samples_of_supported_operators_come_out_right():
    tallies = [check_entry(ENTRIES[title], samples=1) for title in OTHERS]
    counted = sum(tally.counted for tally in tallies)
    wrong = [(t.title, o) for t in tallies for o in t.outcomes if o.verdict in ("failed", "refused")]
    assert len(wrong) <= 0.05 * counted, wrong


def test_a_wrong_number_is_found_and_float32_rounding_is_not():
    call = Call(lambda x: [x.sum()], [torch.tensor([1e8, 1.0, -1e8])], ())
    exact = [torch.tensor(1.0, dtype=torch.float64)]
    assert compare(call, [np.array(0.0, np.float32)], exact) == ""
    assert compare(call, [np.array(9.0, np.float32)], exact) == "output 0 is off by 8.0e+00"


def test_a_wrong_shape_and_a_wrong_infinity_are_found():
    call = Call(lambda x: [x.exp()], [torch.tensor([1e3, 0.0])], ())
    exact = [torch.tensor([float("inf"), 1.0], dtype=torch.float64)]
    assert compare(call, [np.array([np.inf, 1.0], np.float32)], exact) == ""
    assert "inf" in compare(call, [np.array([3.4e38, 1.0], np.float32)], exact)
    assert compare(call, [np.array([1.0], np.float32)], exact) == "output 0 is of shape (1,); expected (2,)"


def test_an_entry_without_a_rule_does_not_count():
    tally = check_entry(ENTRIES["linalg.svd"], samples=2)
    assert tally.counted == 0 and {o.verdict for o in tally.outcomes} <= {"foreign", "none"}
