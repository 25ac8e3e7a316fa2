"""Bytes a second that decoding reads, over what a copy kernel of our own reaches on the same device.

    python benchmarks/decoding_bandwidth.py --device local-cpu [--layers 2] [--hidden 512] [--format int4]

A Llama with random weights continues a prompt. Bytes of a token are those of the weights that its launches
read and of the caches, each once. With --kernels the launches of each method follow, and those of one token
by kernel.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import options_of, print_rows
from llamas import llama, stamps_of

import torchedge
from torchedge.bundles.generation import DECODE, Sampling, shortest
from torchedge.graphs import RESIDENT_ROLES
from torchedge.opencl import open_context

COPY = """
kernel void copy(global const float4 *a, global float4 *b) { b[get_global_id(0)] = a[get_global_id(0)]; }
"""
ROUNDS = 20


def main() -> None:
    """Print a line for the prompt, for a token and for the copy."""
    parser = options_of(
        __doc__,
        layers=2,
        hidden=512,
        intermediate=1408,
        vocabulary=8000,
        length=512,
        prompt=128,
        tokens=32,
        copy=64,
    )
    parser.add_argument("--format", default="int4", choices=("float32", "int8", "int4"))
    parser.add_argument("--device", default="local-cpu", help="profile that the bundle is exported for")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    marks = [("", time.perf_counter())]
    model = llama(options.hidden, options.layers, options.vocabulary, options.length, options.intermediate)
    marks.append(("model", time.perf_counter()))
    ids = torch.randint(0, options.vocabulary, (options.prompt,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        quantize: Any = None if options.format == "float32" else options.format
        bundle = torchedge.export_lm(
            model, options.device, out=Path(folder) / "lm", max_length=options.length, quantize=quantize
        )
        del model
        marks.append(("export", time.perf_counter()))
        prompts, tokens = [], []
        with bundle.place() as runner:
            for turn in range(4):
                runner.reset()
                stamps = stamps_of(runner, ids, options.tokens, sampling=Sampling())
                if turn == 0:
                    marks.append(("building and the first text", time.perf_counter()))
                    continue
                prompts.append(stamps[1] - stamps[0])
                tokens += [after - before for before, after in pairwise(stamps[1:])]
            device = runner.executor.context.device.name
        program = bundle.programs[shortest(DECODE, bundle.methods, len(ids) + 1)]
        used = {index for launch in program.launches for index in launch.tensors}
        read = sum(program.tensors[i].nbytes for i in used if program.tensors[i].role in RESIDENT_ROLES)
        copied = _copy_rate(options.copy * 2**20)
        token = statistics.median(tokens)
        print(device, "|", ", ".join(f"{b[0]} {b[1] - a[1]:.1f} s" for a, b in pairwise(marks)))
        rows = [
            ("a token", f"{1e3 * token:.3f}", f"{read / 2**20:.1f}", f"{read / token / 1e9:.1f}"),
            (f"a prompt of {options.prompt}", f"{1e3 * statistics.median(prompts):.3f}", "", ""),
            ("copy kernel, read and written", "", f"{2 * options.copy}", f"{copied / 1e9:.1f}"),
        ]
        print_rows(("", "ms", "MiB", "GB/s"), rows)
        print(f"a token reads at {read / token / copied:.2f} of the copy's rate")
        if options.kernels:
            _print_kernels(bundle, len(ids))


def _copy_rate(nbytes: int) -> float:
    """Return the bytes a second, read and written together, of a kernel that copies a buffer."""
    context = open_context(None)
    cl, queue = context.cl, context.new_queue(True)
    flags = cl.mem_flags.READ_WRITE
    one, two = (cl.Buffer(context.context, flags, nbytes) for _ in range(2))
    kernel = cl.Program(context.context, COPY).build().copy
    times = []
    for _ in range(ROUNDS):
        event = kernel(queue, (nbytes // 16,), None, one, two)
        event.wait()
        times.append(event.profile.end - event.profile.start)
    return float(2e9 * nbytes / min(times))


def _shortest(runner: Any, program: Any, method: str, position: int) -> list[Any]:  # noqa: ANN401
    """Return the shortest of some times of each launch of a method, for tokens from a position on."""
    tokens = next(t.shape[-1] for t in program.tensors if t.name == "ids" and t.role == "input")
    rounds = []
    for _ in range(3 * ROUNDS):
        runner.step(
            np.ones((1, tokens), np.int64), np.array([position]), np.array([tokens - 1]), method=method
        )
        rounds.append(runner.timings())
    return [min(alike, key=lambda entry: entry.ns) for alike in zip(*rounds, strict=True)]


def _print_kernels(bundle: Any, position: int) -> None:  # noqa: ANN401
    """Print the time of each method's launches, then those of one token by kernel, the longest first."""
    method = shortest(DECODE, bundle.methods, position + 1)
    program = bundle.programs[method]
    with bundle.place(profile=True) as runner:
        known = {
            name: _shortest(runner, bundle.programs[name], name, position if name == method else 0)
            for name in bundle.methods
        }
    print_rows(
        ("method", "launches", "ms in kernels"),
        [(n, len(t), f"{sum(entry.ns for entry in t) / 1e6:.3f}") for n, t in known.items()],
    )
    times = known[method]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for entry in times:
        launch, row = program.launches[entry.launch], sums[entry.kernel]
        row[0] += 1
        row[1] += entry.ns
        row[2] += sum(program.tensors[i].nbytes for i in {*launch.tensors})
    print(f"launches of {method}:")
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])[:14]
    print_rows(
        ("kernel", "launches", "us", "GB/s"),
        [(n, int(r[0]), f"{r[1] / 1e3:.1f}", f"{r[2] / max(r[1], 1):.1f}") for n, r in ordered],
    )


if __name__ == "__main__":
    main()
