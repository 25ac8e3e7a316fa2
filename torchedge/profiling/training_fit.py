"""Fits memory and latency of a device to measured steps, with errors from cross-validation inside them.

One function serves Γ and γ, one Φ and φ: the rows' graphs say which mode they are of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.forests.trees import Forest
from torchedge.prediction.feature_sets import INFERENCE, feature_rows, find_feature_set
from torchedge.prediction.intervals import (
    GRID,
    DistanceScale,
    ErrorModel,
    assumed_errors,
    distance_scale,
    fit_errors,
    fit_law,
)
from torchedge.prediction.latency.model import LatencyModel, Times
from torchedge.prediction.latency.roofline import pack, prior_mean
from torchedge.prediction.latency.shares import SHARE_NAMES
from torchedge.prediction.memory.model import MEMORY_FEATURES, UNLIMITED, Memory, MemoryModel, Process
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.latency_fitting import RIDGE, RIDGE_ONE_NETWORK, RIDGE_PARTS, fit_coefficients
from torchedge.profiling.samples import Mask, Samples, network_weights

FloatArray = npt.NDArray[np.float64]

TREES = 100
PLATEAU = (0.36, 0.72)
"""Rows whose reserved memory lies in this share of the largest seen show what a process takes beside it."""

TIGHT, LARGE = 0.86, 0.32
"""From these shares on: Γ is at its ceiling; simulated reserved memory matters to whether a run fits."""

OWN = "own"
"""What a forest reads if no feature set: `MEMORY_FEATURES` or `SHARE_NAMES`."""

NO_FOREST = "none"
"""Among feature sets to choose from: no forest, the constants or the time model alone."""

MOST_FOLDS = 10
"""More networks than this are left out in as many groups, each network in one."""

_UNMEASURED = assumed_errors(0.25)
"""Of peaks that the device does not tell."""

_NO_ERRORS = ErrorModel(np.zeros(len(GRID)), np.zeros(len(GRID)))


def folds(samples: Samples, rows: Mask, *, levels: bool, networks: bool) -> Iterator[Mask]:
    """Yield the rows to leave out in turn: each inner pruning level, each network; never everything.

    Many networks are left out in `MOST_FOLDS` groups.
    """
    if levels:
        inner = sorted(set(samples.level[rows].tolist()))[1:-1]
        for level in inner:
            yield rows & (samples.level == level)
    names = sorted(set(samples.network[rows].tolist()))
    if networks and len(names) > 1:
        for group in network_groups(names):
            yield rows & np.isin(samples.network, group)


def network_groups(names: Sequence[str], most: int = MOST_FOLDS) -> list[list[str]]:
    """Return networks in at most so many groups of nearly equal size, the same whatever their order."""
    spread = sorted(names) if len(names) <= most else sorted(names, key=_scattered)
    return [spread[start::most] for start in range(min(most, len(spread)))]


def _scattered(name: str) -> bytes:
    """A key under which alike names do not lie beside each other."""
    return hashlib.sha256(name.encode()).digest()


def candidate_sets(samples: Samples) -> tuple[str, ...]:
    """Return what forests may read: our own features, for inference also the paper's 15."""
    training = not samples.work or samples.work[0].training
    return (OWN,) if training else (OWN, INFERENCE.name)


def columns_of(samples: Samples, rows: Mask, feature_set: str | None) -> FloatArray | None:
    """Return the features (R, F) of a feature set for some rows, None for our own."""
    if feature_set in (None, OWN):
        return None
    return feature_rows(samples.graphs, samples.which[rows], samples.batch[rows], str(feature_set))


def _names(feature_set: str, own: tuple[str, ...]) -> tuple[str, ...]:
    return own if feature_set == OWN else find_feature_set(feature_set).names


def _best(errors: Sequence[FloatArray], weights: FloatArray) -> int:
    """Return which of several candidates' log errors (E,) are smallest in the weighted mean."""
    return int(np.argmin([np.average(np.abs(e), weights=weights) for e in errors]))


# memory -----------------------------------------------------------------------------------------------------


def memory_rows(samples: Samples, rows: Mask) -> Mask:
    """The rows among these whose memory run passed."""
    used: Mask = rows & (samples.fits == 1) & np.isfinite(samples.gamma)
    return used


def memory_of(model: MemoryModel, samples: Samples, rows: Mask) -> Memory:
    """Return what a model predicts for some rows."""
    return model.predict(samples.peaks_of(rows), columns_of(samples, rows, model.feature_set))


