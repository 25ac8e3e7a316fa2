"""Fits Γ and Φ of a device to measured training steps, with errors from cross-validation inside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.prediction.intervals import (
    GRID,
    DistanceScale,
    ErrorModel,
    distance_scale,
    fit_errors,
    fit_law,
)
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import pack, prior_mean
from torchedge.prediction.latency.shares import SHARE_NAMES
from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel, Process
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.latency_fitting import RIDGE, RIDGE_ONE_NETWORK, fit_coefficients
from torchedge.profiling.samples import Mask, Samples, network_weights

FloatArray = npt.NDArray[np.float64]

TREES = 100
PLATEAU = (0.36, 0.72)
"""Rows whose reserved memory lies in this share of the largest seen show what a process takes beside it."""

TIGHT, LARGE = 0.86, 0.32
"""From these shares on: Γ is at its ceiling; simulated reserved memory matters to whether a run fits."""

_NO_ERRORS = ErrorModel(np.zeros(len(GRID)), np.zeros(len(GRID)))


def folds(samples: Samples, rows: Mask, *, levels: bool, networks: bool) -> Iterator[Mask]:
    """Yield the rows to leave out in turn: each inner pruning level, each network; never everything."""
    if levels:
        inner = sorted(set(samples.level[rows].tolist()))[1:-1]
        for level in inner:
            yield rows & (samples.level == level)
    names = sorted(set(samples.network[rows].tolist()))
    if networks and len(names) > 1:
        for name in names:
            yield rows & (samples.network == name)


# memory -----------------------------------------------------------------------------------------------------


def memory_rows(samples: Samples, rows: Mask) -> Mask:
    """The rows among these whose memory run passed."""
    used: Mask = rows & (samples.fits == 1) & np.isfinite(samples.gamma) & np.isfinite(samples.reserved)
    return used


def fit_memory(samples: Samples, rows: Mask, *, errors: bool = True, forest: bool = True) -> MemoryModel:
    """Fit Γ to rows; raises ProfileError where too few passed."""
    used = memory_rows(samples, rows)
    if used.sum() < 20:
        raise ProfileError(
            f"only {int(used.sum())} rows with measured memory; expected at least 20 to fit a profile"
        )
    process = _fit_process(samples, used)
    plain = MemoryModel(process, _NO_ERRORS, _NO_ERRORS, _NO_ERRORS)
    grown = None
    if forest:
        features = plain.features(samples.peaks_of(used))
        target = np.log(samples.gamma[used] / features[:, 1])
        grown = fit_forest(features, target, feature_names=MEMORY_FEATURES, trees=TREES)
    model = MemoryModel(process, _NO_ERRORS, *_peak_errors(samples, used, process), grown)
    if not errors:
        return model
    return MemoryModel(
        process, _memory_errors(samples, used, forest), model.reserved_errors, model.allocated_errors, grown
    )


def _fit_process(samples: Samples, used: Mask) -> Process:
    gamma, reserved = samples.gamma, samples.reserved
    linear = samples.peaks.linear
    largest = float(reserved[used].max())
    plateau = used & (reserved > PLATEAU[0] * largest) & (reserved < PLATEAU[1] * largest)
    tight = used & (reserved > TIGHT * largest)
    beside = _by_linear(gamma - reserved, plateau if plateau.any() else used, linear, np.median)
    floor = _by_linear(gamma, used, linear, np.min)
    ceiling = float(np.median(gamma[tight]))
    return Process(beside, floor, ceiling, largest)


def _by_linear(values: FloatArray, rows: Mask, linear: Mask, of: object) -> tuple[float, float]:
    """A figure without and with linear layers; where one group was not measured the other stands in."""
    found = [
        float(of(values[rows & (linear == flag)])) if (rows & (linear == flag)).any() else None  # type: ignore[operator]
        for flag in (False, True)
    ]
    without, with_linear = found
    if without is None:
        without = with_linear
    if with_linear is None:
        with_linear = without
    assert without is not None and with_linear is not None
    return without, with_linear


def _peak_errors(samples: Samples, used: Mask, process: Process) -> tuple[ErrorModel, ErrorModel]:
    """Errors of simulated reserved (of large runs) and allocated memory; nothing fitted, nothing left out."""
    large = used & (samples.peaks.reserved > LARGE * process.capacity)
    large = large if large.sum() >= 20 else used
    pairs = (
        (samples.reserved, samples.peaks.reserved, large),
        (samples.allocated, samples.peaks.allocated, used),
    )
    out = [
        fit_errors(np.log(m[r] / s[r]), np.ones(int(r.sum())), network_weights(samples, r))
        for m, s, r in pairs
    ]
    return out[0], out[1]


def _memory_errors(samples: Samples, used: Mask, forest: bool) -> ErrorModel:
    """Errors of Γ on networks left out (on levels left out where there is one network)."""
    several = len(set(samples.network[used].tolist())) > 1
    errors, difficulty, weights = [], [], []
    for left_out in folds(samples, used, levels=not several, networks=several):
        model = fit_memory(samples, used & ~left_out, errors=False, forest=forest)
        peaks = samples.peaks_of(left_out)
        errors.append(np.log(samples.gamma[left_out] / model.predict(peaks).value))
        difficulty.append(model.difficulty(peaks))
        weights.append(np.full(int(left_out.sum()), 1.0 / left_out.sum()))
    if not errors:
        raise ProfileError("errors need at least two networks or three pruning levels; measure more")
    return fit_errors(np.concatenate(errors), np.concatenate(difficulty), np.concatenate(weights))


# latency ----------------------------------------------------------------------------------------------------


def latency_rows(samples: Samples, rows: Mask) -> Mask:
    """The rows among these with a measured step time."""
    return rows & np.isfinite(samples.phi)


def fit_latency(samples: Samples, rows: Mask, *, errors: bool = True, forest: bool = True) -> LatencyModel:
    """Fit Φ to rows; raises ProfileError where there are too few."""
    used = latency_rows(samples, rows)
    if used.sum() < 20:
        raise ProfileError(
            f"only {int(used.sum())} rows with measured latency; expected at least 20 to fit a profile"
        )
    several = len(set(samples.network[used].tolist())) > 1
    coefficients = fit_coefficients(
        pack(samples.work, samples.which[used], samples.batch[used]),
        samples.phi[used],
        network_weights(samples, used),
        prior_mean(samples.device),
        ridge=RIDGE if several else RIDGE_ONE_NETWORK,
    )
    neutral = DistanceScale(
        1.0, 0.0, np.zeros(len(SHARE_NAMES)), np.ones(len(SHARE_NAMES)), np.zeros((1, len(SHARE_NAMES)))
    )
    analytic, features = LatencyModel(coefficients, _NO_ERRORS, None, neutral).analytic(
        samples.work, samples.which[used], samples.batch[used]
    )
    grown = None
    if forest:
        target = np.log(samples.phi[used] / analytic)
        grown = fit_forest(
            features, target, feature_names=SHARE_NAMES, trees=TREES, min_samples_leaf=4, max_features=0.5
        )
    scale = distance_scale(features)
    model = LatencyModel(coefficients, _NO_ERRORS, grown, scale)
    return _with_latency_errors(samples, used, model, forest) if errors else model


def _with_latency_errors(samples: Samples, used: Mask, model: LatencyModel, forest: bool) -> LatencyModel:
    """Add the errors on levels and networks left out, scaled by the distance they occurred at."""
    errors, distances, weights = [], [], []
    for left_out in folds(samples, used, levels=True, networks=True):
        fitted = fit_latency(samples, used & ~left_out, errors=False, forest=forest)
        times = fitted.predict(samples.work, samples.which[left_out], samples.batch[left_out])
        assert fitted.scale is not None
        errors.append(np.log(samples.phi[left_out] / times.value))
        distances.append(fitted.scale.distance(times.features))
        weights.append(np.full(int(left_out.sum()), 1.0 / left_out.sum()))
    if not errors:
        raise ProfileError("errors need at least two networks or three pruning levels; measure more")
    size, distance, weight = np.concatenate(errors), np.concatenate(distances), np.concatenate(weights)
    assert model.scale is not None
    scale = fit_law(model.scale, size, distance, weight)
    found = fit_errors(size, scale.floor + scale.slope * distance, weight)
    return LatencyModel(model.coefficients, found, model.forest, scale)
