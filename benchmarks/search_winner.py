"""Measure the winner of a search on the device it was searched for, and hold it against the limits.

    torchedge search ofa-resnet50 --device nvidia-h200 --training-memory 4000 --out found
    python benchmarks/search_winner.py found --jobs jobs.jsonl
    python hooks/training_probe.py jobs.jsonl --out rows.jsonl          # on the device
    python benchmarks/search_winner.py found --rows rows.jsonl

The first call writes the really built winner as a job of the probe, the second prints a table of limits,
predictions and measurements; its exit status is 1 where a measurement is above its limit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import options_of

MEASURED = {
    "training_memory": ("train", "memory_mib", "memory", "MiB"),
    "training_latency": ("train", "latency_ms", "latency", "ms"),
    "inference_memory": ("infer", "memory_mib", "memory", "MiB"),
    "inference_latency": ("infer", "latency_ms", "latency", "ms"),
}


def job(winner: dict[str, Any]) -> dict[str, Any]:
    """The winner as a job of `hooks/training_probe.py`."""
    import torch

    import torchedge
    from torchedge.profiling.topologies import serialise

    encoding = winner["best"]["encoding"]
    space = torchedge.OFAResNet50Space(image_sizes=(encoding["image_size"],))
    size = space.sample_size(encoding)
    with torch.device("meta"):
        module = space.build(encoding)
    points = [[mode, p["batch_size"]] for mode, p in sorted(winner["predictions"].items())]
    return {
        "id": "search-winner",
        "network": "ofa-resnet50",
        "pruning_level": 0,
        "strategy": "",
        "input_size": list(size),
        "optimizer": "sgd-momentum",
        "build": {"nodes": serialise(module, "the winner", input_size=size)},
        "points": points,
    }


def compare(winner: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Print limits, predictions and measurements; return whether every measurement is within its limit."""
    found = {row["mode"]: row for row in rows if row.get("row") == "point" and row["job"] == "search-winner"}
    print(f"{'figure':<20}{'limit':>10}{'predicted':>12}{'measured':>12}")
    within = True
    for name, limit in winner["constraints"].items():
        mode, column, kind, unit = MEASURED[name]
        measured = found.get(mode, {}).get(column)
        predicted = winner["predictions"][mode][kind]["value"]
        held = measured is not None and measured <= limit
        within = within and held
        shown = "not measured" if measured is None else f"{measured:,.1f}"
        verdict = "within" if held else "NOT within"
        print(f"{name:<20}{limit:>10,.1f}{predicted:>12,.1f}{shown:>12} {unit:<4}{verdict}")
    return within


def main() -> None:
    """Write the job or print the table."""
    parser = options_of(__doc__)
    parser.add_argument("folder", type=Path, help="the --out folder of the search")
    parser.add_argument("--jobs", type=Path, help="file to write the probe's job to")
    parser.add_argument("--rows", type=Path, help="what the probe wrote")
    arguments = parser.parse_args()
    winner = json.loads((arguments.folder / "winner.json").read_text())
    if arguments.jobs is not None:
        arguments.jobs.write_text(json.dumps(job(winner)) + "\n")
        print(f"written: {arguments.jobs}")
    if arguments.rows is not None:
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
        sys.exit(0 if compare(winner, rows) else 1)


if __name__ == "__main__":
    main()
