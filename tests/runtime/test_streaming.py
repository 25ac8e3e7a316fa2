"""Streaming runs on PoCL: the same bytes as with all weights loaded, over faults as well."""

import errno
import mmap
import os
import threading

import numpy as np
import pytest
from oracles.children import python
from oracles.faulty_files import FaultyFile, preloaded_outputs, write_file
from oracles.streaming_programs import data_of, instance_of, packed_data, weighted_chain

from torchedge.errors import InputError, ProfileError
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import ArraysSource, FileSource
from torchedge.streaming.plans import STRATEGIES, always_next
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule

pytest.importorskip("pyopencl")

STAGING = LEAST_STAGING_BYTES


CHAIN = [3, 5000, 70, 40_000, 1024, 1, 9000, 30_000, 5000, 12]
X = np.linspace(-1, 1, 64, dtype=np.float32)


@pytest.fixture(scope="module")
def chain():
    made = weighted_chain(CHAIN)
    data = data_of(made)
    (expected,) = preloaded_outputs(made, data, X)
    assert np.isfinite(expected).all()
    return made, data, expected


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("reads", ["plain", "mmap", "direct", "arrays"])
def test_streaming_computes_the_same_bytes_from_every_source(chain, strategy, reads, tmp_path):
    made, data, expected = chain
    instance = instance_of(made)
    schedule = make_schedule(made, instance, STRATEGIES[strategy](instance), STAGING)
    arrays = packed_data(made, data)
    if reads == "arrays":
        source = ArraysSource(arrays)
    else:
        path = tmp_path / "weights.bin"
        source = FileSource(path, write_file(path, arrays), reads)
    with Executor(schedule, source=source) as executor:
        for _ in range(3):
            np.testing.assert_array_equal(executor.run(X)[0], expected)


@pytest.fixture
def faulty(chain, tmp_path, monkeypatch):
    """A function from a fault to (executor's arguments, file): the chain, always-next, from a faulty file."""
    monkeypatch.setattr("torchedge.runtime.weight_sources.FIRST_PAUSE", 1e-4)
    made, data, _ = chain
    instance = instance_of(made)
    schedule = make_schedule(made, instance, always_next(instance), STAGING)
    path = tmp_path / "weights.bin"
    places = write_file(path, packed_data(made, data))

    def make(fault, reads="plain"):
        files = []

        def opener(path, reads):
            files.append(FaultyFile(path, reads, fault))
            return files[-1]

        return schedule, FileSource(path, places, reads, opener=opener), files[0]

    return make


@pytest.mark.parametrize("reads", ["plain", "direct"])
@pytest.mark.parametrize("most", [1000, 5000])
def test_short_reads_are_continued(chain, faulty, reads, most):
    if reads == "direct" and most < 4096:
        pytest.skip("a direct read of less than a page means the end of the file")
    schedule, source, _ = faulty(lambda number, offset, into: most * (1 + number % 3), reads)
    with Executor(schedule, source=source) as executor:
        np.testing.assert_array_equal(executor.run(X)[0], chain[2])


def failing(numbers):
    def fault(number, offset, into):
        if number in numbers:
            raise OSError(errno.EIO, "Input/output error")

    return fault


def test_an_error_of_the_disk_that_passes_is_retried(chain, faulty):
    schedule, source, file = faulty(failing({2, 3, 7, 11}))
    with Executor(schedule, source=source) as executor:
        for _ in range(2):
            np.testing.assert_array_equal(executor.run(X)[0], chain[2])
    assert file.count > 11 and file.closed


