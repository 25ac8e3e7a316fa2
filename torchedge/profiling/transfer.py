"""A new device from few measurements: another device's fitted models as the prior of its own.

Latency: the base's coefficients, shifted by what both devices' figures say, are prior means; all rates of one
kind (compute, bandwidth, launches) may move together by a wide factor, each by itself by a narrower one. So
five points give mostly factors, and a hundred nearly a full fit. Memory: the constants of the process
(`process_fitting`). A forest corrects what is left: the base's, shrunk to what the points confirm, or one of
the device's own where there are enough points. Intervals come from points and networks left out in turn, with
Student's quantiles for their number and the base's errors as a few points' worth of evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import InputError, ProfileError
from torchedge.prediction.intervals import GRID, DistanceScale, ErrorModel, distance_scale, fit_law
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import (
    COEFFICIENTS,
    Rows,
    named,
    pack,
    prior_mean,
    prior_spread,
    step_time,
    work_times,
)
from torchedge.prediction.latency.shares import SHARE_NAMES
from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel
from torchedge.prediction.memory.peaks import Peaks
from torchedge.prediction.step_models import FittedModels
from torchedge.profiling.designs import NOISE, choose_points
from torchedge.profiling.latency_fitting import fit_coefficients
from torchedge.profiling.process_fitting import adapt_process
from torchedge.profiling.residual_forests import residual_forest
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import any_scale, columns_of, latency_rows, memory_rows, network_groups

__all__ = ["FEWEST", "Base", "adapt_models", "select_points"]

FloatArray = npt.NDArray[np.float64]

FEWEST = 3
"""Points of a figure below which nothing can be adapted."""

_TOGETHER, _APART = 2.0, 1.0
"""Standard deviations, in log, of what moves all rates of a kind, and of each rate in those of its prior."""

_FOLLOWED = tuple(sorted({c.follows for c in COEFFICIENTS if c.follows}))
_BASE_POINTS, _TWO_SIDED = 5.0, 1.645
"""Points' worth of evidence in the base's errors; standard deviations to either side that hold 90 %."""

_COUNTABLE = 30
"""Points from which their 90 % quantile is taken for the size of errors where it is smaller."""

_RIDGE = 0.25
"""Weight of the squared distance from the prior; the posterior of independent noise has 0.5. This, the
spreads above and the noise of the design were chosen on transfers to the TX2."""

_LOST = 0.3
"""Median error on the points themselves, in log, above which a fit is not believed."""

_MOST_ROWS = 800
_KNOTS, _MEMORY_SPREAD, _NETWORK_SPREAD = 8, 0.2, 0.15


@dataclass(frozen=True, slots=True)
class Base:
    """The device whose models are adapted, and its models of the mode that is adapted."""

    device: Device
    models: FittedModels


# points -----------------------------------------------------------------------------------------------------


def select_points(base: Base, samples: Samples, rows: Mask, count: int, seed: int = 0) -> Mask:
    """Return which rows to measure: the `count` that tell most about all of them, before any is measured.

    Only what was measured in every figure that the dataset has can be chosen. The seed draws half of the
    candidates, so that another seed gives another, about equally good choice. Raises InputError where fewer
    rows are there than asked for, or fewer than `FEWEST` are asked for.
    """
    if count < FEWEST:
        raise InputError(f"{count} points are asked for; expected at least {FEWEST}, or all")
    memory, latency = memory_rows(samples, rows), latency_rows(samples, rows)
    usable = memory & latency if (memory & latency).any() else memory | latency
    places = np.flatnonzero(usable)
    if len(places) < count:
        raise InputError(
            f"{count} points are asked for and {len(places)} rows are usable; ask for fewer, or for all"
        )
    random = np.random.default_rng(seed)
    half = min(max(count, len(places) // 2), max(_MOST_ROWS, count))
    candidates = np.sort(random.choice(places, half, replace=False))
    others = np.setdiff1d(places, candidates)
    room = max(_MOST_ROWS - half, 0)
    if len(others) > room:
        others = np.sort(random.choice(others, room, replace=False))
    places = np.sort(np.concatenate([candidates, others]))
    reactions = []
    if base.models.latency is not None and latency.any():
        found = _reactions(samples, places, _prior(base, samples), _moves())
        reactions.append(np.concatenate([found, _network_reactions(samples, places)], axis=1))
    if memory.any():
        reactions.append(_memory_reactions(samples.peaks, places))
    chosen = choose_points(reactions, _weights(samples, places), np.searchsorted(places, candidates), count)
    mask = np.zeros(len(rows), dtype=np.bool_)
    mask[places[chosen]] = True
    return mask


def _weights(samples: Samples, places: npt.NDArray[np.intp]) -> FloatArray:
    """Every network counts the same."""
    _, inverse, counts = np.unique(samples.network[places], return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[inverse] * len(counts)))


def _network_reactions(samples: Samples, places: npt.NDArray[np.intp]) -> FloatArray:
    """A factor of each network's own, which the time model does not know: it spreads the points."""
    _, inverse = np.unique(samples.network[places], return_inverse=True)
    return _NETWORK_SPREAD * np.eye(int(inverse.max()) + 1)[inverse]


