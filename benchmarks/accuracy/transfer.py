"""Accuracy of a transfer against the number of points, beside a fit to all measurements: docs/transfer.md.

    python benchmarks/accuracy/transfer.py DATASET --base nvidia-h200 [--split levels|networks|thirds]

DATASET is a folder as `torchedge fit` reads it, or one of the public tables. Minutes a split. Points are
chosen from, and the full fit is made on, the training part of a split; both are tested on the other part:

  levels    pruning levels 0, 30, 50, 70, 90 of every network train, all others test
  networks  each network in turn is tested at the other levels; those levels of all others train
  thirds    each third of the networks in turn is tested, the others train

Figures of the device that come from the dataset itself are taken away first. Medians over seeds.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from public_tables import find_public_table, read_public_samples
from tables import options_of

from torchedge.devices import Device, Provenance
from torchedge.prediction.profiles import FittedModels
from torchedge.profiling.accuracy import TRAINING_LEVELS, predict_rows
from torchedge.profiling.latency_fitting import fit_latency, one_thread
from torchedge.profiling.memory_fitting import fit_memory
from torchedge.profiling.samples import (
    OWN,
    QUANTITIES,
    Mask,
    Samples,
    device_of,
    measured_device,
    read_samples,
)
from torchedge.profiling.transfer import adapt_models, base_of, select_points

SIZES = (5, 10, 30, 100)
LIMIT = 1.5


def splits(samples: Samples, kind: str) -> Iterator[tuple[Mask, Mask]]:
    """Yield (rows to choose from, rows to test)."""
    trained = np.isin(samples.level, TRAINING_LEVELS)
    if kind == "levels":
        yield trained, ~trained
    elif kind == "networks":
        for name in samples.networks:
            own = samples.network == name
            yield trained & ~own, ~trained & own
    else:
        third = np.array([hashlib.sha256(n.encode()).digest()[0] % 3 for n in samples.network.tolist()])
        for place in range(3):
            yield third != place, third == place


def without_own_figures(device: Device) -> Device:
    """Return a device without the figures that others measured on it, but for its memory."""
    kept = {
        name: figure
        for name, figure in device.figures.items()
        if figure.provenance is not Provenance.PUBLIC_DATA or name == "memory_mib"
    }
    return replace(device, figures=kept)


def fit_fully(samples: Samples, rows: Mask) -> FittedModels:
    """Fit every figure that is measured to all of these rows."""
    memory = latency = None
    if samples.usable("memory", rows).any():
        memory = fit_memory(samples, rows, errors=False, feature_sets=(OWN,))
    if samples.usable("latency", rows).any():
        latency = fit_latency(samples, rows, errors=False, feature_sets=(OWN,))
    return FittedModels(memory, latency, Provenance.PUBLIC_DATA)


def score(
    samples: Samples, kind: str, make: Callable[[Mask], FittedModels]
) -> dict[str, tuple[float, float, float]]:
    """Return by figure: error as the mean over networks, median over rows, coverage; all in %."""
    error, inside = (
        {quantity: np.full(len(samples.batch), np.nan) for quantity in QUANTITIES} for _ in range(2)
    )
    for pool, test in splits(samples, kind):
        models = make(pool)
        for quantity, model in zip(QUANTITIES, (models.memory, models.latency), strict=True):
            rows = samples.usable(quantity, test)
            if model is None or not rows.any():
                continue
            measured, predicted = samples.measured(quantity)[rows], predict_rows(model, samples, rows)
            error[quantity][rows] = 100 * np.abs(predicted.value / measured - 1)
            inside[quantity][rows] = 100.0 * ((measured >= predicted.low) & (measured <= predicted.high))
    scores = {}
    for symbol, quantity in zip("ΓΦ", QUANTITIES, strict=True):
        tested = np.isfinite(error[quantity])
        if tested.any():
            names = sorted(set(samples.network[tested].tolist()))
            means = [float(error[quantity][tested & (samples.network == name)].mean()) for name in names]
            median, cover = float(np.median(error[quantity][tested])), float(inside[quantity][tested].mean())
            scores[symbol] = (float(np.mean(means)), median, cover)
    return scores


def main() -> None:
    """Print a row a number of points."""
    parser = options_of(__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--base", default="nvidia-h200")
    parser.add_argument("--device")
    parser.add_argument("--split", choices=("levels", "networks", "thirds"), default="levels")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as aside, one_thread():
        if find_public_table(arguments.dataset) is not None:
            device = device_of(arguments.dataset, arguments.device)
            samples = read_public_samples(arguments.dataset, without_own_figures(device)).samples
            measured = {samples.mode: samples}
        else:
            device = measured_device(arguments.dataset, arguments.device, Path(aside))
            measured = read_samples(arguments.dataset, without_own_figures(device))
        for mode, samples in measured.items():
            base = base_of(arguments.base, mode)
            if base is None:
                print(f"{arguments.base} has no models of mode {mode}")
                continue
            full = score(samples, arguments.split, lambda pool, s=samples: fit_fully(s, pool))
            rows = len(samples.batch)
            print(
                f"{base.device.name} to {device.name} ({mode}), {rows} rows of {samples.source.name},",
                end=" ",
            )
            print(f"{len(samples.networks)} networks, split by {arguments.split}, {arguments.seeds} seeds")
            head = "".join(f"{f'{f}: mean, %':>12}{'median':>8}{'inside':>8}{'x full':>8}" for f in full)
            print(f"{'points':<8}{head}")
            for count in arguments.points:
                runs = []
                for seed in range(arguments.seeds):

                    def make(pool: Mask, count: int = count, seed: int = seed) -> FittedModels:
                        points = select_points(base, samples, pool, count, seed)  # noqa: B023
                        return adapt_models(base, samples, points)  # noqa: B023

                    runs.append(score(samples, arguments.split, make))
                cells, verdict = "", []
                for figure, (whole, _, _) in full.items():
                    mean, median, cover = (
                        statistics.median(run[figure][i] for run in runs) for i in range(3)
                    )
                    cells += f"{mean:>12.1f}{median:>8.1f}{cover:>8.0f}{mean / whole:>8.2f}"
                    verdict.append(mean <= LIMIT * whole)
                told = "" if count != 30 else f"  at most {LIMIT}: {'met' if all(verdict) else 'missed'}"
                print(f"{count:<8}{cells}{told}", flush=True)
            cells = "".join(f"{mean:>12.1f}{median:>8.1f}{'':>16}" for mean, median, _ in full.values())
            print(f"{'full fit':<8}{cells}")


if __name__ == "__main__":
    main()
