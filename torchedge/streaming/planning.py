"""From a program to its streaming plan, and to plans of several settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from torchedge.devices import Device
from torchedge.errors import InputError, check_choice
from torchedge.lowering.assembly import Lowered
from torchedge.lowering.inference import lower_fused
from torchedge.lowering.joining import join_programs
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import Target
from torchedge.streaming.budgets import Budget, Budgeted, parse_bytes
from torchedge.streaming.capacities import (
    CHUNK_BYTES,
    LAMBDA,
    M_PEAK_BYTES,
    make_instance,
    rate_capacities,
)
from torchedge.streaming.figures import Lane, lane_of_runs
from torchedge.streaming.instances import Distance, Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import derive_rates
from torchedge.streaming.solving import solve
from torchedge.streaming.streaming_plans import StreamingPlan, predict_run
from torchedge.tracing.steps import CapturedStep

Amount = int | str | None


def plan_program(
    program: Program,
    device: Device,
    *,
    memory_limit: Amount = None,
    m_peak: Amount = M_PEAK_BYTES,
    lam: float = LAMBDA,
    chunk: int | str = CHUNK_BYTES,
    distance: Distance = "layers",
    effort: float = 1.0,
    strategy: Callable[[Instance], OverlapPlan] | None = None,
    launch_ms: Sequence[float] | None = None,
) -> StreamingPlan:
    """Plan the streaming of the weights of a lowered inference. The options are those of `torchedge.plan`.

    strategy: plans in the solver's place, to be compared with it. It may break capacities and M_peak, which
    `notes` name. launch_ms: measured latency of each launch alone, instead of the device's roofline.

    Raises:
        DeviceError: the device's profile lacks a figure that planning takes.
        InputError: an option is out of range.
        LimitError: no plan stays within the memory limit; the message names the smallest that works.
    """
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    peak = None if m_peak is None else parse_bytes(m_peak, "m_peak")
    chunk_bytes = parse_bytes(chunk, "chunk")
    rates = derive_rates(device)
    capacities = rate_capacities(program, device, chunk_bytes=chunk_bytes, launch_ms=launch_ms)
    instance = make_instance(
        program,
        device,
        chunk_bytes=chunk_bytes,
        m_peak_bytes=peak,
        lam=lam,
        distance=distance,
        capacities=capacities,
    )

    def latency(budgeted: Budgeted) -> float:
        schedule = budgeted.schedule
        run_rates = replace(rates, staging_bytes=schedule.staging_bytes)
        return predict_run(instance, budgeted.plan, schedule, run_rates).latency_ms

    budget = Budget(program, instance, limit, partial(solve, effort=effort), latency)
    budgeted = budget.plan() if strategy is None else budget.by_strategy(strategy)
    budgeted = replace(budgeted, plan=replace(budgeted.plan, program=program.digest))
    notes = (*program.notes, *capacities.notes, *_broken(budgeted))
    return StreamingPlan(
        **{part.name: getattr(budgeted, part.name) for part in fields(budgeted)},
        program=program,
        device=device,
        capacities=capacities,
        problem=instance,
        rates=replace(rates, staging_bytes=budgeted.schedule.staging_bytes),
        memory_limit=limit,
        notes=tuple(dict.fromkeys(notes)),
    )


def _broken(budgeted: Budgeted) -> list[str]:
    """Name the rules that a strategy breaks, if any."""
    if not budgeted.problems:
        return []
    name = budgeted.plan.solver.get("strategy", "the strategy")
    more = len(budgeted.problems) - 1
    rest = f", and {more:,} more" if more else ""
    return [f"{name} breaks rules of the overlap problem: {budgeted.problems[0]}{rest}"]


LAMBDAS = (0.9, 0.2, 0.1, 0.05, 0.03)
PARTS = (2, 5)
"""M_peak is lowered to these parts of what is in flight with the first lambda."""

SETTINGS = len(LAMBDAS) + len(PARTS)


@dataclass(frozen=True)
class Tradeoff:
    """One setting, M_peak in bytes, and the plan that it gives."""

    lam: float
    m_peak: int | None
    plan: StreamingPlan


def trade_off(
    program: Program,
    device: Device,
    *,
    m_peak: int | None = M_PEAK_BYTES,
    chunk: int = CHUNK_BYTES,
    effort: float = 1.0,
    progress: Callable[[], object] | None = None,
) -> tuple[Tradeoff, ...]:
    """Plan a program with each of `LAMBDAS` at `m_peak`, and with the first at lower ones.

    Returns the plans, least memory first. progress: called after each of `SETTINGS`. The other options are
    those of `torchedge.plan`, sizes in bytes; its errors are raised here too.
    """

    def planned(lam: float, peak: int | None) -> Tradeoff:
        plan = plan_program(program, device, m_peak=peak, lam=lam, chunk=chunk, effort=effort)
        if progress is not None:
            progress()
        return Tradeoff(lam, peak, plan)

    first = planned(LAMBDAS[0], m_peak)
    in_flight = first.plan.plan.peak_chunks
    settings: list[tuple[float, int | None]] = [(lam, m_peak) for lam in LAMBDAS[1:]]
    settings += [(LAMBDAS[0], max(1, in_flight // part) * chunk) for part in PARTS]
    others = [planned(lam, peak) for lam, peak in settings]
    return tuple(sorted([first, *others], key=lambda point: point.plan.timeline.allocated_bytes))


# queues -----------------------------------------------------------------------------------------------------


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


# adaptive fusion (FlashMem, section 4.3) --------------------------------------------------------------------


Fusion = Literal["all", "adaptive"]


def plan_model(
    captured: CapturedStep,
    target: Target,
    device: Device,
    *,
    fusion: Fusion = "all",
    **options: Any,  # noqa: ANN401 - those of plan_program
) -> StreamingPlan:
    """Lower and plan a captured model. The options are those of `torchedge.plan` and `plan_program`.

    A product into which element-wise values are fused loads as much as a product may, 20 % of its latency by
    the thresholds; an element-wise kernel of its own may load 300 %. With adaptive fusion the last value of
    each launch that fuses any is kept apart, if that pays (`price_ms`); else of half of the launches, those
    that store most, and so on. Nothing is lowered again where no weight is preloaded for want of capacity.
    """
    check_choice("fusion", fusion, get_args(Fusion))
    lowered = lower_fused(captured, target)
    best = plan_program(lowered.program, device, **options)
    names = _candidates(lowered) if fusion == "adaptive" and _lacks_capacity(best) else []
    while names:
        apart = frozenset(names)
        trial = plan_program(lower_fused(captured, target, apart).program, device, **options)
        if price_ms(trial) < price_ms(best):
            return replace(trial, apart=apart)
        names = names[: len(names) // 2]
    return best


def _candidates(lowered: Lowered) -> list[str]:
    """Return the last value of each launch that fuses any, those of the largest results first."""
    program = lowered.program

    def stored(launch: int) -> int:
        return max(program.tensors[index].nbytes for index in program.launches[launch].tensors[:1])

    ordered = sorted(lowered.fused, key=lambda fused: -stored(fused.launch))
    return list(dict.fromkeys(fused.values[-1] for fused in ordered))


def _lacks_capacity(plan: StreamingPlan) -> bool:
    """Whether a layer exceeds its capacity, or a weight is preloaded that an earlier layer could load."""
    first = {weight.name for weight in plan.instance.weights if weight.first_use == 1}
    return plan.relaxation > 1 or not first.issuperset(plan.plan.preload)


def price_ms(plan: StreamingPlan) -> float:
    """Return the price of a plan: the latencies of its layers, and the time to read its objective's chunks.

    The objective counts preloaded chunks and loading distances (`Instance`); where layers exceed their
    capacities it counts as many times. So a split pays if it saves more than the launches that it adds take.
    """
    layers = sum(layer.latency_ms for layer in plan.instance.layers)
    chunks = plan.relaxation * (plan.plan.objective or 0.0)
    return layers + chunks * plan.rates.read_ms(plan.instance.chunk_bytes)
