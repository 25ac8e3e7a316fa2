"""Fits the latency of a device to measured steps: the time model's coefficients, a forest, and errors.

The coefficients are the maximum a posteriori under priors from the hardware's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.arrays import FloatArray
from torchedge.prediction.feature_sets import find_feature_set
from torchedge.prediction.intervals import NO_ERRORS, DistanceScale, distance_scale, fit_errors, fit_law
from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel, Times
from torchedge.prediction.latency.rates import norm_lanes
from torchedge.prediction.latency.roofline import (
    WorkRows,
    WorkTimes,
    fitting_prior,
    named,
    pack,
    prior_spread,
    step_time,
    work_times,
)
from torchedge.prediction.latency.workload import PASSES
from torchedge.prediction.profiles import CHANNELS_LAST, read_kinds
from torchedge.profiling.datasets import KINDS
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.memory_fitting import TREES
from torchedge.profiling.samples import (
    FEW_ROWS,
    MOST_FOLDS,
    NO_FOREST,
    OWN,
    HeldOut,
    Mask,
    Samples,
    candidate_sets,
    columns_of,
    cross_validate,
    enough_rows,
    network_weights,
)

DELTA = 0.03
"""Relative error at which the loss turns from squared to linear."""

RIDGE, RIDGE_FEW = 0.4, 1.5
"""Weight of the priors; a single network, or few rows, determine less and rely on them more. Chosen by
cross-validation inside the training levels, and on 30 points of three networks."""

LAYERS, RIDGE_LAYERS = 0.3, 0.15
"""Weight of the times of layers by kind beside those of steps, and of the priors where these are known."""

HOST = 0.5
"""Weight of the times of the host's thread beside those of steps."""

_LAYERS_DELTA = 0.06
_BOUND = 6.0
_ITERATIONS = 200


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: a fit's sums do not depend on the number of cores, nor wait for busy ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def predict_latency(model: LatencyModel, samples: Samples, rows: Mask) -> Times:
    """Return a model's predictions for some rows."""
    columns = columns_of(samples, rows, model.feature_set)
    return model.predict(samples.work, samples.which[rows], samples.batch[rows], columns)


def fit_latency(
    samples: Samples,
    rows: Mask,
    *,
    errors: bool = True,
    forest: bool = True,
    feature_sets: Sequence[str] | None = None,
    judge: Callable[[HeldOut], object] = lambda _: None,
) -> LatencyModel:
    """Fit Φ (or φ) to rows; ProfileError where there are too few. feature_sets, judge: as in `fit_memory`."""
    used = enough_rows(samples, "latency", rows)
    sets = (candidate_sets(samples, used) if feature_sets is None else feature_sets) if forest else ()
    models = fit_candidates(samples, used, sets if errors else sets[:1])
    if not errors:
        return models[0]
    held_out = _held_out(samples, used, sets)
    judge(held_out)
    model, distance = models[held_out.best], held_out.difficulty
    assert model.scale is not None
    scale = fit_law(model.scale, held_out.errors, distance, held_out.weight)
    quantiles = fit_errors(held_out.errors, scale.floor + scale.slope * distance, held_out.weight)
    return replace(model, errors=quantiles, scale=scale)


def fit_candidates(samples: Samples, used: Mask, sets: Sequence[str]) -> list[LatencyModel]:
    """Fit Φ to rows once for each feature set, all with the same coefficients; without any set, no forest."""
    several = len(set(samples.network[used].tolist())) > 1
    # Times of layers help where networks differ; for one network's prunings, times of steps alone are better.
    layers = samples.layers[used] if samples.layers is not None and several else None
    few = not several or used.sum() < FEW_ROWS
    ridge = RIDGE_FEW if few else RIDGE if layers is None else RIDGE_LAYERS
    lanes = norm_lanes(samples.device) if samples.mode == "train" else 0.0
    images = read_kinds(samples.device).get((CHANNELS_LAST, samples.settings.amp))
    last = None if images is None else images.coefficients
    steps = Steps(
        pack(samples.work, samples.which[used], samples.batch[used], lanes=lanes),
        samples.phi[used],
        network_weights(samples, used),
        fitting_prior(samples.device, samples.settings.amp),
        ridge,
        layers=layers,
        last=last,
    )
    coefficients = fit_coefficients(steps)
    amp = samples.settings.amp
    bare = LatencyModel(coefficients, NO_ERRORS, scale=any_scale(), amp=amp, lanes=lanes, last=last)
    analytic, shares = bare.analytic(samples.work, samples.which[used], samples.batch[used])
    bare = replace(bare, scale=distance_scale(shares))
    target = np.log(samples.phi[used] / analytic)
    models = []
    for name in sets or (NO_FOREST,):
        if name == NO_FOREST:
            models.append(bare)
            continue
        columns = columns_of(samples, used, name)
        forest = fit_forest(
            shares if columns is None else columns,
            target,
            feature_names=SHARE_NAMES if name == OWN else find_feature_set(name).names,
            trees=TREES,
            min_samples_leaf=4,
            max_features=0.5,
        )
        models.append(replace(bare, forest=forest))
    return models


