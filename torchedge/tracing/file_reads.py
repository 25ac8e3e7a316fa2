"""Files that the code of a model reads while it runs: Python reports each `open` to an audit hook."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Any

from torchedge.tracing.copies import where

_OF_PYTHON = (
    "importlib", "zipimport", "linecache", "tokenize", "traceback", "warnings", "inspect", "logging",
    "tempfile", "pkgutil", "ctypes",
)  # fmt: skip
"""Modules that open files of Python's own."""


class _Thread(threading.local):
    files: list[str] | None = None


_thread = _Thread()


@contextmanager
def reading() -> Iterator[list[str]]:
    """Yield the files, each with the line that reads it, that this thread reads until the end."""
    _listen()
    before, _thread.files = _thread.files, []
    try:
        yield _thread.files
    finally:
        _thread.files = before


@functools.cache
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or _thread.files is None:
        return
    path, mode, flags = args
    if not isinstance(path, (str, bytes)) or _writes(mode, flags) or _for_python(sys._getframe(1)):
        return
    _thread.files.append(f"the file {PurePath(os.fsdecode(path)).name!r}{where()}")


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return "r" not in mode and "+" not in mode
    return isinstance(flags, int) and flags & os.O_WRONLY != 0


def _for_python(frame: FrameType | None) -> bool:
    """Return whether Python itself opens a file: to import, to show a line, to log."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_OF_PYTHON) or "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
