"""Fits the memory of a device to measured steps: the constants of its process, a forest, and errors.

Γ (or γ) of a row is clip(reserved + beside, floor, ceiling) times what a forest corrects. `fit_memory` takes
the constants from many rows; `adapt_process` finds them from a few, near those of another device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.forests.trees import Forest
from torchedge.prediction.feature_sets import find_feature_set
from torchedge.prediction.intervals import NO_ERRORS, ErrorModel, assumed_errors, fit_errors
from torchedge.prediction.memory.model import (
    MEMORY_FEATURES,
    UNLIMITED,
    MemoryModel,
    PredictedMemory,
    Process,
)
from torchedge.prediction.memory.peaks import Peaks
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.samples import (
    NO_FOREST,
    HeldOut,
    Mask,
    Samples,
    candidate_sets,
    columns_of,
    cross_validate,
    enough_rows,
    network_weights,
)

FloatArray = npt.NDArray[np.float64]

TREES = 100
_FEWEST_LARGE = 20

PLATEAU = (0.36, 0.72)
"""Rows whose reserved memory lies in this share of the largest seen show a process's memory beside it."""

TIGHT, LARGE = 0.86, 0.32
"""From these shares on: Γ is at its ceiling; simulated reserved memory matters to whether a run fits."""

_FULL = 0.7
"""Share of a board's memory above which the system may take pages back from a run."""

_UNMEASURED = assumed_errors(0.25)
"""Of peaks that the device does not report."""


def predict_memory(model: MemoryModel, samples: Samples, rows: Mask) -> PredictedMemory:
    """Return a model's predictions for some rows."""
    return model.predict(samples.peaks.some(rows), columns_of(samples, rows, model.feature_set))


def fit_memory(
    samples: Samples,
    rows: Mask,
    *,
    errors: bool = True,
    forest: bool = True,
    feature_sets: Sequence[str] | None = None,
    judge: Callable[[HeldOut], object] = lambda _: None,
) -> MemoryModel:
    """Fit Γ (or γ) to rows; raises ProfileError where too few passed.

    feature_sets: candidates for the forest, `OWN`, names of feature sets or `NO_FOREST`; with `errors`
    cross-validation chooses among them, else the first is taken. Default: `candidate_sets`. judge: receives
    the errors of cross-validation.
    """
    used = enough_rows(samples, "memory", rows)
    sets = (candidate_sets(samples, used) if feature_sets is None else feature_sets) if forest else ()
    process = _fit_process(samples, used)
    peak_errors = _peak_errors(samples, used, process)
    if not errors:
        return MemoryModel(process, NO_ERRORS, *peak_errors, _memory_forest(samples, used, process, sets[:1]))
    candidates: list[Sequence[str]] = [(name,) for name in sets] or [()]
    held_out = _held_out(samples, used, candidates)
    judge(held_out)
    model_errors = fit_errors(held_out.errors, held_out.difficulty, held_out.weight)
    forest_of = _memory_forest(samples, used, process, candidates[held_out.best])
    return MemoryModel(process, model_errors, *peak_errors, forest_of)


def _memory_forest(samples: Samples, used: Mask, process: Process, sets: Sequence[str]) -> Forest | None:
    """Grow the forest that corrects the constants, on the first of some feature sets; None without any."""
    if not sets or sets[0] == NO_FOREST:
        return None
    own = MemoryModel(process, NO_ERRORS, NO_ERRORS, NO_ERRORS).features(samples.peaks.some(used))
    target = np.log(samples.gamma[used] / own[:, 1])
    columns = columns_of(samples, used, sets[0])
    names = MEMORY_FEATURES if columns is None else find_feature_set(sets[0]).names
    return fit_forest(own if columns is None else columns, target, feature_names=names, trees=TREES)


