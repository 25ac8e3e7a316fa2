"""What fitted models are compared with: the method perf4sight published, and parts of our own left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.forests.trees import evaluate
from torchedge.prediction.feature_sets import feature_values, find_feature_set
from torchedge.prediction.profiles import load_models
from torchedge.profiling.accuracy import Score, splits
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import latency_rows, memory_rows

__all__ = ["PUBLISHED_TREES", "published_features", "score_published", "score_unfitted"]

FloatArray = npt.NDArray[np.float64]
Predict = Callable[[Mask, Mask], FloatArray]

PUBLISHED_TREES = 300
"""perf4sight, section 4: extremely randomised trees on 56 features; the public code grows 300."""

_FEATURE_SET = "perf4sight"


def published_features(samples: Samples) -> FloatArray:
    """Return (R, 56): perf4sight's features of every row."""
    found = np.empty((len(samples.batch), len(find_feature_set(_FEATURE_SET))))
    for index in np.unique(samples.which):
        rows = samples.which == index
        found[rows] = feature_values(
            samples.graphs[index], samples.batch[rows].astype(np.int64), _FEATURE_SET
        )
    return found


def score_published(
    samples: Samples,
    target: str,
    protocol: str,
    *,
    features: FloatArray | None = None,
    ratio: bool = False,
    tell: Callable[[], Any] = lambda: None,
) -> Score:
    """Score the published method on the same splits: a forest from 56 features to the figure itself.

    features: what `published_features` gave, to save the time. ratio: fit the logarithm of the figure's
    ratio to what is known without measurements (`score_unfitted`) in place of the figure.
    """
    columns = published_features(samples) if features is None else features
    measured = samples.gamma if target == "gamma" else samples.phi
    base = _unfitted(samples, target) if ratio else np.ones(len(measured))
    names = find_feature_set(_FEATURE_SET).names

    def predict(train: Mask, test: Mask) -> FloatArray:
        scaled = measured[train] / base[train]
        goal = np.log(scaled) if ratio else scaled
        forest = fit_forest(columns[train], goal, feature_names=names, trees=PUBLISHED_TREES)
        found = np.asarray(evaluate(forest, columns[test]), dtype=np.float64)
        return (np.exp(found) if ratio else found) * base[test]

    return _score(samples, target, protocol, predict, tell)


def score_unfitted(samples: Samples, target: str, protocol: str) -> Score:
    """Score what is predicted without measurements: simulation and time model under the device's figures."""
    base = _unfitted(samples, target)
    return _score(samples, target, protocol, lambda _, test: base[test], lambda: None)


def _unfitted(samples: Samples, target: str) -> FloatArray:
    models = load_models(replace(samples.device, profile={}, fingerprint=""))
    every = np.ones(len(samples.batch), dtype=np.bool_)
    if target == "gamma":
        return models.memory.predict(samples.peaks_of(every)).value
    return models.latency.predict(samples.work, samples.which, samples.batch).value


def _score(samples: Samples, target: str, protocol: str, predict: Predict, tell: Callable[[], Any]) -> Score:
    measured = samples.gamma if target == "gamma" else samples.phi
    usable = (memory_rows if target == "gamma" else latency_rows)(
        samples, np.ones(len(measured), dtype=np.bool_)
    )
    error = np.full(len(measured), np.nan)
    for train, test in splits(samples, protocol):
        rows = test & usable
        error[rows] = 100 * np.abs(predict(train & usable, rows) / measured[rows] - 1)
        tell()
    done = np.isfinite(error)
    rows_of = {name: done & (samples.network == name) for name in samples.networks}
    return Score(
        target, protocol, {n: float(error[rows].mean()) for n, rows in rows_of.items() if rows.any()}
    )
