"""Accuracy of a transfer against the number of points, beside a fit to all measurements.

`python benchmarks/transfer.py DATASET --base nvidia-h200 [--split levels|networks|thirds]`: DATASET is a
folder as `torchedge fit` reads it. Points are chosen from, and the full fit is made on, the training part of
a split; both are tested on the same other part:

  levels    pruning levels 0, 30, 50, 70, 90 of every network train, all others test
  networks  each network in turn is tested at the other levels; those levels of all others train
  thirds    each third of the networks in turn is tested, the others train

Figures of the device that come from the dataset itself are taken away first. Medians over seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchedge.devices import Device, Provenance
from torchedge.errors import ProfileError
from torchedge.prediction.step_models import FittedModels
from torchedge.profiling.accuracy import TRAINING_LEVELS
from torchedge.profiling.measured import measured_device, read_measured
from torchedge.profiling.profile_folders import one_thread
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import (
    fit_latency,
    fit_memory,
    latency_of,
    latency_rows,
    memory_of,
    memory_rows,
)
from torchedge.profiling.transfer import adapt_models, select_points
from torchedge.profiling.transfer_folders import base_of

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
    try:
        memory = fit_memory(samples, rows, errors=False)
    except ProfileError:  # not measured
        memory = None
    if latency_rows(samples, rows).any():
        latency = fit_latency(samples, rows, errors=False)
    return FittedModels(memory, latency, Provenance.PUBLIC_DATA)


def score(
    samples: Samples, kind: str, make: Callable[[Mask], FittedModels]
) -> dict[str, tuple[float, float, float]]:
    """Return by figure: error as the mean over networks, median over rows, coverage; all in %."""
    every = np.ones(len(samples.batch), dtype=np.bool_)
    usable = {"Γ": memory_rows(samples, every), "Φ": latency_rows(samples, every)}
    error = {figure: np.full(len(every), np.nan) for figure in usable}
    inside = {figure: np.full(len(every), np.nan) for figure in usable}
    for pool, test in splits(samples, kind):
        models = make(pool)
        for figure, model in (("Γ", models.memory), ("Φ", models.latency)):
            rows = test & usable[figure]
            if model is None or not rows.any():
                continue
            measured = samples.gamma[rows] if figure == "Γ" else samples.phi[rows]
            told = memory_of(model, samples, rows) if figure == "Γ" else latency_of(model, samples, rows)  # type: ignore[arg-type]
            error[figure][rows] = 100 * np.abs(told.value / measured - 1)
            inside[figure][rows] = 100.0 * ((measured >= told.low) & (measured <= told.high))
    found = {}
    for figure, errors in error.items():
        done = np.isfinite(errors)
        if done.any():
            names = sorted(set(samples.network[done].tolist()))
            means = [float(errors[done & (samples.network == name)].mean()) for name in names]
            cover = float(inside[figure][done].mean())
            found[figure] = (float(np.mean(means)), float(np.median(errors[done])), cover)
    return found


def main() -> None:
    """Print a row a number of points."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--base", default="nvidia-h200")
    parser.add_argument("--device")
    parser.add_argument("--split", choices=("levels", "networks", "thirds"), default="levels")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as aside, one_thread():
        device = measured_device(arguments.dataset, arguments.device, Path(aside))
        for mode, (samples, source) in read_measured(arguments.dataset, without_own_figures(device)).items():
            base = base_of(arguments.base, mode)
            if base is None:
                print(f"{arguments.base} has no models of mode {mode}")
                continue
            full = score(samples, arguments.split, lambda pool, s=samples: fit_fully(s, pool))
            rows = len(samples.batch)
            print(f"{base.device.name} to {device.name} ({mode}), {rows} rows of {source.name},", end=" ")
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