def _fit_process(samples: Samples, used: Mask) -> Process:
    gamma, simulated = samples.gamma, samples.peaks.reserved
    reserved = np.where(np.isfinite(samples.reserved), samples.reserved, simulated)  # a CPU reports none
    linear = samples.peaks.linear
    largest = float(reserved[used].max())
    device = samples.device
    if device.memory == "dedicated" or device.kind == "cpu":  # nothing takes pages back: no floor, no ceiling
        beside = _by_linear(gamma - reserved, used, linear, np.median)
        total = device.figures.get("usable_memory_mib") or device.figures.get("memory_mib")
        seen = np.where(np.isfinite(samples.reserved), samples.reserved, 0.0)[used].max()  # not simulated
        room = total.value - max(beside) if total is not None else largest
        return Process(beside, (0.0, 0.0), UNLIMITED, max(float(seen), room))
    plateau = used & (reserved > PLATEAU[0] * largest) & (reserved < PLATEAU[1] * largest)
    tight = used & (reserved > TIGHT * largest)
    beside = _by_linear(gamma - reserved, plateau if plateau.any() else used, linear, np.median)
    floor = _by_linear(gamma, used, linear, np.min)
    if not _saturated(samples):  # the largest run seen is not the largest that fits
        return Process(beside, floor, UNLIMITED, _capacity(largest, max(beside), device))
    ceiling = float(np.median(gamma[tight]))
    return Process(beside, floor, ceiling, largest)


def _saturated(samples: Samples) -> bool:
    """Whether any run of a dataset came near the memory of its board, or did not fit."""
    total = samples.device.figures.get("memory_mib")
    largest = float(np.nanmax(samples.gamma))
    return total is None or bool((samples.fits == 0).any()) or largest > _FULL * total.value


def _by_linear(
    values: FloatArray, rows: Mask, linear: Mask, statistic: Callable[[FloatArray], Any]
) -> tuple[float, float]:
    """A figure without and with linear layers; where one group was not measured, the other's figure."""
    groups = [rows & (linear == flag) for flag in (False, True)]
    without, with_linear = (float(statistic(values[g if g.any() else rows])) for g in groups)
    return without, with_linear


def _peak_errors(samples: Samples, used: Mask, process: Process) -> tuple[ErrorModel, ErrorModel]:
    """Errors of simulated reserved (of large runs) and allocated memory; nothing is fitted or held out."""
    large = used & (samples.peaks.reserved > LARGE * process.capacity)
    large = large if large.sum() >= _FEWEST_LARGE else used
    pairs = (
        (samples.reserved, samples.peaks.reserved, large),
        (samples.allocated, samples.peaks.allocated, used),
    )
    models = []
    for measured, simulated, chosen in pairs:
        known = chosen & np.isfinite(measured)
        ratio = np.log(measured[known] / simulated[known])
        weights = network_weights(samples, known)
        models.append(fit_errors(ratio, np.ones(len(ratio)), weights) if known.any() else _UNMEASURED)
    return models[0], models[1]


def _held_out(samples: Samples, used: Mask, candidates: Sequence[Sequence[str]]) -> HeldOut:
    """Errors on networks held out (on levels where there is one network) with the best feature set."""
    several = len(set(samples.network[used].tolist())) > 1

    def predict(training: Mask, left_out: Mask) -> tuple[list[FloatArray], FloatArray]:
        process = _fit_process(samples, training)
        bare = MemoryModel(process, NO_ERRORS, NO_ERRORS, NO_ERRORS)
        models = [replace(bare, forest=_memory_forest(samples, training, process, c)) for c in candidates]
        difficulty = models[-1].difficulty(samples.peaks.some(left_out))
        return [predict_memory(model, samples, left_out).value for model in models], difficulty

    return cross_validate(samples, "memory", used, predict, levels=not several, networks=several)


# a few rows -------------------------------------------------------------------------------------------------

_NOISE = 0.05
"""Relative error at which the loss turns from squared to linear."""

_SPREAD_MIB, _LINEAR_SPREAD_MIB = 400.0, 100.0
"""Distance of a process's constants, and of the part of linear layers, from those of another device."""

_PRICE = 1.0
"""The least gain of a floor or a ceiling, as a log likelihood, for it to be accepted."""

_ROUNDS = 8
_SYSTEM_SHARE = 0.1
"""Share of a unified memory that is taken to stay with the system where the usable part is unknown."""

BESIDE, BESIDE_LINEAR, FLOOR, FLOOR_LINEAR, CEILING = range(5)


def adapt_process(peaks: Peaks, measured: FloatArray, base: Process, device: Device) -> Process:
    """Return the constants that explain measured Γ (R,) in MiB best, near those of a base device.

    peaks: simulated figures of the same rows. Floor and ceiling, which only unified memory has, are fitted
    where the measurements show them. Deterministic.
    """
    unified = device.memory == "unified" and device.kind != "cpu"
    price = _pricing(peaks, measured, base)
    starts = [np.array([*base.beside, 0.0, 0.0, UNLIMITED])]
    if unified:
        least = float(measured.min())
        starts.append(np.array([*base.beside, least, least, UNLIMITED]))
        starts.append(np.array([*base.beside, *base.floor, UNLIMITED]))
    searched = [_search(start, price, peaks, measured, base, unified) for start in starts]
    best = min(searched, key=lambda constants: float(price(constants[None])[0]))
    beside = (float(best[BESIDE]), float(best[BESIDE_LINEAR]))
    return Process(
        beside,
        (float(best[FLOOR]), float(best[FLOOR_LINEAR])),
        float(best[CEILING]),
        _capacity(float(peaks.reserved.max()), max(beside), device),
    )


