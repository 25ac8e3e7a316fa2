"""PyTorch's own samples of every operator, with gradients: nodes in numpy against float64."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from oracles.operator_samples import all_entries, check_entry, is_named, run_in_numpy, title_of

ENTRIES = {title_of(entry): entry for entry in all_entries()}
BEYOND = ("index_put", "scatter_reduce.prod", "index_reduce.prod", "half", "bfloat16")
"""Entries whose sizes values decide (a mask for an index), and dtypes that numpy's nodes do not round to."""


@pytest.mark.sampled(60)
@pytest.mark.parametrize("title", [title for title in ENTRIES if title not in BEYOND])
def test_samples(title):
    samples = 4 if is_named(ENTRIES[title]) else 2  # the others are made of rules
    tally = check_entry(ENTRIES[title], samples=samples, run=run_in_numpy)
    assert not tally.count("failed", "refused"), tally.outcomes
