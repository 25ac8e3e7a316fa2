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
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from harness import options_of, print_rows, timed_steps
from lowering_steps import Case, vision

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

MODELS = ("resnet18", "mobilenet_v2")
COMPARED, TOLERANCE = 4, 0.02
"""First losses held against PyTorch's, and how far they may be off: later ones drift apart by rounding."""
ASKED = 2.0
"""tinygrad's time over ours, asked for."""
RELEASES = {
    "tinygrad 0.14": ("tinygrad", {"DEV": "CL"}),
    "tinygrad 0.10.3 image2d": ("tinygrad_old", {"GPU": "1", "IMAGE": "2"}),
}
"""The option that gives the interpreter of a release, and the variables that choose OpenCL there."""

Steps = Callable[[int], tuple[list[float], list[float]]]
"""Make so many steps; return the seconds and the loss of each."""


@dataclass
class Side:
    """What one side did: seconds of the timed steps, all losses, why there are none."""

    title: str
    run: Steps | None = None
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def advance(self, steps: int, *, timed: bool) -> None:
        """Make steps; a side that fails is left out from there on."""
        if self.run is None:
            return
        try:
            seconds, losses = self.run(steps)
        except RuntimeError as error:
            self.run, self.reason = None, str(error)
            return
        self.seconds += seconds if timed else []
        self.losses += losses

    @property
    def milliseconds(self) -> float:
        """Median of a step."""
        return 1000 * statistics.median(self.seconds)


def tinygrad_steps(python: str, variables: dict[str, str], job: str, folder: Path) -> Steps:
    """Start `benchmarks/tinygrad_models.py` on the .npz of a folder, with OpenCL as pyopencl has it."""
    import pyopencl

    own = folder / variables.get("IMAGE", "buffers")
    own.mkdir()
    package = Path(pyopencl.__file__).parent
    libraries = [*package.glob(".libs/libOpenCL*"), *package.parent.glob("pyopencl.libs/libOpenCL*")]
    library = str(libraries[0]) if libraries else find_library("OpenCL")
    environment, pocl = {**os.environ, **variables}, [*package.glob(".libs/libpocl*")]
    if "OCL_ICD_VENDORS" not in environment and pocl:
        (own / "pocl.icd").write_text(f"{pocl[0]}\n")
        environment["OCL_ICD_VENDORS"] = str(own)
    script = str(Path(__file__).with_name("tinygrad_models.py"))
    words = [python, script, job, str(folder / "start.npz"), *(["--opencl", library] if library else [])]
    log, pipe = own / "log.txt", subprocess.PIPE
    with log.open("w") as file:
        process = subprocess.Popen(words, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=file)

    def run(steps: int) -> tuple[list[float], list[float]]:
        assert process.stdin and process.stdout
        try:
            print(steps, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            process.wait()
            raise RuntimeError(log.read_text().strip().splitlines()[-1]) from error
        return answer["seconds"], answer["results"]

    return run


def case_of(name: str, given: argparse.Namespace) -> Case:
    """Return torchvision's model without dropout and a batch, the same ones at each call."""
    torch.manual_seed(0)
    return vision(name, given.batch, given.size)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    """Return the optimizer of all sides."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def torch_step(case: Case) -> Callable[[], float]:
    """Return PyTorch's step, on CUDA where it is there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = case.model.to(device).train()
    images, labels = (tensor.to(device) for tensor in case.batch)
    optimizer = sgd(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = case.loss(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def torchedge_step(case: Case) -> Callable[[], float]:
    """Return torchedge's step on pyopencl's first device."""
    images, labels = case.batch
    optimizer, keep = sgd(case.model), frozenset(all_rules())
    captured = capture_step(
        case.model.train(), images, targets=labels, loss=case.loss, optimizer=optimizer, keep=keep
    )
    device = choose_device()
    executor = Executor(lower(captured.step, target_for(device)), device)
    executor.load(captured.tensors)
    return lambda: float(executor.run(images, labels)[0])


def compare(name: str, given: argparse.Namespace, folder: Path) -> list[Side]:
    """Train one model on all sides, in rounds."""
    case = case_of(name, given)
    images, labels = (tensor.numpy() for tensor in case.batch)
    start = {key: tensor.numpy() for key, tensor in case.model.state_dict().items()}
    np.savez(folder / "start.npz", images=images, labels=labels.astype(np.int32), **start)  # type: ignore[arg-type]
    sides = [Side("torchedge", timed_steps(torchedge_step(case_of(name, given))))]
    for title, (option, variables) in RELEASES.items():
        side, python = Side(title), getattr(given, option)
        sides.append(side)
        if python is None:
            side.reason = f"left out: --{option.replace('_', '-')} PYTHON gives the interpreter"
        else:
            side.run = tinygrad_steps(python, variables, name, folder)
    sides.append(Side("PyTorch", timed_steps(torch_step(case_of(name, given)))))
    for round_ in range(given.rounds + 1):
        for side in sides:
            print(f"{name}: round {round_} of {given.rounds}, {side.title}", end="   \r", file=sys.stderr)
            side.advance(given.warmup if round_ == 0 else given.steps, timed=round_ > 0)
    return sides


def fault_of(side: Side, reference: Side) -> str:
    """Return what is wrong with a side's losses, or nothing."""
    pairs = list(zip(side.losses, reference.losses, strict=False))[:COMPARED]
    off = max(abs(loss - exact) / abs(exact) for loss, exact in pairs)
    if not off <= TOLERANCE:
        return f"- {side.title}: losses are {off:.1%} off PyTorch's"
    return "" if side.losses[-1] < side.losses[0] else f"- {side.title}: the loss does not fall"


def print_table(name: str, sides: list[Side]) -> bool:
    """Print one model's rows; return whether each side that ran trains."""
    print(f"\n{name}\n")
    rows, ours = [], sides[0]
    ran = [side for side in sides if side.seconds]
    for side in sides:
        if side not in ran:
            rows.append([side.title, side.reason, "", "", "", ""])
            continue
        low, middle, high = statistics.quantiles(side.seconds, n=4)
        losses = [f"{side.losses[place]:.4f}" for place in (0, -1)]
        ratio = f"{side.milliseconds / ours.milliseconds:.2f}" if ours in ran else "-"
        spread = f"{50 * (high - low) / middle:.0f}"
        rows.append([side.title, f"{side.milliseconds:,.1f}", spread, *losses, ratio])
    titles = ("side", "step, ms", "spread, %", "loss, first", "loss, last", "time over torchedge's")
    print_rows(titles, rows)
    faults = [fault for side in ran if (fault := fault_of(side, sides[-1]))]
    print("", *faults, sep="\n")
    for side in sides[1:-1]:
        if side in ran and ours in ran:
            ratio = side.milliseconds / ours.milliseconds
            verdict = "met" if ratio >= ASKED else "MISSED"
            print(f"- {side.title} takes {ratio:.2f} x our time; asked for: at least {ASKED:g}: {verdict}")
    return not faults


def main() -> None:
    """Compare the models asked for."""
    parser = options_of(__doc__, batch=8, size=64, steps=5, rounds=3, warmup=4)
    parser.add_argument("--tinygrad", metavar="PYTHON", help="interpreter with tinygrad 0.14")
    parser.add_argument("--tinygrad-old", metavar="PYTHON", help="interpreter with tinygrad 0.10.3")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
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
