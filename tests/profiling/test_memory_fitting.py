"""The constants of a process: found again from rows that they made, near the base where rows say little."""

from dataclasses import replace

import numpy as np
import pytest

from torchedge.devices import find_device
from torchedge.prediction.memory.model import UNLIMITED, Process
from torchedge.prediction.memory.peaks import Peaks
from torchedge.profiling.memory_fitting import adapt_process

BASE = Process((640.0, 770.0), (0.0, 0.0), UNLIMITED, 1e5)


def peaks(reserved, linear=None):
    reserved = np.asarray(reserved, dtype=float)
    linear = np.ones(len(reserved), dtype=bool) if linear is None else np.asarray(linear)
    return Peaks(np.ones(len(reserved)), 0.9 * reserved, reserved, np.ones(len(reserved)), linear)


@pytest.fixture
def dedicated():
    return replace(find_device("nvidia-h200"), figures={})


def test_dedicated_memory_has_no_floor_whatever_the_rows_say(dedicated):
    rows = peaks([50, 100, 200, 300, 1000, 2000])
    found = adapt_process(rows, np.maximum(rows.reserved + 700, 1500), BASE, dedicated)
    assert found.floor == (0, 0)


def test_what_was_not_measured_stays_with_the_base(dedicated):
    rows = peaks([500, 800, 1500])
    found = adapt_process(rows, rows.reserved + 1000, BASE, dedicated)
    assert found.beside[1] == pytest.approx(1000, abs=5)
    assert found.beside[1] - found.beside[0] == pytest.approx(130, abs=40)


def test_one_run_that_lies_off_moves_little(dedicated):
    rows = peaks([200, 400, 600, 800, 1000, 1200, 1400])
    measured = rows.reserved + 800
    measured[3] *= 2
    assert adapt_process(rows, measured, BASE, dedicated).beside[1] == pytest.approx(800, abs=5)


def test_the_most_a_run_may_reserve_follows_the_device():
    h200, tx2 = find_device("nvidia-h200"), find_device("jetson-tx2")
    rows = peaks([200, 400, 600])
    found = adapt_process(rows, rows.reserved + 700, BASE, h200)
    assert found.capacity == pytest.approx(h200.value("memory_mib") - max(found.beside))
    usable = adapt_process(rows, rows.reserved + 700, BASE, tx2)
    assert usable.capacity == pytest.approx(tx2.value("usable_memory_mib") - max(usable.beside))
    share = replace(tx2, figures={"memory_mib": tx2.figures["memory_mib"]})
    taken = adapt_process(rows, rows.reserved + 700, BASE, share)
    assert taken.capacity == pytest.approx(0.9 * tx2.value("memory_mib") - max(taken.beside))
    unknown = adapt_process(rows, rows.reserved + 700, BASE, replace(tx2, figures={}))
    assert unknown.capacity == 600
