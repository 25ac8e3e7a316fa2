"""Measure what cuDNN takes for recurrent layers, and hold the rules of `torchedge.ops.recurrent` against it.

    python benchmarks/recurrent_memory.py --out recurrent.jsonl  # measures; needs CUDA
    python benchmarks/recurrent_memory.py --read profiles/nvidia-h200/campaign/recurrent.jsonl.gz
    python benchmarks/recurrent_memory.py --steps  # whole training steps against `torchedge.predict`

For each layer: bytes kept after the forward call (results and reserve), and the peaks of the forward call,
the backward call and the forward call without gradients. Prints mean and largest absolute error of the four,
in percent, by kind and dtype.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import options_of

import torchedge
from torchedge.ops import Call, spec_of
from torchedge.tracing.capturing import capture

SIZES = (
    (50, 16, 32, 64), (51, 16, 32, 64), (50, 17, 32, 64), (50, 16, 64, 64), (50, 16, 128, 64),
    (50, 16, 32, 128), (7, 64, 40, 40), (100, 32, 128, 128), (20, 8, 200, 300), (30, 4, 512, 512),
    (128, 32, 256, 512), (64, 128, 128, 256), (256, 8, 512, 1024), (512, 16, 64, 256), (32, 64, 1024, 1024),
    (128, 32, 128, 128), (128, 32, 256, 256), (128, 1, 256, 512), (10, 256, 300, 650),
)  # fmt: skip
"""Steps, batch, features, hidden units."""
FEW = (SIZES[0], SIZES[7])
"""Sizes at which projections and dropout are measured."""


def cases() -> Iterator[dict[str, Any]]:
    """Yield the layers to measure."""
    depths = itertools.product(("float32", "float16"), (1, 2, 3), (False, True))
    for dtype, layers, bi in depths:
        for kind, size in itertools.product(("LSTM", "GRU", "RNN"), SIZES):
            row = {
                "dtype": dtype,
                "layers": layers,
                "bi": bi,
                "kind": kind,
                **dict(zip("tnih", size, strict=True)),
            }
            plain = {**row, "drop": 0.0, "proj": 0, "batch_first": False}
            yield plain
            if size in FEW:
                yield {**plain, "batch_first": True}
                if layers > 1:
                    yield {**plain, "drop": 0.2}
                if kind == "LSTM":
                    yield {**plain, "proj": 16}


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


def measured(row: dict[str, Any]) -> dict[str, float]:
    """Run a layer on the GPU; return the four figures in bytes, and its times."""
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
    times = []
    for _ in range(3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        y = model(x)[0]
        marks[1].record()
        torch.autograd.backward(y, torch.ones_like(y))
        marks[2].record()
        torch.cuda.synchronize()
        times.append([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])
    forward_ms, backward_ms = (statistics.median(each) for each in zip(*times, strict=True))
    figures = {"kept": kept, "forward": forward, "backward": backward, "inference": inference}
    return {**figures, "forward_ms": forward_ms, "backward_ms": backward_ms}


def predicted(row: dict[str, Any]) -> dict[str, int]:
    """Return the four figures by the operator's rules."""
    model, batch_dim = module_of(row).to(getattr(torch, row["dtype"])), 0 if row["batch_first"] else 1
    graph = capture(model, sequence_of(row, "cpu"), batch_size=row["n"], batch_dim=batch_dim)
    op = next(op for op in graph.ops if op.kind in ("lstm", "gru", "rnn_tanh"))
    call, rule = Call(graph.values, op, [True] * len(op.inputs)), spec_of(op.kind).memory
    footprint = None if rule is None else rule(call)
    assert footprint is not None
    results = sum(call.out_bytes(k) for k in range(len(op.outputs)))
    inputs = sum(call.in_bytes(k) for k in range(len(op.inputs)))
    states = 2 if op.kind == "lstm" else 1
    freed = {-event - 1 for event in footprint.forward if event < 0}
    taken = [(abs(event) - 1, footprint.sizes[abs(event) - 1]) for event in footprint.forward if event > 0]
    own = [(number, size.elements[0] * size.item_size) for number, size in taken if size.place < 0]
    workspace = sum(amount for number, amount in own if number in freed)
    kept = results + sum(amount for number, amount in own if number not in freed)
    gradients = inputs - sum(call.in_bytes(k) for k in range(1, 1 + states))
    return {
        "kept": kept,
        "forward": kept + workspace,
        "backward": gradients + workspace,
        "inference": kept + workspace,
    }


_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 3, "dropout": 0.2},
)  # fmt: skip


class Tagger(torch.nn.Module):
    """An embedding, a recurrent layer and a classifier of every step."""

    def __init__(self, kind: Callable[..., torch.nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20_000, 256)
        self.layer = kind(256, 512, batch_first=True, **options)
        self.head = torch.nn.Linear(512 * (2 if options.get("bidirectional") else 1), 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of every step of a batch (N, T), (N · T, 100)."""
        scores: torch.Tensor = self.head(self.layer(self.embedding(tokens))[0])
        return scores.flatten(0, 1)


def run_steps() -> None:
    """Print measured and predicted memory and time of whole training steps, 32 x 128 tokens."""
    tokens, labels = torch.zeros(32, 128, dtype=torch.long), torch.zeros(32 * 128, dtype=torch.long).cuda()
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        for options in _OPTIONS:
            model: torch.nn.Module = Tagger(kind, options)
            predicted = torchedge.predict(
                model, 32, example=tokens, device="nvidia-h200", optimizer="sgd-momentum"
            )
            model, fed = model.cuda(), tokens.cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            times = []
            for step in range(8):
                if step == 3:
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                started = time.perf_counter()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(fed), labels).backward()
                optimizer.step()
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - started))
            memory, latency = torch.cuda.max_memory_allocated() / 2**20, statistics.median(times[3:])
            assert predicted.latency is not None
            off = predicted.allocated.value / memory - 1, predicted.latency.value / latency - 1
            print(
                f"{kind.__name__:5s}{options!s:42s} {memory:6.1f} MiB {off[0]:+6.1%}"
                f"  {latency:6.2f} ms {off[1]:+6.1%}"
            )
            del model, fed, optimizer
            torch.cuda.empty_cache()


def main() -> None:
    """Measure, or read what was measured, and print the errors."""
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    parser.add_argument("--read", type=Path, help="JSON lines of an earlier run, plain or compressed")
    parser.add_argument("--steps", action="store_true", help="run whole training steps; needs CUDA")
    parser.add_argument("--seconds", type=float, default=600, help="longest time of measuring")
    options = parser.parse_args()
    if (options.out is not None) + (options.read is not None) + options.steps != 1:
        parser.error("expected one of --out, --read and --steps")
    if options.steps:
        run_steps()
        return
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
