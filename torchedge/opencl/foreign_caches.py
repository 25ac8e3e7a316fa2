"""Caches of other libraries that a run must neither trust nor depend on: pyopencl's, and PoCL's folder.

pyopencl keeps pickles in the user's cache folder and executes what it finds there: that cache stays off.
PoCL keeps compiled kernels, and has no device at all where their folder cannot be written: it then gets a
folder of its own for as long as the process lives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

from torchedge.errors import TorchedgeWarning
from torchedge.storage.processes import variable_set

NO_CACHE = "PYOPENCL_NO_CACHE"
POCL_CACHE = "POCL_CACHE_DIR"
ROOM = 16 << 20
"""Free bytes below which PoCL gets another folder: it ends the process when its disk is full."""


def import_pyopencl() -> ModuleType:
    """Return pyopencl with its cache of pickles off, also where it was imported before."""
    _provide_pocl_cache()
    with variable_set(NO_CACHE, "1"):
        import pyopencl
    pyopencl._PYOPENCL_NO_CACHE = True  # it may be there without the variable
    return pyopencl


def pocl_cache() -> Path | None:
    """Return the folder in which PoCL keeps compiled kernels; None without a home folder."""
    chosen = os.environ.get(POCL_CACHE)
    if chosen:
        return Path(chosen)
    shared, home = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    if shared:
        return Path(shared, "pocl", "kcache")
    return Path(home, ".cache", "pocl", "kcache") if home else None


@cache
def _provide_pocl_cache() -> None:
    """Give PoCL a temporary folder where its own cannot be written, is full, or would be open to all users.

    PoCL reads the variable at the first look for devices. The folder goes when the process ends.
    """
    folder = pocl_cache()
    fault = "there is no home folder" if folder is None else _fault(folder)
    if fault is None:
        return
    temporary = tempfile.mkdtemp(prefix="torchedge-pocl-")
    os.environ[POCL_CACHE] = temporary
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(temporary, ignore_errors=True)

    atexit.register(remove)
    if folder is not None:
        warnings.warn(
            f"{folder}: {fault}, and PoCL keeps compiled kernels there; this process compiles all of them "
            f"into {temporary}: free the folder, or set {POCL_CACHE} to another",
            TorchedgeWarning,
            stacklevel=2,
        )


def _fault(folder: Path) -> str | None:
    """Return why compiled kernels cannot be written to a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="torchedge-")
        os.close(descriptor)
        os.unlink(name)
        with contextlib.suppress(AttributeError):  # Windows has no statvfs
            status = os.statvfs(folder)
            if status.f_bavail * status.f_frsize < ROOM:
                return f"less than {ROOM >> 20} MiB are free"
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    return None
