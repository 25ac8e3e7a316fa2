"""Grows forests with scikit-learn and turns its models into flat arrays (perf4sight, section 4).

scikit-learn loads on first use. Its trees compare float32 features with float64 thresholds; a threshold
rounded *down* to float32 sends every float32 number the same way, so a converted forest takes the same walks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchedge.errors import InputError, ProfileError, needed
from torchedge.forests.trees import LEAF, MAX_DEPTH, Forest, build_forest, evaluate

Float64 = NDArray[np.float64]


def fit_forest(
    X: ArrayLike,
    y: ArrayLike,
    *,
    feature_names: Sequence[str],
    trees: int = 100,
    min_samples_leaf: int = 1,
    max_features: float = 1.0,
    seed: int = 0,
) -> Forest:
    """Grow extremely randomised trees; the same arguments and scikit-learn version give the same forest.

    X: (n, f) features. y: (n,) targets, in any unit or transform. min_samples_leaf: the fewest rows in a
    leaf; larger is smoother and smaller. max_features: share of the features tried at a split. The forest
    stores the settings and scikit-learn's version.

    Raises:
        ProfileError: a number is not finite in float32, or the trees exceed the bounds of a forest.
        MissingExtraError: scikit-learn is not installed.
    """
    rows, settings = _float32(X), {"min_samples_leaf": min_samples_leaf, "max_features": max_features}
    model = _sklearn("sklearn.ensemble").ExtraTreesRegressor(trees, random_state=seed, **settings)
    model.fit(rows, y)
    # "monotone" as files of earlier versions have it.
    used = {"trees": trees, **settings, "monotone": "", "seed": seed}
    texts = {key: str(value) for key, value in used.items()}
    return convert_model(model, rows, learner="extra_trees", feature_names=feature_names, metadata=texts)


def fit_boosted(
    X: ArrayLike,
    y: ArrayLike,
    *,
    feature_names: Sequence[str],
    weights: ArrayLike | None = None,
    metadata: Mapping[str, str] | None = None,
    **settings: Any,  # noqa: ANN401 - of scikit-learn's HistGradientBoostingRegressor
) -> Forest:
    """Grow boosted trees of (n, f) features and (n,) targets; the same arguments give the same forest.

    Raises MissingExtraError: scikit-learn is not installed.
    """
    model = _sklearn("sklearn.ensemble").HistGradientBoostingRegressor(
        early_stopping=False, random_state=0, **settings
    )
    with _sklearn("threadpoolctl").threadpool_limits(1):  # fastest for few rows, the same everywhere
        model.fit(X, y, sample_weight=weights)
    return convert_model(
        model, X, feature_names=feature_names, learner="gradient boosting", metadata=metadata
    )


def convert_model(
    model: Any,  # noqa: ANN401 - a scikit-learn model; its classes are not importable without the extra
    X: ArrayLike,
    *,
    feature_names: Sequence[str],
    learner: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Forest:
    """Turn a fitted scikit-learn regressor into a ``Forest`` that predicts the same.

    model: random forest, extremely randomised trees or histogram gradient boosting (single output, identity
    link, no categorical features). X: (n, f) the training rows; the forest stores their hull. learner: by
    default the name of the class. metadata: provenance; scikit-learn's version is added.

    Raises:
        InputError: another kind of model.
        ProfileError: a number is not finite, or the trees exceed the bounds of a forest.
        MissingExtraError: scikit-learn is not installed.
    """
    rows = _float32(X)
    raw_trees, scale, offset = _parts(model)
    arrays = [_breadth_first(tree) for tree in raw_trees]
    version = str(_sklearn("sklearn").__version__)
    return build_forest(
        learner=learner or type(model).__name__,
        feature_names=feature_names,
        feature=np.concatenate([feature for feature, _ in arrays]),
        payload=np.concatenate([payload for _, payload in arrays]),
        sizes=np.array([len(feature) for feature, _ in arrays], np.int32),
        hull=np.stack([rows.min(axis=0), rows.max(axis=0)]),
        scale=scale,
        offset=offset,
        metadata={"scikit-learn": version, "rows": str(len(rows)), **(metadata or {})},
        source=f"the trees of {type(model).__name__}",
    )


def predict_left_out(X: ArrayLike, y: ArrayLike, groups: ArrayLike, **settings: Any) -> Float64:  # noqa: ANN401
    """Predict each row (n,) with a forest grown without its group (a network, for example).

    groups: (n,) labels, two or more different ones. settings: of ``fit_forest``.
    """
    rows, targets, labels = _float32(X), np.asarray(y, np.float64), np.asarray(groups)
    predicted = np.empty(len(targets))
    for label in np.unique(labels):
        left_out = labels == label
        forest = fit_forest(rows[~left_out], targets[~left_out], **settings)
        predicted[left_out] = evaluate(forest, rows[left_out])
    return predicted


@dataclass(frozen=True, slots=True)
class _RawTree:
    """One tree as scikit-learn keeps it: nodes in any order, root first; ``left`` is negative at a leaf."""

    feature: NDArray[Any]
    threshold: Float64
    left: NDArray[Any]
    right: NDArray[Any]
    value: Float64


def _parts(model: Any) -> tuple[list[_RawTree], float, float]:  # noqa: ANN401
    """Trees, scale and offset of a scikit-learn regressor."""
    ensemble, single = _sklearn("sklearn.ensemble"), getattr(model, "n_outputs_", 1) == 1
    if isinstance(model, ensemble.RandomForestRegressor | ensemble.ExtraTreesRegressor) and single:
        raw = [estimator.tree_ for estimator in model.estimators_]
        trees = [
            _RawTree(t.feature, t.threshold, t.children_left, t.children_right, t.value[:, 0, 0]) for t in raw
        ]
        return trees, 1 / len(trees), 0.0
    if isinstance(model, ensemble.HistGradientBoostingRegressor) and model.loss in (
        "squared_error",
        "absolute_error",
        "quantile",
    ):
        trees = [_histogram_tree(stage[0].nodes) for stage in model._predictors]
        return trees, 1.0, float(np.ravel(model._baseline_prediction)[0])
    raise InputError(
        f"got a {type(model).__name__} that is no plain sum of trees; expected a scikit-learn forest of one "
        "output, or histogram boosting of squared errors: fit one"
    )


def _histogram_tree(nodes: NDArray[Any]) -> _RawTree:
    leaf = nodes["is_leaf"].astype(bool)
    left = np.where(leaf, -1, nodes["left"].astype(np.int64))
    right = np.where(leaf, -1, nodes["right"].astype(np.int64))
    return _RawTree(nodes["feature_idx"], nodes["num_threshold"], left, right, nodes["value"])


def _breadth_first(tree: _RawTree) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Feature (-1 at a leaf) and payload of each node, in the order that ``build_forest`` expects."""
    order = np.concatenate(list(_levels(tree)))
    leaf = tree.left[order] < 0
    feature = np.where(leaf, LEAF, tree.feature[order]).astype(np.int16)
    thresholds = tree.threshold[order]
    with np.errstate(over="ignore"):
        values, below = tree.value[order].astype(np.float32), thresholds.astype(np.float32)
    below = np.where(below > thresholds, np.nextafter(below, np.float32(-np.inf)), below)
    return feature, np.where(leaf, values, below)


def _levels(tree: _RawTree) -> Iterator[NDArray[np.int64]]:
    level = np.zeros(1, np.int64)
    for _ in range(MAX_DEPTH + 1):
        yield level
        inner = level[tree.left[level] >= 0]
        level = np.stack([tree.left[inner], tree.right[inner]], axis=1).ravel().astype(np.int64)
        if not len(level):
            return
    raise ProfileError(f"the trees are deeper than {MAX_DEPTH} levels, expected less: raise min_samples_leaf")


def _float32(X: ArrayLike) -> NDArray[np.float32]:
    """Rows as scikit-learn's trees compare them."""
    with np.errstate(over="ignore"):
        rows = np.asarray(X).astype(np.float32)
    if not np.isfinite(rows).all():
        raise ProfileError("a feature of the measured rows is not finite in float32; drop that row")
    return rows


def _sklearn(module: str) -> Any:  # noqa: ANN401
    """A scikit-learn module, imported now."""
    with needed("scikit-learn", extra="fit", purpose="fitting a forest"):
        return importlib.import_module(module)
