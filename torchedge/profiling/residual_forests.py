"""The forest that corrects an adapted model: none, another device's shrunk, or one of the device's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.forests.trees import Forest, build_forest, evaluate
from torchedge.profiling.designs import NOISE
from torchedge.profiling.forest_fitting import fit_forest, predict_left_out

__all__ = ["OWN_FOREST", "residual_forest"]

FloatArray = npt.NDArray[np.float64]

OWN_FOREST = 60
"""Points from which a forest of the device's own is tried."""

_FOREST_RIDGE = 5.0
"""Points' worth of evidence against the base's forest."""


def residual_forest(
    base: Forest | None,
    seen: FloatArray,
    own_features: FloatArray,
    own_names: tuple[str, ...],
    missed: FloatArray,
    groups: npt.NDArray[np.intp],
) -> tuple[Forest, FloatArray]:
    """Return the forest that leaves least of the errors of rows left out, and what it leaves of them.

    seen: what the base's forest reads.
    """
    own = np.stack([own_features.min(axis=0), own_features.max(axis=0)]).astype(np.float32)
    choices: list[tuple[Callable[[], Forest], FloatArray]] = [(lambda: _constant(own_names, own), missed)]
    if base is not None:
        says, shrunk = evaluate(base, seen), np.empty(len(missed))
        for group in np.unique(groups):
            out = groups == group
            shrunk[out] = missed[out] - _share(says[~out], missed[~out]) * says[out]
        share = _share(says, missed)
        choices.append((lambda: replace(base, scale=base.scale * share, offset=base.offset * share), shrunk))
    if len(missed) >= OWN_FOREST and len(np.unique(groups)) > 1:
        settings: dict[str, Any] = {"feature_names": own_names, "min_samples_leaf": 4, "max_features": 0.5}
        told = predict_left_out(own_features, missed, groups, **settings)
        choices.append((lambda: fit_forest(own_features, missed, **settings), missed - told))
    make, left = min(choices, key=lambda choice: float(np.abs(choice[1]).mean()))
    return make(), left


def _share(says: FloatArray, missed: FloatArray) -> float:
    """Return how much of the base's forest the errors confirm, 0 to 1; few points confirm little."""
    return float(np.clip(says @ missed / (says @ says + _FOREST_RIDGE * NOISE**2), 0.0, 1.0))


def _constant(names: tuple[str, ...], hull: npt.NDArray[np.float32]) -> Forest:
    """A forest that corrects nothing, and knows which features were measured."""
    return build_forest(
        learner="constant",
        feature_names=names,
        feature=np.array([-1], np.int16),
        payload=np.zeros(1, np.float32),
        sizes=np.ones(1, np.int32),
        hull=hull,
        scale=1.0,
    )
