"""Measured runs: what happened when, on one clock; memory in use within what is allocated."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from oracles.small_programs import chain
from oracles.streaming_programs import data_of, instance_of, packed_data, random_plan, weighted_chain
from oracles.trace_checks import check_trace

from torchedge.errors import InputError
from torchedge.opencl import open_context
from torchedge.runtime import Executor
from torchedge.runtime.measured_runs import _offset_ns
from torchedge.runtime.weight_sources import ArraysSource
from torchedge.runtime.weight_stores import LoadLog
from torchedge.streaming.plans import STRATEGIES, preload_everything
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, FileRead, make_schedule

pytest.importorskip("pyopencl")

X = np.linspace(-1, 1, 64, dtype=np.float32)
PLANS = {**STRATEGIES, "random": lambda instance: random_plan(instance, 3)}


@pytest.fixture(scope="module", params=sorted(PLANS))
def run(request):
    """(schedule, measured run) of the second run of a chain."""
    made = weighted_chain([3, 5000, 70, 40_000, 1024, 9000, 5000, 12])
    instance = instance_of(made)
    schedule = make_schedule(made, instance, PLANS[request.param](instance), LEAST_STAGING_BYTES)
    source = ArraysSource(packed_data(made, data_of(made)))
    with Executor(schedule, source=source, profile=True) as executor:
        executor.run(X)
        executor.run(X)
        return schedule, executor.measured()


@pytest.mark.parametrize(("offset", "corrected"), [(40, 40), (70, 60), (500, 60)])
def test_no_copy_ends_after_a_read_took_its_place(offset, corrected):
    """By the device's clock the copies of read 0 end at 20 and 40; read 1 takes its place at 100."""
    events = [SimpleNamespace(profile=SimpleNamespace(end=end)) for end in (20, 40)]
    reads = [FileRead(0, 8, 0, after, ()) for after in (0, 2, 2)]
    log = LoadLog(reads, 0, offset, times=[(0, 10), (100, 110), None], events=events)
    assert _offset_ns(log) == corrected


def test_allocated_is_what_the_schedule_says(run):
    schedule, measured = run
    memory = schedule.memory
    assert measured.allocated_bytes == memory.total_bytes
    assert measured.allocated["staging"] == memory.staging_bytes and measured.allocated["images"] == 0
    assert measured.memory.peak.total <= measured.allocated_bytes
    assert measured.memory.average.total <= measured.memory.peak.total


def test_the_driver_is_asked(run):
    _, measured = run
    source = measured.driver.source
    assert source == ("resident set" if open_context(None).device.kind == "cpu" else "NVML, this process")
    assert measured.driver.after_bytes > 2**20 and measured.document()["driver"]["source"] == source
    assert f"MiB more in use than before ({source})" in str(measured)


def test_every_byte_is_read_once_and_copied_once(run):
    schedule, measured = run
    copied = {}
    for copy in measured.copies:
        copied[copy.weight] = copied.get(copy.weight, 0) + copy.nbytes
    weights = {t.name: t.nbytes for t in schedule.program.tensors if t.role == "parameter"}
    assert copied == weights and measured.read_bytes == sum(weights.values())


def test_copies_follow_their_read_and_the_launch_before_and_precede_the_first_use(run):
    schedule, measured = run
    clocks = 50.0  # ms by which the host's clock and the device's may differ here
    arrival = {}
    for copy in measured.copies:
        assert measured.reads[copy.read].end_ms <= copy.start_ms + clocks
        assert copy.start_ms <= copy.end_ms
        if copy.launch is None:
            assert copy.end_ms <= measured.initialisation_ms + clocks
        elif copy.launch:
            assert measured.launches[copy.launch - 1].end_ms <= copy.start_ms
        arrival[copy.weight] = copy.end_ms
    for launch, item in zip(schedule.program.launches, measured.launches, strict=True):
        for index in launch.tensors:
            assert arrival.get(schedule.program.tensors[index].name, 0.0) <= item.start_ms + clocks
    ends = [0.0, *[item.end_ms for item in measured.launches]]
    assert all(before <= item.start_ms for before, item in zip(ends, measured.launches, strict=False))


def test_stalls_are_within_the_time_between_launches(run):
    _, measured = run
    before = measured.initialisation_ms
    for launch in measured.launches:
        assert 0 <= launch.stall_ms <= launch.start_ms - before + 1e-9
        before = launch.end_ms
    assert measured.stall_ms <= measured.execution_ms
    assert measured.latency_ms == pytest.approx(measured.initialisation_ms + measured.execution_ms)


def test_weights_are_in_use_from_their_first_copy_to_their_last_use(run):
    schedule, measured = run
    assert measured.memory.total[-1] == sum(
        t.nbytes
        for i, t in enumerate(schedule.program.tensors)
        if i in schedule.preload or t.role in ("input", "output")
    )
    assert measured.memory.times_ms[0] == 0 and measured.memory.times_ms[-1] == measured.latency_ms


def test_the_trace_is_valid_and_complete(run, tmp_path):
    schedule, measured = run
    measured.trace(tmp_path / "trace.json")
    threads = check_trace(tmp_path / "trace.json")
    assert len(threads["launches"]) == len(schedule.program.launches)
    assert len(threads["copies"]) == len(measured.copies)
    assert sum(len(events) for name, events in threads.items() if name.startswith("reads")) == len(
        measured.reads
    )
    assert [event["name"] for event in threads["phases"]] == ["initialisation", "execution"]


def test_json_has_every_figure(run, tmp_path):
    _, measured = run
    measured.to_json(tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["allocated"] == measured.allocated
    assert len(document["launches"]) == len(measured.launches)
    assert document["execution_ms"] == measured.execution_ms
    assert len(document["memory"]["times_ms"]) == len(document["memory"]["activations_bytes"])


def test_only_a_profiled_streaming_run_is_measured():
    made = weighted_chain([3, 50])
    instance = instance_of(made)
    schedule = make_schedule(made, instance, preload_everything(instance), LEAST_STAGING_BYTES)

    def source():
        return ArraysSource(packed_data(made, data_of(made)))

    with Executor(schedule, source=source()) as executor:
        executor.run(X)
        with pytest.raises(InputError, match="profile=True"):
            executor.measured()
    executor = Executor(schedule, source=source(), profile=True)
    with executor, pytest.raises(InputError, match="run it"):
        executor.measured()
    with Executor(chain(), profile=True) as executor:
        executor.run(np.zeros(1000, np.float32))
        with pytest.raises(InputError, match="StreamingSchedule"):
            executor.measured()


def test_memory_is_drawn_with_its_levels(run):
    pytest.importorskip("matplotlib")
    _, measured = run
    figure = measured.plot(limit_bytes=2 * measured.allocated_bytes)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any(label.startswith("allocated") for label in labels)
    assert measured.title in figure.axes[0].get_title(loc="left")
