"""`simulate`: the memory of one step at its peak, with the time of the peak and its largest tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError, check_whole
from torchedge.graphs import ForwardGraph
from torchedge.graphs.sizes import LARGEST_BATCH
from torchedge.ops import unsupported_remark
from torchedge.prediction.memory.caching_allocator import RunStage, replay, run_stages
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.tape import CATEGORIES, Tape
from torchedge.storage.pictures import canvas
from torchedge.texts import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("forward", "backward", "optimizer")
_SHADES = ("#dbe9f6", "#fde2cf", "#dff0d8")
Phase = Literal["forward", "backward", "optimizer"]
_MIB = 2.0**20
_LEAST_MIB = 0.05
"""Parts of the memory below this are not printed."""


@dataclass(frozen=True, slots=True)
class PeakEvent:
    """The moment of the live peak: phase, kind of the running operator, path of its module."""

    phase: Phase
    kind: str
    scope: str
    index: int

    def __str__(self) -> str:
        where = f" of {self.scope}" if self.scope else ""
        return f"{self.phase}: {self.kind}{where}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory over one step: after each of E events the live MiB (E,), its phase (E,) and operator (E,).

    by_category: (E, 7), the live MiB by what fills it, in the order of `tape.CATEGORIES`.
    """

    live_mib: npt.NDArray[np.float64]
    by_category: npt.NDArray[np.float64]
    phase: npt.NDArray[np.int8]
    operator: npt.NDArray[np.int32]


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of one step of a graph at one batch size; MiB = 2^20 bytes. Nothing in it is fitted.

    allocated_mib, reserved_mib: peaks as `torch.cuda.max_memory_allocated` and `max_memory_reserved` would
    show them (replayed allocator); live_mib: the most bytes of live tensors, each rounded up to 512.
    breakdown: the live peak by category, summing to it exactly. largest: label and MiB of the largest tensors
    alive then. unsupported: operators whose memory is a guess. stages: of a run with an evaluation.
    """

    name: str
    batch_size: int
    settings: StepSettings
    allocated_mib: float
    reserved_mib: float
    live_mib: float
    peak: PeakEvent
    breakdown: Mapping[str, float]
    largest: tuple[tuple[str, float], ...]
    unsupported: tuple[str, ...]
    tape: Tape
    stages: tuple[RunStage, ...] = ()

    def timeline(self) -> Timeline:
        """Return live memory after each event of the step."""
        parts = self.tape.live_by_category(self.batch_size)
        return Timeline(parts.sum(axis=1) / _MIB, parts / _MIB, self.tape.phases, self.tape.owners)

    def plot(self) -> Figure:
        """Draw live memory (MiB) over the events of a step, phases shaded, the peak marked.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        with canvas(8.0, 4.0) as figure:
            axes = figure.subplots()
            timeline = self.timeline()
            events = np.arange(len(timeline.live_mib))
            for phase, name in enumerate(PHASES):
                inside = np.flatnonzero(timeline.phase == phase)
                if len(inside):
                    axes.axvspan(inside[0], inside[-1] + 1, color=_SHADES[phase], label=name, zorder=0)
            axes.step(events, timeline.live_mib, where="post", color="#22313f", linewidth=1.2)
            if self.peak.index >= 0:
                axes.plot([self.peak.index], [self.live_mib], "v", color="#c0392b")
                axes.annotate(
                    f"{self.live_mib:.0f} MiB\n{self.peak}",
                    (self.peak.index, self.live_mib),
                    fontsize=8,
                    xytext=(0.5, 0.12),  # below the curve, where there is nothing else
                    textcoords="axes fraction",
                    ha="center",
                    arrowprops={"arrowstyle": "-", "color": "#c0392b", "linewidth": 0.8},
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7},
                )
            axes.axhline(self.reserved_mib, color="#7f8c8d", linestyle=":", label="reserved")
            axes.set(
                xlabel="allocations and releases of one step",
                ylabel="MiB",
                title=f"{self.name}, batch {self.batch_size}",
            )
            axes.set_xlim(0, max(len(events), 1))
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5)
        return figure

    def __str__(self) -> str:
        amp = f", amp {self.settings.amp}" if self.settings.amp else ""
        step = f"batch {self.batch_size}, {self.settings.optimizer}{amp}"
        lines = [
            f"{self.name}, {step}: simulated, nothing fitted",
            "",
            f"allocated peak {number(self.allocated_mib):>10} MiB",
            f"reserved peak  {number(self.reserved_mib):>10} MiB",
            f"live tensors   {number(self.live_mib):>10} MiB at most, in {self.peak}",
        ]
        parts = [(name, mib) for name, mib in self.breakdown.items() if mib >= _LEAST_MIB]
        lines += [f"  {name:<18} {number(mib):>10} MiB" for name, mib in parts]
        lines += ["", "largest tensors at the peak"]
        lines += [f"  {number(mib):>8} MiB  {label}" for label, mib in self.largest]
        lines += [unsupported_remark(kind) for kind in self.unsupported]
        if self.stages:
            lines += ["", f"{'a run, MiB':<14}{'allocated':>10}{'reserved':>10}{'left reserved':>15}"]
        for stage in self.stages:
            figures = number(stage.allocated_mib), number(stage.reserved_mib), number(stage.left_mib)
            lines.append(f"{stage.name:<14}{figures[0]:>10}{figures[1]:>10}{figures[2]:>15}")
        return "\n".join(lines)


