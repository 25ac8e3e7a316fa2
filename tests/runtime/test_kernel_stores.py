"""Streaming by loading kernels and by the slots of launches: the same bytes as with all weights loaded."""

import errno

import numpy as np
import pytest
import torch
from oracles.faulty_files import FaultyFile, preloaded_outputs, write_file
from oracles.streaming_programs import data_of, instance_of, packed_data, random_plan, weighted_chain
from oracles.targets import target_here
from torch import nn

from torchedge.errors import ProfileError
from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.runtime import Executor
from torchedge.runtime.measured_runs import MeasuredCopy, MeasuredRead
from torchedge.runtime.measured_runs import _launches as launches_of
from torchedge.runtime.weight_sources import ArraysSource, FileSource
from torchedge.streaming.commands import resolve, slots_of
from torchedge.streaming.plans import always_next, make_plan
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule

pytest.importorskip("pyopencl")

WAYS = ("kernel", "slot")


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3), nn.GELU(), nn.Flatten(), nn.Linear(864, 100), nn.Softmax(-1)]
    layers += [nn.Linear(100, 333), nn.LayerNorm(333), nn.Linear(333, 65), nn.ReLU(), nn.Linear(65, 10)]
    return nn.Sequential(*layers)


class Made:
    """A network's program for a device class, its data, and its outputs with all weights loaded."""

    def __init__(self, target):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        within = target_here(target)
        self.program = lower_inference(capture_inference_step(network(), (x,)), within).program
        self.data = data_of(self.program)
        self.inputs = [x.numpy()]
        self.outputs = preloaded_outputs(self.program, self.data, *self.inputs)
        self.instance = instance_of(self.program)
        self.packed = packed_data(self.program, self.data)

    def check(self, executor, times=2):
        for _ in range(times):
            for actual, expected in zip(executor.run(*self.inputs), self.outputs, strict=True):
                assert actual.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def made():
    known = {}

    def of(target):
        if target not in known:
            known[target] = Made(target)
        return known[target]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", ["cpu", pytest.param("gpu", marks=pytest.mark.slow), "mobile"])
