"""From a folder of few measurements and another device's profile to a profile of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.devices import Device, find_device, list_devices, weakest
from torchedge.errors import InputError
from torchedge.prediction.profiles import read_models
from torchedge.prediction.step_models import MODE_TABLES, FittedModels, Mode
from torchedge.profiling.accuracy import Score, Told, compare
from torchedge.profiling.measured import Source
from torchedge.profiling.profile_folders import ModeFit, package_versions, score_table, today
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import latency_of, latency_rows, memory_of, memory_rows
from torchedge.profiling.transfer import Base, adapt_models, select_points

__all__ = ["Transfer", "adapt_mode", "base_of", "describe_transfer", "score_rows"]

_MOST_NAMED = 200
_UNUSED = "unused points"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Models adapted to the `used` rows (R,) of one mode, and their scores on the other rows by target."""

    mode: Mode
    base: Device
    samples: Samples
    used: Mask
    models: FittedModels
    scores: Mapping[str, Score] = field(default_factory=dict)


def base_of(name: str, mode: Mode) -> Base | None:
    """Return a base device with its models of a mode, None where it has none of that mode.

    Raises InputError for a device that has no fitted models at all.
    """
    device = find_device(name)
    models = read_models(device, mode)
    if models is None and not any(device.profile.get(table) for table in MODE_TABLES.values()):
        fitted = [d.name for d in list_devices() if any(d.profile.get(t) for t in MODE_TABLES.values())]
        raise InputError(
            f"{device.name} has no fitted models to adapt; choose another --base: {', '.join(fitted)}"
        )
    return None if models is None else Base(device, models)


def adapt_mode(
    base: Base,
    samples: Samples,
    mode: Mode,
    points: int | None,
    seed: int = 0,
    tell: Callable[[str], object] = lambda _: None,
) -> Transfer:
    """Choose points (None, or more than there are: all rows), adapt the base, score what was not chosen."""
    every = np.ones(len(samples.batch), dtype=np.bool_)
    used = memory_rows(samples, every) | latency_rows(samples, every)
    if points is not None and points < used.sum():
        tell("choosing points")
        used = select_points(base, samples, every, points, seed)
    models = adapt_models(base, samples, used, tell)
    return Transfer(mode, base.device, samples, used, models, score_rows(models, samples, ~used))


def score_rows(models: FittedModels, samples: Samples, rows: Mask) -> dict[str, Score]:
    """Score models on some rows: error and interval coverage by network, of "gamma" and "phi"."""
    found: dict[str, Score] = {}
    if models.memory is not None and (usable := memory_rows(samples, rows)).any():
        memory = memory_of(models.memory, samples, usable)
        told = Told(memory.value, memory.low, memory.high)
        found["gamma"] = compare("gamma", _UNUSED, samples.network[usable], samples.gamma[usable], told)
    if models.latency is not None and (usable := latency_rows(samples, rows)).any():
        times = latency_of(models.latency, samples, usable)
        told = Told(times.value, times.low, times.high)
        found["phi"] = compare("phi", _UNUSED, samples.network[usable], samples.phi[usable], told)
    return found


def describe_transfer(
    out: Path, transfer: Transfer, source: Source, points: int | None, seed: int
) -> ModeFit:
    """Return adapted models with what the profile says of them: base, points, which rows, what they reach."""
    samples, used = transfer.samples, transfer.used
    device = samples.device
    provenance = weakest((source.provenance, transfer.models.provenance))
    chosen = "all" if points is None else str(points)
    described: dict[str, Any] = {
        "provenance": str(provenance),
        "dataset": source.name,
        "dataset_sha256": source.digest,
        "date": today(),
        "command": f"torchedge fit {source.name} --base {transfer.base.name} --points {chosen} --seed {seed} "
        f"--device {device.name} --out {out.resolve().name}",
        "base": transfer.base.name,
        "base_sha256": transfer.base.fingerprint,
        "points": int(used.sum()),
        "rows": int(used.sum()),
        "memory_rows": int(memory_rows(samples, used).sum()),
        "latency_rows": int(latency_rows(samples, used).sum()),
        "networks": sorted(set(samples.network[used].tolist())),
        "versions": package_versions(),
    }
    if used.sum() <= _MOST_NAMED:
        described["used"] = [source.labels[place] for place in np.flatnonzero(used).tolist()]
    if transfer.scores:
        described["accuracy"] = {name: {_UNUSED: score_table(s)} for name, s in transfer.scores.items()}
    models = FittedModels(transfer.models.memory, transfer.models.latency, provenance)
    return ModeFit(models, described)