def simulate(
    graph: ForwardGraph,
    batch_size: int,
    settings: StepSettings | None = None,
    *,
    largest: int = 10,
    tape: Tape | None = None,
    evaluation: tuple[ForwardGraph, int, bool] | None = None,
) -> MemoryProfile:
    """Return the memory of one steady-state step (of an inference graph: its forward pass).

    settings: `StepSettings()` by default. largest: how many tensors to list. tape: the result of `write_tape`
    for this graph and these settings, if known. evaluation: an inference graph of the same model that runs
    between steps, its batch size, and whether the cache is emptied around it. Raises InputError for a batch
    size below 1 or one the graph, captured for a fixed batch, does not allow.
    """
    settings = settings or StepSettings()
    batch_size = check_whole("batch_size", batch_size, most=LARGEST_BATCH)
    graph.check_batch_sizes([batch_size])
    tape = tape if tape is not None else write_tape(graph, settings)
    run = replay(tape, batch_size)[-1]
    event, alive, sizes = tape.peak_at(batch_size)
    storages = np.flatnonzero(alive)
    by_size = storages[np.argsort(-sizes[storages], kind="stable")]
    return MemoryProfile(
        name=graph.name,
        batch_size=batch_size,
        settings=settings,
        allocated_mib=run.allocated_mib,
        reserved_mib=run.reserved_mib,
        live_mib=int(sizes[alive].sum()) / _MIB,
        peak=_peak_event(tape, event),
        breakdown=_breakdown(tape, alive, sizes),
        largest=tuple((tape.labels[i], float(sizes[i]) / _MIB) for i in by_size[:largest]),
        unsupported=graph.unsupported,
        tape=tape,
        stages=_stages(graph, batch_size, settings, tape, *evaluation) if evaluation is not None else (),
    )


def _stages(
    graph: ForwardGraph,
    batch_size: int,
    settings: StepSettings,
    steady: Tape,
    inference: ForwardGraph,
    evaluated: int,
    empty_cache: bool,
) -> tuple[RunStage, ...]:
    if graph.loss is None:
        raise InputError("the evaluation runs between training steps; expected mode='train'")
    inference.check_batch_sizes([check_whole("evaluate", evaluated)])
    first = write_tape(graph, settings, first=True)
    return run_stages(first, steady, batch_size, write_tape(inference, settings), evaluated, empty_cache)


def _peak_event(tape: Tape, event: int) -> PeakEvent:
    if event < 0:
        return PeakEvent("forward", "start of the step", "", -1)
    phase = PHASES[int(tape.phases[event])]
    if phase == "optimizer":
        return PeakEvent("optimizer", "update", "", event)
    kind, scope = tape.operators[int(tape.owners[event])]
    return PeakEvent("forward" if phase == "forward" else "backward", kind, scope, event)


def _breakdown(tape: Tape, alive: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64]) -> Mapping[str, float]:
    totals = np.bincount(
        tape.category[alive], weights=sizes[alive].astype(np.float64), minlength=len(CATEGORIES)
    )
    return MappingProxyType(
        {name: float(total) / _MIB for name, total in zip(CATEGORIES, totals, strict=True)}
    )
