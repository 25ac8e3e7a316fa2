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
    metadata: Mapping[str, str] | None = None,
) -> Forest:
    """Grow extremely randomised trees; the same arguments and scikit-learn version give the same forest.

    Args:
        X: (n, f) finite features.
        y: (n,) finite targets, in any unit or transform.
        feature_names: the ``f`` names, in column order.
        trees: how many trees.
        min_samples_leaf: the fewest rows in a leaf; larger is smoother and smaller.
        max_features: share of the features tried at a split.
        seed: of every random choice.
        metadata: provenance to store with the forest; the settings and scikit-learn's version are added.

    Raises:
        InputError: wrong shapes, numbers, names or settings.
        ProfileError: the trees exceed the bounds of a forest (raise ``min_samples_leaf``).
        MissingExtraError: scikit-learn is not installed.
    """
    rows, targets = _check_table(X, y, feature_names)
    if trees < 1 or min_samples_leaf < 1:
        raise InputError(
            f"got {trees} trees and min_samples_leaf {min_samples_leaf}, expected 1 or more: raise them"
        )
    model = _sklearn("sklearn.ensemble").ExtraTreesRegressor(
        n_estimators=trees, min_samples_leaf=min_samples_leaf, max_features=max_features, random_state=seed
    )
    try:
        model.fit(rows, targets)
    except ValueError as error:
        raise InputError(f"scikit-learn rejected the fit: {error}: change the setting it names") from error
    used = {
        "trees": str(trees),
        "min_samples_leaf": str(min_samples_leaf),
        "max_features": str(max_features),
        "monotone": "",  # so that the files of equal forests stay equal
        "seed": str(seed),
    }
    return convert_model(
        model, rows, learner="extra_trees", feature_names=feature_names, metadata={**used, **(metadata or {})}
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

    Args:
        model: random forest, extremely randomised trees or histogram gradient boosting (single output,
            identity link, no categorical features).
        X: (n, f) the training rows; the forest stores their hull.
        feature_names: the ``f`` names, in column order.
        learner: name of the learner; by default the class's.
        metadata: provenance to store with the forest; scikit-learn's version is added.

    Raises:
        InputError: another kind of model, or rows that do not match it.
        ProfileError: the trees exceed the bounds of a forest.
        MissingExtraError: scikit-learn is not installed.
    """
    rows, _ = _check_table(X, np.zeros(len(np.asarray(X))), feature_names)
    raw_trees, scale, offset = _parts(model)
    if rows.shape[1] != model.n_features_in_:
        raise InputError(
            f"got rows of {rows.shape[1]} features, expected the {model.n_features_in_} of the model: "
            "give its training rows"
        )
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

    Args:
        X: (n, f) features.
        y: (n,) targets.
        groups: (n,) labels; one forest is grown for each.
        settings: of ``fit_forest``.

    Raises:
        InputError: fewer than two groups, or an argument that ``fit_forest`` rejects.
    """
    rows, targets = _check_table(X, y, settings["feature_names"])
    labels = np.asarray(groups)
    if labels.shape != targets.shape:
        raise InputError(
            f"got group labels of shape {labels.shape}, expected {targets.shape}: one label a row"
        )
    distinct = np.unique(labels)
    if len(distinct) < 2:
        raise InputError(f"got {len(distinct)} group, expected two or more: label the rows by network")
    predicted = np.empty(len(targets))
    for label in distinct:
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
    ensemble = _sklearn("sklearn.ensemble")
    if getattr(model, "n_outputs_", 1) != 1:
        raise InputError(
            f"got a model of {model.n_outputs_} outputs, expected one: fit one forest for each target"
        )
    if isinstance(model, ensemble.RandomForestRegressor | ensemble.ExtraTreesRegressor):
        trees = [_tree_arrays(estimator.tree_) for estimator in model.estimators_]
        return trees, 1 / len(trees), 0.0
    if isinstance(model, ensemble.HistGradientBoostingRegressor):
        if model.loss not in ("squared_error", "absolute_error", "quantile"):
            raise InputError(
                f"got a model with loss {model.loss}, expected squared_error: only sums of trees convert"
            )
        trees = [_histogram_tree(stage[0].nodes) for stage in model._predictors]
        return trees, 1.0, float(np.ravel(model._baseline_prediction)[0])
    raise InputError(
        f"got a {type(model).__name__}, expected a scikit-learn forest or histogram boosting: fit one"
    )


def _tree_arrays(tree: Any) -> _RawTree:  # noqa: ANN401
    return _RawTree(
        tree.feature, tree.threshold, tree.children_left, tree.children_right, tree.value[:, 0, 0]
    )


def _histogram_tree(nodes: NDArray[Any]) -> _RawTree:
    if nodes["is_categorical"].any():
        raise InputError(
            "got a tree that splits on categories, expected numbers: encode the categories first"
        )
    leaf = nodes["is_leaf"].astype(bool)
    left = np.where(leaf, -1, nodes["left"].astype(np.int64))
    right = np.where(leaf, -1, nodes["right"].astype(np.int64))
    return _RawTree(nodes["feature_idx"], nodes["num_threshold"], left, right, nodes["value"])


def _breadth_first(tree: _RawTree) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Feature (-1 at a leaf) and payload of each node, in the order that ``build_forest`` expects."""
    order = np.concatenate(list(_levels(tree)))
    leaf = tree.left[order] < 0
    feature = np.where(leaf, LEAF, tree.feature[order]).astype(np.int16)
    thresholds = _round_down(tree.threshold[order])
    return feature, np.where(leaf, tree.value[order].astype(np.float32), thresholds)


def _levels(tree: _RawTree) -> Iterator[NDArray[np.int64]]:
    level = np.zeros(1, np.int64)
    for _ in range(MAX_DEPTH + 1):
        yield level
        inner = level[tree.left[level] >= 0]
        level = np.stack([tree.left[inner], tree.right[inner]], axis=1).ravel().astype(np.int64)
        if not len(level):
            return
    raise ProfileError(f"the trees are deeper than {MAX_DEPTH} levels, expected less: raise min_samples_leaf")


def _round_down(thresholds: Float64) -> NDArray[np.float32]:
    """The largest float32 numbers not above the thresholds."""
    with np.errstate(over="ignore"):
        nearest = thresholds.astype(np.float32)
    return np.where(nearest > thresholds, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _check_table(X: ArrayLike, y: ArrayLike, names: Sequence[str]) -> tuple[NDArray[np.float32], Float64]:
    """Rows as float32, as scikit-learn's trees compare them, and targets."""
    try:
        with np.errstate(over="ignore"):
            rows = np.asarray(X).astype(np.float32)
            targets = np.asarray(y, np.float64)
            in_leaves = targets.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"got X or y that are no numbers ({error}), expected arrays of numbers: convert them"
        ) from error
    if rows.ndim != 2 or rows.shape[1] != len(names) or targets.shape != rows.shape[:1] or not len(rows):
        raise InputError(
            f"got X {rows.shape}, y {targets.shape} and {len(names)} names, "
            "expected (n, f), (n,) and f: one row a measurement, one name a column"
        )
    for what, numbers in (("X", rows), ("y", in_leaves)):
        if not np.isfinite(numbers).all():
            raise InputError(
                f"got a number in {what} that is not finite in float32, expected finite: drop that row"
            )
    return rows, targets


def _sklearn(module: str) -> Any:  # noqa: ANN401
    """A scikit-learn module, imported now."""
    with needed("scikit-learn", extra="fit", purpose="fitting a forest"):
        return importlib.import_module(module)
