"""Notices of work that lasts: what is made, and how long it took; on a terminal, else in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AFTER_S = 3.0
"""Seconds of work without a notice."""
_LOG = logging.getLogger(__name__)


@contextmanager
def noticed(what: str) -> Iterator[None]:
    """Say what is being made once it has taken `AFTER_S`, and at its end how long it took.

    The notice goes to stderr where that is a terminal, else to the log at level INFO.
    """
    begun = time.perf_counter()
    timer = threading.Timer(AFTER_S, _say, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    taken = time.perf_counter() - begun
    if taken >= AFTER_S:
        _say(f"{what} took {taken:.1f} s; the next process reads what was made from the cache")


def _say(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"torchedge: {text}", file=sys.stderr, flush=True)
    else:
        _LOG.info("%s", text)