def _memory_reactions(peaks: Peaks, places: npt.NDArray[np.intp]) -> FloatArray:
    """Memory as a curve of the simulated reserve, piecewise linear in its logarithm, and linear layers."""
    size = np.log(peaks.reserved[places] + 1.0)
    knots = np.linspace(size.min(), size.max() + 1e-6, _KNOTS)
    hats = np.maximum(0.0, 1 - np.abs(size[:, None] - knots) / (knots[1] - knots[0]))
    return np.asarray(_MEMORY_SPREAD * np.column_stack([hats, peaks.linear[places]]))


# adapting ---------------------------------------------------------------------------------------------------


def adapt_models(
    base: Base, samples: Samples, rows: Mask, tell: Callable[[str], object] = lambda _: None
) -> FittedModels:
    """Return the base's models adapted to some rows; ProfileError where too few measure any figure.

    A figure that fewer than `FEWEST` rows measure, or that the base has no model of, is left out.
    """
    memory_used, latency_used = memory_rows(samples, rows), latency_rows(samples, rows)
    memory: MemoryModel | None = None
    latency: LatencyModel | None = None
    if base.models.memory is not None and memory_used.sum() >= FEWEST:
        tell("memory")
        memory = _adapt_memory(base.models.memory, samples, memory_used)
    if base.models.latency is not None and latency_used.sum() >= FEWEST:
        tell("latency")
        latency = _adapt_latency(base, base.models.latency, samples, latency_used)
    if memory is None and latency is None:
        raise ProfileError(
            f"{int(memory_used.sum())} rows measure memory and {int(latency_used.sum())} latency; expected "
            f"at least {FEWEST} of a figure that {base.device.name} has a model of"
        )
    return FittedModels(memory, latency, base.models.provenance)


def _groups(samples: Samples, used: Mask) -> npt.NDArray[np.intp]:
    """Return which rows are left out together: networks where there are three or more, else single rows."""
    names = sorted(set(samples.network[used].tolist()))
    if len(names) < 3:
        return np.arange(int(used.sum()), dtype=np.intp)
    groups = network_groups(names)
    of_name = {name: place for place, group in enumerate(groups) for name in group}
    return np.array([of_name[name] for name in samples.network[used].tolist()], dtype=np.intp)


