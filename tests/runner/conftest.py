"""The native runner, built once for all workers, and bundles for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bundles.conftest import batch, copied, inference, model, reseal, training  # noqa: F401 - fixtures
from drivers.processes import default_device, loader

from torchedge.storage.tensors import read_tensors, write_tensors

SOURCE = Path(__file__).resolve().parents[2] / "export" / "runner"
DRIVERS = (
    "libintelocl",
    "libcommon_clang",
    "libtbb",
    "libpocl",
    "libLLVM",
    "libOpenCL",
    "libnvidia",
    "libMesa",
    "libRusticl",
)
SANITIZERS = ("-D", "TORCHEDGE_SANITIZE=ON")

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class NativeRunner:
    """The program `torchedge-run` on the default device; `cache` holds its compiled programs."""

    program: Path
    device: str
    environment: Mapping[str, str]
    cache: Path

    def start(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run it with these arguments to its end."""
        command = [self.program, *map(str, words), "--cache", self.cache]
        return subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )

    def refusal(self, *words: object) -> str:
        """Return its only line of an error; anything but exit status 2 fails the test."""
        done = self.start(*words)
        assert done.returncode == 2, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr.removeprefix("error: ").rstrip("\n")

    def run(self, bundle: Path, folder: Path, steps: Sequence[Arrays], *words: object) -> Arrays:
        """Run steps of inputs by name, and return the outputs as "STEP.NAME"."""
        fed, got = folder / "inputs.safetensors", folder / "outputs.safetensors"
        write_tensors(
            fed, {f"{k}.{name}": array for k, step in enumerate(steps) for name, array in step.items()}
        )
        done = self.start(bundle, "--device", self.device, "--inputs", fed, "--outputs", got, *words)
        assert done.returncode == 0, done.stderr
        return {name: np.array(array) for name, array in read_tensors(got, finite=False)[0].items()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-all` what needs the runner: compiling it takes minutes."""
    for item in items:
        if "build" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def built(folder: Path, *options: str) -> Path:
    """Build the runner in a folder; skip where the tools for it are not there."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: the native runner is not built")
    configured = subprocess.run(
        ["cmake", "-S", SOURCE, "-B", folder, "-D", "FETCHCONTENT_FULLY_DISCONNECTED=ON", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if configured.returncode != 0:
        pytest.skip("cmake finds no nlohmann-json3-dev and libssl-dev: the native runner is not built")
    done = subprocess.run(
        ["cmake", "--build", folder, "--parallel", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "torchedge-run"


@pytest.fixture(scope="session")
def build(tmp_path_factory) -> Callable[..., Path]:
    """Build the runner with options of cmake, once for all workers of a test session.

    $TORCHEDGE_RUNNER names a program that is tested instead, built for another system or by hand.
    """

    def call(*options: str) -> Path:
        import fcntl

        if "TORCHEDGE_RUNNER" in os.environ and not options:
            return Path(os.environ["TORCHEDGE_RUNNER"])

        base = tmp_path_factory.getbasetemp()
        shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        folder = shared / ("runner-" + ("".join(filter(str.isalnum, "".join(options))) or "plain"))
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            program = folder / "torchedge-run"
            return program if program.exists() else built(folder, *options)

    return call


@pytest.fixture(scope="session")
def started(build, tmp_path_factory) -> Callable[..., NativeRunner]:
    """Return the runner, built with options of cmake, on the default device."""
    pytest.importorskip("pyopencl")

    def call(*options: str) -> NativeRunner:
        folder = tmp_path_factory.mktemp("runner")
        device, variables = default_device(folder)
        cache = Path(os.environ.get("TORCHEDGE_CACHE", folder)) / "runner"
        # Drivers keep memory to the end. A leak of the runner's own has no frame in them.
        (folder / "leaks").write_text("".join(f"leak:{name}\n" for name in DRIVERS))
        variables |= {"LSAN_OPTIONS": f"suppressions={folder / 'leaks'}:print_suppressions=0"}
        return NativeRunner(build(*options), device, {**loader(), **variables}, cache)

    return call


@pytest.fixture(scope="session")
def native(started) -> NativeRunner:
    """The runner as users build it."""
    return started()


@pytest.fixture(scope="session")
def shims(native, tmp_path_factory) -> Callable[[str], Path]:
    """Build a library of this folder that stands in front of the runner's OpenCL library."""

    def call(name: str) -> Path:
        if shutil.which("cc") is None:
            pytest.skip(f"no cc: {name}.c is not built")
        real = native.environment.get("TORCHEDGE_OPENCL") or os.environ.get(
            "TORCHEDGE_OPENCL", "libOpenCL.so.1"
        )
        library = tmp_path_factory.mktemp(name) / f"{name}.so"
        linked = [real if "/" in real else f"-l:{real}", f"-Wl,-rpath,{Path(real).parent}", "-ldl"]
        words = ["cc", "-shared", "-fPIC", "-O1", "-w", Path(__file__).with_name(f"{name}.c"), "-o", library]
        subprocess.run([*words, "-Wl,--no-as-needed", *linked], check=True)
        return library

    return call
