"""Bundles of inferences that run one after the other within one memory limit (FlashMem, section 5.3).

Their programs are joined to one, which is planned and run like any other: the last launches of one model load
the first weights of the next, intermediates of all share one arena, and the memory is known before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from torchedge.arrays import Array
from torchedge.bundles.bundle import Bundle
from torchedge.bundles.manifests import Port, memory_of
from torchedge.errors import InputError
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.joining import join_programs
from torchedge.lowering.placement import placed_for
from torchedge.lowering.programs import Program
from torchedge.storage.amounts import Amount, bytes_of, with_unit
from torchedge.storage.locks import cached_property
from torchedge.streaming.figures import Lane, draw_lanes
from torchedge.streaming.simulation import MemoryCurve, in_turn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchedge.lowering.kernels.loading import LoadingWay
    from torchedge.opencl import ClDevice
    from torchedge.runtime import Executor
    from torchedge.runtime.measured_runs import MeasuredRun
    from torchedge.runtime.weight_sources import Reads
    from torchedge.streaming.planning import StreamingPlan


class BundleQueue:
    """Bundles in a row; one may occur more than once.

    Input, output or weight NAME of the bundle in place k (from 1) is called k/NAME.
    Raises InputError: there are no bundles, one of them trains, or their device classes differ.
    """

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.bundles = tuple(bundles)
        for bundle in self.bundles:
            if bundle.trains:
                raise InputError(
                    f"{bundle.path}: is a bundle that trains; expected inferences in a queue: export it "
                    "without mode='train'"
                )
        self.program: Program = join_programs([bundle.program for bundle in self.bundles])

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> BundleQueue:
        """Read bundles, and check everything in them; raises what `Bundle.open` raises."""
        return cls([Bundle.open(path) for path in paths])

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of launches up to the end of each bundle, 0 first."""
        return tuple(accumulate([len(bundle.program.launches) for bundle in self.bundles], initial=0))

    @property
    def names(self) -> tuple[str, ...]:
        """The model of each bundle."""
        return tuple([bundle.manifest.model for bundle in self.bundles])

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs of all bundles, in order."""
        return _ports([bundle.inputs for bundle in self.bundles])

    @cached_property
    def outputs(self) -> tuple[Port, ...]:
        """The outputs of all bundles, in order."""
        return _ports([bundle.outputs for bundle in self.bundles])

    def plan(self, memory_limit: Amount, device: ClDevice | None = None) -> StreamingPlan:
        """Return the plan within a limit: all weights are preloaded if it allows that.

        It is made with the profile that the first bundle was exported for. device: the OpenCL device that
        runs it.

        Raises:
            LimitError: no plan stays within the limit; its `works_bytes` suffice.
            DeviceError: the device's profile is not there, or lacks a figure.
        """
        from torchedge.streaming.planning import plan_program
        from torchedge.streaming.plans import preload_everything

        limit = bytes_of(memory_limit, "memory_limit")
        program = self.program if device is None else placed_for(self.program, device, ALIGNMENT)
        profile = self.bundles[0].device
        if memory_of([program]).total_bytes <= limit:
            whole = plan_program(program, profile, strategy=preload_everything)
            if whole.schedule.memory.total_bytes <= limit:
                return replace(whole, memory_limit=limit)
        return plan_program(program, profile, memory_limit=with_unit(limit))

    def place(
        self,
        device: ClDevice | str | int | None = None,
        *,
        memory_limit: Amount,
        reads: Reads = "plain",
        loading: LoadingWay = "copy",
    ) -> QueueRunner:
        """Plan the queue and return its runner on an OpenCL device; options as of `Bundle.place`.

        Raises what `plan`, `Executor` and `Bundle.open_source` raise.
        """
        # Reading a bundle needs no OpenCL.
        from torchedge.opencl import open_context
        from torchedge.runtime import Executor
        from torchedge.runtime.weight_sources import JoinedSource

        chosen = open_context(device).device
        plan = self.plan(memory_limit, chosen)
        source = JoinedSource([bundle.open_source(reads) for bundle in self.bundles])
        executor = Executor(plan.schedule, chosen, source=source, loading=loading, profile=True)
        for place, bundle in enumerate(self.bundles, 1):
            for name, packed in bundle.packed_states():
                executor.load_packed([(f"{place}/{name}", packed)])
        return QueueRunner(self, plan, executor)


@dataclass(frozen=True, eq=False)
class QueueRunner:
    """Runs the bundles of a queue in turn, as planned; preloaded weights stay from run to run."""

    queue: BundleQueue
    plan: StreamingPlan
    executor: Executor

    def step(self, *inputs: object) -> list[Array]:
        """Run all bundles once, on arrays in the order of `BundleQueue.inputs`; return all outputs.

        Raises:
            InputError: too few or many arrays, a wrong shape or dtype.
            ProfileError: weights cannot be read. OpenCLError: the driver fails.
        """
        return self.executor.run(*inputs)

    def measured(self) -> QueueRun:
        """Return times and memory of the initialisation and the last run; raises InputError without one."""
        return QueueRun(self.queue.names, self.queue.ends, self.executor.measured())

    def close(self) -> None:
        """Give the device's memory back."""
        self.executor.close()

    def __enter__(self) -> QueueRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One model in a run of a queue (ms from the run's start; bytes).

    latency_ms: from the end of the model before. stall_ms: its launches waited for weights. loaded_bytes: its
    weights loaded during the run, ahead_bytes of them beside launches of the models before. peak_bytes: the
    most in use while it ran.
    """

    model: str
    start_ms: float
    latency_ms: float
    stall_ms: float
    loaded_bytes: int
    ahead_bytes: int
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class QueueRun:
    """A measured run of a queue. ends: the number of launches up to the end of each model, 0 first."""

    names: tuple[str, ...]
    ends: tuple[int, ...]
    measured: MeasuredRun

    @cached_property
    def memory(self) -> MemoryCurve:
        """Memory in use during the run, without the initialisation."""
        return self.measured.memory.between(self.measured.initialisation_ms, self.measured.latency_ms)

    @cached_property
    def models(self) -> tuple[ModelRun, ...]:
        """What each model took, in turn."""
        run, count = self.measured, len(self.names)
        loaded, ahead = [0] * count, [0] * count
        for copy in run.copies:
            if copy.launch is not None:
                place = int(copy.weight.partition("/")[0]) - 1
                loaded[place] += copy.nbytes
                ahead[place] += copy.nbytes if copy.launch < self.ends[place] else 0
        models, start = [], run.initialisation_ms
        for place, (first, stop) in enumerate(pairwise(self.ends)):
            launches = run.launches[first:stop]
            end = launches[-1].end_ms if launches else start
            figures = (
                start - run.initialisation_ms,
                end - start,
                sum(launch.stall_ms for launch in launches),
                loaded[place],
                ahead[place],
                int(run.memory.between(start, end).peak.total),
            )
            models.append(ModelRun(self.names[place], *figures))
            start = end
        return tuple(models)


def draw_runs(runs: Sequence[QueueRun], limit_bytes: int | None = None) -> Figure:
    """Draw the memory in use in the initialisation and in runs one after the other (FlashMem, Fig. 6).

    Raises InputError: there are no runs. MissingExtraError: matplotlib is not installed.
    """
    if not runs:
        raise InputError("no runs were given; expected at least one")
    begin = runs[0].measured.initialisation_ms
    curves = [runs[0].measured.memory.between(0.0, begin)]
    spans: list[tuple[str, float, float]] = []
    for run in runs:
        curves.append(run.memory)
        for model in run.models:
            start = begin + model.start_ms
            spans.append((model.model, start, start + model.latency_ms))
        begin += run.measured.execution_ms
    allocated = runs[0].measured.allocated_bytes
    return draw_lanes([Lane("measured", in_turn(curves), tuple(spans), allocated)], limit_bytes=limit_bytes)


def _ports(groups: Sequence[Sequence[Port]]) -> tuple[Port, ...]:
    return tuple(
        [replace(port, name=f"{k}/{port.name}") for k, ports in enumerate(groups, 1) for port in ports]
    )
