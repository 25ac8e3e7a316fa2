"""What limits predictions between the pruning levels of the Jetson TX2 data: docs/accuracy.md.

    python benchmarks/accuracy/tx2_limits.py DATA/jetson-tx2 [--draws 6]

Three tables:

- errors at the levels between the first and the last, each predicted from all networks at all other levels,
  where parts that no model can know are measured: the run's reserved memory, or what the same network
  and level err by at the four nearest batch sizes;
- how far the simulation is off at a level, in the median over batch sizes, beside level 0;
- how far the predictions of two random prunings of one network to one level lie apart. A published topology
  that is another random pruning than the measured one costs as much, whatever the model.

Takes seven minutes on one core.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import options_of, print_table

from torchedge.arrays import FloatArray
from torchedge.prediction.analysis import analyse
from torchedge.prediction.memory.peaks import simulate_peaks
from torchedge.prediction.profiles import load_models
from torchedge.profiling.accuracy import predict_unseen, splits
from torchedge.profiling.campaigns.pruning import prune
from torchedge.profiling.datasets import TOPOLOGIES
from torchedge.profiling.latency_fitting import one_thread
from torchedge.profiling.samples import Quantity, Samples, device_of, read_samples, simulate_records
from torchedge.profiling.topologies import build_topology
from torchedge.tracing.capturing import capture

NEAREST = 4
DRAWN = ("googlenet", "squeezenet")
"""Networks whose published topologies are pruned as `prune` does: no group of channels is spared."""

DRAWN_LEVELS, DRAWN_BATCHES = (20, 50, 70, 85), np.array([32.0, 64.0, 128.0])


def unseen(samples: Samples, quantity: Quantity) -> FloatArray:
    """Return (R,) predictions of the rows at levels held out in turn, NaN elsewhere."""
    value = np.full(len(samples.batch), np.nan)
    tested = np.zeros(len(value), dtype=np.bool_)
    for _, rows in splits(samples, "levels"):
        tested |= rows
    compared = predict_unseen(samples, quantity, "levels", intervals=False)
    assert compared is not None
    value[tested & samples.usable(quantity)] = compared.value
    return value


def from_neighbours(samples: Samples, quantity: Quantity, value: FloatArray) -> FloatArray:
    """Return predictions (R,) corrected by the median error at the nearest batch sizes of the same graph."""
    corrected = np.full(len(value), np.nan)
    errors = np.log(samples.measured(quantity) / value)
    for graph in range(len(samples.graphs)):
        rows = np.flatnonzero((samples.which == graph) & np.isfinite(errors))
        for row in rows if len(rows) > NEAREST else ():
            apart = np.abs(np.log(samples.batch[rows] / samples.batch[row]))
            near = rows[np.argsort(apart, kind="stable")[1 : NEAREST + 1]]
            corrected[row] = value[row] * np.exp(np.median(errors[near]))
    return corrected


def errors_of(samples: Samples, quantity: Quantity, value: FloatArray) -> list[float]:
    """Return mean absolute errors in % by network, then their mean."""
    error = 100 * np.abs(value / samples.measured(quantity) - 1)
    means = [float(np.nanmean(error[samples.network == name])) for name in samples.networks]
    return [*means, float(np.mean(means))]


def print_knowledge(samples: Samples) -> None:
    """Print errors as they are, and with parts measured."""
    columns = []
    for quantity in ("memory", "latency"):
        value = unseen(samples, quantity)
        columns.append(errors_of(samples, quantity, value))
        columns.append(errors_of(samples, quantity, from_neighbours(samples, quantity, value)))
        if quantity == "memory":
            known = np.isfinite(samples.reserved)
            reserved = np.where(known, samples.reserved, samples.peaks.reserved)
            allocated = np.where(known, samples.allocated, samples.peaks.allocated)
            measured = replace(samples.peaks, reserved=reserved, allocated=allocated)
            columns.append(errors_of(samples, quantity, unseen(replace(samples, peaks=measured), quantity)))
    print("mean absolute error at unseen levels, %: predicted; corrected by what the same")
    print(f"network and level err by at the {NEAREST} nearest batch sizes (near); and with the run's")
    print("measured reserved memory in place of the simulated one (reserved)")
    head = ["network", "Γ", "Γ near", "Γ reserved", "Φ", "Φ near"]
    names = [*samples.networks, "mean"]
    print_table(head, [[n, *(f"{c[i]:.1f}" for c in columns)] for i, n in enumerate(names)])


def print_offsets(samples: Samples) -> None:
    """Print how far simulated allocated memory is off at each level."""
    rows = samples.usable("memory") & np.isfinite(samples.allocated)
    ratio = np.full(len(rows), np.nan)
    ratio[rows] = samples.allocated[rows] / simulate_records(samples, rows)
    levels = [0, 20, 25, 30, 35, 50, 65, 70, 85, 90]
    print("\nmeasured over simulated allocated memory less one, %: median over batch sizes at")
    print("a level (none is simulated with anything fitted; topologies of level 0 are exact)")
    table = []
    for name in samples.networks:
        at = [rows & (samples.network == name) & (samples.level == level) for level in levels]
        table.append([name, *(f"{100 * (np.median(ratio[m]) - 1):+.1f}" for m in at)])
    print_table(["network", *map(str, levels)], table)


def print_draws(samples: Samples, folder: Path, draws: int) -> None:
    """Print how far predictions of random prunings to one level lie apart."""
    lines = (folder / TOPOLOGIES).read_text(encoding="utf-8").splitlines()
    nodes = {row["network"]: row["nodes"] for row in map(json.loads, lines) if row["pruning_level"] == 0}
    models = load_models(samples.device)
    which = np.zeros(len(DRAWN_BATCHES), dtype=np.intp)
    table = []
    for name in DRAWN:
        for level in DRAWN_LEVELS:
            figures = []
            for seed in range(draws):
                module = prune(build_topology(nodes[name], name), (3, 224, 224), level, seed=seed).model
                graph = capture(module, input_size=(3, 224, 224), mode="train", method="trace", name=name)
                work = analyse(graph)
                peaks = simulate_peaks([work.tape(samples.settings)], [work.traits], which, DRAWN_BATCHES)
                latency = models.latency.predict([work.work], which, DRAWN_BATCHES).value
                memory = models.memory.predict(peaks).value
                figures.append(np.log([peaks.allocated, peaks.reserved, memory, latency]))
            first, second = np.triu_indices(draws, 1)
            logs = np.array(figures)
            apart = 100 * np.abs(logs[first] - logs[second]).mean(axis=(0, 2))
            table.append([f"{name} {level}", *(f"{a:.1f}" for a in apart)])
    print(f"\n{draws} random prunings to the same level, batch sizes 32, 64 and 128: mean distance of")
    print("two of them, %: simulated allocated and reserved memory, predicted Γ and Φ")
    print_table(["network and level", "allocated", "reserved", "Γ", "Φ"], table)


def main() -> None:
    """Print the tables."""
    parser = options_of(__doc__)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--draws", type=int, default=6, help="random prunings a level (default: 6)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with one_thread():
        samples = read_samples(arguments.dataset, device_of(arguments.dataset, None))["train"]
        print_knowledge(samples)
        print_offsets(samples)
        print_draws(samples, arguments.dataset, arguments.draws)


if __name__ == "__main__":
    main()
