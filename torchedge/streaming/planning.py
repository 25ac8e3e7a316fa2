"""From a program to its streaming plan: what loads when, the time and memory of that, and what it saves."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchedge.devices import Device
from torchedge.errors import InputError, check_choice
from torchedge.lowering.assembly import Lowered
from torchedge.lowering.inference import lower_inference
from torchedge.lowering.joining import join_programs
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import Target
from torchedge.storage import Document, write_json
from torchedge.storage.amounts import Amount, bytes_of, with_unit
from torchedge.storage.locks import cached_property
from torchedge.streaming.budgets import Budget, Budgeted, in_mib
from torchedge.streaming.capacities import LAMBDA, Capacities, make_instance, rate_capacities
from torchedge.streaming.figures import Lane, draw_comparison, draw_gantt, draw_memory, lane_of_runs
from torchedge.streaming.instances import INSTANCES, MEBIBYTE, Distance, Instance
from torchedge.streaming.plans import PLANS, OverlapPlan, preload_everything
from torchedge.streaming.rates import Rates, derive_rates
from torchedge.streaming.schedules import StreamingSchedule, activations_of, make_schedule
from torchedge.streaming.simulation import RunTimeline, simulate_plan, timeline_document
from torchedge.streaming.solving.planner import solve
from torchedge.tracing.steps import CapturedStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK, M_PEAK = "256KiB", "500MiB"


def plan_program(
    program: Program,
    device: Device,
    *,
    memory_limit: Amount | None = None,
    m_peak: Amount | None = M_PEAK,
    lam: float = LAMBDA,
    chunk: Amount = CHUNK,
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
    limit = None if memory_limit is None else bytes_of(memory_limit, "memory_limit")
    peak = None if m_peak is None else bytes_of(m_peak, "m_peak")
    chunk_bytes = bytes_of(chunk, "chunk")
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
    m_peak: Amount | None = M_PEAK,
    chunk: Amount = CHUNK,
    effort: float = 1.0,
    progress: Callable[[], object] | None = None,
) -> tuple[Tradeoff, ...]:
    """Plan a program with each of `LAMBDAS` at `m_peak`, and with the first at lower ones.

    Returns the plans, least memory first. progress: called after each of `SETTINGS`. The other options are
    those of `torchedge.plan`; its errors are raised here too.
    """

    def planned(lam: float, peak: int | None) -> Tradeoff:
        plan = plan_program(program, device, m_peak=with_unit(peak), lam=lam, chunk=chunk, effort=effort)
        if progress is not None:
            progress()
        return Tradeoff(lam, peak, plan)

    most = None if m_peak is None else bytes_of(m_peak, "m_peak")
    first = planned(LAMBDAS[0], most)
    in_flight = first.plan.plan.peak_chunks
    settings: list[tuple[float, int | None]] = [(lam, most) for lam in LAMBDAS[1:]]
    settings += [(LAMBDAS[0], max(1, in_flight // part) * bytes_of(chunk)) for part in PARTS]
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
    memory_limit: Amount | None,
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
    lowered = lower_inference(captured, target)
    best = plan_program(lowered.program, device, **options)
    first = {weight.name for weight in best.instance.weights if weight.first_use == 1}
    # A layer exceeds its capacity, or a weight is preloaded that an earlier layer could load.
    lacks_capacity = best.relaxation > 1 or not first.issuperset(best.plan.preload)
    names = _candidates(lowered) if fusion == "adaptive" and lacks_capacity else []
    while names:
        apart = frozenset(names)
        trial = plan_program(lower_inference(captured, target, apart).program, device, **options)
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


def price_ms(plan: StreamingPlan) -> float:
    """Return the price of a plan: the latencies of its layers, and the time to read its objective's chunks.

    The objective counts preloaded chunks and loading distances (`Instance`); where layers exceed their
    capacities it counts as many times. So a split pays if it saves more than the launches that it adds take.
    """
    layers = sum(layer.latency_ms for layer in plan.instance.layers)
    chunks = plan.relaxation * (plan.plan.objective or 0.0)
    return layers + chunks * plan.rates.read_ms(plan.instance.chunk_bytes)


# the plan ---------------------------------------------------------------------------------------------------

Picture = Literal["memory", "gantt", "comparison"]


def predict_run(
    problem: Instance, plan: OverlapPlan, schedule: StreamingSchedule, rates: Rates
) -> RunTimeline:
    """Return the simulated run of a plan with its schedule."""
    program, known = schedule.program, {weight.name for weight in problem.weights}
    others = [program.tensors[index] for index in schedule.preload]
    staying = sum(tensor.nbytes for tensor in others if tensor.name not in known)
    return simulate_plan(
        problem,
        plan,
        rates,
        [nbytes + staying for nbytes in activations_of(program)],
        allocated_bytes=schedule.memory.total_bytes,
    )


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of a plan: number from 1, class, capacity and loads (chunks), times (ms), memory (MiB)."""

    number: int
    name: str
    load_class: str
    capacity_chunks: int
    loaded_chunks: int
    loads: tuple[str, ...]
    latency_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class StreamingPlan(Budgeted):
    """An overlap plan of a program on a device, verified, with its schedule and its predicted run (FlashMem).

    program: what runs, a layer a launch. problem: the overlap problem with the device's own capacities.
    rates: how fast weights move, and the size of the staging pool. `memory_limit` is in bytes. apart: values
    that the program computes by kernels of their own (`lower_inference`).
    """

    program: Program
    device: Device
    capacities: Capacities
    problem: Instance
    rates: Rates
    memory_limit: int | None = None
    notes: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()

    @property
    def status(self) -> str:
        """OPTIMAL (proven) or FEASIBLE (with a gap)."""
        return self.plan.status

    @cached_property
    def timeline(self) -> RunTimeline:
        """The predicted run of the plan."""
        return self.predict(self.plan, self.schedule)

    @cached_property
    def preloading(self) -> RunTimeline:
        """The predicted run of the same program that preloads every weight."""
        plan = preload_everything(self.problem)
        schedule = make_schedule(self.program, self.problem, plan, self.rates.staging_bytes)
        return self.predict(plan, schedule)

    def predict(self, plan: OverlapPlan, schedule: StreamingSchedule) -> RunTimeline:
        """Predict the run of any plan of this program, with its schedule."""
        return predict_run(self.problem, plan, schedule, self.rates)

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """The per-layer table."""
        loads: dict[int, list[tuple[str, int]]] = {}
        for load in self.plan.loads:
            loads.setdefault(load.layer, []).append((load.weight, load.chunks))
        runs = self.timeline.layers
        return tuple(
            LayerRow(
                number,
                layer.name,
                layer.load_class,
                layer.capacity_chunks,
                sum(chunks for _, chunks in loads.get(number, [])),
                tuple(f"{weight} ({chunks})" for weight, chunks in loads.get(number, [])),
                layer.latency_ms,
                float(runs.starts_ms[number - 1]),
                float(runs.ends_ms[number - 1]),
            )
            for number, layer in enumerate(self.problem.layers, 1)
        )

    def __str__(self) -> str:
        return describe(self)

    def summary(self) -> Document:
        """Return the plan, its proof and its predicted run as plain data: bytes and ms, with provenance."""
        plan, memory = self.plan, self.schedule.memory
        return {
            "model": self.program.name,
            "program": self.program.digest,
            "device": self.device.name,
            "launches": len(self.program.launches),
            "weights": len(self.instance.weights),
            "streamed_weights": self.streamed_weights,
            "weight_bytes": self.weight_bytes,
            "status": plan.status,
            "objective": plan.objective,
            "lower_bound": plan.lower_bound,
            "gap": plan.gap,
            "memory_limit_bytes": self.memory_limit,
            "relaxation": self.relaxation,
            "allocated": {**asdict(memory), "total_bytes": memory.total_bytes},
            "predicted": timeline_document(self.timeline),
            "preload_everything": timeline_document(self.preloading),
            "capacities": {"provenance": str(self.capacities.provenance), "source": self.capacities.source},
            "notes": list(self.notes),
        }

    def document(self) -> Document:
        """Return everything as plain data: the summary, the plan, and the instance that it solves."""
        files = {"plan": PLANS.document(self.plan), "instance": INSTANCES.document(self.instance)}
        return {**self.summary(), **files}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON text; with a path, write it there too (atomically).

        Raises ProfileError: the file cannot be written.
        """
        document = self.document()
        if path is not None:
            write_json(path, document)
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)

    def plot(self, kind: Picture = "memory", *, layers: tuple[int, int] | None = None) -> Figure:
        """Draw the memory over time, the loads against the layers ("gantt"), or the run beside preloading.

        layers: first and last layer of a Gantt chart.

        Raises:
            InputError: there is no such picture.
            MissingExtraError: matplotlib is not installed.
        """
        if kind not in get_args(Picture):
            raise InputError(f"the picture is {kind!r}; expected one of {', '.join(get_args(Picture))}")
        if kind == "gantt":
            return draw_gantt(self.timeline, layers=layers)
        if kind == "comparison":
            return draw_comparison({"streamed": self.timeline, "preloaded": self.preloading})
        return draw_memory(self.timeline, limit_bytes=self.memory_limit)

    def sources(self) -> Sequence[str]:
        """Return the sources of the figures behind the plan, with their provenance."""
        figures = {
            "disk read": self.rates.disk_read,
            "copy to the device": self.rates.copy,
            "host's time for a launch": self.rates.host_launch,
            "for a transfer": self.rates.host_transfer,
        }
        rates = [
            f"{name} {figure.value:g} {figure.unit} ({figure.provenance})"
            for name, figure in figures.items()
            if figure is not None
        ]
        return [f"capacities: {self.capacities.source} ({self.capacities.provenance})", *rates]

    @property
    def streamed_weights(self) -> int:
        """How many weights are loaded while layers run."""
        return len({load.weight for load in self.plan.loads})

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that may be streamed."""
        return sum(weight.nbytes for weight in self.problem.weights)


