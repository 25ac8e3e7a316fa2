"""PyTorch's own samples of every operator, with gradients: nodes in numpy against float64."""

import pytest

pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from oracles.operator_samples import check_entry, entries, is_named, run_in_numpy

BEYOND = ("index_put", "scatter_reduce.prod", "index_reduce.prod", "half", "bfloat16")
"""Entries whose sizes values decide (a mask for an index), and dtypes that numpy's nodes do not round to."""


def pytest_generate_tests(metafunc):
    """Name the entries, unless the slow tests are left out."""
    left_out = metafunc.config.option.markexpr == "not slow"
    metafunc.parametrize("title", [] if left_out else [title for title in entries() if title not in BEYOND])


@pytest.mark.slow
def test_samples(title):
    samples = 4 if is_named(entries()[title]) else 2  # the others are made of rules
    tally = check_entry(entries()[title], samples=samples, run=run_in_numpy)
    assert not tally.count("failed", "refused"), tally.outcomes
