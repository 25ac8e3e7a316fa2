"""Models named on the command line, captured as graphs. Imports torch when called."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torchedge.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchedge.graphs import Graph

__all__ = ["capture_named", "check_mode", "load_named"]


def load_named(text: str, *, weights: bool = False) -> tuple[Any, str]:
    """Return the model that a word names and its label; what the model's own code prints goes to stderr.

    weights: give it weights, as its own code draws or loads them.
    """
    from torchedge.tracing.sources import load_model

    with contextlib.redirect_stdout(sys.stderr):
        return load_model(text, weights=weights)


def capture_named(
    text: str, *, mode: str, input_size: tuple[int, ...] | None, batch_sizes: Sequence[int]
) -> list[Graph]:
    """Return the graph of the model that a word names for each batch size; it bears the model's label.

    One graph serves all batch sizes, unless the model needs one for each.
    """
    from torchedge.tracing.capturing import CaptureRequest, capture_each

    request = CaptureRequest(text, mode=check_mode(mode), input_size=input_size)
    with contextlib.redirect_stdout(sys.stderr):
        return capture_each(request, batch_sizes)


def check_mode(mode: str) -> Any:  # noqa: ANN401 - a Literal, which argparse knows nothing of
    """Return the mode; raises InputError for another word."""
    if mode not in ("train", "infer"):
        raise InputError(f"--mode is {mode!r}; expected train or infer")
    return mode
