"""Parts of a transfer against what they stand for: left-out fits, shrunk forests, a board's own data."""

import numpy as np
import pytest

from torchedge.forests.trees import evaluate
from torchedge.prediction.intervals import GRID, assumed_errors
from torchedge.profiling.designs import NOISE

pytest.importorskip("sklearn")

RANDOM = np.random.default_rng(0)


def test_left_out_errors_are_those_of_fits_without_the_group():
    """Of a linear model they are exact."""
    from torchedge.profiling.transfer import _left_out

    reactions, measured = RANDOM.normal(size=(9, 3)), RANDOM.normal(size=9)
    groups = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])

    def fit(rows):
        precision = reactions[rows].T @ reactions[rows] / NOISE**2 + np.eye(3)
        return np.linalg.solve(precision, reactions[rows].T @ measured[rows] / NOISE**2)

    errors = measured - reactions @ fit(np.ones(9, dtype=bool))
    expected = np.empty(9)
    for group in range(3):
        out = groups == group
        expected[out] = measured[out] - reactions[out] @ fit(~out)
    assert _left_out(errors, reactions, groups) == pytest.approx(expected)


def test_few_points_give_wider_quantiles_of_the_same_errors():
    from torchedge.profiling.transfer import _student

    errors = np.array([0.05, -0.05, 0.04])
    few = _student(errors, np.ones(3), 3, assumed_errors(0.01))
    many = _student(np.tile(errors, 3), np.ones(9), 9, assumed_errors(0.01))
    assert np.interp(0.9, GRID, few.size) > np.interp(0.9, GRID, many.size) > 0.08
    wide = _student(errors, np.ones(3), 3, assumed_errors(0.5))
    assert np.interp(0.9, GRID, wide.size) > np.interp(0.9, GRID, few.size)


@pytest.fixture
def base_forest():
    from torchedge.profiling.forest_fitting import fit_forest

    rows = RANDOM.random((200, 2))
    return fit_forest(rows, rows[:, 0] - 0.5, feature_names=("a", "b"), trees=20)


def test_a_base_forest_that_the_points_confirm_is_kept(base_forest):
    from torchedge.profiling.residual_forests import residual_forest

    seen = RANDOM.random((20, 2))
    missed = evaluate(base_forest, seen)
    forest, left = residual_forest(base_forest, seen, seen, ("a", "b"), missed, np.arange(20))
    assert np.abs(left).mean() < 0.2 * np.abs(missed).mean()
    assert 0.9 < forest.scale / base_forest.scale <= 1


def test_a_base_forest_that_the_points_contradict_is_dropped(base_forest):
    from torchedge.profiling.residual_forests import residual_forest

    seen = RANDOM.random((20, 2))
    missed = -evaluate(base_forest, seen)
    forest, left = residual_forest(base_forest, seen, seen, ("a", "b"), missed, np.arange(20))
    assert left == pytest.approx(missed) and evaluate(forest, seen) == pytest.approx(np.zeros(20))
    assert forest.low == pytest.approx(seen.min(axis=0).astype(np.float32))


def test_many_points_grow_a_forest_of_their_own():
    from torchedge.profiling.residual_forests import OWN_FOREST, residual_forest

    seen = RANDOM.random((4 * OWN_FOREST, 2))
    missed = np.where(seen[:, 1] > 0.5, 0.2, -0.2)
    forest, left = residual_forest(None, seen, seen, ("a", "b"), missed, np.arange(len(seen)) % 8)
    assert forest.learner == "extra_trees" and np.abs(left).mean() < 0.1


@pytest.mark.slow
def test_thirty_points_of_a_board_reach_one_and_a_half_times_the_error_of_a_full_fit(shared_data):
    """H200 to Jetson TX2, as `benchmarks/transfer.py` prints it for more seeds and sizes."""
    from torchedge.devices import find_device
    from torchedge.profiling.accuracy import TRAINING_LEVELS
    from torchedge.profiling.measured import read_measured
    from torchedge.profiling.training_fit import fit_latency, latency_of, latency_rows
    from torchedge.profiling.transfer import adapt_models, select_points
    from torchedge.profiling.transfer_folders import base_of

    samples, _ = read_measured(shared_data / "jetson-tx2", find_device("jetson-tx2"))["train"]
    base = base_of("nvidia-h200", "train")
    assert base is not None
    pool = np.isin(samples.level, TRAINING_LEVELS)
    test = ~pool & latency_rows(samples, np.ones(len(pool), dtype=bool))

    def error(model):
        return float(np.abs(latency_of(model, samples, test).value / samples.phi[test] - 1).mean())

    adapted = adapt_models(base, samples, select_points(base, samples, pool, 30))
    assert error(adapted.latency) < 1.5 * error(fit_latency(samples, pool, errors=False))
