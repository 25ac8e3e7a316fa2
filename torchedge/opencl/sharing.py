"""Objects that use a device, among threads and processes: one thread at a time, and no fork."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

from torchedge.errors import OpenCLError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_processes: list[int] = []  # the first process that used OpenCL


kept_in_forks: WeakSet[Any] = WeakSet()
"""Objects of a driver, and objects with parts or events of them."""


@functools.cache
def _weak(kind: type) -> Any:
    return type(kind.__name__, (kind,), {})


def keep_in_forks(kind: type, *arguments: Any, **options: Any) -> Any:
    """Return a new object of one of pyopencl's classes; it can be referred to weakly, and forks keep it."""
    driven = _weak(kind)(*arguments, **options)
    kept_in_forks.add(driven)
    return driven


def _leave_drivers_alone() -> None:
    """Let a fork of a process that used OpenCL never release what is the driver's, and end without it.

    Releasing, and the driver's own end of the process, wait for threads of the parent or take locks that
    these hold: a fork that ended while the parent launched never came to its end.
    """
    if not is_fork():
        return
    for kept in list(kept_in_forks):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    with suppress(OSError, AttributeError):  # glibc's: _exit gets the status, before what drivers registered
        process = ctypes.CDLL(None)
        process.on_exit(ctypes.cast(process._exit, ctypes.c_void_p), None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_drivers_alone)


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
