import pytest

pytest.importorskip("pyopencl")
pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from drivers.test_kernels import FAMILIES
from lowering.test_whole_ranges import OPERATORS
from oracles.operator_samples import all_entries, check_entry, is_named, title_of

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


def test_an_entry_without_a_rule_does_not_count():
    tally = check_entry(ENTRIES["linalg.svd"], samples=2)
    assert tally.counted == 0 and {o.verdict for o in tally.outcomes} <= {"foreign", "none"}
