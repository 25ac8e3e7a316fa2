"""Judge `fits` by runs of the H200 campaigns: failing runs that are called fitting, working ones refused.

    python benchmarks/accuracy/limits.py [--confidence 0.95 0.99] [--every 1] [--by kind|setting|network]

Two judgements. *Real failures*: runs under a limit that PyTorch was given, which ran out of memory or did not
(`limit_mib` in the campaign's settings and limits). *Limits around what was measured*: every point that ran
is judged with limits at multiples of its measured device memory Γ: below it a run fails, from it on it works.
`evenly` averages limits drawn evenly, in log, from half to twice the measured memory.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import log

import numpy as np

from torchedge.devices import find_device
from torchedge.errors import TorchedgeError
from torchedge.graphs import Mode
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling.datasets import read_dataset

FAILING, WORKING = (0.7, 0.8, 0.9, 0.95, 0.999), (1.0, 1.02, 1.05, 1.1, 1.2, 1.5)
"""Limits over measured memory, of runs that fail and of runs that work."""

LN2 = log(2.0)


@dataclass(frozen=True)
class Run:
    """A point: what Γ it was measured at, or (limit, whether it ran); required MiB by confidence."""

    kind: str
    setting: str
    network: str
    measured: float
    limit: float | None
    ran: bool
    required: tuple[float, ...]


def main() -> int:
    """Print both judgements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.95, 0.99])
    parser.add_argument("--every", type=int, default=1, help="take each n-th point of the plain campaign")
    parser.add_argument("--by", choices=("kind", "setting", "network"), default="kind")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    runs = [run for folder in ("settings", "limits", "") for run in read_runs(folder, arguments)]
    for place, confidence in enumerate(arguments.confidence):
        print(f"\nconfidence {confidence:g}")
        print_limited([r for r in runs if r.limit is not None], place)
        print_around([r for r in runs if r.limit is None], place, arguments.by)
    return 0


def read_runs(folder: str, arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the points of the campaign or of its settings."""
    device = find_device("nvidia-h200")
    dataset = read_dataset(device.folder / "campaign" / folder)
    file = device.folder / "campaign" / folder / "measurements.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("limit_mib")]
    limits = {(row["id"], row["mode"], int(row["batch_size"])): float(row["limit_mib"]) for row in rows}
    beside: dict[str, float] = {}
    order = np.argsort(-dataset["fits"], kind="stable").tolist()  # failed runs last: see `beside`
    for count, place in enumerate(order):
        if count % (1 if folder else arguments.every):
            continue
        label, batch = str(dataset.id[place]), int(dataset.batch[place])
        if label.startswith("narrow:"):
            continue  # a context with next to nothing in it
        mode: Mode = "train" if dataset.mode[place] == "train" else "infer"
        network = dataset.networks[label]
        job = network.job or {}
        try:
            prediction = predict_graph(dataset.graph_of(label, mode), batch, device, network.settings)
        except TorchedgeError as error:
            sys.stderr.write(f"{label}: {error}\n")
            continue
        ran, limit = bool(dataset["fits"][place]), limits.get((label, mode, batch), np.nan)
        memory, reserved = float(dataset["memory"][place]), float(dataset["reserved"][place])
        name = str(job.get("network", label))
        step = re.split("-near-|-limit-", label)[0]
        if ran:
            beside[step] = memory - reserved
        if np.isfinite(limit):  # PyTorch's own limit, to which the process's memory is added
            limit += beside.get(step, prediction.memory.value - prediction.reserved.value)
        elif not ran:
            continue
        kind = ("limited" if np.isfinite(limit) else "settings") if folder else f"campaign, {mode}"
        yield Run(
            kind,
            str(network.setting if folder else mode),
            name,
            memory,
            limit if np.isfinite(limit) else None,
            ran,
            tuple(prediction.needed_mib(c) for c in arguments.confidence),
        )


def print_limited(runs: list[Run], place: int) -> None:
    """Print how runs under a real limit were judged."""
    failed, ran = [r for r in runs if not r.ran], [r for r in runs if r.ran]
    fitting = [r for r in failed if r.limit is not None and r.required[place] <= r.limit]
    refused = [r for r in ran if r.limit is not None and r.required[place] > r.limit]
    print(f"  failed under a real limit   {len(failed):>5}, of these called fitting {len(fitting)}")
    print(f"  ran under a real limit      {len(ran):>5}, of these refused {len(refused)}")
    for run in fitting:
        required = run.required[place]
        print(f"    {run.network} {run.setting}: limit {run.limit:.0f} MiB, required {required:.0f}")


def print_around(runs: list[Run], place: int, by: str) -> None:
    """Print shares of wrong judgements over limits around the measured memory, in percent."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name in {getattr(run, by), "all"}:
            groups[name].append(run.required[place] / run.measured)
    heads = "".join(f"{100 * limit:>7g}" for limit in (*FAILING, *WORKING))
    print("  limit, % of measured memory: called fitting below 100, refused from 100 on; evenly: both")
    print(f"  {'':30}runs{heads}   evenly")
    for name, ratios in sorted(groups.items(), key=lambda item: (item[0] != "all", item[0])):
        ratio = np.array(ratios)
        wrong = [100 * np.mean(ratio <= f) for f in FAILING] + [100 * np.mean(ratio > f) for f in WORKING]
        spread = np.log(np.clip(ratio, 0.5, 2.0)) / LN2
        even = 100 * np.mean(np.maximum(-spread, 0)), 100 * np.mean(np.maximum(spread, 0))
        cells = "".join(f"{share:7.1f}" for share in wrong)
        print(f"  {name:30}{len(ratio):>4}{cells}  {even[0]:5.2f} {even[1]:5.2f}")


if __name__ == "__main__":
    sys.exit(main())
