"""Prediction intervals: the distance of measured values from predictions, taken from cross-validation.

Conformal: quantiles of the errors of models that were not fitted to the network (or its pruning level). Each
error is divided by the difficulty of its row, so that hard rows get wide intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchedge.arrays import FloatArray
from torchedge.errors import ProfileError
from torchedge.storage import REBUILD

GRID = np.concatenate([np.linspace(0.0, 0.98, 99), np.linspace(0.981, 0.999, 19)])
"""Levels at which quantiles are stored, finer towards the tail."""


@dataclass(frozen=True, slots=True, eq=False)
class ErrorModel:
    """Quantiles of the scaled error log(measured / predicted) / difficulty on `GRID`.

    size: (G,) of its absolute value, for two-sided intervals. above: (G,) of the error itself, at least zero:
    how far measurements exceed predictions, for one-sided margins.
    """

    size: FloatArray
    above: FloatArray

    def __post_init__(self) -> None:
        for name in ("size", "above"):
            array = getattr(self, name)
            if (
                array.shape != GRID.shape
                or not np.isfinite(array).all()
                or (array < 0).any()
                or (np.diff(array) < 0).any()
            ):
                raise ProfileError(
                    f"the error quantiles {name!r} are not {len(GRID)} rising numbers from 0 on; {REBUILD}"
                )

    def half_width(self, difficulty: FloatArray) -> FloatArray:
        """Return (R,) the half-width of a 90 % interval in log, given the difficulty (R,)."""
        return np.asarray(np.interp(0.9, GRID, self.size) * difficulty)

    def margin(self, difficulty: FloatArray, confidence: float) -> FloatArray:
        """Return (R,) the log excess that measurements stay below with a one-sided confidence."""
        return np.asarray(np.interp(confidence, GRID, self.above) * difficulty)


def fit_errors(errors: FloatArray, difficulty: FloatArray, weights: FloatArray) -> ErrorModel:
    """Return the quantiles of cross-validated log errors (E,), weighted, each divided by its difficulty."""
    scaled = errors / difficulty
    size = weighted_quantiles(np.abs(scaled), weights, GRID)
    above = np.maximum(weighted_quantiles(scaled, weights, GRID), 0.0)
    return ErrorModel(np.maximum.accumulate(size), np.maximum.accumulate(above))


def assumed_errors(half_width: float) -> ErrorModel:
    """Return errors for an unmeasured model: the 90 % interval is `half_width` (in log) to both sides."""
    slope = GRID / 0.9 * half_width
    return ErrorModel(slope, slope)


def joined_errors(errors: ErrorModel, half_width: float) -> ErrorModel:
    """Return errors beside independent ones whose 90 % interval is `half_width` (in log) to both sides."""
    other = assumed_errors(half_width)
    return ErrorModel(np.hypot(errors.size, other.size), np.hypot(errors.above, other.above))


NO_ERRORS = assumed_errors(0.0)
"""The errors of a model while it is fitted: none."""


@dataclass(frozen=True, slots=True, eq=False)
class DistanceScale:
    """Difficulty = floor + slope · distance of standardised features to the nearest of the measured rows.

    centre, spread: (F,) standardisation; reference: (M, F) standardised measured rows.
    """

    floor: float
    slope: float
    centre: FloatArray
    spread: FloatArray
    reference: FloatArray

    def __post_init__(self) -> None:
        fits = self.reference.ndim == 2 and self.reference.shape[1:] == self.centre.shape == self.spread.shape
        finite = all(np.isfinite(a).all() for a in (self.centre, self.spread, self.reference))
        if not (
            fits
            and finite
            and (self.spread > 0).all()
            and self.floor > 0
            and self.slope >= 0
            and len(self.reference)
        ):
            raise ProfileError(f"the distance scale's arrays do not fit together; {REBUILD}")

    def difficulty(self, features: FloatArray) -> FloatArray:
        """Return (R,): the difficulty of each row of features (R, F)."""
        return self.floor + self.slope * self.distance(features)

    def distance(self, features: FloatArray) -> FloatArray:
        """Return (R,): root-mean-square distance of each row to the nearest measured one."""
        rows = (features - self.centre) / self.spread
        squares = (
            (rows**2).sum(axis=1)[:, None] + (self.reference**2).sum(axis=1) - 2 * rows @ self.reference.T
        )
        return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0.0) / rows.shape[1]))

    def tensors(self, prefix: str) -> dict[str, FloatArray]:
        """Return the arrays to store under a name prefix."""
        return {
            f"{prefix}.law": np.array([self.floor, self.slope]),
            f"{prefix}.centre": self.centre,
            f"{prefix}.spread": self.spread,
            f"{prefix}.reference": self.reference.astype(np.float32),
        }


def distance_scale(features: FloatArray) -> DistanceScale:
    """Return a scale that refers to measured rows (M, F), thinned evenly to 400; its law is unfitted."""
    centre, spread = features.mean(axis=0), features.std(axis=0) + 0.02
    places = np.unique(np.linspace(0, len(features) - 1, min(400, len(features))).astype(int))
    return DistanceScale(1.0, 0.0, centre, spread, (features[places] - centre) / spread)


def fit_law(
    scale: DistanceScale, errors: FloatArray, distances: FloatArray, weights: FloatArray
) -> DistanceScale:
    """Return the scale with floor and slope from a weighted regression of |error| (E,) on distance (E,)."""
    size = np.abs(errors)
    mean_error, mean_distance = np.average(size, weights=weights), np.average(distances, weights=weights)
    variance = np.average((distances - mean_distance) ** 2, weights=weights)
    joint = np.average((distances - mean_distance) * (size - mean_error), weights=weights)
    slope = float(max(0.0, joint / variance)) if variance > 0 else 0.0
    floor = float(max(mean_error - slope * mean_distance, 0.25 * mean_error, 1e-4))
    return DistanceScale(floor, slope, scale.centre, scale.spread, scale.reference)


def weighted_quantiles(values: FloatArray, weights: FloatArray, levels: FloatArray) -> FloatArray:
    """Return quantiles of weighted values (V,), with the finite-sample correction of conformal prediction."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / (weights.sum() * (1 + 1 / len(values)))
    return np.asarray(np.interp(levels, share, values[order]))