def _capacity(largest: float, beside: float, device: Device) -> float:
    """Return the most that a run may reserve: the device's figures, or the largest seen if that is more."""
    usable, total = device.figures.get("usable_memory_mib"), device.figures.get("memory_mib")
    if usable is not None:
        return max(largest, usable.value - beside)
    if total is None:
        return largest
    share = 1 - _SYSTEM_SHARE if device.memory == "unified" else 1.0
    return max(largest, share * total.value - beside)


def _pricing(peaks: Peaks, measured: FloatArray, base: Process) -> Callable[[FloatArray], FloatArray]:
    """Return the negative log posterior of candidates (C, 5)."""
    extra = base.beside[1] - base.beside[0]
    floored = base.floor[0] > 0

    def price(constants: FloatArray) -> FloatArray:
        beside = np.where(peaks.linear, constants[:, [BESIDE_LINEAR]], constants[:, [BESIDE]])
        floor = np.where(peaks.linear, constants[:, [FLOOR_LINEAR]], constants[:, [FLOOR]])
        value = np.minimum(np.maximum(peaks.reserved + beside, floor), constants[:, [CEILING]])
        error = np.log(np.maximum(value, 1e-3) / measured) / _NOISE
        misfit = (np.sqrt(1 + error * error) - 1).sum(axis=1)
        apart = ((constants[:, BESIDE] - base.beside[0]) / _SPREAD_MIB) ** 2
        apart += ((constants[:, BESIDE_LINEAR] - constants[:, BESIDE] - extra) / _LINEAR_SPREAD_MIB) ** 2
        active = constants[:, FLOOR] > 0
        step = ((constants[:, FLOOR_LINEAR] - constants[:, FLOOR] - extra) / _LINEAR_SPREAD_MIB) ** 2
        apart += np.where(active, step, 0.0)
        if floored:
            apart += ((constants[:, FLOOR] - base.floor[0]) / _SPREAD_MIB) ** 2
        believed = active.astype(float) * (not floored) + (constants[:, CEILING] < UNLIMITED)
        return np.asarray(misfit + apart / 2 + _PRICE * believed)

    return price


def _search(
    start: FloatArray,
    price: Callable[[FloatArray], FloatArray],
    peaks: Peaks,
    measured: FloatArray,
    base: Process,
    unified: bool,
) -> FloatArray:
    """Change one constant, or a pair of them, at a time as long as that helps."""
    extra = base.beside[1] - base.beside[0]
    beside = measured - peaks.reserved
    beside = np.concatenate([beside[beside > 0], np.array(base.beside)])
    moves: list[tuple[FloatArray, dict[int, float]]] = [
        (beside, {BESIDE: 0.0, BESIDE_LINEAR: extra}),
        (beside - extra, {BESIDE: 0.0, BESIDE_LINEAR: extra}),
        (beside, {BESIDE: 0.0}),
        (beside, {BESIDE_LINEAR: 0.0}),
    ]
    if unified:
        moves += [
            (measured, {FLOOR: 0.0, FLOOR_LINEAR: extra}),
            (measured - extra, {FLOOR: 0.0, FLOOR_LINEAR: extra}),
            (measured, {FLOOR: 0.0}),
            (measured, {FLOOR_LINEAR: 0.0}),
            (np.array([0.0]), {FLOOR: 0.0, FLOOR_LINEAR: 0.0}),
            (np.append(measured, UNLIMITED), {CEILING: 0.0}),
        ]
    best, least = start, float(price(start[None])[0])
    for _ in range(_ROUNDS):
        before = least
        for values, changed in moves:
            tried = np.repeat(best[None], len(values), axis=0)
            for place, added in changed.items():
                tried[:, place] = np.maximum(values + added, 0.0)
            prices = price(tried)
            if prices.min() < least - 1e-9:
                best, least = tried[int(prices.argmin())], float(prices.min())
        if least == before:
            break
    return best