_WIDTH = 80
_INDENT = 15


def describe(plan: StreamingPlan) -> str:
    """Return the text that `print(plan)` shows."""
    program = plan.program
    head = (
        f"{program.name} on {plan.device.name}: {len(program.launches):,} launches, "
        f"{_weights(len(plan.problem.weights), plan.weight_bytes)}"
    )
    lines = [
        *textwrap.wrap(head, _WIDTH, break_on_hyphens=False),
        "",
        *_comparison(plan.timeline, plan.preloading),
        "",
        *_loads(plan),
        *_entry("objective", f"{plan.plan.objective:,.6g}, {_proven(plan)} ({_settings(plan.instance)})"),
    ]
    memory = plan.schedule.memory
    lines += _entry(
        "memory",
        f"{in_mib(memory.preloaded_bytes)} MiB of preloaded weights, {in_mib(memory.arena_bytes)} MiB shared "
        f"by streamed weights and intermediates, {in_mib(memory.staging_bytes)} MiB of staging buffers, "
        f"{in_mib(memory.ports_bytes)} MiB of inputs and outputs",
    )
    if plan.memory_limit is not None:
        lines += _entry("memory limit", _limit(plan, plan.memory_limit))
    lines += _entry("predicted", f"{plan.timeline.provenance} figures. {'; '.join(plan.sources())}")
    for note in plan.notes:
        lines += _entry("note", note)
    return "\n".join(lines)


