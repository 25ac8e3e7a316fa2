"""Other processes on the device that this one uses."""

from __future__ import annotations

import os
from pathlib import Path

from torchedge.opencl import choose_device
from torchedge.opencl.drivers import RUNTIME_PLATFORM, VENDORS, installed_runtime

POCL_PLATFORM = "Portable Computing Language"


def default_device(folder: Path) -> tuple[str, dict[str, str]]:
    """Return platform and name of the default device, and the variables with which a loader finds it.

    folder: where a list of drivers may be written.
    """
    device = choose_device()
    variables = {}
    if device.platform == RUNTIME_PLATFORM and (library := installed_runtime()):
        (folder / "runtime.icd").write_text(f"{library}\n")
        variables[VENDORS] = str(folder)
    libraries = {str(path.parent) for path in _libraries("libpocl*.so*")}
    if device.platform == POCL_PLATFORM and libraries:  # only Python's own process finds them without it
        before = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = ":".join([*libraries, *([before] if before else [])])
    return f"{device.platform} {device.name}", variables


def loader() -> dict[str, str]:
    """Return the variable that names pyopencl's own OpenCL loader, which finds the drivers from PyPI."""
    libraries = _libraries("libOpenCL*.so*")
    return {"TORCHEDGE_OPENCL": str(libraries[0])} if libraries else {}


def _libraries(pattern: str) -> list[Path]:
    import pyopencl

    return sorted((Path(pyopencl.__file__).parent / ".libs").glob(pattern))