def _student(errors: FloatArray, difficulty: FloatArray, count: int, base: ErrorModel) -> ErrorModel:
    """Return Student's quantiles for the scaled errors (E,) of `count` points.

    Where the base's errors, worth `_BASE_POINTS` points, are larger, they widen them.
    """
    from scipy import stats

    scaled = np.abs(errors / difficulty)
    own = float(np.mean(scaled**2))
    if count >= _COUNTABLE:  # a few points that lie far off say little about most
        own = min(own, (float(np.quantile(scaled, 0.9)) / _TWO_SIDED) ** 2)
    known = (float(np.interp(0.9, GRID, base.size)) / _TWO_SIDED) ** 2
    mixed = (count * own + _BASE_POINTS * known) / (count + _BASE_POINTS)
    scale = float(np.sqrt(max(own, mixed) * (1 + 1 / count)))
    freedom = max(count - 1, 1)
    size = scale * stats.t.ppf((1 + GRID) / 2, freedom)
    above = scale * stats.t.ppf(np.maximum(GRID, 0.5), freedom)
    return ErrorModel(np.asarray(size), np.asarray(np.maximum(above, 0.0)))


# latency ----------------------------------------------------------------------------------------------------


def _prior(base: Base, samples: Samples) -> FloatArray:
    """The base's coefficients, shifted by the ratio of the figures that both devices give."""
    model = base.models.latency
    assert model is not None
    shared = set(base.device.figures) & set(samples.device.figures) - {"step_time_ratio"}
    here, there = (
        replace(d, figures={name: figure for name, figure in d.figures.items() if name in shared})
        for d in (samples.device, base.device)
    )
    shift = prior_mean(here, samples.settings.amp) - prior_mean(there, model.amp)
    return np.asarray(model.coefficients + shift)


def _moves() -> FloatArray:
    """Return (K, Z): each coefficient by itself, then all that follow one figure together."""
    together = np.array([[float(c.follows == name) for name in _FOLLOWED] for c in COEFFICIENTS])
    return np.concatenate([np.diag(_APART * prior_spread()), _TOGETHER * together], axis=1)


def _reactions(
    samples: Samples, places: npt.NDArray[np.intp], coefficients: FloatArray, moves: FloatArray
) -> FloatArray:
    """Return (R, Z): how the log time of rows changes with each unknown, by central differences."""
    rows = pack(samples.work, samples.which[places], samples.batch[places])
    slopes = np.empty((len(places), len(coefficients)))
    for place in range(len(coefficients)):
        step = np.zeros(len(coefficients))
        step[place] = 0.05
        slopes[:, place] = (
            _log_times(rows, coefficients + step) - _log_times(rows, coefficients - step)
        ) / 0.1
    return slopes @ moves


def _log_times(rows: Rows, coefficients: FloatArray) -> FloatArray:
    p = named(coefficients)
    times = work_times(rows, p)
    return np.asarray(np.log(step_time(times.busy, times.launch, p)))


def _adapt_latency(base: Base, model: LatencyModel, samples: Samples, used: Mask) -> LatencyModel:
    places, moves = np.flatnonzero(used), _moves()
    count = len(places)
    rows = pack(samples.work, samples.which[used], samples.batch[used])
    prior = _prior(base, samples)
    for ridge in (_RIDGE, 4 * _RIDGE, 16 * _RIDGE):  # more where the search for the mode got lost
        coefficients = fit_coefficients(
            rows,
            samples.phi[used],
            np.ones(count),
            prior,
            ridge=ridge * moves.shape[1] / count,
            spread=moves,
        )
        if np.median(np.abs(np.log(samples.phi[used]) - _log_times(rows, coefficients))) < _LOST:
            break
    amp = samples.settings.amp
    bare = LatencyModel(coefficients, model.errors, None, any_scale(), amp)
    analytic, shares = bare.analytic(samples.work, samples.which[used], samples.batch[used])
    groups = _groups(samples, used)
    errors, reactions = np.log(samples.phi[used] / analytic), _reactions(samples, places, coefficients, moves)
    missed = _left_out(errors, reactions, groups)
    columns = columns_of(samples, used, model.feature_set)
    forest, left = residual_forest(
        model.forest, shares if columns is None else columns, shares, SHARE_NAMES, missed, groups
    )
    alone = _left_out(errors, reactions, np.arange(count)) + left - missed
    typical = 1.0 if model.scale is None else model.scale.floor
    known = ErrorModel(model.errors.size * typical, model.errors.above * typical)
    quantiles = _student(np.concatenate([left, alone]), np.ones(2 * count), count, known)
    scale = _strain_by_distance(bare, samples, shares, reactions)
    return LatencyModel(coefficients, quantiles, forest, scale, amp)


