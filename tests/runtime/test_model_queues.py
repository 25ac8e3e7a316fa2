"""Queues of models: the outputs of each alone, memory never above the limit, the next one prepared ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from oracles.streaming_programs import data_of, instance_of, packed_data, random_plan, weighted_chain

from torchedge.errors import DeviceMemoryError, InputError, LimitError, ProfileError
from torchedge.lowering.joining import join_programs
from torchedge.runtime import Executor
from torchedge.runtime.memory import MemoryBudget
from torchedge.runtime.model_queues import QueuedModel, run_queue
from torchedge.runtime.weight_sources import ArraysSource, FileSource, JoinedSource
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule
from torchedge.streaming.strategies import always_next, preload_everything

pytest.importorskip("pyopencl")

X = np.linspace(-1, 1, 64, dtype=np.float32)
SIZES = ([3, 5000, 70, 20_000], [9000, 12, 9000, 9000, 50], [70, 30_000, 2])


@pytest.fixture(scope="module")
def models():
    """Three models, each with the output that it has alone with all weights loaded."""
    made = []
    for k, sizes in enumerate(SIZES):
        program = weighted_chain(sizes)
        instance = instance_of(program)
        data = data_of(program, seed=k)
        schedule = make_schedule(program, instance, always_next(instance), LEAST_STAGING_BYTES)
        packed = packed_data(program, data)
        with Executor(program) as executor:
            executor.load(data)
            (expected,) = executor.run(X)
        made.append((QueuedModel(f"model {k}", schedule, lambda p=packed: ArraysSource(p), (X,)), expected))
    return made


def totals(models):
    return [model.schedule.memory.total_bytes for model, _ in models]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slack", [0, 100_000, None])
def test_ten_interleaved_iterations_compute_what_each_model_computes_alone(models, slack):
    limit = None if slack is None else max(totals(models)) + slack
    run = run_queue([model for model, _ in models * 10], memory_limit=limit)
    assert [model.name for model in run.models] == [f"model {k}" for k in range(3)] * 10
    for done, (_, expected) in zip(run.models, models * 10, strict=True):
        np.testing.assert_array_equal(done.outputs[0], expected)
        assert done.ready_ms <= done.start_ms <= done.end_ms
    assert all(a.end_ms <= b.start_ms for a, b in zip(run.models, run.models[1:], strict=False))
    assert max(totals(models)) <= run.peak_bytes <= (limit or sum(sorted(totals(models))[-2:]))
    assert 0 < run.average_bytes <= run.peak_bytes and run.allocated[-1] == 0
    assert "30 models in" in str(run) and "1. model 0: ready at" in str(run)


def test_the_next_model_is_prepared_while_the_present_one_runs(models):
    """Model 0 cannot end before the weights of model 1 are opened: together they would hang otherwise."""
    opened = threading.Event()
    (first, expected), (second, _), _ = models

    class Waiting(ArraysSource):
        def read(self, address, needed, into):
            assert address < 2**41 or opened.wait(30)
            super().read(address, needed, into)

    def open_second():
        opened.set()
        return second.open_source()

    arrays = first.open_source()
    waiting = Waiting.__new__(Waiting)
    waiting.__dict__.update(arrays.__dict__)
    queue = [
        QueuedModel("first", first.schedule, lambda: waiting, (X,)),
        QueuedModel("second", second.schedule, open_second, (X,)),
    ]
    run = run_queue(queue)
    np.testing.assert_array_equal(run.models[0].outputs[0], expected)


def test_a_limit_below_a_model_names_one_that_works(models):
    needed = max(totals(models))
    with pytest.raises(LimitError, match=f"takes {needed} bytes, the queue's limit") as caught:
        run_queue([model for model, _ in models], memory_limit=needed - 1)
    assert caught.value.works_bytes == needed
    with pytest.raises(InputError, match="no models"):
        run_queue([])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_model_that_fails_ends_the_queue_and_frees_the_others(models, place, tmp_path):
    def broken():
        return FileSource(tmp_path / "missing.bin", {})

    queue = [model for model, _ in models]
    queue[place] = QueuedModel("broken", queue[place].schedule, broken, (X,))
    with pytest.raises(ProfileError, match=r"missing\.bin"):
        run_queue(queue, memory_limit=max(totals(models)))
    queue[place] = QueuedModel("broken", queue[place].schedule, models[place][0].open_source, (X, X))
    with pytest.raises(InputError, match="got 2 inputs"):
        run_queue(queue, memory_limit=max(totals(models)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchedge")]


def test_profiled_queues_have_measured_runs(models):
    run = run_queue([model for model, _ in models], profile=True)
    for done, (model, _) in zip(run.models, models, strict=True):
        assert done.measured is not None
        assert done.measured.allocated_bytes == model.schedule.memory.total_bytes


def test_a_queue_is_drawn(models):
    pytest.importorskip("matplotlib")
    figure = run_queue([model for model, _ in models]).plot(limit_bytes=2**20)
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"model 0", "model 1", "model 2", "memory"} < labels


def test_a_budget_waits_and_refuses_what_never_fits():
    budget = MemoryBudget(100)
    budget.take(60, "a")
    taken = threading.Event()
    waiter = threading.Thread(target=lambda: (budget.take(50, "b"), taken.set()))
    waiter.start()
    assert not taken.wait(0.05)
    budget.give(60)
    assert taken.wait(30)
    waiter.join()
    assert (budget.taken_bytes, budget.peak_bytes) == (50, 60)
    with pytest.raises(DeviceMemoryError, match="c takes 101 bytes, expected at most 100"):
        budget.take(101, "c")


def test_an_executor_gives_its_budget_back_also_when_it_fails(models, tmp_path):
    (model, _), *_ = models
    total = model.schedule.memory.total_bytes
    budget = MemoryBudget(total)
    with Executor(model.schedule, source=model.open_source(), budget=budget):
        assert budget.taken_bytes == total
    assert budget.taken_bytes == 0
    with pytest.raises(InputError, match="hold no"):
        Executor(model.schedule, source=ArraysSource({}), budget=budget)
    assert budget.taken_bytes == 0


def test_joined_sources_have_the_tensors_of_each():
    arrays = [{"w": np.arange(k, k + 4, dtype=np.uint8)} for k in range(3)]
    source = JoinedSource([ArraysSource(a) for a in arrays])
    into = np.zeros(4, np.uint8)
    for k in range(3):
        source.read(source.address(f"{k + 1}/w", 4) + 1, 3, into)
        np.testing.assert_array_equal(into[:3], arrays[k]["w"][1:])
    for name in ("w", "0/w", "4/w", "x/w"):
        with pytest.raises(InputError, match="belongs to none of 3 joined programs"):
            source.address(name, 4)
    with pytest.raises(InputError, match="no 'v'"):
        source.address("1/v", 4)


def test_a_preloading_executor_takes_all_before_it_runs():
    program = weighted_chain([3, 5000])
    instance = instance_of(program)
    schedule = make_schedule(program, instance, preload_everything(instance), LEAST_STAGING_BYTES)
    budget = MemoryBudget()
    with Executor(schedule, source=ArraysSource(packed_data(program, data_of(program))), budget=budget):
        first, second = [nbytes for _, nbytes in budget.history][1:]
    assert second - first == schedule.memory.arena_bytes


@pytest.mark.parametrize("seed", range(3))
def test_joined_programs_stream_as_one_and_compute_what_each_computes_alone(models, seed):
    """Weights of the next model are loaded beside launches of the one before, as one plan says."""
    programs = [weighted_chain(sizes) for sizes in SIZES]
    joined = join_programs(programs)
    instance = instance_of(joined)
    schedule = make_schedule(joined, instance, random_plan(instance, seed), LEAST_STAGING_BYTES)
    begins = np.cumsum([0, *[len(program.launches) for program in programs]])
    ahead = [
        transfer
        for model in (1, 2)
        for transfers in schedule.transfers[: begins[model]]
        for transfer in transfers
        if joined.tensors[transfer.tensor].name.startswith(f"{model + 1}/")
    ]
    assert ahead
    source = JoinedSource([model.open_source() for model, _ in models])
    with Executor(schedule, source=source, checks=True) as executor:
        for _ in range(2):
            outputs = executor.run(X, X, X)
            for output, (_, expected) in zip(outputs, models, strict=True):
                np.testing.assert_array_equal(output, expected)