def fit_memory(
    samples: Samples,
    rows: Mask,
    *,
    errors: bool = True,
    forest: bool = True,
    feature_sets: Sequence[str] | None = None,
) -> MemoryModel:
    """Fit Γ (or γ) to rows; raises ProfileError where too few passed.

    feature_sets: what the forest may read, `OWN`, names of feature sets or `NO_FOREST`; with `errors`
    cross-validation chooses among them, else the first is taken. Default: `candidate_sets`.
    """
    used = memory_rows(samples, rows)
    if used.sum() < 20:
        raise ProfileError(
            f"only {int(used.sum())} rows with measured memory; expected at least 20 to fit a profile"
        )
    sets = (candidate_sets(samples) if feature_sets is None else feature_sets) if forest else ()
    process = _fit_process(samples, used)
    peak_errors = _peak_errors(samples, used, process)
    if not errors:
        return MemoryModel(
            process, _NO_ERRORS, *peak_errors, _memory_forest(samples, used, process, sets[:1])
        )
    found, chosen = _memory_errors(samples, used, sets)
    return MemoryModel(process, found, *peak_errors, _memory_forest(samples, used, process, chosen))


def _memory_forest(samples: Samples, used: Mask, process: Process, sets: Sequence[str]) -> Forest | None:
    """Grow the forest that corrects the constants, on the first of some feature sets; None without any."""
    if not sets or sets[0] == NO_FOREST:
        return None
    own = MemoryModel(process, _NO_ERRORS, _NO_ERRORS, _NO_ERRORS).features(samples.peaks_of(used))
    columns = columns_of(samples, used, sets[0])
    target = np.log(samples.gamma[used] / own[:, 1])
    features = own if columns is None else columns
    return fit_forest(features, target, feature_names=_names(sets[0], MEMORY_FEATURES), trees=TREES)


def _fit_process(samples: Samples, used: Mask) -> Process:
    gamma, simulated = samples.gamma, samples.peaks.reserved
    reserved = np.where(np.isfinite(samples.reserved), samples.reserved, simulated)  # a CPU tells none
    linear = samples.peaks.linear
    largest = float(reserved[used].max())
    if samples.device.memory == "dedicated":  # nothing takes pages back: Γ follows the reserve to the end
        beside = _by_linear(gamma - reserved, used, linear, np.median)
        total = samples.device.figures.get("usable_memory_mib") or samples.device.figures.get("memory_mib")
        seen = np.where(np.isfinite(samples.reserved), samples.reserved, 0.0)[used].max()  # not simulated
        room = total.value - max(beside) if total is not None else largest
        return Process(beside, (0.0, 0.0), UNLIMITED, max(float(seen), room))
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
    out = []
    for measured, simulated, chosen in pairs:
        known = chosen & np.isfinite(measured)
        ratio = np.log(measured[known] / simulated[known])
        weights = network_weights(samples, known)
        found = fit_errors(ratio, np.ones(len(ratio)), weights) if known.any() else _UNMEASURED
        out.append(found)
    return out[0], out[1]


def _memory_errors(samples: Samples, used: Mask, sets: Sequence[str]) -> tuple[ErrorModel, Sequence[str]]:
    """Errors on networks left out (on levels where there is one network), and the best feature set."""
    several = len(set(samples.network[used].tolist())) > 1
    candidates: list[Sequence[str]] = [(name,) for name in sets] or [()]
    errors: list[list[FloatArray]] = [[] for _ in candidates]
    difficulty, weights = [], []
    for left_out in folds(samples, used, levels=not several, networks=several):
        kept = used & ~left_out
        process = _fit_process(samples, kept)
        for place, names in enumerate(candidates):
            grown = _memory_forest(samples, kept, process, names)
            model = MemoryModel(process, _NO_ERRORS, _NO_ERRORS, _NO_ERRORS, grown)
            errors[place].append(np.log(samples.gamma[left_out] / memory_of(model, samples, left_out).value))
        difficulty.append(model.difficulty(samples.peaks_of(left_out)))
        weights.append(np.full(int(left_out.sum()), 1.0 / left_out.sum()))
    if not weights:
        raise ProfileError("errors need at least two networks or three pruning levels; measure more")
    found, weight = [np.concatenate(e) for e in errors], np.concatenate(weights)
    best = _best(found, weight)
    return fit_errors(found[best], np.concatenate(difficulty), weight), candidates[best]


# latency ----------------------------------------------------------------------------------------------------


