"""Drivers of this machine's processor that pip installs, beside those that the OpenCL loader finds.

PoCL's wheel lies beside pyopencl, whose loader looks there. Intel's runtime (`intel-opencl-rt`, for x86-64
processors of any vendor) registers itself with conda alone: under pip its `.icd` file names no library. So
its library is added to the vendors while the loader looks for drivers, once in a process.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from torchedge.storage.locks import PROCESS
from torchedge.storage.processes import variable_set

VENDORS, DEFAULT_VENDORS = "OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"
"""Environment variables of the loader: a folder of `.icd` files or one driver; the folder else."""
SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
RUNTIME_PLATFORM = "Intel(R) OpenCL"

_DISTRIBUTION, _LIBRARY = "intel-opencl-rt", "libintelocl.so"
_MAX_ICD_BYTES = 4096


_asked: list[bool] = []  # whether the loader has looked, and whether with Intel's runtime from pip


def find_platforms(cl: Any) -> list[Any]:
    """Return the platforms of the loader, with Intel's runtime from pip; raises pyopencl's errors.

    The loader looks once: a program that used pyopencl before has what it found then.
    """
    with PROCESS:
        folder = None if _asked else _extended_vendors()
        _asked[:] = _asked or [folder is not None]
        if folder is None:
            return list(cl.get_platforms())
        try:
            with variable_set(VENDORS, folder):
                return list(cl.get_platforms())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def is_added(platform_name: str) -> bool:
    """Whether a platform is Intel's runtime from pip, added to the drivers that the user installed."""
    return platform_name == RUNTIME_PLATFORM and any(_asked)


def installed_runtime() -> Path | None:
    """Return the library of Intel's runtime that pip installed into this environment, or None."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution(_DISTRIBUTION).files or ():
            if file.name == _LIBRARY:
                path = Path(os.path.abspath(str(file.locate())))
                return path if path.is_file() else None
    return None


def driver_advice() -> str:
    """Return how to get a driver for this machine's processor."""
    vendors = os.environ.get(VENDORS)
    if vendors and not Path(vendors).exists():
        return f"unset {VENDORS}, whose folder {vendors} does not exist"
    machine = platform.machine() or "an unknown processor"
    debian = "apt install pocl-opencl-icd (Debian, Ubuntu)"
    if sys.platform != "linux":
        return "for this machine's processor install its vendor's OpenCL runtime, or PoCL from conda-forge"
    if machine.lower() not in ("x86_64", "amd64"):
        return f"for this machine's processor ({machine}), for which PyPI has no driver, run: {debian}"
    known = debian if installed_runtime() else "pip install 'torchedge[opencl]'"
    return f"for this machine's processor run: {known}"


def _extended_vendors() -> str | None:
    """Return a temporary folder with the vendors that the loader would find, and Intel's runtime.

    None where the runtime is not installed or among them, or the user names one driver.
    """
    library, folders = installed_runtime(), _vendor_folders()
    if library is None:
        return None
    files = [path for folder in folders for path in sorted(folder.glob("*.icd"))]
    with suppress(OSError):
        texts = [path.read_bytes()[:_MAX_ICD_BYTES] for path in files]
        if not folders or any(_names_runtime(os.fsdecode(text).strip()) for text in texts):
            return None
        target = Path(tempfile.mkdtemp(prefix="torchedge-icd-"))
        for number, text in enumerate([*texts, os.fsencode(library)]):
            (target / f"{number:03}.icd").write_bytes(text)
        return str(target)
    return None


def _names_runtime(library: str) -> bool:
    """Whether the loader finds an Intel runtime under this name."""
    where, name = os.path.split(library)
    return name.startswith(_LIBRARY) and (not where or os.path.exists(library))


def _vendor_folders() -> list[Path]:
    """Return the folders in which the loader looks; none where the user names one driver or no folder."""
    chosen = os.environ.get(VENDORS)
    if chosen:
        return [Path(chosen)] if os.path.isdir(chosen) else []
    folders = [Path(os.environ.get(DEFAULT_VENDORS) or SYSTEM_VENDORS)]
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):  # conda's loader looks there
        folders.append(Path(sys.prefix, "etc", "OpenCL", "vendors"))
    return folders
