"""Pictures of simulated and measured runs.

matplotlib loads when one is asked for, and needs no display; without it, drawing raises MissingExtraError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from torchedge.errors import InputError
from torchedge.storage.pictures import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, canvas
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.simulation import MemoryCurve, RunTimeline, in_turn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class DrawnRun(Protocol):
    """A run with its memory in use over time: simulated (RunTimeline) or measured (MeasuredRun)."""

    @property
    def title(self) -> str:
        """The model, the plan or the device, and whether the run was simulated."""

    @property
    def memory(self) -> MemoryCurve:
        """Memory in use."""

    @property
    def allocated_bytes(self) -> int:
        """Memory allocated."""

    @property
    def initialisation_ms(self) -> float:
        """Time before the first launch may start."""

    @property
    def latency_ms(self) -> float:
        """Initialisation and execution."""


def show_mib(nbytes: float) -> str:
    """Return bytes as MiB, to two digits at least."""
    mib = nbytes / MEBIBYTE
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"


def mark_initialisation(axes: Axes, timeline: DrawnRun) -> None:
    """Shade the time before the first layer may start."""
    if timeline.initialisation_ms > 0:
        label = f"initialisation: {timeline.initialisation_ms:,.1f} ms"
        axes.axvspan(0, timeline.initialisation_ms, color="#e8e8e8", zorder=0, label=label)


def show_legend(figure: Figure, columns: int = 4) -> None:
    """Put one legend below all panels of a figure, each label once."""
    handle_of: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            handle_of.setdefault(str(label), handle)
    figure.legend(list(handle_of.values()), list(handle_of), loc="outside lower center", ncols=columns)


CLASSES = MappingProxyType({"reusable": BLUE, "elemental": GREEN, "hierarchical": PINK})
MOST_NAMED = 40
"""Up to so many weights are named."""
MOST_TOLD_APART = 200
"""With more weights, boxes are higher than their rows, to be visible."""


def draw_gantt(timeline: RunTimeline, *, layers: tuple[int, int] | None = None) -> Figure:
    """Draw disk reads, loads and layers over time; below, how long each weight stays in memory.

    `layers`: the first and last layer (from 1) to show, default all with the initialisation.
    Raises InputError: `layers` is not within the model.
    """
    count = len(timeline.instance.layers)
    if layers is not None and not 1 <= layers[0] <= layers[1] <= count:
        raise InputError(f"layers are {layers}; expected a first and a last one from 1 to {count}")
    begin = 0.0 if layers is None else float(timeline.layers.starts_ms[layers[0] - 1])
    end = float(timeline.layers.ends_ms[(count if layers is None else layers[1]) - 1])
    loads, weights = timeline.loads, timeline.instance.weights
    last = np.array([w.last_use for w in weights], np.int64)
    leaves = timeline.layers.ends_ms[last[loads.weights] - 1]
    inside = (loads.read_starts_ms < end) & (leaves > begin)
    rows = sorted(set(loads.weights[inside].tolist()), key=lambda k: (weights[k].first_use, k))
    height = min(5.0, 0.4 + 0.16 * len(rows))
    with canvas(10.0, 2.8 + height) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, height))
        _draw_queues(top, timeline)
        _draw_weights(bottom, timeline, rows)
        if begin < timeline.initialisation_ms:
            mark_initialisation(top, timeline)
        shown = "" if layers is None else f", layers {layers[0]} to {layers[1]}"
        top.set(title=timeline.title + shown)
        bottom.set(xlabel="time (ms)")
        bottom.set_xlim(begin, end if end > begin else begin + 1)
        show_legend(figure)
    return figure


def _draw_queues(axes: Axes, timeline: RunTimeline) -> None:
    loads, layers = timeline.loads, timeline.layers
    early = loads.layers == 0
    _boxes(axes, loads.read_starts_ms, loads.read_ends_ms, 2, 0.7, ORANGE, "read from the disk")
    _boxes(axes, loads.starts_ms[early], loads.ends_ms[early], 1, 0.7, GREY, "preloaded")
    _boxes(axes, loads.starts_ms[~early], loads.ends_ms[~early], 1, 0.7, "black", "copied beside a layer")
    classes = np.array([layer.load_class for layer in timeline.instance.layers])
    for name, colour in CLASSES.items():
        own = classes == name
        _boxes(axes, layers.starts_ms[own], layers.ends_ms[own], 0, 0.7, colour, f"{name} layer")
    axes.set_yticks([2, 1, 0], ["disk", "copies", "layers"])
    axes.set_ylim(-0.6, 2.6)
    axes.grid(visible=False, axis="y")


def _draw_weights(axes: Axes, timeline: RunTimeline, rows: Sequence[int]) -> None:
    loads, weights, layers = timeline.loads, timeline.instance.weights, timeline.layers
    row = np.full(len(weights), -1, np.int64)
    row[list(rows)] = np.arange(len(rows))
    shown = row[loads.weights] >= 0
    y = row[loads.weights][shown]
    reads, arrives, starts = loads.read_starts_ms[shown], loads.read_ends_ms[shown], loads.starts_ms[shown]
    first = np.array([layers.starts_ms[weights[k].first_use - 1] for k in rows])
    leaves = np.array([layers.ends_ms[weights[k].last_use - 1] for k in rows])
    scale = max(1.0, len(rows) / MOST_TOLD_APART)
    high, low = 0.8 * scale, 0.3 * scale
    _boxes(axes, arrives, starts, y, low, "#f4cf85", "waits in a staging buffer")
    _boxes(axes, starts, leaves[y], y, low, SKY, "on the device")
    _boxes(axes, reads, arrives, y, high, ORANGE, "read from the disk")
    for early, colour, label in ((True, GREY, "preloaded"), (False, "black", "copied beside a layer")):
        own = (loads.layers[shown] == 0) == early
        _boxes(axes, starts[own], loads.ends_ms[shown][own], y[own], high, colour, label)
    _boxes(axes, first, leaves, np.arange(len(rows)), high, RED, "from its first to its last use")
    if len(rows) <= MOST_NAMED:
        axes.set_yticks(range(len(rows)), [_short(weights[k].name) for k in rows], fontsize=7)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(rows)} weights, by first use")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _short(name: str) -> str:
    return name if len(name) <= 34 else "…" + name[-33:]


def _boxes(
    axes: Axes, left: ArrayLike, right: ArrayLike, middle: ArrayLike, height: float, colour: str, label: str
) -> None:
    """Draw boxes of one colour, from `left` to `right`, around `middle`."""
    from matplotlib.collections import PolyCollection

    x0, x1, y = np.broadcast_arrays(*[np.asarray(x, np.float64) for x in (left, right, middle)])
    low, high = y - height / 2, y + height / 2
    corners = np.stack([np.stack(p, -1) for p in ((x0, low), (x1, low), (x1, high), (x0, high))], 1)
    if len(corners):
        axes.add_collection(PolyCollection(list(corners), facecolors=colour, linewidths=0, label=label))


KINDS = MappingProxyType(
    {
        "staging": ("staging buffers", ORANGE),
        "weights": ("weights", BLUE),
        "activations": ("activations", GREEN),
    }
)
YELLOW = "#F0E442"
MODELS = (BLUE, ORANGE, GREEN, PINK, GREY, YELLOW, SKY)


@dataclass(frozen=True)
class Lane:
    """Memory over the time in which several models run, and each one's name, start and end (ms).

    `allocated_bytes` is the most that is allocated at once.
    """

    label: str
    memory: MemoryCurve
    spans: tuple[tuple[str, float, float], ...]
    allocated_bytes: int


def lane_of_runs(label: str, runs: Sequence[RunTimeline]) -> Lane:
    """Return runs, one at least, one after the other as one lane; each frees all memory at its end."""
    ends = np.cumsum([0.0] + [run.latency_ms for run in runs]).tolist()
    spans = tuple((run.instance.name, ends[k], ends[k + 1]) for k, run in enumerate(runs))
    memory = in_turn([run.memory for run in runs])
    return Lane(label, memory, spans, max(run.allocated_bytes for run in runs))


def draw_memory(timeline: DrawnRun, *, limit_bytes: int | None = None) -> Figure:
    """Draw the memory in use over time, stacked by kind, with average, allocated memory and a limit."""
    with canvas(8.5, 4.0) as figure:
        axes = figure.subplots()
        curve = timeline.memory
        _stack(axes, curve)
        levels = ((timeline.allocated_bytes, "allocated", "--"), (curve.average.total, "average", ":"))
        for nbytes, what, line in levels:
            label = f"{what}: {show_mib(nbytes)}"
            axes.axhline(nbytes / MEBIBYTE, color="black", linestyle=line, linewidth=0.9, label=label)
        _limit(axes, limit_bytes)
        mark_initialisation(axes, timeline)
        axes.set(xlabel="time (ms)", ylabel="memory (MiB)", title=timeline.title)
        axes.set_xlim(0, timeline.latency_ms or 1)
        axes.set_ylim(bottom=0)
        show_legend(figure, columns=3)
    return figure


def draw_tradeoff(points: Sequence[tuple[str, RunTimeline]], *, title: str = "") -> Figure:
    """Draw latency against memory for plans of one model under several settings (FlashMem, Fig. 8).

    `points`: a label (what was set) and the run of each plan, in the order in which the line joins them; one
    at least.
    """
    with canvas(9.5, 4.0) as figure:
        from matplotlib import colormaps

        panels = figure.subplots(1, 2, sharex=True)
        shades = colormaps["viridis_r"](np.linspace(0.08, 0.98, len(points)))
        for axes, what in zip(panels, ("integrated", "execution"), strict=True):
            x = [run.allocated_bytes / MEBIBYTE for _, run in points]
            y = [run.latency_ms if what == "integrated" else run.execution_ms for _, run in points]
            axes.plot(x, y, color=GREY, linewidth=0.9, zorder=1)
            for place, (label, _) in enumerate(points):
                axes.plot(
                    x[place],
                    y[place],
                    "o",
                    color=shades[place],
                    markeredgecolor="black",
                    markersize=7,
                    markeredgewidth=0.6,
                    label=label if what == "integrated" else None,
                )
            axes.set(xlabel="allocated memory (MiB)", ylabel=f"{what} latency (ms)", title=f"{what} latency")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0, top=1.1 * max(y) if max(y) > 0 else 1)
        figure.suptitle(title or points[0][1].instance.name, x=0.01, ha="left", weight="bold", size=11)
        figure.legend(loc="outside right upper")
    return figure


def draw_comparison(runs: Mapping[str, RunTimeline]) -> Figure:
    """Draw latency and memory of runs of one model side by side, by their labels (FlashMem, Fig. 9).

    Bars show the parts of latency; the numbers beside them compare with the first run.
    """
    own = list(runs.values())
    with canvas(10.0, 1.85 + 0.27 * len(own)) as figure:
        left, right = figure.subplots(1, 2)
        parts = (
            ("initialisation", GREY, [run.initialisation_ms for run in own]),
            ("layers alone", BLUE, [float(run.layers.alone_ms.sum()) for run in own]),
            ("waiting for weights", ORANGE, [run.stalls.waiting for run in own]),
            ("slowed by copies", RED, [run.stalls.slowed for run in own]),
        )
        begin = np.zeros(len(own))
        for label, colour, widths in parts:
            left.barh(range(len(own)), widths, left=begin, color=colour, label=label, height=0.72)
            begin += widths
        for place, run in enumerate(own):
            times = _times(run.latency_ms, own[0].latency_ms) if place else ""
            _beside(left, run.latency_ms, place, f"{run.latency_ms:,.0f} ms{times}")
        left.set_xlim(0, 1.35 * max(run.latency_ms for run in own) or 1)
        _draw_averages(right, own)
        left.set(title=own[0].instance.name, xlabel="integrated latency (ms)")
        right.set_xlabel("memory (MiB)")
        for axes in (left, right):
            axes.set_yticks(range(len(own)), list(runs) if axes is left else [])
            axes.set_ylim(len(own) - 0.4, -0.6)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        show_legend(figure)
    return figure


def draw_lanes(lanes: Sequence[Lane], *, limit_bytes: int | None = None) -> Figure:
    """Draw memory while several models run in turn, a panel for each way to do it (FlashMem, Fig. 6)."""
    models = list(dict.fromkeys(name for lane in lanes for name, _, _ in lane.spans))
    colours = {name: MODELS[k % len(MODELS)] for k, name in enumerate(models)}
    top = max(limit_bytes or 0, *(lane.allocated_bytes for lane in lanes)) / MEBIBYTE
    with canvas(9.0, 0.8 + 2.1 * len(lanes)) as figure:
        panels = figure.subplots(len(lanes), 1, sharey=True, squeeze=False)[:, 0]
        for axes, lane in zip(panels, lanes, strict=True):
            for name, start, end in lane.spans:
                axes.axvspan(start, end, color=colours[name], alpha=0.3, linewidth=0, label=name, zorder=0)
                axes.axvline(end, color="white", linewidth=0.8, zorder=0.5)
            times, total = lane.memory.times_ms, lane.memory.total / MEBIBYTE
            axes.step(times, total, where="post", color="black", linewidth=1.0, label="memory")
            _limit(axes, limit_bytes)
            allocated, average = show_mib(lane.allocated_bytes), show_mib(lane.memory.average.total)
            axes.set_title(
                f"{lane.label}: {times[-1]:,.0f} ms, {allocated} allocated at most, {average} on average"
            )
            axes.set_ylabel("memory (MiB)")
            axes.set_xlim(0, float(times[-1]) or 1)
            axes.set_ylim(0, 1.08 * top or 1)
        panels[-1].set_xlabel("time (ms)")
        show_legend(figure)
    return figure


# the parts of pictures --------------------------------------------------------------------------------------


def _limit(axes: Axes, limit_bytes: int | None) -> None:
    if limit_bytes is not None:
        label = f"limit: {show_mib(limit_bytes)}"
        axes.axhline(limit_bytes / MEBIBYTE, color=RED, linewidth=1.4, label=label)


def _stack(axes: Axes, curve: MemoryCurve) -> None:
    kinds = [name for name in ("weights", "staging", "activations") if getattr(curve, name).any()]
    heights = [getattr(curve, name) / MEBIBYTE for name in kinds]
    if kinds:
        labels, colours = zip(*(KINDS[name] for name in kinds), strict=True)
        axes.stackplot(
            curve.times_ms, heights, labels=labels, colors=colours, step="post", linewidth=0, alpha=0.85
        )


def _draw_averages(axes: Axes, runs: Sequence[RunTimeline]) -> None:
    average = [run.memory.average.total / MEBIBYTE for run in runs]
    peak = [run.allocated_bytes / MEBIBYTE for run in runs]
    axes.barh(range(len(runs)), average, color=GREEN, label="average memory in use", height=0.72)
    axes.plot(
        peak, range(len(runs)), "|", color="black", markersize=13, markeredgewidth=2, label="allocated memory"
    )
    for place, run in enumerate(runs):
        times = _times(run.allocated_bytes, runs[0].allocated_bytes) if place else ""
        text = f"{show_mib(run.memory.average.total)}, allocated {show_mib(run.allocated_bytes)}{times}"
        _beside(axes, max(peak[place], average[place]), place, text)
    axes.set_xlim(0, 1.75 * max(peak) or 1)


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def _times(value: float, first: float) -> str:
    if not first > 0:
        return ""
    ratio = value / first
    return f" ({ratio:.2f}×)" if ratio < 9.995 else f" ({ratio:,.0f}×)"
