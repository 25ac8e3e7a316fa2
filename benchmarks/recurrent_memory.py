"""Measure what cuDNN takes for recurrent layers, and hold the rules of `torchedge.ops.recurrent` against it.

    python benchmarks/recurrent_memory.py --out recurrent.jsonl  # measures; needs CUDA
    python benchmarks/recurrent_memory.py --read profiles/nvidia-h200/campaign/recurrent.jsonl.gz

For each layer: bytes kept after the forward call (results and reserve), and the peaks of the forward call,
the backward call and the forward call without gradients. Prints mean and largest absolute error of the four,
in percent, by kind and dtype.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchedge.ops import Call, spec_of
from torchedge.tracing.capturing import capture

SIZES = (
    (50, 16, 32, 64), (51, 16, 32, 64), (50, 17, 32, 64), (50, 16, 64, 64), (50, 16, 128, 64),
    (50, 16, 32, 128), (7, 64, 40, 40), (100, 32, 128, 128), (20, 8, 200, 300), (30, 4, 512, 512),
)  # fmt: skip
"""Steps, batch, features, hidden units."""
FEW = (SIZES[0], SIZES[7])
"""Sizes at which projections and dropout are measured."""


def cases() -> Iterator[dict[str, Any]]:
    """Yield the layers to measure."""
    plain = itertools.product(("LSTM", "GRU", "RNN"), SIZES, (1, 2, 3), (False, True))
    for kind, (t, n, i, h), layers, bi in plain:
        row = {"kind": kind, "t": t, "n": n, "i": i, "h": h, "layers": layers, "bi": bi}
        few = (t, n, i, h) in FEW
        for dtype, drop, proj, batch_first in itertools.product(
            ("float32", "bfloat16", "float16"), (0.0, 0.2), (0, 16), (False, True)
        ):
            special = bool(drop) + bool(proj) + batch_first
            if special > 1 or (proj and kind != "LSTM") or (drop and layers == 1):
                continue
            if not special or (few and not batch_first) or (batch_first and dtype == "float32"):
                yield {**row, "dtype": dtype, "drop": drop, "proj": proj, "batch_first": batch_first}


def module_of(row: dict[str, Any]) -> torch.nn.RNNBase:
    """Return the layer of a row."""
    options = {"proj_size": row["proj"]} if row["proj"] else {}
    kind: type[torch.nn.RNNBase] = getattr(torch.nn, row["kind"])
    return kind(
        row["i"],
        row["h"],
        row["layers"],
        bidirectional=row["bi"],
        dropout=row["drop"],
        batch_first=row["batch_first"],
        **options,
    )


def sequence_of(row: dict[str, Any], device: str) -> torch.Tensor:
    """Return an input of a row."""
    batch, steps = (row["n"], row["t"]) if row["batch_first"] else (row["t"], row["n"])
    return torch.zeros(batch, steps, row["i"], device=device, dtype=getattr(torch, row["dtype"]))


def measured(row: dict[str, Any]) -> dict[str, int]:
    """Run a layer on the GPU; return the four figures in bytes."""
    model = module_of(row).cuda().to(getattr(torch, row["dtype"]))
    model.flatten_parameters()
    x = sequence_of(row, "cuda").requires_grad_()
    for _ in range(2):
        model(x)[0].sum().backward()
        model.zero_grad()
        x.grad = None

    def allocated() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    before = allocated()
    y, states = model(x)
    forward = torch.cuda.max_memory_allocated() - before
    kept = allocated() - before
    gradient = torch.ones_like(y)
    before = allocated()
    torch.autograd.backward(y, gradient)
    backward = torch.cuda.max_memory_allocated() - before
    del y, states, gradient
    with torch.no_grad():
        before = allocated()
        model(x)
        inference = torch.cuda.max_memory_allocated() - before
    return {"kept": kept, "forward": forward, "backward": backward, "inference": inference}


def predicted(row: dict[str, Any]) -> dict[str, int]:
    """Return the four figures by the operator's rules."""
    model, batch_dim = module_of(row).to(getattr(torch, row["dtype"])), 0 if row["batch_first"] else 1
    graph = capture(model, sequence_of(row, "cpu"), batch_size=row["n"], batch_dim=batch_dim)
    op = next(op for op in graph.ops if op.kind in ("lstm", "gru", "rnn_tanh"))
    spec, call = spec_of(op.kind), Call(graph.values, op, [True] * len(op.inputs))
    results = sum(call.out_bytes(k) for k in range(len(op.outputs)))
    workspace, inputs = sum(spec.scratch(call)), sum(call.in_bytes(k) for k in range(len(op.inputs)))
    states = 2 if op.kind == "lstm" else 1
    kept = results + sum(spec.aux(call))
    gradients = inputs - sum(call.in_bytes(k) for k in range(1, 1 + states))
    return {
        "kept": kept,
        "forward": kept + workspace,
        "backward": gradients + sum(spec.backward_scratch(call)),
        "inference": kept + workspace,
    }


def main() -> None:
    """Measure, or read what was measured, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    parser.add_argument("--read", type=Path, help="JSON lines of an earlier run, plain or compressed")
    options = parser.parse_args()
    if (options.out is None) == (options.read is None):
        parser.error("expected either --out or --read")
    if options.read is not None:
        opened = gzip.open if options.read.suffix == ".gz" else open
        with opened(options.read, "rt") as file:
            rows = [json.loads(line) for line in file if not line.startswith("#")]
    else:
        rows = [{**row, **measured(row)} for row in cases()]
        lines = [
            f"# torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
            *map(json.dumps, rows),
        ]
        options.out.write_text("\n".join(lines) + "\n")
    errors = defaultdict(list)
    for row in rows:
        figures = predicted(row)
        errors[row["kind"], row["dtype"]].append([figures[k] / row[k] - 1 for k in figures])
    print(f"{'kind':5s} {'dtype':9s} {'rows':>5s}   kept        forward     backward    inference")
    for (kind, dtype), each in errors.items():
        table = 100 * np.abs(np.array(each))
        cells = [f"{mean:5.1f} {most:5.1f}" for mean, most in zip(table.mean(0), table.max(0), strict=True)]
        print(f"{kind:5s} {dtype:9s} {len(each):5d}  {' '.join(cells)}")


if __name__ == "__main__":
    main()