def test_an_error_of_the_disk_that_stays_names_file_and_offset_and_the_executor_runs_on(chain, faulty):
    broken = set()
    schedule, source, _ = faulty(failing(broken))
    with Executor(schedule, source=source) as executor:
        np.testing.assert_array_equal(executor.run(X)[0], chain[2])
        for first in (0, 3, 6):
            broken |= set(range(source._file.count + first, source._file.count + 100))
            with pytest.raises(
                ProfileError, match=r"weights\.bin: reading \d+ bytes at offset \d+ failed \(In"
            ):
                executor.run(X)
            broken.clear()
            np.testing.assert_array_equal(executor.run(X)[0], chain[2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchedge")]


def test_an_error_while_preloading_ends_the_construction(faulty):
    schedule, source, file = faulty(failing(range(1, 100)))
    with pytest.raises(ProfileError, match=r"at offset 0 failed"):
        Executor(schedule, source=source)
    assert file.closed


def test_a_disk_that_stalls_makes_the_run_late_not_wrong(chain, faulty):
    gates = [threading.Event() for _ in range(3)]

    def fault(number, offset, into):
        if number in (2, 5, 6):
            gates[(2, 5, 6).index(number)].wait(30)

    schedule, source, _ = faulty(fault)
    with Executor(schedule, source=source) as executor:
        for gate, seconds in zip(gates, (0.05, 0.1, 0.15), strict=True):
            threading.Timer(seconds, gate.set).start()
        np.testing.assert_array_equal(executor.run(X)[0], chain[2])


@pytest.mark.parametrize("reads", ["plain", "mmap", "direct"])
def test_a_file_that_shrinks_is_reported(chain, faulty, reads, tmp_path):
    schedule, source, _ = faulty(lambda number, offset, into: None, reads)
    path = tmp_path / "weights.bin"
    with Executor(schedule, source=source) as executor:
        executor.run(X)
        content = path.read_bytes()
        path.write_bytes(content[:100_000])
        with pytest.raises(ProfileError, match=r"ends near byte \d+, expected \d+ bytes more"):
            executor.run(X)
        path.write_bytes(content[:-1] + b"?")
        with pytest.raises(ProfileError, match="was changed while it was open"):
            executor.run(X)


def test_reads_into_memory_that_takes_no_direct_reads_go_through_other_memory(chain, faulty, monkeypatch):
    preadv = os.preadv

    def refuse(descriptor, arrays, offset):
        if not isinstance(arrays[0], mmap.mmap):
            raise OSError(errno.EFAULT, "Bad address")
        return preadv(descriptor, arrays, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    schedule, source, _ = faulty(lambda number, offset, into: None, "direct")
    with Executor(schedule, source=source) as executor:
        np.testing.assert_array_equal(executor.run(X)[0], chain[2])


def test_a_source_of_another_program_is_refused(chain, tmp_path):
    made, data, _ = chain
    instance = instance_of(made)
    schedule = make_schedule(made, instance, always_next(instance), STAGING)
    arrays = packed_data(made, data)
    with pytest.raises(InputError, match="no place for 'w1'"):
        Executor(schedule, source=ArraysSource({n: a for n, a in arrays.items() if n != "w1"}))
    with pytest.raises(InputError, match=r"19996 bytes for 'w1', .* takes 20000"):
        Executor(schedule, source=ArraysSource({**arrays, "w1": arrays["w1"][1:]}))
    path = tmp_path / "weights.bin"
    places = write_file(path, arrays)
    with pytest.raises(InputError, match=r"4 bytes for 'w1', .* takes 20000"):
        Executor(schedule, source=FileSource(path, {**places, "w1": (0, 4)}))
    with pytest.raises(ProfileError, match=r"'w1' lies at bytes \d+ to \d+ of a file of"):
        FileSource(path, {**places, "w1": (path.stat().st_size - 1, 20_000)})
    with pytest.raises(ProfileError, match="not a regular file"):
        FileSource(tmp_path, {})
    with pytest.raises(InputError, match="schedule without a source"):
        Executor(schedule)


def test_streamed_weights_are_neither_read_nor_written(chain):
    made, data, expected = chain
    instance = instance_of(made)
    schedule = make_schedule(made, instance, always_next(instance), STAGING)
    with Executor(schedule, source=ArraysSource(packed_data(made, data))) as executor:
        np.testing.assert_array_equal(executor.read("w0"), data["w0"])
        with pytest.raises(InputError, match="has no tensor 'w1'"):
            executor.read("w1")
        with pytest.raises(InputError, match="has no tensor 'w1'"):
            executor.load({"w1": data["w1"]})
        executor.launch()
        executor.launch()
        executor.finish()
        np.testing.assert_array_equal(executor.run(X)[0], expected)


@pytest.mark.parametrize("launch", [0, 4, len(CHAIN) - 1])
def test_a_run_that_is_interrupted_leaves_the_executor_usable(chain, launch, monkeypatch):
    made, data, expected = chain
    instance = instance_of(made)
    schedule = make_schedule(made, instance, always_next(instance), STAGING)
    with Executor(schedule, source=ArraysSource(packed_data(made, data))) as executor:
        store = executor._store
        after = store.after

        def interrupt(position, event):
            after(position, event)
            if position == launch:
                raise KeyboardInterrupt

        monkeypatch.setattr(store, "after", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.run(X)
        monkeypatch.undo()
        np.testing.assert_array_equal(executor.run(X)[0], expected)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchedge")]


def test_an_executor_that_is_only_dropped_ends_and_closes_its_file(chain, faulty):
    schedule, source, file = faulty(lambda number, offset, into: None)
    executor = Executor(schedule, source=source)
    del source
    executor.launch()
    del executor
    assert file.closed


@pytest.mark.parametrize("loading", ["copy", "kernel"])
def test_an_executor_that_the_end_of_the_process_finds_open_says_nothing(loading):
    script = f"""
import numpy as np
from oracles.streaming_programs import data_of, instance_of, packed_data, weighted_chain
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import ArraysSource
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule
from torchedge.streaming.plans import always_next
made = weighted_chain([3, 500])
instance = instance_of(made)
schedule = make_schedule(made, instance, always_next(instance), LEAST_STAGING_BYTES)
source = ArraysSource(packed_data(made, data_of(made)))
executor = Executor(schedule, source=source, loading={loading!r})
executor.run(np.ones(64, np.float32))
"""
    done = python("-c", script)
    assert "Exception" not in done.stderr and "Error" not in done.stderr
