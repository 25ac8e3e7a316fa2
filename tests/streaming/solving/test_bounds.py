"""Lower bounds hold whatever the prices, and exact search finds what trying every subset finds."""

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from oracles.random_instances import random_instance

from torchedge.streaming.solving.bounds import Relaxation, ascend
from torchedge.streaming.solving.choices import Outlook, search
from torchedge.streaming.solving.problems import ORDERS, Subproblem, make_problem, pack, residency, segments

SEEDS = range(80)


def subsets(jobs):
    return chain.from_iterable(combinations(jobs, k) for k in range(len(jobs) + 1))


def cheapest(problem, part, room=None):
    """The best choice of preload_costs by trying every one."""
    best = None
    for preloaded in subsets(part.jobs):
        jobs = [job for job in part.jobs if job not in preloaded]
        packing = pack(problem, jobs, ORDERS["fewest remaining"], end=part.end)
        if packing.unfinished:
            continue
        if room is not None and any(a > b for a, b in zip(residency(problem, jobs), room, strict=True)):
            continue
        cost = packing.cost + sum(job.preload_cost for job in preloaded)
        best = cost if best is None else min(best, cost)
    return best


def parts(seed, size="small"):
    problem = make_problem(random_instance(seed, size))
    for part in segments(problem):
        if len({job.late for job in part.jobs}) == 1 and len(part.jobs) <= 9:
            yield problem, part


@pytest.mark.parametrize("seed", SEEDS)
def test_search_finds_the_cheapest(seed):
    for problem, part in parts(seed):
        found = search(problem, part, most_states=10**6)
        assert found.proven
        assert found.cost == cheapest(problem, part)
        lost = sum(job.preload_cost for job in part.jobs if job.weight in found.preloaded)
        kept = [job for job in part.jobs if job.weight not in found.preloaded]
        assert pack(problem, kept, end=part.end).cost + lost == found.cost


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("limit", [1, 3, 6])
def test_search_keeps_a_limit(seed, limit):
    problem = make_problem(random_instance(seed, "small"))
    jobs = [job for job in problem.jobs if job.last == job.release - 1]
    if len(jobs) > 9 or len({job.late for job in jobs}) != 1:
        return
    problem = replace(problem, jobs=tuple(jobs))
    part = Subproblem(min(job.release for job in jobs), problem.layers, tuple(jobs))
    room = [limit] * problem.layers
    assert search(problem, part, most_states=10**6, room=room).cost == cheapest(problem, part, room)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_and_pruning_by_them_loses_nothing(seed):
    for problem, part in parts(seed):
        best = cheapest(problem, part)
        everything = sum(job.preload_cost for job in part.jobs)
        climbed = ascend(problem, part, everything, rounds=30)
        assert climbed.value <= best + 1e-6
        relaxation = Relaxation(problem, part)
        relaxation.seed(climbed.prices)
        bound = relaxation.improve(30)
        assert climbed.value - 1e-6 <= bound.value <= best + 1e-6
        outlook = Outlook(problem, part, bound.capacity_prices, bound.excess)
        found = search(problem, part, most_states=10**6, best=everything + 1, outlook=outlook)
        assert found.cost == best
        none = search(problem, part, most_states=10**6, best=best, outlook=outlook)
        assert none.proven
        assert none.cost is None


@pytest.mark.parametrize("seed", range(20))
def test_any_prices_give_a_bound(seed):
    rng = np.random.default_rng(seed)
    for problem, part in parts(seed):
        relaxation = Relaxation(problem, part)
        relaxation.seed(rng.exponential(rng.choice([0.1, 1, 10]), part.end - part.start))
        assert relaxation.improve(0).value <= cheapest(problem, part) + 1e-6
