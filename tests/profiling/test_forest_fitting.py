"""Grown forests predict what scikit-learn predicts, deterministically; bad input is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.errors import InputError, ProfileError
from torchedge.forests.trees import evaluate
from torchedge.profiling import forest_fitting
from torchedge.profiling.forest_fitting import convert_model, fit_forest, predict_left_out

ensemble = pytest.importorskip("sklearn.ensemble")

Table = tuple[np.ndarray, np.ndarray, list[str]]


def make_table(seed: int, rows: int = 120, features: int = 5, spread: float = 3.0) -> Table:
    """Features over many orders of magnitude, some with ties, and a target that depends on them."""
    rng = np.random.default_rng(seed)
    X = np.exp(rng.normal(0, spread, (rows, features)))
    X[:, -1] = rng.integers(0, 4, rows)
    y = X[:, 0] ** 0.5 * (1 + X[:, -1]) + rng.normal(0, 0.1, rows)
    return X, y, [f"f{i}" for i in range(features)]


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**31),
    features=st.integers(1, 9),
    rows=st.integers(2, 80),
    leaf=st.integers(1, 5),
    spread=st.floats(0, 12),
)
@settings(max_examples=40)
def test_agrees_with_scikit_learn(seed: int, features: int, rows: int, leaf: int, spread: float) -> None:
    X, y, names = make_table(seed, rows, features, spread)
    forest = fit_forest(X, y, feature_names=names, trees=7, min_samples_leaf=leaf, seed=seed)
    model = ensemble.ExtraTreesRegressor(7, min_samples_leaf=leaf, random_state=seed).fit(X, y)
    unseen = np.concatenate(
        [X, np.nextafter(X.astype(np.float32), 0), make_table(seed + 1, 50, features, spread)[0]]
    )
    np.testing.assert_allclose(evaluate(forest, unseen), model.predict(unseen), rtol=1e-5)


def test_thresholds_between_float32_numbers_send_neighbours_the_same_way() -> None:
    """Midpoints of adjacent float32 numbers have no float32 of their own: rounding down keeps the walk."""
    start = np.float32(16777216.0)
    column = [start]
    for _ in range(63):
        column.append(np.nextafter(column[-1], np.float32(np.inf)))
    X = np.array(column, np.float32)[:, None]
    y = np.arange(64.0) ** 2
    model = ensemble.RandomForestRegressor(20, random_state=0).fit(X, y)
    forest = convert_model(model, X, feature_names=["x"])
    np.testing.assert_allclose(evaluate(forest, X), model.predict(X), rtol=1e-6)
    assert (
        model.estimators_[0].tree_.threshold.astype(np.float32) > model.estimators_[0].tree_.threshold
    ).any()


@pytest.mark.parametrize(
    "grow",
    [
        lambda: ensemble.HistGradientBoostingRegressor(random_state=0, max_iter=60, min_samples_leaf=3),
        lambda: ensemble.HistGradientBoostingRegressor(random_state=0, max_iter=30, loss="absolute_error"),
    ],
    ids=["squared", "absolute"],
)
def test_boosting_converts(grow: Callable[[], Any]) -> None:
    X, y, names = make_table(3, rows=300)
    rows = X.astype(np.float32)
    model = grow().fit(rows, y)
    forest = convert_model(model, rows, feature_names=names)
    np.testing.assert_allclose(
        evaluate(forest, rows), model.predict(rows), rtol=1e-5, atol=1e-4 * np.ptp(y) / 100
    )


def test_models_that_are_no_plain_sum_are_refused() -> None:
    X, y, names = make_table(4)
    positive = np.abs(y) + 1
    poisson = ensemble.HistGradientBoostingRegressor(loss="poisson", max_iter=3).fit(X, positive)
    two = ensemble.RandomForestRegressor(2).fit(X, np.stack([y, y], axis=1))
    boosting = ensemble.GradientBoostingRegressor(n_estimators=2).fit(X, y)
    for model in (poisson, two, boosting, object()):
        with pytest.raises(InputError, match="expected"):
            convert_model(model, X, feature_names=names)


def test_left_out_predictions_never_saw_their_group() -> None:
    X, y, names = make_table(7, rows=90)
    groups = np.repeat(["a", "b", "c"], 30)
    left_out = predict_left_out(X, y, groups, feature_names=names, trees=5, seed=3)
    other = groups != "b"
    forest = fit_forest(X[other], y[other], feature_names=names, trees=5, seed=3)
    assert np.array_equal(left_out[~other], evaluate(forest, X[~other]))


@pytest.mark.parametrize(
    "change",
    [{"y": np.full(120, 1e39)}, {"X": np.full((120, 5), 1e39)}, {"feature_names": ["a"]}],
    ids=["targets", "features", "names"],
)
def test_numbers_and_names_that_no_forest_can_have_are_refused(change: dict[str, Any]) -> None:
    X, y, names = make_table(8)
    arguments: dict[str, Any] = {"X": X, "y": y, "feature_names": names, "trees": 2, **change}
    with pytest.raises(ProfileError):
        fit_forest(arguments.pop("X"), arguments.pop("y"), **arguments)


def test_a_tree_deeper_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest_fitting, "MAX_DEPTH", 3)
    X, y, names = make_table(9)
    with pytest.raises(ProfileError, match="min_samples_leaf"):
        fit_forest(X, y, feature_names=names, trees=1)
    assert fit_forest(X, y, feature_names=names, trees=1, min_samples_leaf=50).depths.max() <= 3
