"""The compiled replay gives, to the byte, what Python's does, and steps aside where it cannot."""

import numpy as np
import pytest

from torchedge.prediction.memory import compiled_replay
from torchedge.prediction.memory.caching_allocator import ReplayRows, replay_rows
from torchedge.prediction.memory.compiled_replay import replay_all


@pytest.fixture
def compiled(monkeypatch):
    kernel = compiled_replay._compiled()
    if kernel is None:
        pytest.skip("no OpenCL CPU device")
    monkeypatch.setattr(compiled_replay, "_asked", compiled_replay._WORTH)
    runs = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *given: runs.append(len(given[-1])) or run(*given))
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


def in_python(events, persistent, sizes, counted_from=0):
    return replay_rows(ReplayRows(events, persistent, sizes, counted_from))


@pytest.mark.parametrize("seed", range(20))
def test_random_tapes(compiled, seed):
    given = tape(seed, freed=(0.3, 0.5, 0.7)[seed % 3])
    other = (*tape(100 + seed, steps=50), 30)
    found = replay_all([ReplayRows(*given), ReplayRows(*other)])
    assert np.array_equal(found[0], in_python(*given)) and np.array_equal(found[1], in_python(*other))
    assert compiled == [12]


def test_rows_whose_lists_are_full_are_left_to_python(compiled, monkeypatch):
    monkeypatch.setattr(compiled_replay, "_FREE_BLOCKS", 3)
    given = tape(1, freed=0.4)
    assert np.array_equal(replay_all([ReplayRows(*given)])[0], in_python(*given))


@pytest.mark.parametrize("case", ["huge", "past 32 bits", "no events", "nothing there before"])
def test_odd_tapes(compiled, case):
    events, persistent, sizes = tape(2)
    if case == "huge":
        sizes[0, 5] = 1 << 33
    elif case == "past 32 bits":
        sizes[1:3] <<= 14
    elif case == "no events":
        events = events[:0]
    else:
        persistent = persistent[:0]
    (found,) = replay_all([ReplayRows(events, persistent, sizes)])
    assert np.array_equal(found, in_python(events, persistent, sizes))


def test_large_storages_and_many_free_blocks_stay_compiled(compiled):
    events, persistent, sizes = tape(5, steps=1500, freed=0.45)
    sizes[:, ::50] <<= 9
    rows = ReplayRows(events, persistent, sizes)
    peaks = compiled_replay._run(compiled_replay._compiled(), [rows])
    assert sizes.max() > 1 << 24 and np.array_equal(peaks, replay_rows(rows))


def test_a_few_rows_pay_for_no_compiler(monkeypatch):
    monkeypatch.setattr(compiled_replay, "_asked", 0)
    monkeypatch.setattr(compiled_replay, "_compiled", lambda: pytest.fail("compiled"))
    given = tape(3)
    assert np.array_equal(replay_all([ReplayRows(*given)])[0], in_python(*given))


def test_without_opencl_python_does_it(monkeypatch):
    monkeypatch.setattr(compiled_replay, "_asked", compiled_replay._WORTH)
    monkeypatch.setattr(compiled_replay, "_compiled", lambda: None)
    given = tape(4)
    assert np.array_equal(replay_all([ReplayRows(*given)])[0], in_python(*given))
