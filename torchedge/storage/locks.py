"""Locks: of this process and its settings, and of a file among processes."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO, TypeVar

_T = TypeVar("_T")

PROCESS = threading.RLock()
"""Held while a setting or a table of the whole process changes; a fork waits until it is free."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=PROCESS.acquire, after_in_parent=PROCESS.release, after_in_child=PROCESS.release
    )


class cached_property(functools.cached_property[_T]):
    """A property that is computed once an object; two threads may both compute it.

    Before Python 3.12 that of functools has one lock for all objects: a fork while another thread computes
    one would never get it.
    """

    def __init__(self, func: Callable[[Any], _T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


@contextmanager
def warnings_ignored(category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore warnings of a category inside, one thread at a time.

    Python restores one list of filters for all threads: if two blocks overlap, the first to end would leave
    the filters of the other behind.
    """
    with PROCESS, warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


@contextmanager
def logs_ignored(name: str) -> Iterator[None]:
    """Ignore what a logger writes inside, one thread at a time."""
    logger = logging.getLogger(name)
    with PROCESS:
        level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            logger.setLevel(level)


class _Pauses:
    """Blocks inside `collection_paused` now, and whether garbage was collected before the first of them."""

    count = 0
    collecting = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cyclic garbage inside: building large trees spends a sixth of its time on that.

    The setting is the process's: it comes back, on errors too, when the last of the blocks ends that any
    thread is in. Where collection is off already, it stays off.
    """
    with PROCESS:
        if not _Pauses.count:
            _Pauses.collecting = gc.isenabled()
            gc.disable()
        _Pauses.count += 1
    try:
        yield
    finally:
        with PROCESS:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.collecting:
                gc.enable()


def lock_file(file: BinaryIO | int, *, wait: bool) -> bool:
    """Lock an open file until it is closed; return False if another opener has it and `wait` is off.

    file: or its descriptor. The lock ends with the process, however that ends. Without POSIX locks every call
    succeeds.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
