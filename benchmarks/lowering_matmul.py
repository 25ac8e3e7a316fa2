"""Multiply float32 matrices on the OpenCL device: torchedge beside tinygrad and CLBlast.

    python benchmarks/lowering_matmul.py --tinygrad tg/bin/python --clblast /usr/lib/libclblast.so.1
    python benchmarks/lowering_matmul.py --size 4096 --repeats 5

512 x 512 x 512 by default, inputs and output on the device, in rounds of one side after the other; GFLOP/s
of the median call, which ends when the device is done. NumPy and PyTorch on the CPU (and PyTorch on CUDA,
TF32 off) stand beside them. benchmarks/lowering_tinygrad.py says how to come by tinygrad's interpreters;
CLBlast is Debian's libclblast1 or a build of one's own. The OpenCL device is that of pyopencl's first
platform. Every result is held against float64; the exit status is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinygrad_processes import NEW, OLD, Flavour, Tinygrad

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import target_for
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

ROW_MAJOR, NOT_TRANSPOSED = 101, 111
"""CLBlast's constants."""
Run = Callable[[int], tuple[list[float], list[float]]]
"""Multiplies so many times; returns the seconds of each, and last elements of products."""


@dataclass
class Side:
    """One implementation: how to run it, what it took, what came out."""

    title: str
    run: Run | None = None
    seconds: list[float] = field(default_factory=list)
    results: list[float] = field(default_factory=list)
    reason: str = ""


def timed(multiply: Callable[[], Any], last: Callable[[Any], float]) -> Run:
    """Return a function that times so many calls."""

    def run(repeats: int) -> tuple[list[float], list[float]]:
        seconds, found = [], None
        for _ in range(repeats):
            began = time.perf_counter()
            found = multiply()
            seconds.append(time.perf_counter() - began)
        return seconds, [last(found)]

    return run


def torch_side(a: np.ndarray, b: np.ndarray, device: str) -> Run:
    """Return PyTorch's product."""
    x, y = torch.from_numpy(a).to(device), torch.from_numpy(b).to(device)

    def multiply() -> torch.Tensor:
        found = x @ y
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    return timed(multiply, lambda found: float(found[-1, -1]))


def clblast_side(a: np.ndarray, b: np.ndarray, library: str) -> Run:
    """Return CLBlast's sgemm with its stored tuning; raises OSError where the library does not load."""
    import pyopencl as cl

    beside = Path(library).with_name("libOpenCL.so.1")
    if beside.exists():
        ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
    sgemm = ctypes.CDLL(library).CLBlastSgemm
    rows, inner, columns = len(a), len(b), b.shape[1]
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    queue = cl.CommandQueue(context)
    product = np.empty((rows, columns), np.float32)
    copy = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, copy, hostbuf=matrix) for matrix in (a, b, product)]
    handle = ctypes.c_void_p(queue.int_ptr)
    operands = [
        (ctypes.c_void_p(buffer.int_ptr), ctypes.c_size_t(0), ctypes.c_size_t(width))
        for buffer, width in zip(buffers, (inner, columns, columns), strict=True)
    ]
    arguments = (
        *(ROW_MAJOR, NOT_TRANSPOSED, NOT_TRANSPOSED),
        *map(ctypes.c_size_t, (rows, columns, inner)),
        *(ctypes.c_float(1.0), *operands[0], *operands[1]),
        *(ctypes.c_float(0.0), *operands[2], ctypes.byref(handle), None),
    )

    def multiply() -> None:
        if status := sgemm(*arguments):
            raise RuntimeError(f"CLBlastSgemm returned {status}")
        queue.finish()

    def last(_: None) -> float:
        cl.enqueue_copy(queue, product, buffers[2])
        return float(product[-1, -1])

    return timed(multiply, last)


class _Product(torch.nn.Module):
    """The product of two matrices."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a @ b."""
        return a @ b


