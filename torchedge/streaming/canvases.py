"""What the pictures of simulated runs share: style, colours, and how a run is named in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchedge.errors import MissingExtraError
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.timelines import RunTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "canvas",
    "mark_initialisation",
    "run_title",
    "show_legend",
    "show_mib",
]

BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
"""Okabe and Ito's colours, which colour-blind readers tell apart."""

GREY = "#9a9a9a"
_DPI = 130
_STYLE = MappingProxyType(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#e3e3e3",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "figure.dpi": _DPI,
        "savefig.dpi": _DPI,
    }
)


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of some inches, to be drawn on in one style while the context lasts.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", extra="plots", purpose="drawing") from error
    style: dict[Any, Any] = dict(_STYLE)
    with matplotlib.rc_context(style):
        yield Figure(figsize=(width, height), layout="constrained")


def run_title(timeline: RunTimeline) -> str:
    """Return what a run is called above a picture, with the provenance of what it stands on."""
    return f"{timeline.instance.name}, {timeline.strategy} (simulated; rates {timeline.provenance})"


def show_mib(nbytes: float) -> str:
    """Return bytes as MiB, to two digits at least."""
    mib = nbytes / MEBIBYTE
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"


def mark_initialisation(axes: Axes, timeline: RunTimeline) -> None:
    """Shade the time before the first layer may start."""
    if timeline.initialisation_ms > 0:
        label = f"initialisation: {timeline.initialisation_ms:,.1f} ms"
        axes.axvspan(0, timeline.initialisation_ms, color="#e8e8e8", zorder=0, label=label)


def show_legend(figure: Figure, columns: int = 4) -> None:
    """Put one legend below all panels of a figure, each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            found.setdefault(str(label), handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
