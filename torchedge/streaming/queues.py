"""Models that run one after the other, planned as one program: each loads the next one's first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchedge.devices import Device
from torchedge.errors import InputError
from torchedge.lowering.joining import join_programs
from torchedge.lowering.programs import Program
from torchedge.streaming.figures import Lane, lane_of_runs
from torchedge.streaming.planning import Amount, plan_program
from torchedge.streaming.streaming_plans import StreamingPlan


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one model's weights in whole chunks: preloaded, loaded by the models before it, by itself."""

    preloaded: int
    carried: int
    own: int


@dataclass(frozen=True)
class QueuePlan:
    """The plan of a queue as one program, and of each model alone.

    Weight NAME of the model in place k (from 1) is called k/NAME in the program of all.
    """

    together: StreamingPlan
    alone: tuple[StreamingPlan, ...]

    @property
    def latency_ms(self) -> float:
        """Predicted time of the whole queue, planned together."""
        return self.together.timeline.latency_ms

    @property
    def alone_ms(self) -> float:
        """Predicted time of the whole queue, one model at a time."""
        return sum(plan.timeline.latency_ms for plan in self.alone)

    @property
    def ends(self) -> list[int]:
        """The number of launches up to the end of each model, 0 first."""
        return [0, *accumulate(len(plan.program.launches) for plan in self.alone)]

    @property
    def shares(self) -> tuple[Share, ...]:
        """For each model in place, where its weights are loaded."""
        plan, size, ends = self.together.plan, self.together.instance.chunk_bytes, self.ends
        chunks = {w.name: w.chunks for w in self.together.instance.weights}
        counts = [[0, 0, 0] for _ in self.alone]
        for name in plan.preload:
            counts[_place(name)][0] += size * chunks[name]
        for load in plan.loads:
            model = _place(load.weight)
            counts[model][2 if load.layer > ends[model] else 1] += size * load.chunks
        return tuple(Share(*count) for count in counts)

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Both for `draw_lanes`."""
        run = self.together.timeline
        times = [0.0, *(float(run.layers.ends_ms[end - 1]) for end in self.ends[1:])]
        names = [plan.program.name for plan in self.alone]
        spans = tuple((name, *span) for name, span in zip(names, pairwise(times), strict=True))
        together = Lane("planned together", run.memory, spans, run.allocated_bytes)
        return together, lane_of_runs("one at a time", [plan.timeline for plan in self.alone])


def plan_queue(
    programs: Sequence[Program],
    device: Device,
    *,
    memory_limit: Amount,
    progress: Callable[[], object] = lambda: None,
    **options: object,
) -> QueuePlan:
    """Plan models that run one after the other within one memory limit.

    Only the first model has to preload what its first launch uses; preloaded weights stay until all models
    have run. progress: called after each plan, one more than there are models. options: those of
    `plan_program`.

    Raises:
        InputError: there are no programs, or they are lowered for different targets.
        LimitError: a model alone, or all together, do not run within the limit.
    """
    if not programs:
        raise InputError("no models were given; expected at least one")
    plans = []
    for program in (*programs, join_programs(programs)):
        plans.append(plan_program(program, device, memory_limit=memory_limit, **options))  # type: ignore[arg-type]
        progress()
    return QueuePlan(plans[-1], tuple(plans[:-1]))


def _place(name: str) -> int:
    """Return the place (from 0) of the model of a weight."""
    return int(name.partition("/")[0]) - 1