def torchedge_side(a: np.ndarray, b: np.ndarray) -> Run:
    """Return torchedge's product."""
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    device = choose_device()
    captured = capture_step(_Product(), (x, y), keep=frozenset(all_rules()))
    executor = Executor(lower(captured.step, target_for(device)), device)
    executor.run(a, b)

    def multiply() -> None:
        executor.launch()
        executor.finish()

    return timed(multiply, lambda _: float(executor.run(a, b)[0][-1, -1]))


def make_sides(
    given: argparse.Namespace, a: np.ndarray, b: np.ndarray, started: list[Tinygrad]
) -> list[Side]:
    """Return every side that there is; `started` receives the processes to end."""
    sides = []

    def add(title: str, make: Callable[[], Run]) -> None:
        side = Side(title)
        try:
            side.run = make()
        except (OSError, LookupError) as error:
            side.reason = str(error)
        sides.append(side)

    def tinygrad(flavour: Flavour, python: str | None) -> Run:
        if python is None:
            raise LookupError(f"left out: {flavour.option} PYTHON gives the interpreter")
        started.append(Tinygrad(flavour, python, "matmul", Path(given.folder) / "start.npz"))
        return started[-1].run

    def clblast() -> Run:
        if given.clblast is None:
            raise LookupError("left out: --clblast PATH gives the library")
        return clblast_side(a, b, given.clblast)

    add("torchedge", lambda: torchedge_side(a, b))
    add(NEW.title, lambda: tinygrad(NEW, given.tinygrad))
    add(OLD.title, lambda: tinygrad(OLD, given.tinygrad_old))
    add("CLBlast", clblast)
    add("NumPy, CPU", lambda: timed(lambda: a @ b, lambda found: float(found[-1, -1])))
    add("PyTorch, CPU", lambda: torch_side(a, b, "cpu"))
    if torch.cuda.is_available():
        add("PyTorch, CUDA, TF32 off", lambda: torch_side(a, b, "cuda"))
    return sides


def measure(sides: list[Side], rounds: int, repeats: int) -> None:
    """Run all sides in rounds; the first round warms up."""
    for round_ in range(rounds + 1):
        for side in sides:
            if side.run is None:
                continue
            try:
                seconds, results = side.run(repeats)
            except RuntimeError as error:
                side.run, side.reason = None, str(error)
                continue
            side.results += results
            side.seconds += seconds if round_ else []


def print_table(sides: list[Side], size: int, expected: float, scale: float) -> bool:
    """Print GFLOP/s; return whether every product is right."""
    print(f"\n{size} x {size} x {size}, float32\n")
    print("| side | ms | GFLOP/s | of torchedge's speed |\n|---|---|---|---|")
    fine = True
    ours = statistics.median(sides[0].seconds) if sides[0].seconds else None
    for side in sides:
        if not side.seconds:
            print(f"| {side.title} | {side.reason} | | |")
            continue
        took = statistics.median(side.seconds)
        right = all(abs(found - expected) <= 1e-4 * scale for found in side.results)
        fine &= right
        share = f"{ours / took:.2f}" if ours else "-"
        wrong = "" if right else " WRONG"
        print(f"| {side.title} | {1000 * took:.2f} | {2e-9 * size**3 / took:,.1f}{wrong} | {share} |")
    return fine


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tinygrad", metavar="PYTHON", help="interpreter with tinygrad 0.14")
    parser.add_argument("--tinygrad-old", metavar="PYTHON", help="interpreter with tinygrad 0.10.3")
    parser.add_argument("--clblast", metavar="PATH", help="libclblast.so")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20, help="calls a round and side")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((given.size, given.size), np.float32) for _ in range(2))
    started: list[Tinygrad] = []
    with tempfile.TemporaryDirectory() as given.folder:
        np.savez(Path(given.folder) / "start.npz", a=a, b=b)
        sides = make_sides(given, a, b, started)
        measure(sides, given.rounds, given.repeats)
        for process in started:
            process.close()
    expected = float(a[-1].astype(np.float64) @ b[:, -1].astype(np.float64))
    sys.exit(0 if print_table(sides, given.size, expected, given.size**0.5) else 1)


if __name__ == "__main__":
    main()
