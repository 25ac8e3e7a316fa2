"""Run models with their weights streamed, by several plans, beside a run with all weights preloaded.

    python benchmarks/streaming_runs.py resnet-50 gpt-neo-small
    python benchmarks/streaming_runs.py gpt-neo-1.3b --cold --reads direct --staging 64 --trace traces/

Models are those of `torchedge plan` by name, with random weights. Each is lowered for the OpenCL device; its
weights are written to a file in FOLDER in the order of their first use. Every plan runs under the same
executor: an initialisation and a first run (the paper's integrated latency), then `--repeat` runs more. A run
before all others, which is not shown, lets the driver compile.

The table has the memory that a run allocates and what it uses on average, the times of initialisation, first
run and median further run, the time in which launches of the first run waited for weights, and whether the
outputs are bit for bit those of preloading. "less" and "faster" compare with preloading. With `--cold` the
file is dropped from the page cache before each run. The exit status is 1 where outputs differ. Needs the
packages of the models.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.runtime.measured_runs import MeasuredRun
from torchedge.runtime.weight_sources import FileSource, Reads
from torchedge.streaming.instances import MEBIBYTE, Instance, Layer, Weight
from torchedge.streaming.schedules import make_schedule, weight_uses
from torchedge.streaming.strategies import STRATEGIES
from torchedge.tracing.paper_models import PAPER_MODELS

PAGE = 4096
TITLES = (
    "model",
    "plan",
    "same",
    "MiB",
    "less",
    "MiB used",
    "init ms",
    "first ms",
    "again ms",
    "wait ms",
    "faster",
)


@dataclass(frozen=True)
class Lowered:
    """A model as a program, its weights in a file, and its inputs."""

    name: str
    program: Program
    path: Path
    places: Mapping[str, tuple[int, int]]
    inputs: Sequence[Any]


def prepare(name: str, folder: Path, device: str | None) -> Lowered:
    """Build a model with random weights, lower it, and write its weights."""
    torch.manual_seed(0)
    model, example = PAPER_MODELS[name]()
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    args = tuple(_random(value) for value in args)
    kwargs = {key: _random(value) for key, value in kwargs.items()}
    start = time.perf_counter()
    captured = capture_inference_step(model.eval(), args, kwargs)
    program = lower_inference(captured, target_for(choose_device(device)))
    seconds = time.perf_counter() - start
    print(
        f"{name}: {len(program.launches)} launches, captured and lowered in {seconds:.1f} s", file=sys.stderr
    )
    path = folder / f"{name}.bin"
    places = write_weights(program, captured.tensors, path)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return Lowered(name, program, path, places, [value.numpy() for value in values])


def _random(value: Any) -> Any:  # noqa: ANN401 - an argument of a model
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype)
    return (
        torch.randint(0, 1000, value.shape, dtype=value.dtype)
        if value.dim()
        else value.new_ones((), device="cpu")
    )


def write_weights(
    program: Program, data: Mapping[str, torch.Tensor], path: Path
) -> dict[str, tuple[int, int]]:
    """Write weights packed, in the order of their first use, each from a page on; return their places."""
    uses = weight_uses(program)
    places = {}
    with path.open("wb") as file:
        for index in sorted(uses, key=lambda index: uses[index]):
            stored = program.tensors[index]
            packed = stored.layout.pack(data[stored.name].detach().numpy())
            file.write(bytes(-file.tell() % PAGE))
            places[stored.name] = (file.tell(), packed.nbytes)
            file.write(np.ascontiguousarray(packed).data)
        os.fsync(file.fileno())
    return places


def instance_of(program: Program, chunk_bytes: int) -> Instance:
    """Return the overlap problem of a program, for strategies that ask for no capacity."""
    layers = [
        Layer(f"launch {k}", 0, 1.0, program.kernels[launch.kernel].load_class)
        for k, launch in enumerate(program.launches)
    ]
    weights = [
        Weight(stored.name, stored.nbytes, -(-stored.nbytes // chunk_bytes), first + 1, last + 1)
        for index, (first, last) in weight_uses(program).items()
        for stored in [program.tensors[index]]
    ]
    return Instance(chunk_bytes, tuple(layers), tuple(weights), name=program.name)


def run(
    lowered: Lowered, instance: Instance, plan: str, options: argparse.Namespace
) -> tuple[MeasuredRun, list[float], bytes]:
    """Return the measured first run, the times of further runs (ms), and the outputs' bytes."""
    schedule = make_schedule(
        lowered.program, instance, STRATEGIES[plan](instance), options.staging * MEBIBYTE
    )
    if options.cold:
        _drop(lowered.path)
    source = FileSource(lowered.path, lowered.places, options.reads)
    times: list[float] = []
    with Executor(schedule, options.device, source=source, loading=options.loading, profile=True) as executor:
        outputs = b"".join(output.tobytes() for output in executor.run(*lowered.inputs))
        first = executor.measured()
        for _ in range(options.repeat):
            if options.cold:
                _drop(lowered.path)
            executor.run(*lowered.inputs)
            times.append(executor.measured().execution_ms)
    return first, times, outputs


def _drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(lowered: Lowered, options: argparse.Namespace) -> bool:
    """Print the rows of a model; return whether all outputs are the same."""
    instance = instance_of(lowered.program, options.chunk * MEBIBYTE)
    run(lowered, instance, "preload-all", argparse.Namespace(**{**vars(options), "repeat": 0}))
    preloaded: tuple[MeasuredRun, bytes] | None = None
    same = True
    for plan in ("preload-all", *[name for name in STRATEGIES if name != "preload-all"]):
        measured, times, outputs = run(lowered, instance, plan, options)
        preloaded = preloaded or (measured, outputs)
        equal = outputs == preloaded[1]
        same = same and equal
        cells = (
            lowered.name,
            plan,
            "yes" if equal else "NO",
            f"{measured.allocated_bytes / MEBIBYTE:.1f}",
            f"{preloaded[0].allocated_bytes / measured.allocated_bytes:.2f}",
            f"{measured.memory.average.total / MEBIBYTE:.1f}",
            f"{measured.initialisation_ms:.1f}",
            f"{measured.execution_ms:.1f}",
            f"{statistics.median(times):.1f}" if times else "-",
            f"{measured.stall_ms:.1f}",
            f"{preloaded[0].latency_ms / measured.latency_ms:.2f}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
            measured.trace(options.trace / f"{lowered.name}-{plan}.json")
    return same


def main() -> int:
    """Print the table; the exit status is 1 where outputs differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=["resnet-50"], metavar="MODEL", help=", ".join(PAPER_MODELS)
    )
    parser.add_argument("--device", help="OpenCL device (see `torchedge devices --opencl`)")
    parser.add_argument("--reads", choices=Reads.__args__, default="plain")  # type: ignore[attr-defined]
    parser.add_argument("--loading", choices=("copy", "kernel", "slot"), default="copy")
    parser.add_argument("--staging", type=int, default=16, help="MiB of the staging pool")
    parser.add_argument("--chunk", type=int, default=1, help="MiB of a chunk")
    parser.add_argument("--repeat", type=int, default=3, help="runs after the first")
    parser.add_argument(
        "--cold", action="store_true", help="drop the weights from the page cache before each run"
    )
    parser.add_argument("--folder", type=Path, help="where weights are written, on the disk to be measured")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of each first run")
    options = parser.parse_args()
    print("| " + " | ".join(TITLES) + " |")
    print("|---" * len(TITLES) + "|")
    same = True
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            same = report(prepare(name, Path(folder), options.device), options) and same
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
