"""Objects that use a device, among threads and processes: one thread at a time, and no fork."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from torchedge.errors import OpenCLError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_processes: list[int] = []  # the first process that used OpenCL


def is_fork() -> bool:
    """Return whether this process was forked from one that used OpenCL."""
    return bool(_processes) and _processes[0] != os.getpid()


def check_process() -> None:
    """Raise OpenCLError in a fork of a process that used OpenCL: drivers' threads do not survive it."""
    if not _processes:
        _processes.append(os.getpid())
    if is_fork():
        raise OpenCLError(
            f"OpenCL was used by process {_processes[0]} before it forked into {os.getpid()}, where the "
            "drivers' threads are gone; use OpenCL after the fork only, or start processes with 'spawn'"
        )


def serialised(method: _Method) -> _Method:
    """Run a method while the object's `_lock`, an RLock, is held: other threads wait.

    In a fork of the process that used OpenCL it raises OpenCLError, before the lock, which a thread of the
    parent may hold.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_process()
        with self._lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
