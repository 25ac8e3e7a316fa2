"""The result of torchedge.plan: which launch loads what, the time and memory of that, and what it saves."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from torchedge.devices import Device
from torchedge.errors import InputError
from torchedge.lowering.programs import Program
from torchedge.storage import Document
from torchedge.streaming.budgets import Budgeted
from torchedge.streaming.capacities import Capacities
from torchedge.streaming.instances import INSTANCES, MEBIBYTE, Instance
from torchedge.streaming.launches import activations_of
from torchedge.streaming.plans import PLANS, OverlapPlan, preload_everything
from torchedge.streaming.rates import Rates
from torchedge.streaming.schedules import StreamingSchedule, make_schedule
from torchedge.streaming.simulation import RunTimeline, simulate_plan, timeline_document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            "capacities": {
                "provenance": str(self.capacities.provenance),
                "source": self.capacities.source,
            },
            "notes": list(self.notes),
        }

    def document(self) -> Document:
        """Return everything as plain data: the summary, the plan, and the instance that it solves."""
        files = {"plan": PLANS.document(self.plan), "instance": INSTANCES.document(self.instance)}
        return {**self.summary(), **files}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON text; with a path, write it there too (atomically).

        Raises:
            ProfileError: the file cannot be written.
        """
        from torchedge.storage import write_json

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
        from torchedge.streaming.figures import draw_comparison, draw_gantt, draw_memory

        if kind not in get_args(Picture):
            raise InputError(f"the picture is {kind!r}; expected one of {', '.join(get_args(Picture))}")
        if kind == "gantt":
            return draw_gantt(self.timeline, layers=layers)
        if kind == "comparison":
            return draw_comparison([self.timeline, self.preloading], labels=["streamed", "preloaded"])
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
        f"{_mib(memory.preloaded_bytes)} of preloaded weights, {_mib(memory.arena_bytes)} shared by streamed "
        f"weights and intermediates, {_mib(memory.staging_bytes)} of staging buffers, "
        f"{_mib(memory.ports_bytes)} of inputs and outputs",
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
    return f"{count:,} {'weight' if count == 1 else 'weights'} of {_mib(nbytes)}"


def _proven(plan: StreamingPlan) -> str:
    if plan.plan.status == "OPTIMAL":
        return "proven optimal"
    if plan.plan.gap is None:
        return "no bound is known"
    limited = " without a memory limit" if plan.instance.memory_chunks is not None else ""
    return f"at most {100 * plan.plan.gap / (1 - plan.plan.gap):.2g} % above the optimum{limited}"


def _settings(instance: Instance) -> str:
    limit = "none" if instance.m_peak_chunks is None else _mib(instance.m_peak_chunks * instance.chunk_bytes)
    return f"lambda {instance.lam:g}, M_peak {limit}"


def _limit(plan: StreamingPlan, limit: int) -> str:
    text = f"{_mib(limit)}, of which {_mib(limit - plan.schedule.memory.total_bytes)} stay free"
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


def _mib(nbytes: float) -> str:
    mib = nbytes / MEBIBYTE
    return f"{mib:,.1f} MiB" if mib >= 1 or not mib else f"{mib:.2g} MiB"
