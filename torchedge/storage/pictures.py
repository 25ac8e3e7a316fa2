"""Pictures in one style. matplotlib loads when a picture is drawn, and needs no display."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.errors import InputError, needed
from torchedge.storage.documents import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
"""Okabe and Ito's colours, which colour-blind readers can distinguish."""

GREY = "#9a9a9a"
FORMATS = (".png", ".svg", ".pdf")

_DPI = 130
_STYLE: dict[Any, Any] = {
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


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of this size in inches, in the common style; notebooks show it.

    Raises MissingExtraError: matplotlib is not installed.
    """
    with needed("matplotlib", extra="plots", purpose="drawing"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure._repr_png_ = partial(picture_bytes, figure)  # type: ignore[attr-defined]
        yield figure


def check_picture(option: str, path: Path) -> None:
    """Check that a picture can be drawn and written, before the work is done.

    Raises:
        InputError: the path that `option` gives is of no known format or in no folder.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS or (path.exists() and not path.is_file()):
        raise InputError(f"{option} is {path}; expected a file that ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} is {path}; expected it in a folder that exists: create {path.parent}")
    with needed("matplotlib", extra="plots", purpose="drawing"):
        import matplotlib  # noqa: F401


def picture_bytes(figure: Figure, form: str = "png") -> bytes:
    """Return a figure as a file; the same drawing gives the same bytes."""
    import matplotlib

    out = io.BytesIO()
    dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "torchedge"}):
        figure.savefig(out, format=form, dpi="figure", metadata=dates.get(form))
    return out.getvalue()


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure to a file whose suffix is its format; raises ProfileError if that fails."""
    write_bytes(path, picture_bytes(figure, path.suffix.lower()[1:]))