def any_scale() -> DistanceScale:
    """Return a scale that only makes a model describe its rows."""
    count = len(SHARE_NAMES)
    return DistanceScale(1.0, 0.0, np.zeros(count), np.ones(count), np.zeros((1, count)))


def _held_out(samples: Samples, used: Mask, sets: Sequence[str]) -> HeldOut:
    """Errors on levels and networks held out with the best feature set, and the rows' distances."""

    def predict(training: Mask, left_out: Mask) -> tuple[list[FloatArray], FloatArray]:
        fitted = fit_candidates(samples, training, sets)
        times = [predict_latency(model, samples, left_out) for model in fitted]
        assert fitted[-1].scale is not None
        return [t.value for t in times], fitted[-1].scale.distance(times[-1].features)

    many = len(set(samples.network[used].tolist())) > MOST_FOLDS
    return cross_validate(samples, "latency", used, predict, levels=not many, networks=True)


# coefficients -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Measured steps and what a fit knows of their coefficients beforehand.

    measured: (R,) ms; weights: (R,). prior: (K,). spread: (K, Z) changes of the coefficients by Z independent
    standard deviations; default: the hardware's priors, one a coefficient. layers: (R, 6) measured ms of
    layers by `KINDS` (NaN: unknown), which then join the loss; so does thread, (R,) ms that the host's thread
    took for a step (NaN: unknown). hosts: (R,) which fitted host a step ran on, -1: none. last: as in
    `LatencyModel`.
    """

    rows: WorkRows
    measured: FloatArray
    weights: FloatArray
    prior: FloatArray
    ridge: float = RIDGE
    spread: FloatArray | None = None
    layers: FloatArray | None = None
    thread: FloatArray | None = None
    hosts: npt.NDArray[np.intp] | None = None
    last: FloatArray | None = None

    @property
    def moves(self) -> FloatArray:
        """The spread (K, Z)."""
        return np.diag(prior_spread()) if self.spread is None else self.spread

    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the weighted pseudo-Huber loss of log(predicted / measured).

        It is a function of the coefficients, and of the slowness (H + 1,) in log of hosts and of all else.
        """
        fitted = self.rows.mapped(lambda a: torch.from_numpy(np.ascontiguousarray(a)))
        target = torch.from_numpy(np.log(self.measured))
        share = torch.from_numpy(self.weights / self.weights.sum())
        by_kind = None if self.layers is None else torch.from_numpy(np.log(self.layers))
        lane = None if self.thread is None else torch.from_numpy(np.log(self.thread))
        hosts = None if self.hosts is None else torch.from_numpy(self.hosts)
        last = None if self.last is None else torch.from_numpy(self.last)

        def loss(coefficients: torch.Tensor, slowness: torch.Tensor) -> torch.Tensor:
            p = named(coefficients, last=last)
            times = work_times(fitted, p, torch, _torch_segments)
            launch = times.launch if hosts is None else times.launch * torch.exp(slowness[hosts])
            error = (torch.log(step_time(times.busy, launch, p, torch)) - target) / DELTA
            steps = (share * (torch.sqrt(1 + error * error) - 1)).sum()
            if lane is not None:
                known = torch.isfinite(lane)
                error = (torch.log(launch[known] + torch.exp(p["step"])) - lane[known]) / DELTA
                steps = steps + HOST * (share[known] * (torch.sqrt(1 + error * error) - 1)).sum()
            return steps if by_kind is None else steps + LAYERS * _layers_loss(fitted, times, by_kind, share)

        return loss


