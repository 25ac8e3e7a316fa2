"""The compiled replay gives, to the byte, what Python's does, and steps aside where it cannot."""

import numpy as np
import pytest

from torchedge.prediction.memory import compiled_pools
from torchedge.prediction.memory.compiled_pools import Task, replay_tasks
from torchedge.prediction.memory.pools import PoolReplay


@pytest.fixture
def compiled(monkeypatch):
    kernel = compiled_pools._compiled()
    if kernel is None:
        pytest.skip("no OpenCL CPU device")
    monkeypatch.setattr(compiled_pools, "_asked", compiled_pools._WORTH)
    runs = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *given: runs.append(given[0]) or run(*given))
    return runs


def tape(seed, steps=300, freed=0.6):
    rng = np.random.default_rng(seed)
    alive, events = [], []
    for storage in range(10, steps):
        events.append(storage + 1)
        alive.append(storage)
        while alive and rng.random() < freed:
            events.append(-1 - alive.pop(int(rng.integers(len(alive)))))
    sizes = np.exp(rng.uniform(0, np.log(100_000), size=(6, steps))).astype(np.int64)
    sizes[rng.random(sizes.shape) < 0.05] = 0
    return np.array(events, dtype=np.int32), np.arange(10, dtype=np.int32), sizes


def slow(events, persistent, sizes, counted_from=0):
    return np.array(PoolReplay(events, persistent, counted_from).peaks(sizes))


@pytest.mark.parametrize("seed", range(20))
def test_random_tapes(compiled, seed):
    given = tape(seed, freed=(0.3, 0.5, 0.7)[seed % 3])
    other = (*tape(100 + seed, steps=50), 30)
    found = replay_tasks([Task(*given), Task(*other)])
    assert np.array_equal(found[0], slow(*given)) and np.array_equal(found[1], slow(*other))
    assert compiled == [12]


def test_rows_whose_lists_are_full_are_left_to_python(compiled, monkeypatch):
    monkeypatch.setattr(compiled_pools, "_FREE_BLOCKS", 3)
    given = tape(1, freed=0.4)
    assert np.array_equal(replay_tasks([Task(*given)])[0], slow(*given))


@pytest.mark.parametrize("case", ["huge", "no events", "nothing there before"])
def test_odd_tapes(compiled, case):
    events, persistent, sizes = tape(2)
    if case == "huge":
        sizes[0, 5] = 1 << 25
    elif case == "no events":
        events = events[:0]
    else:
        persistent = persistent[:0]
    (found,) = replay_tasks([Task(events, persistent, sizes)])
    assert np.array_equal(found, slow(events, persistent, sizes))


def test_a_few_rows_pay_for_no_compiler(monkeypatch):
    monkeypatch.setattr(compiled_pools, "_asked", 0)
    monkeypatch.setattr(compiled_pools, "_compiled", lambda: pytest.fail("compiled"))
    given = tape(3)
    assert np.array_equal(replay_tasks([Task(*given)])[0], slow(*given))


def test_without_opencl_python_does_it(monkeypatch):
    monkeypatch.setattr(compiled_pools, "_asked", compiled_pools._WORTH)
    monkeypatch.setattr(compiled_pools, "_compiled", lambda: None)
    given = tape(4)
    assert np.array_equal(replay_tasks([Task(*given)])[0], slow(*given))
