"""A picture of memory over one step; matplotlib is imported when a plot is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchedge.errors import MissingExtraError
from torchedge.prediction.memory.simulation import PHASES, MemoryProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = ("#dbe9f6", "#fde2cf", "#dff0d8")


def draw_timeline(profile: MemoryProfile, axes: Axes | None = None) -> Any:  # noqa: ANN401 - a matplotlib Axes
    """Draw live memory (MiB) over the events of a step, phases shaded, the peak marked; return the axes.

    axes: where to draw, a new figure by default. Raises MissingExtraError where matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError(
            'matplotlib is not installed; install it with: pip install "torchedge[plots]"'
        ) from error
    if axes is None:
        axes = pyplot.subplots(figsize=(8, 4), layout="constrained")[1]
    timeline = profile.timeline()
    events = np.arange(len(timeline.live_mib))
    for phase, name in enumerate(PHASES):
        inside = np.flatnonzero(timeline.phase == phase)
        if len(inside):
            axes.axvspan(inside[0], inside[-1] + 1, color=_SHADES[phase], label=name, zorder=0)
    axes.step(events, timeline.live_mib, where="post", color="#22313f", linewidth=1.2)
    if profile.peak.index >= 0:
        axes.plot([profile.peak.index], [profile.live_mib], "v", color="#c0392b")
        axes.annotate(
            f"{profile.live_mib:.0f} MiB\n{profile.peak}",
            (profile.peak.index, profile.live_mib),
            fontsize=8,
            xytext=(0.5, 0.12),  # below the curve, where there is nothing else
            textcoords="axes fraction",
            ha="center",
            arrowprops={"arrowstyle": "-", "color": "#c0392b", "linewidth": 0.8},
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7},
        )
    axes.axhline(profile.reserved_mib, color="#7f8c8d", linestyle=":", label="reserved")
    axes.set(
        xlabel="allocations and releases of one step",
        ylabel="MiB",
        title=f"{profile.name}, batch {profile.batch_size}",
    )
    axes.set_xlim(0, max(len(events), 1))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, fontsize=8, frameon=False)
    return axes
