"""Parts of a transfer against what they stand for: left-out fits, shrunk forests, a board's own data."""

import numpy as np
import pytest

from torchedge.forests.trees import evaluate
from torchedge.profiling.transfer import NOISE, OWN_FOREST, _left_out, choose_points, residual_forest

pytest.importorskip("sklearn")


@pytest.fixture
def random():
    return np.random.default_rng(0)


def test_left_out_errors_are_those_of_fits_without_the_group(random):
    """Of a linear model they are exact."""
    reactions, measured = random.normal(size=(9, 3)), random.normal(size=9)
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


@pytest.fixture
def base_forest(random):
    from torchedge.profiling.forest_fitting import fit_forest

    rows = random.random((200, 2))
    return fit_forest(rows, rows[:, 0] - 0.5, feature_names=("a", "b"), trees=20)


def test_a_base_forest_that_the_points_confirm_is_kept(base_forest, random):
    seen = random.random((20, 2))
    missed = evaluate(base_forest, seen)
    forest, left = residual_forest(base_forest, seen, seen, ("a", "b"), missed, np.arange(20))
    assert np.abs(left).mean() < 0.2 * np.abs(missed).mean()
    assert 0.9 < forest.scale / base_forest.scale <= 1


def test_a_base_forest_that_the_points_contradict_is_dropped(base_forest, random):
    seen = random.random((20, 2))
    missed = -evaluate(base_forest, seen)
    forest, left = residual_forest(base_forest, seen, seen, ("a", "b"), missed, np.arange(20))
    assert left == pytest.approx(missed) and evaluate(forest, seen) == pytest.approx(np.zeros(20))
    assert forest.low == pytest.approx(seen.min(axis=0).astype(np.float32))


@pytest.mark.slow
def test_many_points_grow_a_forest_of_their_own(random):
    seen = random.random((4 * OWN_FOREST, 2))
    missed = np.where(seen[:, 1] > 0.5, 0.2, -0.2)
    forest, left = residual_forest(None, seen, seen, ("a", "b"), missed, np.arange(len(seen)) % 8)
    assert forest.learner == "extra_trees" and np.abs(left).mean() < 0.1


# which points to measure ------------------------------------------------------------------------------------


def test_only_candidates_are_chosen_and_none_twice():
    reaction = np.random.default_rng(0).normal(size=(20, 4))
    candidates = np.array([3, 5, 8, 13])
    chosen = choose_points([reaction], np.ones(20), candidates, 10)
    assert sorted(chosen.tolist()) == candidates.tolist()


def test_every_choice_is_the_best_of_all_by_the_posterior_covariance():
    """Against the covariance computed from nothing, for each candidate."""
    random = np.random.default_rng(1)
    reaction, weights = random.normal(size=(12, 3)), random.random(12)

    def remaining(points):
        precision = np.eye(3) + reaction[points].T @ reaction[points] / NOISE**2
        return weights @ np.einsum("ij,jk,ik->i", reaction, np.linalg.inv(precision), reaction)

    chosen = choose_points([reaction], weights, np.arange(12), 4).tolist()
    for place in range(4):
        before = chosen[:place]
        others = [row for row in range(12) if row not in before]
        best = min(others, key=lambda row: remaining([*before, row]))
        assert remaining([*before, chosen[place]]) == pytest.approx(remaining([*before, best]))


def test_what_several_figures_tell_adds_up():
    one, two = np.array([[1.0], [0.0], [0.9]]), np.array([[0.0], [1.0], [0.9]])
    assert choose_points([one, two], np.ones(3), np.arange(3), 1).tolist() == [2]


@pytest.mark.slow
def test_thirty_points_of_a_board_reach_one_and_a_half_times_the_error_of_a_full_fit(shared_data):
    """H200 to Jetson TX2, as `benchmarks/accuracy/transfer.py` prints it for more seeds and sizes."""
    from torchedge.devices import find_device
    from torchedge.profiling.accuracy import TRAINING_LEVELS
    from torchedge.profiling.latency_fitting import fit_latency, predict_latency
    from torchedge.profiling.samples import read_samples
    from torchedge.profiling.transfer import adapt_models, base_of, select_points

    samples = read_samples(shared_data / "jetson-tx2", find_device("jetson-tx2"))["train"]
    base = base_of("nvidia-h200", "train")
    assert base is not None
    pool = np.isin(samples.level, TRAINING_LEVELS)
    test = samples.usable("latency", ~pool)

    def error(model):
        return float(np.abs(predict_latency(model, samples, test).value / samples.phi[test] - 1).mean())

    # One choice of points is off by 10 % either way: the mean of three.
    adapted = [adapt_models(base, samples, select_points(base, samples, pool, 30, seed)) for seed in range(3)]
    mean = np.mean([error(models.latency) for models in adapted])
    assert mean < 1.5 * error(fit_latency(samples, pool, errors=False))
