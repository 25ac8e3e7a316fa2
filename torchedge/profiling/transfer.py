"""A new device from few measurements: another device's fitted models as the prior of its own.

Latency: the base's coefficients, shifted by the ratio of both devices' figures, are prior means; all rates of
one kind (compute, bandwidth, launches) may move together by a wide factor, each by itself by a narrower one.
Five points thus determine mostly factors, a hundred nearly a full fit. Memory: the constants of the process
(`memory_fitting.adapt_process`). A forest corrects the remainder: the base's, shrunk to what the points
confirm, or one of the device's own with enough points. Intervals come from points and networks held out in
turn, with Student's quantiles for their number and the base's errors as a few points' worth of evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device, find_device, list_devices, weakest
from torchedge.errors import InputError, ProfileError
from torchedge.forests.trees import Forest, build_forest, evaluate
from torchedge.graphs import Mode
from torchedge.prediction.intervals import GRID, DistanceScale, ErrorModel, distance_scale, fit_law
from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel
from torchedge.prediction.latency.rates import norm_lanes
from torchedge.prediction.latency.roofline import (
    COEFFICIENTS,
    WorkRows,
    named,
    pack,
    prior_spread,
    rated_mean,
    step_time,
    work_times,
)
from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel
from torchedge.prediction.memory.peaks import Peaks
from torchedge.prediction.profiles import MODE_TABLES, FittedModels, read_models
from torchedge.profiling.accuracy import Score, compare_models
from torchedge.profiling.forest_fitting import fit_forest, predict_left_out
from torchedge.profiling.latency_fitting import Steps, any_scale, fit_coefficients
from torchedge.profiling.memory_fitting import adapt_process
from torchedge.profiling.profile_folders import KEYS, ModeFit, describe, score_table
from torchedge.profiling.samples import (
    HeldOut,
    Mask,
    Quantity,
    Samples,
    columns_of,
    network_groups,
    network_weights,
)

IndexArray = npt.NDArray[np.intp]

NOISE = 0.05
"""Standard deviation, in log, of the part of a measured figure that no model explains."""

FEWEST = 3
"""Fewest points of a quantity that a model can be adapted to."""

_TOGETHER, _APART = 2.0, 1.0
"""Standard deviations in log: of the factor on all rates of a kind, and of each rate (in its prior's)."""

_FOLLOWED = tuple(sorted({c.follows for c in COEFFICIENTS if c.follows}))
_BASE_POINTS, _TWO_SIDED = 5.0, 1.645
"""Points' worth of evidence in the base's errors; standard deviations to either side that hold 90 %."""

_COUNTABLE = 30
"""From this many points on, the errors' 90 % quantile replaces their mean square where it is smaller."""

_RIDGE = 0.25
"""Weight of the squared distance from the prior; the posterior of independent noise has 0.5. This, the
spreads above and the noise of the design were chosen on transfers to the TX2."""

_LOST = 0.3
"""Median error on the points themselves, in log, above which a fit is rejected."""

_MOST_ROWS = 800
_KNOTS, _MEMORY_SPREAD, _NETWORK_SPREAD = 8, 0.2, 0.15

OWN_FOREST = 60
"""Points from which a forest of the device's own is tried."""

_FOREST_RIDGE = 5.0
"""Points' worth of evidence against the base's forest."""

_MOST_NAMED = 200
_UNUSED = "unused points"


@dataclass(frozen=True, slots=True)
class Base:
    """The device whose models are adapted, and its models of the mode that is adapted."""

    device: Device
    models: FittedModels


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Models adapted to the `used` rows (R,) of one mode, and their scores on the other rows by target.

    held_out: the errors of used rows, each predicted by a fit without its network or point.
    """

    base: Device
    samples: Samples
    used: Mask
    models: FittedModels
    scores: Mapping[str, Score] = field(default_factory=dict)
    held_out: Mapping[Quantity, HeldOut] = field(default_factory=dict)


def base_of(name: str | Path, mode: Mode) -> Base | None:
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
    points: int | None,
    seed: int = 0,
    start: Callable[[str], object] = lambda _: None,
) -> Adaptation:
    """Choose points (None or too many: all rows), adapt the base, and score it on the other rows."""
    used = samples.usable("memory") | samples.usable("latency")
    if points is not None and points < used.sum():
        start("choosing points")
        used = select_points(base, samples, samples.every, points, seed)
    held_out: dict[Quantity, HeldOut] = {}
    models = adapt_models(base, samples, used, start, held_out)
    scores = {KEYS[c.quantity]: c.score for c in compare_models(samples, models, ~used)}
    return Adaptation(base.device, samples, used, models, scores, held_out)


# points -----------------------------------------------------------------------------------------------------


def select_points(base: Base, samples: Samples, rows: Mask, count: int, seed: int = 0) -> Mask:
    """Return which `count` rows to measure: those that lower the uncertainty of all rows most.

    Only rows with every quantity that the dataset measured can be chosen. The seed draws half of the
    candidates, so that another seed gives another, about equally good choice. Raises InputError for fewer
    usable rows than `count`, or a `count` below `FEWEST`.
    """
    if count < FEWEST:
        raise InputError(f"{count} points are asked for; expected at least {FEWEST}, or all")
    memory, latency = samples.usable("memory", rows), samples.usable("latency", rows)
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
        by_rate = _reactions(samples, places, _prior(base, samples), _moves())
        reactions.append(np.concatenate([by_rate, _network_reactions(samples, places)], axis=1))
    if memory.any():
        reactions.append(_memory_reactions(samples.peaks, places))
    chosen = choose_points(
        reactions, network_weights(samples, places), np.searchsorted(places, candidates), count
    )
    mask = np.zeros(len(rows), dtype=np.bool_)
    mask[places[chosen]] = True
    return mask


def _network_reactions(samples: Samples, places: IndexArray) -> FloatArray:
    """A factor of each network's own, which the time model does not have: it spreads the points."""
    _, inverse = np.unique(samples.network[places], return_inverse=True)
    return _NETWORK_SPREAD * np.eye(int(inverse.max()) + 1)[inverse]


def _memory_reactions(peaks: Peaks, places: IndexArray) -> FloatArray:
    """Memory as a curve of the simulated reserve, piecewise linear in its logarithm, and linear layers."""
    size = np.log(peaks.reserved[places] + 1.0)
    knots = np.linspace(size.min(), size.max() + 1e-6, _KNOTS)
    hats = np.maximum(0.0, 1 - np.abs(size[:, None] - knots) / (knots[1] - knots[0]))
    return np.asarray(_MEMORY_SPREAD * np.column_stack([hats, peaks.linear[places]]))


def choose_points(
    reactions: Sequence[FloatArray], weights: FloatArray, candidates: IndexArray, count: int
) -> IndexArray:
    """Return the rows (count,) to measure, the most informative first; all candidates if there are fewer.

    reactions: for each figure that a measurement of a row gives, (R, Z): its change in log by one standard
    deviation of each of Z unknowns (other unknowns for every figure). weights: (R,) how much a row counts.
    candidates: rows that may be chosen. Deterministic; of equals the first wins.
    """
    left = [int(c) for c in candidates]
    covariances = [np.eye(r.shape[1]) for r in reactions]
    chosen: list[int] = []
    while left and len(chosen) < count:
        gain = np.zeros(len(left))
        for reaction, covariance in zip(reactions, covariances, strict=True):
            spread = reaction[left] @ covariance
            shared = reaction @ spread.T
            own = np.einsum("ij,ij->i", spread, reaction[left])
            gain += (weights @ shared**2) / (own + NOISE**2)
        best = left.pop(int(np.argmax(gain)))
        chosen.append(best)
        for place, (reaction, covariance) in enumerate(zip(reactions, covariances, strict=True)):
            moved = covariance @ reaction[best]
            covariances[place] = covariance - np.outer(moved, moved) / (reaction[best] @ moved + NOISE**2)
    return np.array(chosen, dtype=np.intp)


# adapting ---------------------------------------------------------------------------------------------------


def adapt_models(
    base: Base,
    samples: Samples,
    rows: Mask,
    start: Callable[[str], object] = lambda _: None,
    held_out: dict[Quantity, HeldOut] | None = None,
) -> FittedModels:
    """Return the base's models adapted to some rows; ProfileError where too few measure any figure.

    A quantity with fewer than `FEWEST` rows, or without a model of the base, is omitted. held_out: receives
    the errors of rows held out.
    """
    held_out = {} if held_out is None else held_out
    memory_used, latency_used = samples.usable("memory", rows), samples.usable("latency", rows)
    memory: MemoryModel | None = None
    latency: LatencyModel | None = None
    if base.models.memory is not None and memory_used.sum() >= FEWEST:
        start("memory")
        memory, missed = _adapt_memory(base.models.memory, samples, memory_used)
        held_out["memory"] = _without(missed, samples, memory_used)
    if base.models.latency is not None and latency_used.sum() >= FEWEST:
        start("latency")
        latency, missed = _adapt_latency(base, base.models.latency, samples, latency_used)
        held_out["latency"] = _without(missed, samples, latency_used)
    if memory is None and latency is None:
        raise ProfileError(
            f"{int(memory_used.sum())} rows measure memory and {int(latency_used.sum())} latency; expected "
            f"at least {FEWEST} of a figure that {base.device.name} has a model of"
        )
    return FittedModels(memory, latency, base.models.provenance)


def _without(errors: FloatArray, samples: Samples, used: Mask) -> HeldOut:
    """Return log errors (N,) of rows held out in a form that can be judged."""
    flat = np.ones(len(errors))
    return HeldOut(0, errors, flat, flat, samples.network[used])


def _groups(samples: Samples, used: Mask) -> IndexArray:
    """Return a group for each row, held out together: its network with three or more, else the row."""
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
    shift = rated_mean(here, samples.settings.amp) - rated_mean(there, model.amp)
    return np.asarray(model.coefficients + shift)


def _moves() -> FloatArray:
    """Return (K, Z): each coefficient by itself, then all that follow one figure together."""
    together = np.array([[float(c.follows == name) for name in _FOLLOWED] for c in COEFFICIENTS])
    return np.concatenate([np.diag(_APART * prior_spread()), _TOGETHER * together], axis=1)


def _reactions(
    samples: Samples, places: IndexArray, coefficients: FloatArray, moves: FloatArray
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


def _log_times(rows: WorkRows, coefficients: FloatArray) -> FloatArray:
    p = named(coefficients)
    times = work_times(rows, p)
    return np.asarray(np.log(step_time(times.busy, times.launch, p)))


def _adapt_latency(
    base: Base, model: LatencyModel, samples: Samples, used: Mask
) -> tuple[LatencyModel, FloatArray]:
    """Return the adapted model and the log errors (N,) of rows held out."""
    places, moves = np.flatnonzero(used), _moves()
    count = len(places)
    lanes = norm_lanes(samples.device) if model.lanes else 0.0
    rows = pack(samples.work, samples.which[used], samples.batch[used], lanes=lanes)
    prior = _prior(base, samples)
    for ridge in (_RIDGE, 4 * _RIDGE, 16 * _RIDGE):  # more where the search for the mode got lost
        weight = ridge * moves.shape[1] / count
        coefficients = fit_coefficients(Steps(rows, samples.phi[used], np.ones(count), prior, weight, moves))
        if np.median(np.abs(np.log(samples.phi[used]) - _log_times(rows, coefficients))) < _LOST:
            break
    amp = samples.settings.amp
    bare = LatencyModel(coefficients, model.errors, None, any_scale(), amp, lanes=lanes)
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
    return LatencyModel(coefficients, quantiles, forest, scale, amp, lanes=lanes), left


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
    """Return (Z, Z): the unknowns' covariance, at first unit, after points with these reactions (N, Z)."""
    return np.asarray(
        np.linalg.inv(reactions.T @ reactions / NOISE**2 + np.eye(reactions.shape[1])), dtype=np.float64
    )


def _left_out(errors: FloatArray, reactions: FloatArray, groups: IndexArray) -> FloatArray:
    """Return the errors (N,) that fits without each group would have, to first order (their hat matrix)."""
    hat = reactions @ _covariance(reactions) @ reactions.T / NOISE**2
    left_out = np.empty(len(errors))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        left_out[rows] = np.linalg.solve(np.eye(len(rows)) - hat[np.ix_(rows, rows)], errors[rows])
    return left_out


# memory -----------------------------------------------------------------------------------------------------


def _adapt_memory(model: MemoryModel, samples: Samples, used: Mask) -> tuple[MemoryModel, FloatArray]:
    """Return the adapted model and the log errors (N,) of rows held out."""
    peaks, measured, groups = samples.peaks.some(used), samples.gamma[used], _groups(samples, used)
    process = adapt_process(peaks, measured, model.process, samples.device)
    missed = np.empty(len(measured))
    for group in np.unique(groups):
        training, out = groups != group, groups == group
        fitted = adapt_process(peaks.some(training), measured[training], model.process, samples.device)
        missed[out] = np.log(measured[out] / fitted.base(peaks.reserved[out], peaks.linear[out]))
    bare = replace(model, process=process, forest=None)
    features = bare.features(peaks)
    columns = columns_of(samples, used, model.feature_set)
    forest, missed = residual_forest(
        model.forest, features if columns is None else columns, features, MEMORY_FEATURES, missed, groups
    )
    allocated, reserved = samples.allocated[used], samples.reserved[used]
    adapted = MemoryModel(
        process,
        _student(missed, bare.difficulty(peaks), len(missed), model.errors),
        _peak_errors(reserved, peaks.reserved, model.reserved_errors),
        _peak_errors(allocated, peaks.allocated, model.allocated_errors),
        forest,
    )
    return adapted, missed


def _peak_errors(measured: FloatArray, simulated: FloatArray, base: ErrorModel) -> ErrorModel:
    known = np.isfinite(measured) & (measured > 0)
    if known.sum() < FEWEST:
        return base
    errors = np.log(measured[known] / simulated[known])
    return _student(errors, np.ones(len(errors)), len(errors), base)


# the remainder ----------------------------------------------------------------------------------------------


def residual_forest(
    base: Forest | None,
    columns: FloatArray,
    own_features: FloatArray,
    own_names: tuple[str, ...],
    missed: FloatArray,
    groups: IndexArray,
) -> tuple[Forest, FloatArray]:
    """Return the forest with the smallest errors on held-out rows, and these errors.

    columns: the features that the base's forest reads.
    """
    own = np.stack([own_features.min(axis=0), own_features.max(axis=0)]).astype(np.float32)
    choices: list[tuple[Callable[[], Forest], FloatArray]] = [(lambda: _constant(own_names, own), missed)]
    if base is not None:
        corrections, shrunk = evaluate(base, columns), np.empty(len(missed))
        for group in np.unique(groups):
            out = groups == group
            shrunk[out] = missed[out] - _share(corrections[~out], missed[~out]) * corrections[out]
        share = _share(corrections, missed)
        choices.append((lambda: replace(base, scale=base.scale * share, offset=base.offset * share), shrunk))
    if len(missed) >= OWN_FOREST and len(np.unique(groups)) > 1:
        settings: dict[str, Any] = {"feature_names": own_names, "min_samples_leaf": 4, "max_features": 0.5}
        predicted = predict_left_out(own_features, missed, groups, **settings)
        choices.append((lambda: fit_forest(own_features, missed, **settings), missed - predicted))
    make, left = min(choices, key=lambda choice: float(np.abs(choice[1]).mean()))
    return make(), left


def _share(corrections: FloatArray, missed: FloatArray) -> float:
    """Return how much of the base's forest the errors confirm, 0 to 1; few points confirm little."""
    return float(np.clip(corrections @ missed / (corrections @ corrections + _FOREST_RIDGE * NOISE**2), 0, 1))


def _constant(names: tuple[str, ...], hull: npt.NDArray[np.float32]) -> Forest:
    """A forest that corrects nothing, with the range of the measured features."""
    return build_forest(
        learner="constant",
        feature_names=names,
        feature=np.array([-1], np.int16),
        payload=np.zeros(1, np.float32),
        sizes=np.ones(1, np.int32),
        hull=hull,
        scale=1.0,
    )


# descriptions -----------------------------------------------------------------------------------------------


def describe_transfer(out: Path, transfer: Adaptation, points: int | None, seed: int) -> ModeFit:
    """Return adapted models with their table: base, points, which rows, and their accuracy on the others."""
    samples, used, models = transfer.samples, transfer.used, transfer.models
    source = replace(samples.source, provenance=weakest((samples.source.provenance, models.provenance)))
    chosen = "all" if points is None else str(points)
    described = describe(
        source,
        f"torchedge fit {MODE_TABLES[samples.mode]} {source.name} --base {transfer.base.name} "
        f"--points {chosen} --seed {seed} --device {samples.device.name} --out {out.resolve().name}",
        base=transfer.base.name,
        base_sha256=transfer.base.fingerprint,
        points=int(used.sum()),
        rows=int(used.sum()),
        memory_rows=int(samples.usable("memory", used).sum()) if models.memory is not None else 0,
        latency_rows=int(samples.usable("latency", used).sum()) if models.latency is not None else 0,
        networks=sorted(set(samples.network[used].tolist())),
    )
    if used.sum() <= _MOST_NAMED:
        described["used"] = samples.points(used)
    if transfer.scores:
        described["accuracy"] = {name: {_UNUSED: score_table(s)} for name, s in transfer.scores.items()}
    return ModeFit(FittedModels(models.memory, models.latency, source.provenance), described)