def _comparison(run: RunTimeline, whole: RunTimeline) -> list[str]:
    """Return a table of a run beside the run that preloads everything."""
    rows: list[tuple[str, float, float, str]] = [
        ("latency", run.latency_ms, whole.latency_ms, "ms"),
        ("  initialisation", run.initialisation_ms, whole.initialisation_ms, "ms"),
        ("  layers alone", float(run.layers.alone_ms.sum()), float(whole.layers.alone_ms.sum()), "ms"),
        ("  waiting for weights", run.stalls.waiting, whole.stalls.waiting, "ms"),
        ("  slowed by copies", run.stalls.slowed, whole.stalls.slowed, "ms"),
        ("memory allocated", run.allocated_bytes, whole.allocated_bytes, "MiB"),
        ("  in use on average", run.memory.average.total, whole.memory.average.total, "MiB"),
    ]
    lines = [f"{'':<24}{'this plan':>14}{'preloading everything':>26}"]
    for name, ours, theirs, unit in rows:
        scale = MEBIBYTE if unit == "MiB" else 1
        cells = [f"{value / scale:,.1f} {unit}" for value in (ours, theirs)]
        times = f"{theirs / ours:.1f} times" if ours > 0 and not name.startswith(" ") else ""
        lines.append(f"{name:<24}{cells[0]:>14}{cells[1]:>26}{times:>14}".rstrip())
    return lines


def _loads(plan: StreamingPlan) -> list[str]:
    before = plan.timeline.preloaded_bytes
    count = len(plan.problem.weights) - plan.streamed_weights
    streamed = _weights(plan.streamed_weights, plan.weight_bytes - before)
    return [
        *_entry("preloaded", _weights(count, before)),
        *_entry("streamed", f"{streamed}, loaded while layers run" if plan.streamed_weights else streamed),
    ]


def _weights(count: int, nbytes: int) -> str:
    if not count:
        return "no weights"
    return f"{count:,} {'weight' if count == 1 else 'weights'} of {in_mib(nbytes)} MiB"


def _proven(plan: StreamingPlan) -> str:
    if plan.plan.status == "OPTIMAL":
        return "proven optimal"
    if plan.plan.gap is None:
        return "no bound is known"
    limited = " without a memory limit" if plan.instance.memory_chunks is not None else ""
    return f"at most {100 * plan.plan.gap / (1 - plan.plan.gap):.2g} % above the optimum{limited}"


def _settings(instance: Instance) -> str:
    chunks = instance.m_peak_chunks
    limit = "none" if chunks is None else f"{in_mib(chunks * instance.chunk_bytes)} MiB"
    return f"lambda {instance.lam:g}, M_peak {limit}"


def _limit(plan: StreamingPlan, limit: int) -> str:
    text = f"{in_mib(limit)} MiB, of which {in_mib(limit - plan.schedule.memory.total_bytes)} MiB stay free"
    if plan.relaxation > 1:
        text += f"; to keep it, layers load up to {plan.relaxation:.3g} times their capacity"
    return text


def _entry(name: str, text: str) -> list[str]:
    """Return a name with a text beside it."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=name.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )
