"""The search for a kernel's fastest schedule among predicted ones, one measurement after the other."""

import numpy as np

from torchedge.lowering.trials import COMMON, MORE, OWN, Trials, known_of, next_trials, search
from torchedge.textures.coefficients import KernelErrors, TimedKernel


def trials(predicted, times=None, fields=None, shares=None):
    count = len(predicted)
    fields = np.arange(count)[:, None] * np.ones(12, int) if fields is None else fields
    shares = np.zeros((count, 2)) if shares is None else shares
    return Trials(np.asarray(fields), np.asarray(shares, float), np.array(predicted, float), times or {})


def test_without_times_the_least_predictions_come_first():
    assert next_trials([trials([3, 1, np.inf, 2])], 2) == [[1, 3]]
    assert next_trials([trials([3, 1, np.inf, 2])], 9) == [[1, 3, 0]]
    assert next_trials([], 2) == []


def test_nothing_is_timed_twice_and_what_does_not_run_is_no_guide():
    kernel = trials([3, 1, 2], {1: np.inf})
    assert next_trials([kernel], 3) == [[2, 0]]


def test_an_error_is_expected_of_schedules_that_are_alike_and_of_other_kernels_too():
    # Two families of schedules; the best of the first is ten times as slow as predicted.
    fields = np.repeat([[0], [1]], 3, axis=0) * np.ones(12, int)
    fields[:, 0] = np.arange(6)
    predicted = [1.0, 1.1, 1.2, 1.5, 1.6, 1.7]
    known = trials(predicted, {0: 10.0}, fields)
    assert next_trials([known], 1) == [[3]]
    assert next_trials([trials(predicted, {}, fields)], 1) == [[0]]
    assert next_trials([trials(predicted, {}, fields), known], 1) == [[3], [3]]
    assert next_trials([trials(predicted, {}, fields)], 1, [known.known()]) == [[3]]


def test_an_error_is_expected_where_the_same_term_decides():
    # One field differs between all; where latency decides, predictions are too small.
    shares = np.array([[1, 0], [1, 0], [0, 1], [0, 1]])
    kernel = trials([1.0, 1.1, 1.3, 1.4], {0: 10.0}, np.arange(4)[:, None], shares)
    assert next_trials([kernel], 1) == [[2]]
    assert next_trials([trials([1.0, 1.1, 1.3, 1.4], {0: 10.0}, np.arange(4)[:, None])], 1) == [[1]]


def test_candidates_that_are_timed_at_once_differ():
    # Two families; nothing is known of either, and the second is predicted little slower.
    fields = np.repeat([[0], [1]], 3, axis=0) * np.ones(12, int)
    fields[:, 0] = np.arange(6)
    kernel = trials([1.0, 1.001, 1.002, 1.05, 1.051, 1.052], {}, fields)
    far = trials([1.0], {0: 1.0}, 9 * np.ones((1, 12), int))
    assert next_trials([kernel, far], 2)[0] == [0, 3]


def test_the_search_begins_with_the_errors_that_a_profile_holds():
    fields = np.repeat([[0], [1]], 2, axis=0) * np.ones(12, int)
    errors = KernelErrors((TimedKernel("another", ((0,) * 12,), ((0, 0),), (2.0,)),))
    calls = []

    def timer(wanted):
        calls.append(wanted)
        return [[1.0] * len(numbers) for numbers in wanted]

    for known in (errors, errors.without(["another"])):
        search([trials([1.0, 1.0, 1.1, 1.1], {}, fields)], timer, known_of(known))
    assert calls == [[[0, 2]], [[3, 1]], [[0, 1]], [[2, 3]]]


def test_the_search_finds_the_best_of_many_within_a_few_trials():
    # True errors are drawn from the process; eight of 100 candidates are timed.
    generator = np.random.default_rng(3)
    regrets, alone = [], []
    for _ in range(12):
        fields = generator.integers(0, 3, (100, 6))
        differing = (fields[:, None] != fields[None]).sum(-1)
        errors = generator.multivariate_normal(np.zeros(100), np.exp(-differing / 4.0) * (COMMON + OWN))
        predicted = np.exp(generator.normal(0, 0.1, 100))
        true = predicted * np.exp(errors)
        kernel = trials(predicted, {}, fields)
        for _ in range(8):
            (numbers,) = next_trials([kernel], 1)
            kernel.times.update({number: float(true[number]) for number in numbers})
        regrets.append(min(kernel.times.values()) / true.min() - 1)
        alone.append(true[np.argmin(predicted)] / true.min() - 1)
    assert np.mean(regrets) < 0.4 * np.mean(alone)


def test_the_device_is_opened_twice_and_small_kernels_run_once():
    kernels, calls = [trials(range(9, 0, -1)) for _ in range(3)], []

    def timer(wanted):
        calls.append(wanted)
        return [[1.0] * len(numbers) for numbers in wanted]

    search(kernels, timer, many=2)
    assert [len(call) for call in calls] == [3, 2]
    assert calls[0] == [[0, 8], [0, 8], [0]]
    assert [len(kernel.times) for kernel in kernels] == [2 + MORE, 2 + MORE, 1]
