"""Files and pictures that commands write: refused before the work where they cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchedge.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "check_target", "save_figure"]

_SUFFIXES = (".png", ".svg", ".pdf")


def check_target(option: str, path: Path) -> None:
    """Refuse a file to write that is a folder, or whose folder is not there."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: expected a file in a folder that is there; correct the path")


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be written, or drawn."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: expected a file that ends in {', '.join(_SUFFIXES)}")
    check_target("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", extra="plots", purpose="drawing") from error


def save_figure(figure: Figure, path: Path, dpi: int | None = None) -> None:
    """Write a picture; raises InputError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=dpi or "figure")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from error
