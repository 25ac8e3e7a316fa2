"""Errors, coverage and summaries of predictions beside measurements."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.comparisons import compared

from torchedge.profiling.accuracy import comparison_document


def test_errors_are_signed_percentages_and_coverage_counts_rows():
    table = compared()
    assert table.error == pytest.approx(np.full(27, 10.0)) and table.score.mean == pytest.approx(10)
    assert table.coverage == 100
    low = table.low.copy()
    low[:3] = 1.05 * table.measured[:3]
    assert replace(table, low=low).coverage == pytest.approx(100 * 24 / 27)


def test_every_network_counts_the_same_in_the_mean():
    table = compared()
    value = np.where(table.network == "plain", 1.4, 1.1) * table.measured
    table = replace(table, value=value)
    assert table.score.mean == pytest.approx((10 + 10 + 40) / 3)
    document = comparison_document(table)
    rows = {name: entry["rows"] for name, entry in document["networks"].items()}
    assert rows == {"one": 12, "two": 12, "plain": 3}
    assert document["levels"]["30"] == {"rows": 6, "error": pytest.approx(10)}


def test_the_rows_that_err_most_come_first():
    table = compared()
    value = table.value.copy()
    value[5], value[20] = 0.2 * table.measured[5], 1.5 * table.measured[20]
    worst = replace(table, value=value).worst()
    assert [round(row[4]) for row in worst[:2]] == [-80, 50]
    assert worst[0][0] == table.label[5] and worst[0][1] == int(table.batch[5])


def test_intervals_that_were_not_fitted_have_no_coverage():
    blank = np.full(27, np.nan)
    table = compared(low=blank, high=blank)
    assert not table.has_intervals
    assert np.isnan(comparison_document(table)["coverage"])
