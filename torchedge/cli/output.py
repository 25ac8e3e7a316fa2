"""What commands print: aligned tables of at most 80 columns, wrapped lines, and JSON without NaN."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["WIDTH", "number", "plain", "print_json", "print_table", "print_wrapped", "span", "table", "warn"]

WIDTH = 80


def number(value: float) -> str:
    """Return a figure with about three digits that count, thousands grouped."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def span(low: float, high: float) -> str:
    """Return an interval in as few characters as it takes."""
    return f"{number(low)}-{number(high)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, gap: int = 2) -> list[str]:
    """Return the lines of a table; the first `left` columns stand left, the others right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append((" " * gap).join(cells).rstrip())
    return out


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, gap: int = 2) -> None:
    """Print a table."""
    print("\n".join(table(head, rows, left=left, gap=gap)))


def print_wrapped(text: str, *, first: str = "", rest: str = "") -> None:
    """Print text in lines of at most 80 columns; `first` and `rest` stand before its lines."""
    print(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False))


def warn(text: str) -> None:
    """Write one line of warning to stderr."""
    print("torchedge: warning:", " ".join(text.split()), file=sys.stderr)


def plain(value: Any) -> Any:  # noqa: ANN401 - any nested result
    """Return nested results as what JSON has: numpy as numbers and lists, what is not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(document: Any) -> None:  # noqa: ANN401
    """Print a document as JSON, in ASCII: no terminal and no pipe can spoil it."""
    print(json.dumps(plain(document), indent=2, allow_nan=False))
