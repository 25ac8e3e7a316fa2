"""A progress bar on stderr; plain lines where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Progress"]

_BAR = 30


class Progress:
    """Counts `total` steps: `with Progress(3, "fitting") as progress: progress.step()`.

    On a terminal one line shows a bar and the time, and is removed at the end; elsewhere what is being done
    and each tenth of the way are lines. `done` steps were done before; with `remaining`, which is for many
    steps, the time that the others take at the same pace is shown, and elsewhere only the tenths are.
    """

    def __init__(self, total: int, label: str, *, done: int = 0, remaining: bool = False) -> None:
        self.total, self.label = max(total, 1), label
        self.done = self._before = done
        self._remaining = remaining
        self._doing = ""
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        if self._terminal:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            if self._terminal:
                self._write("\r\x1b[K")
            elif kind is None:
                self._write(f"{self.label}: done after {self._seconds()} s\n")

    def doing(self, what: str) -> None:
        """Say what the current step is."""
        self._doing = what
        if self._terminal:
            self._draw()
        elif not self._remaining:
            self._write(f"{self.label}: {what}\n")

    def more(self, steps: int) -> None:
        """Count on so many steps more than was said."""
        self.total += steps

    def note(self, state: str) -> None:
        """Say how things stand, on a terminal alone: for what changes at each step."""
        self._doing = state

    def step(self) -> None:
        """Count one step as done."""
        before, self.done = self.done, min(self.done + 1, self.total)
        if self._terminal:
            self._draw()
        elif 10 * self.done // self.total > 10 * before // self.total and self.done < self.total:
            left = f", {self._left()}" if self._remaining else ""
            self._write(f"{self.label}: {100 * self.done // self.total} %{left}\n")

    def _tick(self) -> None:
        while not self._ended.wait(0.5):
            self._draw()

    def _seconds(self) -> int:
        return round(time.monotonic() - self._start)

    def _left(self) -> str:
        """Return how long the steps that are left take at the pace of those done."""
        fresh = self.done - self._before
        if not fresh:
            return "? left"
        seconds = (time.monotonic() - self._start) * (self.total - self.done) / fresh
        if seconds < 120:
            return f"{seconds:.0f} s left"
        return f"{seconds / 60:.0f} min left" if seconds < 7200 else f"{seconds / 3600:.1f} h left"

    def _draw(self) -> None:
        filled = _BAR * self.done // self.total
        bar = "#" * filled + "." * (_BAR - filled)
        spent = self._left() if self._remaining else f"{self._seconds()} s"
        text = f"{self.label} [{bar}] {self.done}/{self.total} {spent} {self._doing}"
        with self._lock:
            if not self._ended.is_set():
                self._write(f"\r{text[:79]}\x1b[K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads stderr: the work goes on
            self._terminal = False
