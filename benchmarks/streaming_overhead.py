"""Time what streaming costs the host: `python benchmarks/streaming_overhead.py`.

A chain of tiny kernels, each with a weight of its own, runs with all weights preloaded and with each weight
streamed beside the launch before it (always-next), by the same executor, from a file that the page cache
holds. Printed for each size of weights: reads, copies, the time of a step each way (the least of `--rounds`,
taken in turn), how much longer it takes for each transfer, and how much longer the thread that launches is
busy. The last lines fit

    extra time of a step = transfers * (time of a transfer) + bytes * (time to read and copy a byte)

over all sizes, and give the times that `torchedge profile --streaming` measures for predictions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import options_of, print_rows
from oracles.faulty_files import write_file
from oracles.small_programs import pointwise, program, tensor
from oracles.streaming_programs import data_of, instance_of, packed_data

from torchedge.lowering.programs import Program
from torchedge.opencl import open_context
from torchedge.profiling.load_measuring import host_us
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import FileSource
from torchedge.streaming.plans import STRATEGIES
from torchedge.streaming.schedules import make_schedule
from torchedge.textures.layouts import PAGE_BYTES

KIB = 2**10
FLOAT = 4
PLACES = 6
"""Reads for which the staging pool has room."""


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, launches=200, rounds=15)
    parser.add_argument("--device", help="OpenCL device, as in `torchedge devices --opencl`")
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 16, 64, 256], help="sizes of weights")
    parser.add_argument("--loading", choices=["copy", "kernel"], default="copy")
    options = parser.parse_args()
    titles = ("weight, KiB", "reads", "copies", "preloaded, ms", "streamed, ms", "ratio")
    print_rows([*titles, "us more a transfer", "us of the launching thread"], [])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kib in options.kib:
            rows.append(measure(kib, options, Path(folder)))
            preloaded, streamed, transfers, _, reads, busy = rows[-1]
            ms = f"{preloaded * 1e3:.2f}", f"{streamed * 1e3:.2f}", f"{preloaded / streamed:.2f}"
            more = [f"{seconds / transfers * 1e6:.1f}" for seconds in (streamed - preloaded, busy)]
            print_rows([], [(kib, reads, transfers, *ms, *more)])
    extra = np.array([streamed - preloaded for preloaded, streamed, *_ in rows])
    terms = np.array([[transfers, nbytes] for _, _, transfers, nbytes, *_ in rows], np.float64)
    (each, byte), *_ = np.linalg.lstsq(terms, extra, rcond=None)
    print(f"a streamed transfer: {each * 1e6:.1f} us more, and its bytes at {1e-9 / byte:.2f} GB/s")
    launch, transfer = host_us(open_context(options.device))
    print(f"for predictions: a launch {launch:.1f} us of the host, a transfer {transfer:.1f} us")


def chain_of(launches: int, floats: int) -> Program:
    """Return launches that each add 64 floats of a weight of their own."""
    names = ["x", *[f"t{k}" for k in range(launches - 1)], "z"]
    roles = ["input", *["intermediate"] * (launches - 1), "output"]
    tensors = [tensor(name, (64,), role) for name, role in zip(names, roles, strict=True)]
    tensors += [tensor(f"w{k}", (floats,), "parameter") for k in range(launches)]
    add = pointwise("add", "c[i] = b[i] + a[i];", ["read", "read", "write"])
    calls = [("add", [f"w{k}", names[k], names[k + 1]], [64]) for k in range(launches)]
    return program(tensors, [add], calls)


def measure(kib: int, options: argparse.Namespace, folder: Path) -> tuple[float, float, int, int, int, float]:
    """Return figures of one size of weights.

    They are the time of a step preloaded and streamed (s), transfers, bytes, reads, and how much longer the
    launching thread is busy (s).
    """
    chain = chain_of(options.launches, kib * KIB // FLOAT)
    instance = instance_of(chain)
    path = folder / f"{kib}.bin"
    places = write_file(path, packed_data(chain, data_of(chain)))
    x = np.zeros(64, np.float32)
    staging = PLACES * max(kib * KIB, 3 * PAGE_BYTES)
    staging = -(-staging // PAGE_BYTES) * PAGE_BYTES
    executors = [
        Executor(
            make_schedule(chain, instance, STRATEGIES[strategy](instance), max(staging, 16 * PAGE_BYTES)),
            options.device,
            source=FileSource(path, places),
            loading=options.loading,
        )
        for strategy in ("preload-all", "always-next")
    ]
    least, busy = [float("inf")] * 2, [float("inf")] * 2
    for number in range(options.rounds + 1):
        for place, executor in enumerate(executors):
            begun, ran = time.perf_counter(), time.thread_time()
            executor.run(x)
            if number:
                least[place] = min(least[place], time.perf_counter() - begun)
                busy[place] = min(busy[place], time.thread_time() - ran)
    reads = executors[1]._store.log.reads
    copies = [copy for read in reads for copy in read.copies]
    for executor in executors:
        executor.close()
    nbytes = sum(copy.nbytes for copy in copies)
    return least[0], least[1], len(copies), nbytes, len(reads), busy[1] - busy[0]


if __name__ == "__main__":
    main()
