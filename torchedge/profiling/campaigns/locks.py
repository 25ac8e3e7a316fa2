"""A lock on an open file that goes with the process, however that ends."""

from __future__ import annotations

from typing import BinaryIO

__all__ = ["take_lock"]


def take_lock(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file; return False where another process has it and `wait` is off.

    Without POSIX locks there is none, and two processes at once are the user's to avoid.
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
