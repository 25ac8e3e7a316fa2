"""How long the driver compiles a model's kernels: by kernels a program, by threads, by processes.

    python benchmarks/opencl_builds.py                       # MobileNetV2's training step, default device
    python benchmarks/opencl_builds.py resnet18 --device 0 --batch-size 16

Each line is a fresh process, or several, without caches of the driver: wall seconds from the first build to
the last one, processor seconds, and wall seconds with the start of the processes. On PoCL, which compiles
when a kernel is first enqueued, each kernel is also enqueued once, for one work-group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

CPUS = len(os.sched_getaffinity(0))


def texts_of(sources: Mapping[str, str], size: int) -> list[tuple[list[str], str]]:
    """Return (names, text) of programs of at most `size` kernels with the same helpers each."""
    groups: dict[str, dict[str, str]] = {}
    for name, source in sources.items():
        place = source.rfind("\n", 0, source.index("__kernel void")) + 1
        groups.setdefault(source[:place].strip(), {})[name] = source[place:]
    texts = []
    for preamble, bodies in groups.items():
        names = list(bodies)
        for begin in range(0, len(names), size):
            part = names[begin : begin + size]
            texts.append((part, "\n".join([preamble, *[bodies[name] for name in part]])))
    return texts


def child(path: str, device: str | None, size: int, threads: int, share: Sequence[int], options: str) -> None:
    """Build this process's share of the kernels, and print wall and processor seconds."""
    from torchedge.lowering.program_files import read_program
    from torchedge.opencl import open_context
    from torchedge.opencl.compiling import SELF_CACHING
    from torchedge.opencl.wide_vectors import in_halves

    program = read_program(path)
    context = open_context(device)
    cl, lazy = context.cl, context.device.platform in SELF_CACHING
    number, count = share
    texts = texts_of({k.name: k.source for k in program.kernels}, size)[number::count]
    nbytes = max(tensor.nbytes for tensor in program.tensors) + 4096
    first = {program.kernels[launch.kernel].name: launch for launch in reversed(program.launches)}

    def build(names: list[str], text: str) -> int:
        text = in_halves(text) + text if lazy else text
        own = cl.Context([context.handle]) if lazy else context.context
        built = cl.Program(cl._cl._Program(own, text)).build(["-cl-std=CL1.2", *options.split()])
        for name in names if lazy else ():
            kernel, launch = cl.Kernel(built, name), first[name]
            buffer = cl.Buffer(own, cl.mem_flags.READ_WRITE, nbytes)
            kernel.set_args(*[buffer] * len(launch.tensors), *map(np.int32, launch.sizes))
            queue = cl.CommandQueue(own)
            cl.enqueue_nd_range_kernel(queue, kernel, launch.local_size, launch.local_size).wait()
        return sum(map(len, built.get_info(cl.program_info.BINARIES))) if not lazy else 0

    began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        binaries = sum(pool.map(lambda item: build(*item), texts))
    print(json.dumps([time.perf_counter() - began[0], time.process_time() - began[1], len(texts), binaries]))


def write_training(name: str, path: Path, device: str | None, batch_size: int, side: int) -> str:
    """Lower a model's training step for a device, write its program, and return a description."""
    import torch

    from torchedge.lowering.assembly import lower
    from torchedge.lowering.program_files import write_program
    from torchedge.lowering.rules.registry import all_rules
    from torchedge.lowering.targets import target_for
    from torchedge.opencl import open_context
    from torchedge.tracing.optimizers import OptimizerSettings
    from torchedge.tracing.steps import capture_step
    from torchedge.tracing.vision import import_torchvision

    model = getattr(import_torchvision().models, name)(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with OptimizerSettings(optimizer).as_captured():
        captured = capture_step(
            model,
            (torch.randn(batch_size, 3, side, side),),
            {},
            targets=(torch.zeros(batch_size, dtype=torch.int64),),
            loss=torch.nn.functional.cross_entropy,
            optimizer=optimizer,
            keep=frozenset(all_rules()),
        )
    chosen = open_context(device).device
    program = lower(captured.step, target_for(chosen))
    write_program(path, program)
    characters = sum(len(kernel.source) for kernel in program.kernels)
    return (
        f"{name} on {chosen.name}: {len(program.launches)} launches of {len(program.kernels)} kernels, "
        f"{characters:,} characters; {CPUS} processor cores"
    )


def main() -> int:
    """Print seconds of each way of building."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="mobilenet_v2")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--device")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, size, threads, number, count, *options = arguments.child
        share = int(number), int(count)
        child(path, arguments.device, int(size), int(threads), share, " ".join(options))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.json"
        print(write_training(arguments.model, path, arguments.device, arguments.batch_size, arguments.side))
        measure(path, arguments.device)
    return 0


def measure(path: Path, device: str | None) -> None:
    """Print a line for each way."""
    whole = 1 << 20
    many = sorted({2, CPUS // 2, CPUS} - {0, 1})
    ways: list[tuple[str, int, int, int, str]] = [
        ("all in one program", whole, 1, 1, ""),
        ("16 a program", 16, 1, 1, ""),
        ("4 a program", 4, 1, 1, ""),
        ("one a program", 1, 1, 1, ""),
        *[(f"one a program, {n} threads", 1, n, 1, "") for n in many],
        *[(f"4 a program, {n} threads", 4, n, 1, "") for n in many],
        *[(f"one a program, {n} processes", 1, 1, n, "") for n in many],
        *[(f"4 a program, {n} processes", 4, 1, n, "") for n in many],
    ]
    for title, size, threads, processes, options in ways:
        print(f"  {title:<36}{timed(path, device, size, threads, processes, options)}", flush=True)


def timed(path: Path, device: str | None, size: int, threads: int, processes: int, options: str) -> str:
    """Run one way and return its figures as text."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {"POCL_CACHE_DIR": folder, "CUDA_CACHE_DISABLE": "1", "CUDA_CACHE_PATH": folder}
        began = time.perf_counter()
        children = []
        for number in range(processes):
            words = [str(path), str(size), str(threads), str(number), str(processes), *options.split()]
            command = [
                sys.executable,
                __file__,
                *([f"--device={device}"] if device else []),
                "--child",
                *words,
            ]
            children.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **fresh},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        results: list[Any] = []
        for process in children:
            out, errors = process.communicate()
            if process.returncode:
                return f"failed: {' '.join(errors.split())[-300:]}"
            results.append(json.loads(out.splitlines()[-1]))
        wall = time.perf_counter() - began
    longest, processor = max(r[0] for r in results), sum(r[1] for r in results)
    programs, nbytes = sum(r[2] for r in results), sum(r[3] for r in results)
    return (
        f"{longest:7.2f} s wall, {processor:7.2f} s processor, {wall:7.2f} s with its start; "
        f"{programs} programs, {nbytes:,} bytes"
    )


if __name__ == "__main__":
    raise SystemExit(main())
