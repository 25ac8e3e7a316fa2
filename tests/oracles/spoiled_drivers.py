"""A driver from PyPI with one function of it spoiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyopencl as cl
import pytest

from torchedge.opencl.drivers import installed_runtime


def spoiled(how: str, folder: Path) -> dict[str, str]:
    """Build the driver into a folder, and return variables with which it is the only one.

    how: a word of spoiled_driver.c. A machine without a C compiler or a driver from PyPI skips the test.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    # PoCL from pip does not build on every processor, which hides what is spoiled behind the build.
    libraries = [installed_runtime(), *Path(cl.__file__).parent.glob(".libs/libpocl*")]
    libraries = [path for path in libraries if path is not None]
    if compiler is None or not libraries:
        pytest.skip("no C compiler, or no driver from pip to spoil")
    library, source = folder / "spoiled.so", Path(__file__).with_name("spoiled_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (folder / "spoiled.icd").write_text(f"{library}\n")
    return {
        "SPOILED_DRIVER": str(libraries[0]), "SPOILED": how, "OCL_ICD_VENDORS": str(folder / "spoiled.icd"),
        "TORCHEDGE_CACHE": str(folder / "cache"), "TORCHEDGE_OPENCL_DEVICE": "",
    }  # fmt: skip