def latency_rows(samples: Samples, rows: Mask) -> Mask:
    """The rows among these with a measured step time."""
    return rows & np.isfinite(samples.phi)


def latency_of(model: LatencyModel, samples: Samples, rows: Mask) -> Times:
    """Return what a model predicts for some rows."""
    columns = columns_of(samples, rows, model.feature_set)
    return model.predict(samples.work, samples.which[rows], samples.batch[rows], columns)


def fit_latency(
    samples: Samples,
    rows: Mask,
    *,
    errors: bool = True,
    forest: bool = True,
    feature_sets: Sequence[str] | None = None,
) -> LatencyModel:
    """Fit Φ (or φ) to rows; raises ProfileError where there are too few. feature_sets: as in `fit_memory`."""
    used = latency_rows(samples, rows)
    if used.sum() < 20:
        raise ProfileError(
            f"only {int(used.sum())} rows with measured latency; expected at least 20 to fit a profile"
        )
    sets = (candidate_sets(samples) if feature_sets is None else feature_sets) if forest else ()
    models = fit_candidates(samples, used, sets if errors else sets[:1])
    return _with_latency_errors(samples, used, models, sets) if errors else models[0]


def fit_candidates(samples: Samples, used: Mask, sets: Sequence[str]) -> list[LatencyModel]:
    """Fit Φ to rows once for each feature set, all with the same coefficients; without any set, no forest."""
    several = len(set(samples.network[used].tolist())) > 1
    # Layers apart help where networks differ; of one network's prunings the steps tell more.
    parts = samples.parts[used] if samples.parts is not None and several else None
    ridge = RIDGE_ONE_NETWORK if not several else RIDGE if parts is None else RIDGE_PARTS
    coefficients = fit_coefficients(
        pack(samples.work, samples.which[used], samples.batch[used]),
        samples.phi[used],
        network_weights(samples, used),
        prior_mean(samples.device, samples.settings.amp),
        ridge=ridge,
        parts=parts,
    )
    analytic, shares = LatencyModel(coefficients, _NO_ERRORS, None, any_scale()).analytic(
        samples.work, samples.which[used], samples.batch[used]
    )
    scale, target = distance_scale(shares), np.log(samples.phi[used] / analytic)
    amp = samples.settings.amp
    if not sets:
        return [LatencyModel(coefficients, _NO_ERRORS, None, scale, amp)]
    models = []
    for name in sets:
        if name == NO_FOREST:
            models.append(LatencyModel(coefficients, _NO_ERRORS, None, scale, amp))
            continue
        columns = columns_of(samples, used, name)
        grown = fit_forest(
            shares if columns is None else columns,
            target,
            feature_names=_names(name, SHARE_NAMES),
            trees=TREES,
            min_samples_leaf=4,
            max_features=0.5,
        )
        models.append(LatencyModel(coefficients, _NO_ERRORS, grown, scale, amp))
    return models


def any_scale() -> DistanceScale:
    """Return a scale that only makes a model describe its rows."""
    count = len(SHARE_NAMES)
    return DistanceScale(1.0, 0.0, np.zeros(count), np.ones(count), np.zeros((1, count)))


def _with_latency_errors(
    samples: Samples, used: Mask, models: Sequence[LatencyModel], sets: Sequence[str]
) -> LatencyModel:
    """Choose among models by the errors on levels and networks left out; add these, scaled by distance."""
    errors: list[list[FloatArray]] = [[] for _ in models]
    distances, weights = [], []
    several = len(set(samples.network[used].tolist())) > MOST_FOLDS
    for left_out in folds(samples, used, levels=not several, networks=True):
        for place, fitted in enumerate(fit_candidates(samples, used & ~left_out, sets)):
            times = latency_of(fitted, samples, left_out)
            errors[place].append(np.log(samples.phi[left_out] / times.value))
        assert fitted.scale is not None
        distances.append(fitted.scale.distance(times.features))
        weights.append(np.full(int(left_out.sum()), 1.0 / left_out.sum()))
    if not weights:
        raise ProfileError("errors need at least two networks or three pruning levels; measure more")
    found, distance, weight = (
        [np.concatenate(e) for e in errors],
        np.concatenate(distances),
        np.concatenate(weights),
    )
    best = _best(found, weight)
    model, size = models[best], found[best]
    assert model.scale is not None
    scale = fit_law(model.scale, size, distance, weight)
    quantiles = fit_errors(size, scale.floor + scale.slope * distance, weight)
    return LatencyModel(model.coefficients, quantiles, model.forest, scale, model.amp)
