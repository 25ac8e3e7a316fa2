"""Time what running a program costs beside its kernels: launches, builds, binaries.

    python benchmarks/opencl_launches.py
    python benchmarks/opencl_launches.py --device gpu --kernels 40

Launches: a chain of kernels over 64 elements, run by the executor, with parts of the arena as arguments or
the whole arena with offsets; the microseconds that handing one over takes, and that one takes until all are
done, the median of rounds. "No event": the driver's function itself, called without asking for an event.
Builds: so many kernels as one program and as a program each, the first run after (where PoCL compiles), and
once more from the binary; in processes of their own with empty caches of the driver, after one other kernel
has been built.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import oracle_path  # noqa: F401 - for oracles

from torchedge.opencl import compile_kernels, open_context
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.memory import allocate_buffer

if TYPE_CHECKING:
    from torchedge.runtime import Executor

LAUNCHES, ROUNDS = 500, 15
DRIVER_CACHES = ("POCL_CACHE_DIR", "CUDA_CACHE_PATH")


def time_launches(device: str | None, *, whole: bool, profile: bool = False, events: bool = True) -> None:
    """Print the time of a launch."""
    import numpy as np
    from oracles.small_programs import chain

    from torchedge.runtime import Executor

    with Executor(chain(LAUNCHES - 1, 64), device, profile=profile, whole_arena=whole) as executor:
        executor.run(np.zeros(64, np.float32))
        enqueue = executor._enqueue if events else without_events(executor)
        given, done, steps = [], [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            enqueue()
            handed = time.perf_counter()
            executor._queue.finish()
            done.append((time.perf_counter() - began) / LAUNCHES)
            given.append((handed - began) / LAUNCHES)
            began = time.perf_counter()
            executor.run(np.zeros(64, np.float32))
            steps.append(time.perf_counter() - began)
    kind = ("whole arena" if whole else "parts") + ", timed" * profile + ", no event" * (not events)
    print(
        f"launch, {kind}: {statistics.median(given) * 1e6:.2f} us to hand over, "
        f"{statistics.median(done) * 1e6:.2f} us each until all are done; "
        f"a step of {LAUNCHES}: {statistics.median(steps) * 1e3:.2f} ms"
    )


def without_events(executor: Executor) -> Callable[[], None]:
    """Return a function that enqueues the launches of an executor without events."""
    import pyopencl

    launch = ctypes.CDLL(pyopencl._cl.__file__).clEnqueueNDRangeKernel
    queue = ctypes.c_void_p(executor._queue.int_ptr)
    calls = []
    for kernel, work_items, group in executor._calls:
        sizes = [part and (ctypes.c_size_t * len(part))(*part) for part in (work_items, group)]
        count = ctypes.c_uint(len(work_items))
        calls.append((queue, ctypes.c_void_p(kernel.int_ptr), count, None, *sizes, 0, None, None))

    def enqueue() -> None:
        for call in calls:
            if launch(*call):
                raise SystemExit("the driver refuses a launch")

    return enqueue


def source(number: int) -> str:
    """Return a kernel of its own."""
    return f"""__kernel void k{number}(__global const float *a, __global const float *b, __global float *c) {{
    const int i = get_global_id(0);
    float s = {number}.5f;
    for (int j = 0; j < 64; j++)
        s = mad(a[(i * {number + 3} + j) & 1023], b[(j * {number + 1} + i) & 1023], s);
    c[i] = tanh(s);
}}
"""


def build(way: str, device: str | None, count: int, folder: str) -> None:
    """Build in one way, run each kernel once, print the seconds."""
    context = open_context(device)
    cl, queue = context.cl, context.queue
    compile_kernels(context, {"k": source(count).replace(f"k{count}", "k")}, cache=None)
    began = time.perf_counter()
    cache = BinaryCache(Path(folder) / "binaries")
    if way == "a program each":
        built = [compile_kernels(context, {f"k{i}": source(i)}, cache=None) for i in range(count)]
    else:
        kept = cache if way.startswith("binary") else None
        built = [compile_kernels(context, {f"k{i}": source(i) for i in range(count)}, cache=kept)] * count
    kernels = [compiled.kernel(f"k{i}") for i, compiled in enumerate(built)]
    ready = time.perf_counter()
    buffers = [allocate_buffer(context, 4096, "benchmark") for _ in range(3)]
    for kernel in kernels:
        kernel.set_args(*buffers)
        cl.enqueue_nd_range_kernel(queue, kernel, (1024,), (64,))
    queue.finish()
    print(f"{way:32} {ready - began:8.2f} {time.perf_counter() - ready:10.2f}")


def build_all(device: str | None, count: int) -> None:
    """Print a line for each way to build, in a process of its own."""
    print(f"{f'{count} kernels':32} {'build s':>8} {'first run s':>11}")
    ways = (
        "a program each",
        "one program",
        "one program, driver's cache warm",
        "binary written",
        "binary read",
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(ways):
            fresh = Path(folder) / str(number - (way == ways[2]))
            fresh.mkdir(exist_ok=True)
            words = [sys.executable, __file__, "--way", way, "--folder", folder, "--kernels", str(count)]
            words += ["--device", device] if device else []
            caches = {**os.environ, **dict.fromkeys(DRIVER_CACHES, str(fresh))}
            subprocess.run(words, env=caches, check=True)


def main() -> None:
    """Time launches, then builds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="number, type or part of a name of an OpenCL device")
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        build(given.way, given.device, given.kernels, given.folder)
        return
    print(open_context(given.device).device.name, flush=True)
    for whole in (False, True):
        time_launches(given.device, whole=whole)
        time_launches(given.device, whole=whole, profile=True)
        time_launches(given.device, whole=whole, events=False)
    sys.stdout.flush()
    build_all(given.device, given.kernels)


if __name__ == "__main__":
    main()
