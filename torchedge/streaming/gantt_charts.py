"""Gantt charts of simulated runs: loads against layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from torchedge.errors import InputError
from torchedge.streaming.canvases import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    canvas,
    mark_initialisation,
    run_title,
    show_legend,
)
from torchedge.streaming.timelines import RunTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_gantt"]

CLASSES = MappingProxyType({"reusable": BLUE, "elemental": GREEN, "hierarchical": PINK})
MOST_NAMED = 40
"""Up to so many weights are named."""
MOST_TOLD_APART = 200
"""With more weights than that, boxes are higher than their rows, or nothing would be seen of them."""


def draw_gantt(timeline: RunTimeline, *, layers: tuple[int, int] | None = None) -> Figure:
    """Draw when the disk reads, when loads move and when layers run, and below each weight's stay in memory.

    `layers`: the first and last layer (from 1) to show, default all with the initialisation.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: `layers` is not within the model.
    """
    count = len(timeline.instance.layers)
    if layers is not None and not 1 <= layers[0] <= layers[1] <= count:
        raise InputError(f"layers are {layers}; expected a first and a last one from 1 to {count}")
    begin = 0.0 if layers is None else float(timeline.layers.starts_ms[layers[0] - 1])
    end = float(timeline.layers.ends_ms[(count if layers is None else layers[1]) - 1])
    rows = _weights_in(timeline, begin, end)
    height = min(5.0, 0.4 + 0.16 * len(rows))
    with canvas(10.0, 2.8 + height) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, height))
        _draw_queues(top, timeline)
        _draw_weights(bottom, timeline, rows)
        if begin < timeline.initialisation_ms:
            mark_initialisation(top, timeline)
        shown = "" if layers is None else f", layers {layers[0]} to {layers[1]}"
        top.set(title=run_title(timeline) + shown)
        bottom.set(xlabel="time (ms)")
        bottom.set_xlim(begin, end if end > begin else begin + 1)
        show_legend(figure)
    return figure


def _draw_queues(axes: Axes, timeline: RunTimeline) -> None:
    loads, layers = timeline.loads, timeline.layers
    early = loads.layers == 0
    _boxes(axes, loads.read_starts_ms, loads.read_ends_ms, 2, 0.7, ORANGE, "read from the disk")
    _boxes(axes, loads.starts_ms[early], loads.ends_ms[early], 1, 0.7, GREY, "stand-alone transform")
    _boxes(axes, loads.starts_ms[~early], loads.ends_ms[~early], 1, 0.7, "black", "loaded beside a layer")
    classes = np.array([layer.load_class for layer in timeline.instance.layers])
    for name, colour in CLASSES.items():
        own = classes == name
        _boxes(axes, layers.starts_ms[own], layers.ends_ms[own], 0, 0.7, colour, f"{name} layer")
    axes.set_yticks([2, 1, 0], ["disk", "to texture", "layers"])
    axes.set_ylim(-0.6, 2.6)
    axes.grid(visible=False, axis="y")


def _weights_in(timeline: RunTimeline, begin: float, end: float) -> list[int]:
    """Return the weights that are in memory, or read, between two times, by first use."""
    loads, weights = timeline.loads, timeline.instance.weights
    last = np.array([w.last_use for w in weights], np.int64)
    leaves = timeline.layers.ends_ms[last[loads.weights] - 1]
    inside = (loads.read_starts_ms < end) & (leaves > begin)
    return sorted(set(loads.weights[inside].tolist()), key=lambda k: (weights[k].first_use, k))


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
    _boxes(axes, arrives, starts, y, low, "#f4cf85", "waits in unified memory")
    _boxes(axes, starts, leaves[y], y, low, SKY, "in texture memory")
    _boxes(axes, reads, arrives, y, high, ORANGE, "read from the disk")
    for early, colour, label in (
        (True, GREY, "stand-alone transform"),
        (False, "black", "loaded beside a layer"),
    ):
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

    given = (np.asarray(x, np.float64) for x in (left, right, middle))
    x0, x1, y = np.broadcast_arrays(*given)
    low, high = y - height / 2, y + height / 2
    corners = np.stack([np.stack(p, -1) for p in ((x0, low), (x1, low), (x1, high), (x0, high))], 1)
    if len(corners):
        axes.add_collection(PolyCollection(list(corners), facecolors=colour, linewidths=0, label=label))
