"""Models that run one after the other under one memory limit (FlashMem, section 5.3, Fig. 6).

While a model runs, another thread compiles the next one and, as soon as the limit leaves room, allocates and
preloads its weights; its arena waits until the model before has given its memory back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError, LimitError
from torchedge.opencl import ClDevice
from torchedge.runtime.executors import Executor
from torchedge.runtime.measured_runs import MeasuredRun
from torchedge.runtime.memory import Array, MemoryBudget
from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.figures import Lane, draw_lanes
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.schedules import StreamingSchedule
from torchedge.streaming.simulation import MemoryCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ModelRun", "QueueRun", "QueuedModel", "run_queue"]


@dataclass(frozen=True, eq=False)
class QueuedModel:
    """A model in a queue: its schedule, a function that opens its weights, and its inputs in order."""

    name: str
    schedule: StreamingSchedule
    open_source: Callable[[], WeightSource]
    inputs: Sequence[object]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """One model of a queue that has run (ms from the queue's start).

    ready_ms: its weights are preloaded. start_ms and end_ms: of its run. measured: where the queue was
    profiled.
    """

    name: str
    ready_ms: float
    start_ms: float
    end_ms: float
    outputs: tuple[Array, ...]
    measured: MeasuredRun | None


@dataclass(frozen=True, eq=False)
class QueueRun:
    """A queue that has run: its models in order, and the bytes allocated from each time (ms) on."""

    models: tuple[ModelRun, ...]
    times_ms: npt.NDArray[np.float64]
    allocated: npt.NDArray[np.int64]

    @property
    def latency_ms(self) -> float:
        """Time of the whole queue, initialisations included."""
        return self.models[-1].end_ms

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once."""
        return int(self.allocated.max())

    @property
    def average_bytes(self) -> float:
        """Bytes allocated, on average over the queue's time."""
        spans = np.diff(np.append(self.times_ms, max(self.latency_ms, self.times_ms[-1])))
        return float(self.allocated @ spans / spans.sum())

    def plot(self, limit_bytes: int | None = None) -> Figure:
        """Draw the memory allocated over time (FlashMem, Fig. 6).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        times, first = np.unique(self.times_ms[::-1], return_index=True)
        nothing = np.zeros(len(times), np.int64)
        memory = MemoryCurve(times, nothing, self.allocated[::-1][first], nothing)
        spans = tuple([(run.name, run.start_ms, run.end_ms) for run in self.models])
        lane = Lane("one after the other, memory allocated", memory, spans, self.peak_bytes)
        return draw_lanes([lane], limit_bytes=limit_bytes)

    def __str__(self) -> str:
        lines = [
            f"{len(self.models)} models in {self.latency_ms:.1f} ms; memory "
            f"{self.peak_bytes / MEBIBYTE:.1f} MiB at most, {self.average_bytes / MEBIBYTE:.1f} on average"
        ]
        for place, run in enumerate(self.models, 1):
            lines.append(
                f"{place}. {run.name}: ready at {run.ready_ms:.1f} ms, ran from {run.start_ms:.1f} to "
                f"{run.end_ms:.1f}"
            )
        return "\n".join(lines)


def run_queue(
    models: Sequence[QueuedModel],
    device: ClDevice | str | int | None = None,
    *,
    memory_limit: int | None = None,
    profile: bool = False,
) -> QueueRun:
    """Run models one after the other; together they never allocate more than `memory_limit` bytes.

    Raises:
        InputError: there are no models. LimitError: a model alone takes more than the limit; its
            `works_bytes` suffice. Others as `Executor` does.
    """
    if not models:
        raise InputError("no models were given; expected at least one")
    largest = max(models, key=lambda model: model.schedule.memory.total_bytes)
    needed = largest.schedule.memory.total_bytes
    if memory_limit is not None and needed > memory_limit:
        raise LimitError(
            f"{largest.name} takes {needed} bytes, the queue's limit is {memory_limit}; set a limit of at "
            f"least {needed}, or plan the model with the limit",
            works_bytes=needed,
        )
    budget = MemoryBudget(memory_limit)
    begin = budget.history[0][0]

    def elapsed() -> float:
        return (time.perf_counter_ns() - begin) / 1e6

    def prepare(model: QueuedModel) -> tuple[Executor, float]:
        executor = Executor(
            model.schedule, device, source=model.open_source(), budget=budget, profile=profile
        )
        return executor, elapsed()

    runs: list[ModelRun] = []
    with ThreadPoolExecutor(1, "torchedge-queue") as ahead:
        upcoming: Future[tuple[Executor, float]] | None = ahead.submit(prepare, models[0])
        try:
            for place, model in enumerate(models):
                assert upcoming is not None
                executor, ready = upcoming.result()
                upcoming = ahead.submit(prepare, models[place + 1]) if place + 1 < len(models) else None
                with executor:
                    start = elapsed()
                    outputs = executor.run(*model.inputs)
                    end = elapsed()
                    measured = executor.measured() if profile else None
                runs.append(ModelRun(model.name, ready, start, end, tuple(outputs), measured))
        finally:
            if upcoming is not None and upcoming.exception() is None:
                upcoming.result()[0].close()
    times = np.array([(time_ns - begin) / 1e6 for time_ns, _ in budget.history])
    return QueueRun(tuple(runs), times, np.array([nbytes for _, nbytes in budget.history], np.int64))
