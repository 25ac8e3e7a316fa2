"""Notices of work that lasts: its name, its stage and its time; on a terminal, else in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

AFTER_S = 2.0
"""Seconds of work without a notice, and between two notices."""
_LOG = logging.getLogger(__name__)


@dataclass
class _Work:
    what: str
    stage: str = ""
    said: float = field(default_factory=time.perf_counter)
    named: bool = False

    def say(self) -> None:
        """Say the stage, the first time behind what is being made."""
        begin = " " if self.named else self.what + ":" * bool(self.stage)
        _say(" ".join(filter(None, (begin, self.stage, "..."))))
        self.said, self.named = time.perf_counter(), True


_CURRENT: ContextVar[_Work | None] = ContextVar("work that lasts", default=None)


@contextmanager
def noticed(what: str) -> Iterator[None]:
    """Say what is being made and its stage once it has taken `AFTER_S`, and at its end how long it took.

    Within other work it is a stage of that. Notices go to stderr where that is a terminal, else to the log at
    level INFO.
    """
    if _CURRENT.get() is not None:
        stage(what)
        yield
        return
    work = _Work(what)
    begun, token = work.said, _CURRENT.set(work)
    timer = threading.Timer(AFTER_S, work.say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _CURRENT.reset(token)
    taken = time.perf_counter() - begun
    if taken >= AFTER_S:
        _say(f"{what} took {taken:.1f} s")


def stage(name: str) -> None:
    """Name the current stage of the work that lasts; without one, do nothing."""
    work = _CURRENT.get()
    if work is not None and name != work.stage:
        work.stage = name
        if time.perf_counter() - work.said >= AFTER_S:
            work.say()


def _say(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"torchedge: {text}", file=sys.stderr, flush=True)
    else:
        _LOG.info("%s", text)
