"""Time training steps of ResNet-18 and MobileNetV2: torchedge beside tinygrad on one OpenCL device.

    python -m venv tg && tg/bin/pip install tinygrad==0.14.0 numpy
    python -m venv tg-old && tg-old/bin/pip install tinygrad==0.10.3 numpy
    python benchmarks/lowering_tinygrad.py --tinygrad tg/bin/python --tinygrad-old tg-old/bin/python

Needs pyopencl and torchvision. tinygrad 0.14 runs with DEV=CL, 0.10.3 with GPU=1 IMAGE=2 (real image2d), each
in its own interpreter, with its own layers, optimizer and TinyJit (`benchmarks/tinygrad_models.py`); BEAM and
the like are taken from the environment. All sides start from the same weights and train on the same batch:
float32, SGD with momentum, no dropout, a step ends when its loss is on the host. Steps are timed in rounds,
one side after the other, after `--warmup` steps; medians are told. That every side trains is checked by its
losses, against PyTorch's (which runs on the CPU, or on CUDA with TF32 off). The OpenCL device is the one that
OCL_ICD_VENDORS leads to, by default pyopencl's PoCL. `--batch 32 --size 224` suits a GPU. The exit status is
1 where a side does not train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from harness import options_of

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step
from torchedge.tracing.vision import import_torchvision

MODELS = ("resnet18", "mobilenet_v2")
LEARNING_RATE, MOMENTUM = 0.01, 0.9
COMPARED, TOLERANCE = 4, 0.02
"""First losses held against PyTorch's, and how far they may be off: later ones drift apart by rounding."""
ASKED = 2.0
"""tinygrad's time over ours, asked for."""

Start = dict[str, np.ndarray]


@dataclass(frozen=True)
class Flavour:
    """One release of tinygrad, the option that gives its interpreter, and what chooses OpenCL there."""

    title: str
    option: str
    variables: dict[str, str]


NEW = Flavour("tinygrad 0.14", "--tinygrad", {"DEV": "CL"})
OLD = Flavour("tinygrad 0.10.3 image2d", "--tinygrad-old", {"GPU": "1", "IMAGE": "2"})


class Tinygrad:
    """Make steps of `benchmarks/tinygrad_models.py` in a process; `start` is its .npz."""

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


class Side(Protocol):
    """Something that trains: makes steps, returns their seconds and losses."""

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Make steps."""


class Stepper:
    """A side in this process, from a function that makes one step and returns its loss."""

    def __init__(self, step: Callable[[], float]) -> None:
        self.step = step

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Make steps."""
        seconds, losses = [], []
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(self.step())
            seconds.append(time.perf_counter() - began)
        return seconds, losses


@dataclass
class Run:
    """What one side did: seconds of the timed steps, all losses, why there are none."""

    title: str
    side: Side | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reason: str = ""

    def advance(self, steps: int, *, timed: bool) -> None:
        """Make steps; a side that fails is left out from there on."""
        if self.side is None:
            return
        try:
            seconds, losses = self.side.run(steps)
        except RuntimeError as error:
            self.side, self.reason = None, str(error)
            return
        self.seconds += seconds if timed else []
        self.losses += losses

    @property
    def milliseconds(self) -> float:
        """Median of a step."""
        return 1000 * statistics.median(self.seconds)