def _strain_by_distance(
    bare: LatencyModel, samples: Samples, measured: FloatArray, reactions: FloatArray
) -> DistanceScale:
    """Return how uncertain the fit leaves rows, against their average, by their distance to the points.

    Learnt from all rows of the dataset: it takes no measurement. measured: (N, F) shares of the points.
    """
    places = np.arange(len(samples.batch), dtype=np.intp)
    places = places[np.unique(np.linspace(0, len(places) - 1, min(_MOST_ROWS, len(places))).astype(int))]
    _, shares = bare.analytic(samples.work, samples.which[places], samples.batch[places])
    others = _reactions(samples, places, bare.coefficients, _moves())
    spread = np.einsum("ij,ij->i", others @ _covariance(reactions), others)
    strain, scale = np.sqrt(1 + spread / NOISE**2), distance_scale(measured)
    return fit_law(scale, strain / strain.mean(), scale.distance(shares), np.ones(len(places)))


def _covariance(reactions: FloatArray) -> FloatArray:
    """Return (Z, Z): what points with these reactions (N, Z) leave of the unknowns' unit variance."""
    return np.asarray(
        np.linalg.inv(reactions.T @ reactions / NOISE**2 + np.eye(reactions.shape[1])), dtype=np.float64
    )


def _left_out(errors: FloatArray, reactions: FloatArray, groups: npt.NDArray[np.intp]) -> FloatArray:
    """Return the errors (N,) that fits without each group would have, to first order (their hat matrix)."""
    hat = reactions @ _covariance(reactions) @ reactions.T / NOISE**2
    found = np.empty(len(errors))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        found[rows] = np.linalg.solve(np.eye(len(rows)) - hat[np.ix_(rows, rows)], errors[rows])
    return found


# memory -----------------------------------------------------------------------------------------------------


def _adapt_memory(model: MemoryModel, samples: Samples, used: Mask) -> MemoryModel:
    peaks, measured, groups = samples.peaks_of(used), samples.gamma[used], _groups(samples, used)
    process = adapt_process(peaks, measured, model.process, samples.device)
    missed = np.empty(len(measured))
    for group in np.unique(groups):
        kept, out = groups != group, groups == group
        found = adapt_process(peaks.some(kept), measured[kept], model.process, samples.device)
        missed[out] = np.log(measured[out] / found.base(peaks.reserved[out], peaks.linear[out]))
    bare = replace(model, process=process, forest=None)
    features = bare.features(peaks)
    columns = columns_of(samples, used, model.feature_set)
    forest, missed = residual_forest(
        model.forest, features if columns is None else columns, features, MEMORY_FEATURES, missed, groups
    )
    allocated, reserved = samples.allocated[used], samples.reserved[used]
    return MemoryModel(
        process,
        _student(missed, bare.difficulty(peaks), len(missed), model.errors),
        _peak_errors(reserved, peaks.reserved, model.reserved_errors),
        _peak_errors(allocated, peaks.allocated, model.allocated_errors),
        forest,
    )


def _peak_errors(measured: FloatArray, simulated: FloatArray, base: ErrorModel) -> ErrorModel:
    known = np.isfinite(measured) & (measured > 0)
    if known.sum() < FEWEST:
        return base
    errors = np.log(measured[known] / simulated[known])
    return _student(errors, np.ones(len(errors)), len(errors), base)