@pytest.mark.parametrize("seed", range(3))
def test_every_plan_computes_the_same_bytes(made, target, way, seed):
    case = made(target)
    schedule = make_schedule(
        case.program, case.instance, random_plan(case.instance, seed), LEAST_STAGING_BYTES
    )
    with Executor(schedule, source=ArraysSource(case.packed), loading=way, checks=True) as executor:
        case.check(executor, 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reads", ["plain", "mmap", "direct"])
@pytest.mark.parametrize("padding", [40, 64])
def test_files_are_streamed_at_any_offset(made, way, reads, padding, tmp_path):
    """At odd offsets no vector is aligned: copy commands do the rest."""
    case = made("cpu")
    path = tmp_path / "weights.bin"
    source = FileSource(path, write_file(path, case.packed, padding), reads)
    plan = always_next(case.instance)
    schedule = make_schedule(case.program, case.instance, plan, LEAST_STAGING_BYTES)
    with Executor(schedule, source=source, loading=way) as executor:
        case.check(executor)


def test_launches_carry_the_largest_transfer(made):
    case = made("mobile")
    weights = sorted(case.instance.weights, key=lambda w: w.first_use)
    chosen = [w for w in weights if w.first_use > 2]
    loads = {w.name: {1: w.chunks} for w in chosen}
    plan = make_plan(case.instance, loads, {"strategy": "all beside the first launch"})
    schedule = make_schedule(case.program, case.instance, plan, LEAST_STAGING_BYTES)
    loads = resolve(schedule, ArraysSource(case.packed).places, by_kernels=True)
    slots = slots_of(case.program, loads)
    assert list(slots) == [0]
    copies = [copy for read in loads.run for copy in read.copies]
    most = copies[slots[0].copy]
    assert most.nbytes == max(copy.nbytes for copy in copies if copy.after == 0)
    own = case.program.kernels[case.program.launches[0].kernel]
    assert slots[0].kernel.name != own.name and slots[0].kernel.access == own.access
    with Executor(schedule, source=ArraysSource(case.packed), loading="slot", profile=True) as executor:
        case.check(executor)
        run = executor.measured()
        assert executor.timings()[0].kernel == own.name
    carried = [copy for copy in run.copies if copy.launch == 0]
    assert sum(copy.nbytes for copy in carried) == sum(t.nbytes for t in schedule.transfers[0])
    first = run.launches[0]
    alike = [copy for copy in carried if (copy.start_ms, copy.end_ms) == (first.start_ms, first.end_ms)]
    assert len(alike) == 1 and alike[0].weight == case.program.tensors[most.tensor].name
    assert run.allocated["staging"] <= schedule.memory.staging_bytes


def test_kernels_of_another_text_are_left_to_loading_kernels():
    chain = weighted_chain([5000, 70, 40_000, 9000])
    data, x = data_of(chain), np.linspace(-1, 1, 64, dtype=np.float32)
    instance = instance_of(chain)
    schedule = make_schedule(chain, instance, always_next(instance), LEAST_STAGING_BYTES)
    expected = preloaded_outputs(chain, data, x)
    with Executor(schedule, source=ArraysSource(packed_data(chain, data)), loading="slot") as executor:
        np.testing.assert_array_equal(executor.run(x), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_after_a_failed_one_computes_the_same(made, way, tmp_path, monkeypatch):
    """A disk that fails in the middle of a run ends it; the next run begins anew."""
    monkeypatch.setattr("torchedge.runtime.weight_sources.FIRST_PAUSE", 1e-4)
    case = made("cpu")
    plan = always_next(case.instance)
    schedule = make_schedule(case.program, case.instance, plan, LEAST_STAGING_BYTES)
    path, failing = tmp_path / "weights.bin", [False]
    places = write_file(path, case.packed, 64)

    def fault(number, offset, into):
        if failing[0] and offset > path.stat().st_size // 2:
            raise OSError(errno.EIO, "Input/output error")

    source = FileSource(path, places, "plain", opener=lambda path, reads: FaultyFile(path, reads, fault))
    with Executor(schedule, source=source, loading=way) as executor:
        case.check(executor)
        failing[0] = True
        for _ in range(2):
            with pytest.raises(ProfileError, match="Input/output error"):
                executor.run(*case.inputs)
        failing[0] = False
        case.check(executor)


@pytest.mark.parametrize("way", ["copy", *WAYS])
def test_the_waits_of_a_stream_hold_on_drivers_whose_finish_does_not_wait(made, way, monkeypatch):
    """Mesa's rusticl 22.3 returns from clFinish at once where clFlush came last."""
    import pyopencl as cl

    class Queue(cl.CommandQueue):
        def finish(self):
            raise AssertionError("a queue that may be flushed is waited for by clFinish")

    case = made("cpu")
    monkeypatch.setattr(cl, "CommandQueue", Queue)
    schedule = make_schedule(case.program, case.instance, random_plan(case.instance, 0), LEAST_STAGING_BYTES)
    with Executor(schedule, source=ArraysSource(case.packed), loading=way) as executor:
        assert any(isinstance(queue, Queue) for queue in (executor._queue, executor._store._uploads))
        case.check(executor)
        executor._store.abort()
        case.check(executor)


def test_a_launch_that_waits_for_bytes_of_its_slot_stalls(made):
    """Launch 1 carries bytes that were read until 9 ms, after launch 0 had ended at 5 ms."""
    case = made("cpu")
    name = max(case.instance.weights, key=lambda weight: weight.first_use).name
    times = [(1.0, 5.0), (10.0, 12.0)] + [(12.0, 12.0)] * (len(case.program.launches) - 2)
    reads = [MeasuredRead(1, 0, 4096, 2.0, 9.0)]
    for start, stall in ((10.0, 4.0), (10.5, 0.0)):  # in the launch; beside it
        copy = MeasuredCopy(name, 0, 1, 4096, start, 12.0)
        launches = launches_of(case.program, times, [copy], reads, 0.0)
        assert [launch.stall_ms for launch in launches[:2]] == [0.0, stall]
