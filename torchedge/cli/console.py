"""All that commands print: tables, wrapped text, numbers, JSON, warnings, progress, pictures.

Output is as wide as the terminal. Away from a terminal it has 80 columns and no colours, so that the same
answer is always the same text. Tables shorten long names, never numbers; paths are never broken.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from torchedge.errors import InputError
from torchedge.texts import printable, shorten

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from torchedge.devices import Device

BAD_INPUT, DOES_NOT_FIT = 2, 3
"""Exit statuses: unusable input; the answer is "does not fit"."""

MIB = 2**20
NARROWEST, USUAL, WIDEST = 60, 80, 120
"""Columns of output: on a terminal at least and at most; away from one."""

VERBOSITY, JSON, WORDS = "torchedge.verbosity", "torchedge.json", "torchedge.words"
"""Keys under which click's context keeps -q and -v, --json, and all arguments."""


def width() -> int:
    """Return the number of columns to print."""
    if not sys.stdout.isatty():
        return USUAL
    return min(max(shutil.get_terminal_size((USUAL, 24)).columns, NARROWEST), WIDEST)


def verbosity() -> int:
    """Return -1 after -q, 1 after -v, else 0."""
    context = click.get_current_context(silent=True)
    return 0 if context is None else int(context.meta.get(VERBOSITY, 0))


def json_wanted() -> bool:
    """Return whether --json is given."""
    return JSON in click.get_current_context().meta


class PrintableStream:
    """A text stream to which control codes pass as visible escapes: texts of devices and files hold any.

    Only line feeds, tabs and the codes of colours and weights go through as they are.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - any stream
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, and return its length; raises InputError where the output takes no more."""
        with self._checked():
            self._stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        """Write all; raises InputError where the output takes no more."""
        with self._checked():
            self._stream.flush()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InputError(
                f"the output cannot be written ({error.strerror or error}); free some space, or send it to "
                "another place"
            ) from error

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the stream
        return getattr(self._stream, name)


# text and JSON ----------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, gap: int = 2) -> list[str]:
    """Return the lines of a table.

    Its first `left` columns are names, which are shortened to fit the width, the others numbers.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    columns = [list(column) for column in zip(head, *rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    excess = sum(widths) + gap * (len(widths) - 1) - width()
    for place in sorted(range(left), key=lambda n: -widths[n]):
        room = max(widths[place] - max(excess, 0), 12)
        if room < widths[place]:
            columns[place] = [shorten(cell, room) for cell in columns[place]]
            excess -= widths[place] - room
            widths[place] = room
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for place, (first, *_) in enumerate(columns):
        justify: Any = "left" if place < left else "right"
        grid.add_column(first, justify=justify, no_wrap=True, min_width=widths[place])
    for cells in list(zip(*columns, strict=True))[1:]:
        grid.add_row(*cells)
    console = Console(markup=False, highlight=False, emoji=False, width=sum(widths) + gap * len(widths))
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().splitlines()]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table."""
    print("\n".join(table(head, rows, left=left)))


def print_wrapped(text: str, *, first: str = "", rest: str = "") -> None:
    """Print text in lines of the width; `first` and `rest` stand before its lines. Paths are not broken."""
    print(
        textwrap.fill(
            text,
            width(),
            initial_indent=first,
            subsequent_indent=rest,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def print_next(command: str) -> None:
    """Print the command that comes next, on a line of its own that is never broken."""
    print(f"next: {command}")


def shown_device(device: Device) -> str:
    """Return what --device takes for a device: its name where that finds this profile, else its folder."""
    from torchedge.devices import profile_roots

    return device.name if device.folder.parent in profile_roots() else str(device.folder)


def print_notes(*notes: Iterable[str]) -> None:
    """Print each note of several results once."""
    for note in dict.fromkeys(chain(*notes)):
        print_wrapped(note, first="note: ", rest="  ")


def warn(text: str, kind: str = "warning") -> None:
    """Write one line of warning, or of another kind, to stderr, unless -q is given."""
    if verbosity() >= 0:
        print(f"torchedge: {kind}:", printable(" ".join(text.split())), file=sys.stderr)


def print_json(document: Any) -> None:  # noqa: ANN401 - any nested result
    """Print a document as JSON, in ASCII: no terminal and no pipe can spoil it."""
    from torchedge.storage.documents import plain

    print(json.dumps(plain(document), indent=2, allow_nan=False))


def answer(document: Any, show: Callable[[], object], **written: Path | None) -> None:  # noqa: ANN401 - any nested result
    """Print a document with --json; else `show` the answer and name the files, each keyword being a verb."""
    if json_wanted():
        print_json(document)
        return
    show()
    for verb, path in written.items():
        if path is not None:
            print_wrapped(f"{verb.replace('_', ' ')} to {path}")


# progress ---------------------------------------------------------------------------------------------------


class Progress:
    """A progress bar on stderr: `with Progress(3, "fitting") as progress: progress.step()`.

    It shows on a terminal only, and not with -q. With -v, stages are lines if stderr is no terminal.
    `done` steps were done before. `remaining`: show the time left instead of the time spent.
    """

    def __init__(self, total: int, label: str, *, done: int = 0, remaining: bool = False) -> None:
        self._total, self._label, self._done, self._begun = max(total, 1), printable(label), done, False
        self._start = time.monotonic()
        shown = sys.stderr.isatty() and verbosity() >= 0
        self._lines = verbosity() > 0 and not shown
        self._bar = self._new_bar(remaining) if shown else None
        self._task = None if self._bar is None else self._bar.add_task("", total=self._total, completed=done)

    def _new_bar(self, remaining: bool) -> Bar:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        return Progress(
            TextColumn(self._label, markup=False),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeRemainingColumn() if remaining else TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line(f"done after {round(time.monotonic() - self._start)} s")

    def begin(self, stage: str) -> None:
        """Show the current stage; count the one before as done, unless a step already did."""
        if self._begun:
            self.step()
        self._begun = True
        self.doing(stage)

    def doing(self, stage: str) -> None:
        """Show the current stage."""
        self.note(stage)
        self._line(stage)

    def note(self, state: str) -> None:
        """Show a state that changes at each step: on the bar alone."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=printable(state))

    def more(self, steps: int) -> None:
        """Add steps to the total."""
        self._total += steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._total)

    def step(self) -> None:
        """Count one step as done."""
        self._begun = False
        before, self._done = self._done, min(self._done + 1, self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif 10 * self._done // self._total > 10 * before // self._total and self._done < self._total:
            self._line(f"{100 * self._done // self._total} %")

    def _line(self, text: str) -> None:
        if self._lines:
            print(f"{self._label}: {printable(text)}", file=sys.stderr, flush=True)
