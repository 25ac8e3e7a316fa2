"""Compare the native runner with Python's, on this machine's default OpenCL device.

    make runner && python benchmarks/native_runner.py

Small networks are exported and run by both, in turn, with compiled programs in the cache. It prints the time
from the start of the process to the first output, that of a step within one process, from array to array, and
their ratios (medians and quartiles); a step that streams its weights (alone with --streaming), and the
largest resident set before they are loaded and after; then the size of the stripped library, and the lines of
its source. `bundle_fuzzing.py` and `bundle_mutations.py` look for bundles that end it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from harness import CHECKOUT, options_of

# isort: split
from drivers.processes import default_device, loader
from oracles.step_networks import Recurrent
from torch import nn

import torchedge
from torchedge.bundles.bundle import Bundle
from torchedge.storage.tensors import write_tensors


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Return models and examples by name, each at batch size 1."""
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()
    import torchvision

    torch.manual_seed(0)
    mobile = torchvision.models.mobilenet_v3_small(weights=None).eval()
    return {
        "lstm": (Recurrent(nn.LSTM, 32, 64, 10).eval(), torch.randn(1, 32, 32)),
        "mobilenet_v3_small": (mobile, torch.randn(1, 3, 64, 64)),
    }


def seconds(command: Sequence[object], environment: dict[str, str]) -> float:
    """Run a command to its end and return its time by the clock."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - start


class Library:
    """A bundle open in libtorchedge, in this process."""

    def __init__(self, path: Path, folder: Path, device: str) -> None:
        class Options(ctypes.Structure):
            _fields_ = (
                *((name, ctypes.c_char_p) for name in ("device", "library", "cache", "sha256")),
                ("memory_limit", ctypes.c_uint64),
                *((name, ctypes.c_void_p) for name in ("progress", "context")),
                ("hints", ctypes.c_uint32),
            )

        self.library, self.handle = ctypes.CDLL(str(path)), ctypes.c_void_p()
        self.library.torchedge_error.restype = ctypes.c_char_p
        options = Options(device.encode(), loader().get("TORCHEDGE_OPENCL", "").encode())
        self.call("open", str(folder).encode(), ctypes.byref(options), ctypes.byref(self.handle))

    def call(self, name: str, *words: object) -> None:
        """Call a function; exit with its error."""
        if getattr(self.library, f"torchedge_{name}")(*words):
            raise SystemExit(self.library.torchedge_error(self.handle).decode())

    def step(self, fed: str, array: np.ndarray, got: str, result: np.ndarray) -> None:
        """Run one batch, from an array to an array."""
        source, target = (
            (name.encode(), a.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(a.nbytes))
            for name, a in ((fed, array), (got, result))
        )
        self.call("set_input", self.handle, None, *source)
        self.call("step", self.handle, None)
        self.call("get_output", self.handle, *target)


def compare(program: Path, name: str, rounds: int, steps: int, folder: Path) -> None:
    """Print start and step of one network, in Python and natively."""
    model, example = networks()[name]
    bundle = torchedge.export(model, example, out=folder / name, device="local-cpu", onnx=False)
    fed, array = bundle.inputs[0].name, example.numpy()
    write_tensors(folder / "inputs.safetensors", {fed: array})
    np.save(folder / "inputs.npy", array)
    device, variables = default_device(folder)
    environment = {**os.environ, **loader(), **variables}
    native = [program, bundle.path, "--device", device, "--inputs", folder / "inputs.safetensors"]
    python = [sys.executable, "-m", "torchedge", "run", bundle.path, "--input", folder / "inputs.npy"]
    starts: list[tuple[float, float]] = []
    for _ in range(rounds + 1):  # the first round fills the caches
        starts.append((seconds(python, environment), seconds(native, environment)))
    show(name, "start", starts[1:])
    pairs = steps_of(program, bundle, device, array, steps)
    show(name, "step", pairs[steps // 10 :])


class Deep(nn.Sequential):
    """Forty layers of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(40) for layer in (nn.Linear(512, 512), nn.ReLU())])


def stream(program: Path, steps: int, folder: Path) -> None:
    """Print the step of a streaming network, in Python and natively, and the memory of the native process."""
    torch.manual_seed(0)
    settings = {"device": "local-cpu", "onnx": False, "memory_limit": "8MiB"}
    bundle = torchedge.export(Deep().eval(), torch.randn(8, 512), out=folder / "deep", **settings)
    fed, array = bundle.inputs[0].name, torch.randn(8, 512).numpy()
    write_tensors(folder / "inputs.safetensors", {fed: array})
    device, variables = default_device(folder)
    pairs = steps_of(program, bundle, device, array, steps)
    show("deep, streaming", "step", pairs[steps // 10 :])
    fed_file = folder / "inputs.safetensors"
    command = [program, bundle.path, "--device", device, "--inputs", fed_file, "--figures"]
    for _ in range(2):  # the second takes compiled programs from the cache
        done = subprocess.run(
            [str(word) for word in command], env={**os.environ, **loader(), **variables},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    figures = json.loads(done.stdout)
    built, peak, device_bytes = (
        figures[key] / 2**20 for key in ("built_peak_bytes", "peak_bytes", "allocated_bytes")
    )
    weights = sum(t.nbytes for t in bundle.program.tensors if t.role != "intermediate") / 2**20
    print(
        f"resident: at most {built:.1f} MiB until kernels were built, {peak:.1f} MiB until the end; "
        f"the plan takes {device_bytes:.1f} MiB with staging, of weights of {weights:.1f} MiB"
    )


def steps_of(
    program: Path, bundle: Bundle, device: str, array: np.ndarray, steps: int
) -> list[tuple[float, float]]:
    """Return times of steps in turn, in Python and natively, and hold their bits against each other."""
    library = Library(program.with_name("libtorchedge.so"), bundle.path, device)
    fed, got = bundle.inputs[0].name, bundle.outputs[0]
    result = np.empty(got.shape, got.dtype)
    pairs = []
    for _ in range(steps):
        begin = time.perf_counter()
        (expected,) = bundle.run(array)
        middle = time.perf_counter()
        library.step(fed, array, got.name, result)
        pairs.append((middle - begin, time.perf_counter() - middle))
        assert expected.tobytes() == result.tobytes()
    return pairs


def show(name: str, what: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print medians of pairs (Python's, native) of seconds, and the median and quartiles of their ratio."""
    python, native = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    print(
        f"{name:20} {what:6} python {python:9.3f} ms  native {native:9.3f} ms  "
        f"ratio {middle:.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    """Compare."""
    parser = options_of(__doc__, rounds=5, steps=200)
    parser.add_argument("--program", type=Path, default=CHECKOUT / "build" / "runner" / "torchedge-run")
    parser.add_argument("--streaming", action="store_true", help="Measure streaming and memory alone.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stream(arguments.program, arguments.steps, folder)
        for name in networks() if not arguments.streaming else ():
            compare(arguments.program, name, arguments.rounds, arguments.steps, folder)
        library = shutil.copy(arguments.program.with_name("libtorchedge.so"), folder)
        subprocess.run(["strip", library], check=True)
        files = [p for p in (CHECKOUT / "export" / "runner").rglob("*") if p.suffix in (".cpp", ".h")]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        size = Path(library).stat().st_size / 1024
        print(f"stripped library {size:.0f} KiB; {lines} lines in {len(files)} files")


if __name__ == "__main__":
    main()