def build(name: str) -> torch.nn.Module:
    """Return torchvision's model with fixed weights, without dropout."""
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(import_torchvision().models, name)()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def make_batch(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (batch 3 size size) and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(0, 1000, (batch,), generator=generator)


def torch_step(name: str, batch: int, size: int) -> Callable[[], float]:
    """Return PyTorch's step, on CUDA where it is there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(name).to(device)
    images, labels = (tensor.to(device) for tensor in make_batch(batch, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def torchedge_step(name: str, batch: int, size: int) -> Callable[[], float]:
    """Return torchedge's step on pyopencl's first device."""
    model = build(name)
    images, labels = make_batch(batch, size)
    captured = capture_step(
        model,
        images,
        targets=labels,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        keep=frozenset(all_rules()),
    )
    device = choose_device()
    executor = Executor(lower(captured.step, target_for(device)), device)
    executor.load(captured.tensors)
    return lambda: float(executor.run(images, labels)[0])


def save_start(name: str, batch: int, size: int, path: Path) -> None:
    """Write weights and batch for tinygrad's process."""
    start: Start = {key: tensor.numpy() for key, tensor in build(name).state_dict().items()}
    images, labels = make_batch(batch, size)
    np.savez(path, images=images.numpy(), labels=labels.numpy().astype(np.int32), **start)  # type: ignore[arg-type]


def compare(name: str, given: argparse.Namespace, folder: Path) -> list[Run]:
    """Train one model on all sides, in rounds."""
    save_start(name, given.batch, given.size, folder / "start.npz")
    runs = [Run("torchedge"), Run(NEW.title), Run(OLD.title), Run("PyTorch")]
    for run, make in ((runs[0], torchedge_step), (runs[3], torch_step)):
        run.side = Stepper(make(name, given.batch, given.size))
    started = []
    for run, flavour, python in ((runs[1], NEW, given.tinygrad), (runs[2], OLD, given.tinygrad_old)):
        if python is None:
            run.reason = f"left out: {flavour.option} PYTHON gives the interpreter"
            continue
        run.side = Tinygrad(flavour, python, name, folder / "start.npz")
        started.append(run.side)
    for round_ in range(given.rounds + 1):
        for run in runs:
            print(f"{name}: round {round_} of {given.rounds}, {run.title}", end="   \r", file=sys.stderr)
            run.advance(given.warmup if round_ == 0 else given.steps, timed=round_ > 0)
    for side in started:
        side.close()
    return runs


def trains(run: Run, reference: Run) -> str:
    """Return what is wrong with a side's losses, or nothing."""
    pairs = list(zip(run.losses, reference.losses, strict=False))[:COMPARED]
    off = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
    if not off <= TOLERANCE:
        return f"losses are {off:.1%} off PyTorch's"
    return "" if run.losses[-1] < run.losses[0] else "the loss does not fall"


def print_table(name: str, runs: list[Run]) -> bool:
    """Print one model's rows; return whether each side that ran trains."""
    print(f"\n{name}\n\n| side | step, ms | spread, % | loss, first | loss, last | time over torchedge's |")
    print("|---|---|---|---|---|---|")
    faults = []
    for run in runs:
        if not run.seconds:
            print(f"| {run.title} | {run.reason} | | | | |")
            continue
        quarters = statistics.quantiles(run.seconds, n=4)
        spread = 50 * (quarters[2] - quarters[0]) / statistics.median(run.seconds)
        ratio = f"{run.milliseconds / runs[0].milliseconds:.2f}" if runs[0].seconds else "-"
        print(
            f"| {run.title} | {run.milliseconds:,.1f} | {spread:.0f} | {run.losses[0]:.4f} "
            f"| {run.losses[-1]:.4f} | {ratio} |"
        )
        if fault := trains(run, runs[-1]):
            faults.append(f"{run.title}: {fault}")
    print("\n" + "".join(f"- {fault}\n" for fault in faults), end="")
    for run in runs[1:3]:
        if run.seconds and runs[0].seconds:
            ratio = run.milliseconds / runs[0].milliseconds
            verdict = "met" if ratio >= ASKED else "MISSED"
            print(f"- {run.title} takes {ratio:.2f} x our time; asked for: at least {ASKED:g}: {verdict}")
    return not faults


def main() -> None:
    """Compare the models asked for."""
    parser = options_of(__doc__)
    parser.add_argument("--tinygrad", metavar="PYTHON", help="interpreter with tinygrad 0.14")
    parser.add_argument("--tinygrad-old", metavar="PYTHON", help="interpreter with tinygrad 0.10.3")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--steps", type=int, default=5, help="a round and side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4, help="first steps, not timed")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"batch {given.batch}, {given.size} x {given.size}, {given.rounds} rounds of {given.steps} steps")
    fine = True
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            fine &= print_table(name, compare(name, given, Path(folder)))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
