"""The choice of points: closed forms of Bayesian linear regression."""

import numpy as np
import pytest

from torchedge.profiling.designs import NOISE, choose_points


def test_the_row_that_lowers_the_remaining_variance_most_comes_first():
    """One unknown: every row learns the same from a candidate, most from the one that reacts strongest."""
    reaction = np.array([[0.1], [0.3], [0.2]])
    chosen = choose_points([reaction], np.ones(3), np.arange(3), 1)
    assert chosen.tolist() == [1]


def test_a_second_point_goes_where_the_first_said_nothing():
    reaction = np.array([[1.0, 0.0], [0.9, 0.0], [0.0, 0.5]])
    assert choose_points([reaction], np.ones(3), np.arange(3), 2).tolist() == [0, 2]


def test_rows_count_as_they_are_weighted():
    reaction = np.eye(2)
    assert choose_points([reaction], np.array([0.1, 1.0]), np.arange(2), 1).tolist() == [1]


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