def fit_coefficients(steps: Steps) -> FloatArray:
    """Return the coefficients (K,) that explain measured times best.

    Minimises the loss of steps plus `ridge` times the mean squared distance from the prior in standard
    deviations, by L-BFGS in float64 from the prior. Deterministic.
    """
    loss, known = steps.loss(), torch.zeros(1, dtype=torch.float64)
    return most_likely(steps.prior, steps.moves, steps.ridge, lambda coefficients: loss(coefficients, known))


def fit_slowness(kinds: Sequence[Steps], hosts: int) -> FloatArray:
    """Return how many times as long launches take on each host (H,), for every kind of steps the same.

    Each kind has coefficients of its own, which are fitted beside; it counts by its rows.
    """
    sizes = [len(kind.prior) for kind in kinds]
    rows = np.array([len(kind.measured) for kind in kinds]) / sum(len(kind.measured) for kind in kinds)
    losses, known = [kind.loss() for kind in kinds], torch.zeros(1, dtype=torch.float64)
    widths = [kind.moves.shape[1] for kind in kinds]
    moves = np.zeros((sum(sizes) + hosts, sum(widths) + hosts))
    ridge = np.zeros(moves.shape[1])
    for place, kind in enumerate(kinds):
        down, right = sum(sizes[:place]), sum(widths[:place])
        moves[down : down + sizes[place], right : right + widths[place]] = kind.moves
        ridge[right : right + widths[place]] = rows[place] * kind.ridge * len(ridge) / widths[place]
    moves[sum(sizes) :, sum(widths) :] = np.eye(hosts)

    def loss(coefficients: torch.Tensor) -> torch.Tensor:
        *parts, slowness = torch.split(coefficients, [*sizes, hosts])
        known_too = torch.cat([slowness, known])
        each = zip(rows.tolist(), losses, parts, strict=True)
        return sum((share * own(part, known_too) for share, own, part in each), torch.zeros(()))

    prior = np.concatenate([*(kind.prior for kind in kinds), np.zeros(hosts)])
    return np.exp(most_likely(prior, moves, ridge, loss)[-hosts:])


def most_likely(
    prior: FloatArray,
    spread: FloatArray,
    ridge: float | FloatArray,
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> FloatArray:
    """Return the coefficients (K,) that minimise the loss plus `ridge` times the squared distance.

    prior: (K,); spread: (K, Z), in whose units the mean squared distance from it counts. ridge: for all (Z,)
    the same, or one for each.
    """
    mean, moves = torch.from_numpy(prior), torch.from_numpy(spread)
    weight = torch.as_tensor(ridge, dtype=torch.float64)
    distance = torch.zeros(moves.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [distance],
        max_iter=_ITERATIONS,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-7,
    )

    def coefficients() -> torch.Tensor:
        return mean + moves @ (_BOUND * torch.tanh(distance / _BOUND))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = loss(coefficients()) + (weight * distance * distance).mean()
        total.backward()
        return total

    with one_thread():
        optimizer.step(closure)
    with torch.no_grad():
        return np.asarray(coefficients().numpy(), dtype=np.float64)


def _layers_loss(
    rows: WorkRows, times: WorkTimes, measured: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Return the loss of the times by kind; measured: (R, 6) logarithms, NaN where there is none."""
    products, passes = times.products, dict(zip(PASSES, times.passes, strict=True))
    sums = {
        "product_forward": _torch_segments(products["fwd"], rows.product_row, rows.count),
        "norm": passes["norm"],
        "activation": passes["activation"],
        "pool": passes["pool_in"] + passes["pool_window"],
    }
    if rows.training:
        back = products["bwd_x"] + products["bwd_w"]
        sums["product_backward"] = _torch_segments(back, rows.product_row, rows.count)
    if times.depthwise:
        sums["depthwise"] = _torch_segments(sum(times.depthwise.values()), rows.depthwise_row, rows.count)
    total = torch.zeros((), dtype=torch.float64)
    for name, predicted in sums.items():
        column = measured[:, KINDS.index(name)]
        known = torch.isfinite(column)
        error = (torch.log(predicted[known].clamp_min(1e-9)) - column[known]) / _LAYERS_DELTA
        total = total + (share[known] * (torch.sqrt(1 + error * error) - 1)).sum()
    return total


def _torch_segments(values: Any, index: Any, count: int) -> Any:  # noqa: ANN401
    """Sum values that share an index (torch, differentiable)."""
    return torch.zeros(count, dtype=values.dtype).index_add(0, index, values)
