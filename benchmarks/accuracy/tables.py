"""Tables and wrapped lines as the accuracy benchmarks print them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import options_of as options_of

from torchedge.texts import number as number


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int = 2) -> None:
    """Print a table with its first column to the left and the others to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    for line in [head, *rows]:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        print((" " * gap).join(cells).rstrip())


def print_wrapped(text: str, *, rest: str = "") -> None:
    """Print text in lines of at most 80 columns; `rest` stands before all but the first."""
    print(textwrap.fill(text, 80, subsequent_indent=rest, break_on_hyphens=False))
