"""Growing forests with scikit-learn and turning its models into flat arrays (perf4sight, section 4).

scikit-learn loads on first use. Its trees compare float32 features with float64 thresholds; a threshold
rounded *down* to float32 sends every float32 number the same way, so a converted forest takes the same walks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchedge.errors import InputError, MissingExtraError, ProfileError
from torchedge.forests.trees import LEAF, MAX_DEPTH, Forest, build_forest, evaluate

__all__ = ["Learner", "conformal_quantiles", "convert_model", "fit_forest", "predict_left_out"]

Learner = Literal["extra_trees", "random_forest"]
Float64 = NDArray[np.float64]


def fit_forest(
    X: ArrayLike,
    y: ArrayLike,
    *,
    feature_names: Sequence[str],
    learner: Learner = "extra_trees",
    trees: int = 100,
    min_samples_leaf: int = 1,
    max_features: float | Literal["sqrt", "log2"] = 1.0,
    monotone: Mapping[str, int] | None = None,
    sample_weight: ArrayLike | None = None,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> Forest:
    """Grow a forest; the same arguments and scikit-learn version give the same forest.

    Args:
        X: (n, f) finite features.
        y: (n,) finite targets, in whatever unit or transform the caller chose.
        feature_names: the ``f`` names, in column order.
        learner: ``extra_trees`` (perf4sight's) or ``random_forest``.
        trees: how many trees.
        min_samples_leaf: the fewest rows in a leaf; larger is smoother and smaller.
        max_features: share of the features tried at a split, or the square root or logarithm of their number.
        monotone: direction by feature name: 1 the target never falls with the feature, -1 it never rises.
        sample_weight: (n,) weights of the rows.
        seed: of every random choice.
        metadata: provenance to keep with the forest; the settings and scikit-learn's version are added.

    Raises:
        InputError: wrong shapes, numbers, names or settings.
        ProfileError: the trees pass the bounds of a forest (raise ``min_samples_leaf``).
        MissingExtraError: scikit-learn is not installed.
    """
    rows, targets, weights = _check_table(X, y, sample_weight, feature_names)
    if trees < 1 or min_samples_leaf < 1:
        raise InputError(
            f"got {trees} trees and min_samples_leaf {min_samples_leaf}, expected 1 or more: raise them"
        )
    ensemble = _sklearn("sklearn.ensemble")
    classes = {"extra_trees": "ExtraTreesRegressor", "random_forest": "RandomForestRegressor"}
    if learner not in classes:
        raise InputError(f"got learner {learner!r}, expected {' or '.join(classes)}: choose one of them")
    settings: dict[str, Any] = {
        "n_estimators": trees,
        "min_samples_leaf": min_samples_leaf,
        "max_features": max_features,
        "random_state": seed,
    }
    if monotone:  # scikit-learn 1.3 lacks the argument
        settings["monotonic_cst"] = _directions(monotone, feature_names)
    try:
        model = getattr(ensemble, classes[learner])(**settings).fit(rows, targets, weights)
    except ValueError as error:
        raise InputError(f"scikit-learn refused the fit: {error}: change the setting it names") from error
    used = {
        "trees": str(trees),
        "min_samples_leaf": str(min_samples_leaf),
        "max_features": str(max_features),
        "monotone": ", ".join(f"{name} {sign:+d}" for name, sign in sorted((monotone or {}).items())),
        "seed": str(seed),
    }
    return convert_model(
        model, rows, learner=learner, feature_names=feature_names, metadata={**used, **(metadata or {})}
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
        model: random forest, extremely randomised trees, gradient boosting or histogram gradient boosting
            (single output, identity link, no categorical features).
        X: (n, f) the training rows, of which the hull is kept.
        feature_names: the ``f`` names, in column order.
        learner: how to call the learner; by default the class's name.
        metadata: provenance to keep with the forest; scikit-learn's version is added.

    Raises:
        InputError: another kind of model, or rows that do not match it.
        ProfileError: the trees pass the bounds of a forest.
        MissingExtraError: scikit-learn is not installed.
    """
    rows, _, _ = _check_table(X, np.zeros(len(np.asarray(X))), None, feature_names)
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


def predict_left_out(
    X: ArrayLike,
    y: ArrayLike,
    groups: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    **settings: Any,  # noqa: ANN401
) -> Float64:
    """Predict each row with a forest grown without its group (a network, say): (n,), for honest residuals.

    Args:
        X: (n, f) features.
        y: (n,) targets.
        groups: (n,) labels; one forest is grown for each.
        sample_weight: (n,) weights of the rows.
        settings: as ``fit_forest`` takes them.

    Raises:
        InputError: fewer than two groups, or anything ``fit_forest`` refuses.
    """
    rows, targets, weights = _check_table(X, y, sample_weight, settings["feature_names"])
    labels = _check_groups(groups, len(targets))
    distinct = np.unique(labels)
    if len(distinct) < 2:
        raise InputError(f"got {len(distinct)} group, expected two or more: label the rows by network")
    result = np.empty(len(targets))
    for label in distinct:
        left_out = labels == label
        kept_weights = None if weights is None else weights[~left_out]
        forest = fit_forest(rows[~left_out], targets[~left_out], sample_weight=kept_weights, **settings)
        result[left_out] = evaluate(forest, rows[left_out])
    return result


def conformal_quantiles(residuals: ArrayLike, groups: ArrayLike | None, level: float) -> tuple[float, float]:
    """Two-sided split-conformal quantiles of left-out residuals (Lei et al. 2018; equal tails).

    With groups every group weighs the same, however many rows it has. The finite-sample term (one unseen row
    at either end) counts rows, not groups: coverage on a new group is an empirical figure, to be measured.

    Args:
        residuals: (n,) signed residuals of rows that the model had not seen.
        groups: (n,) labels, or None for rows that weigh the same.
        level: the coverage to aim at, such as 0.9.

    Returns:
        (low, high): a new residual falls between them with probability ``level``.

    Raises:
        InputError: a level outside (0, 1), or too few residuals for it.
    """
    values = np.asarray(residuals, np.float64)
    if not 0 < level < 1:
        raise InputError(f"got level {level}, expected a number between 0 and 1: 0.9 is usual")
    tail = (1 - level) / 2
    needed = int(np.ceil(1 / tail - 1e-9)) - 1
    if values.ndim != 1 or len(values) < needed or not np.isfinite(values).all():
        raise InputError(
            f"got residuals of shape {values.shape}, expected {needed} or more finite ones "
            f"for level {level}: measure more rows or lower the level"
        )
    weights = np.full(len(values), 1 / len(values))
    if groups is not None:
        _, member, counts = np.unique(
            _check_groups(groups, len(values)), return_inverse=True, return_counts=True
        )
        weights = 1 / (len(counts) * counts[member])
    unseen = 1 / (len(values) + 1)
    upper = _weighted_quantile(values, weights * (1 - unseen), 1 - tail)
    return -_weighted_quantile(-values, weights * (1 - unseen), 1 - tail), upper


def _weighted_quantile(values: Float64, weights: Float64, share: float) -> float:
    """The smallest value with the share of the weight at or below it; weight missing to 1 lies above all."""
    order = np.argsort(values, kind="stable")
    reached = np.searchsorted(np.cumsum(weights[order]), share - 1e-12)
    return float(values[order][min(int(reached), len(values) - 1)])


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
    if isinstance(model, ensemble.GradientBoostingRegressor):
        trees = [_tree_arrays(estimator.tree_) for estimator in model.estimators_[:, 0]]
        return trees, float(model.learning_rate), _boosting_offset(model)
    if isinstance(model, ensemble.HistGradientBoostingRegressor):
        if model.loss not in ("squared_error", "absolute_error", "quantile"):
            raise InputError(
                f"got a model with loss {model.loss}, expected squared_error: only sums of trees convert"
            )
        trees = [_histogram_tree(stage[0].nodes) for stage in model._predictors]
        return trees, 1.0, float(np.ravel(model._baseline_prediction)[0])
    raise InputError(
        f"got a {type(model).__name__}, expected a scikit-learn forest or gradient boosting: fit one of these"
    )


def _boosting_offset(model: Any) -> float:  # noqa: ANN401
    """The constant that gradient boosting starts from."""
    start = model.init_
    if isinstance(start, str) and start == "zero":
        return 0.0
    if not hasattr(start, "constant_"):
        raise InputError(
            f"got boosting that starts from {start!r}, expected a constant: fit it with init=None"
        )
    return float(np.ravel(start.constant_)[0])


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
    """Feature (-1 at a leaf) and payload of each node, in the order that ``build_forest`` wants."""
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


def _directions(monotone: Mapping[str, int], names: Sequence[str]) -> list[int]:
    unknown = sorted(set(monotone) - set(names))
    if unknown or not set(monotone.values()) <= {-1, 0, 1}:
        wrong = f"unknown feature {unknown[0]!r}" if unknown else f"values {sorted(set(monotone.values()))}"
        raise InputError(f"got monotone with {wrong}, expected -1, 0 or 1 by feature name: correct it")
    return [monotone.get(name, 0) for name in names]


def _check_table(
    X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, names: Sequence[str]
) -> tuple[NDArray[np.float32], Float64, Float64 | None]:
    """Rows as float32 (what scikit-learn's trees see), targets and weights."""
    try:
        with np.errstate(over="ignore"):
            rows = np.asarray(X).astype(np.float32)
            targets = np.asarray(y, np.float64)
            in_leaves = targets.astype(np.float32)
        weights = None if sample_weight is None else np.asarray(sample_weight, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"got X, y or weights that are no numbers ({error}), expected arrays of numbers"
        ) from error
    if rows.ndim != 2 or rows.shape[1] != len(names) or targets.shape != rows.shape[:1] or not len(rows):
        raise InputError(
            f"got X {rows.shape}, y {targets.shape} and {len(names)} names, "
            "expected (n, f), (n,) and f: one row a measurement, one name a column"
        )
    if weights is not None and (
        weights.shape != targets.shape or not (weights >= 0).all() or not weights.any()
    ):
        raise InputError(
            f"got weights {weights.shape}, expected {targets.shape}, none negative: one a measurement"
        )
    for what, numbers in (
        ("X", rows),
        ("y", in_leaves),
        ("sample_weight", targets if weights is None else weights),
    ):
        if not np.isfinite(numbers).all():
            raise InputError(
                f"got a number in {what} that is not finite in float32, expected finite: drop that row"
            )
    return rows, targets, weights


def _check_groups(groups: ArrayLike, rows: int) -> NDArray[Any]:
    labels = np.asarray(groups)
    if labels.shape != (rows,):
        raise InputError(f"got group labels of shape {labels.shape}, expected ({rows},): one label a row")
    return labels


def _sklearn(module: str) -> Any:  # noqa: ANN401
    """A scikit-learn module, imported now."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("scikit-learn", extra="fit", purpose="fitting a forest") from error
