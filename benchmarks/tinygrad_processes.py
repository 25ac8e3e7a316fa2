"""tinygrad in a process of its own interpreter, on the OpenCL device that this interpreter's pyopencl has."""

from __future__ import annotations

import json
import os
import subprocess
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Flavour:
    """One release of tinygrad, the option that gives its interpreter, and what chooses OpenCL there."""

    title: str
    option: str
    variables: dict[str, str]


NEW = Flavour("tinygrad 0.14", "--tinygrad", {"DEV": "CL"})
OLD = Flavour("tinygrad 0.10.3 image2d", "--tinygrad-old", {"GPU": "1", "IMAGE": "2"})


class Tinygrad:
    """Makes steps of `benchmarks/tinygrad_models.py` in a process; `start` is its .npz."""

    def __init__(self, flavour: Flavour, python: str, job: str, start: Path) -> None:
        folder = start.with_name(flavour.option.strip("-"))
        folder.mkdir()
        self.log = (folder / "log.txt").open("w+")
        command = [python, str(Path(__file__).with_name("tinygrad_models.py")), job, str(start)]
        if library := opencl_library():
            command += ["--opencl", library]
        self.process = subprocess.Popen(
            command,
            env=_environment(folder, flavour.variables),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of so many steps and their results; raises RuntimeError with its last words."""
        assert self.process.stdin and self.process.stdout
        try:
            print(steps, file=self.process.stdin, flush=True)
            found = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(self.log.read().strip().splitlines()[-1]) from error
        return found["seconds"], found["results"]

    def close(self) -> None:
        """End the process."""
        self.process.communicate()
        self.log.close()


def opencl_library() -> str | None:
    """Return the libOpenCL that pyopencl brings, or the system's."""
    import pyopencl

    package = Path(pyopencl.__file__).parent
    brought = [*package.glob(".libs/libOpenCL*"), *package.parent.glob("pyopencl.libs/libOpenCL*")]
    return str(brought[0]) if brought else find_library("OpenCL")


def _environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return a process's environment, led to pyopencl's PoCL where it names no OpenCL driver."""
    import pyopencl

    environment = {**os.environ, **variables}
    brought = list(Path(pyopencl.__file__).parent.glob(".libs/libpocl*"))
    if "OCL_ICD_VENDORS" not in environment and brought:
        (folder / "pocl.icd").write_text(f"{brought[0]}\n")
        environment["OCL_ICD_VENDORS"] = str(folder)
    return environment
