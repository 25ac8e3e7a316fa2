"""Lower bounds hold whatever the prices, and searching finds what trying every subset finds."""

from itertools import chain, combinations

import numpy as np
import pytest
from oracles.random_instances import random_instance

from torchedge.streaming.solving.labels import ChunkLimits, LabelSearch
from torchedge.streaming.solving.prices import Flow, Guide, Tables, ascend
from torchedge.streaming.solving.problems import (
    WorkBudget,
    make_problem,
    pack,
    residency,
    segments,
)

SEEDS = range(80)
ENDLESS = 1e12


def search(problem, part, **options):
    return LabelSearch(problem, part, **options).run()


def subsets(jobs):
    return chain.from_iterable(combinations(jobs, k) for k in range(len(jobs) + 1))


def cheapest(problem, part, limit=None):
    """The best choice of preloads by trying every one."""
    best = None
    for preloaded in subsets(part.jobs):
        jobs = [job for job in part.jobs if job not in preloaded]
        packing = pack(problem, jobs, end=part.end)
        if packing.unfinished or (limit is not None and max(residency(problem, jobs)) > limit):
            continue
        cost = packing.cost + sum(job.preload_cost for job in preloaded)
        best = cost if best is None else min(best, cost)
    return best


def fits(problem, part, jobs, limit):
    return not pack(problem, jobs, end=part.end).unfinished and max(residency(problem, jobs)) <= limit


def parts(seed, tied=True):
    """Small parts whose jobs have one price of lateness; tied: also with weights used in many layers."""
    problem = make_problem(random_instance(seed, "small"))
    for part in segments(problem):
        single = all(job.last == job.release - 1 for job in part.jobs)
        if len({job.late for job in part.jobs}) == 1 and len(part.jobs) <= 9 and (tied or single):
            yield problem, part


def cost_of(problem, part, preloaded):
    lost = sum(job.preload_cost for job in part.jobs if job.weight in preloaded)
    return lost + pack(problem, [job for job in part.jobs if job.weight not in preloaded], end=part.end).cost


@pytest.mark.parametrize("seed", SEEDS)
def test_search_finds_the_cheapest(seed):
    for problem, part in parts(seed):
        labels = search(problem, part, width=10**6, work=WorkBudget(ENDLESS))
        assert labels.bound == np.inf
        assert cost_of(problem, part, labels.preloaded) == cheapest(problem, part)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("limit", [1, 3, 6])
def test_search_keeps_a_limit(seed, limit):
    for problem, part in parts(seed):
        labels = search(problem, part, width=10**6, work=WorkBudget(ENDLESS), limits=ChunkLimits(limit))
        assert cost_of(problem, part, labels.preloaded) == cheapest(problem, part, limit)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_and_pruning_by_them_loses_nothing(seed):
    for problem, part in parts(seed, tied=False):
        best, tables = cheapest(problem, part), Tables(problem, part)
        everything = sum(job.preload_cost for job in part.jobs)
        climbed = ascend(tables, everything, rounds=50, work=WorkBudget(ENDLESS))
        assert climbed.value <= best + 1e-6
        prices = np.zeros(part.end - part.start)
        prices[tables.slots - part.start] = climbed.prices
        most = sum(job.chunks for job in part.jobs)
        flow = Flow(problem, part, most, climbed.streaming, tables.preload_cost, prices)
        assert climbed.value - 1e-6 <= flow.bound <= best + 1e-6
        guide = Guide(problem, part, tables, climbed.prices, flow)
        for width in (1, 3, 10**6):
            labels = search(
                problem, part, width=width, work=WorkBudget(ENDLESS), guide=guide, best=everything + 1
            )
            cost = np.inf if labels.preloaded is None else cost_of(problem, part, labels.preloaded)
            assert min(labels.bound, cost) <= best + 1e-6
            assert labels.bound < np.inf or cost == best
        none = search(problem, part, width=10**6, work=WorkBudget(ENDLESS), guide=guide, best=best)
        assert none.bound == np.inf and none.preloaded is None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("limit", [2, 5, 60])
def test_any_prices_give_a_bound_within_a_limit(seed, limit, monkeypatch):
    rng = np.random.default_rng(seed)
    for problem, part in parts(seed):
        tables = Tables(problem, part)
        falling = np.sort(rng.exponential(rng.choice([0.1, 1, 10]), len(tables.slots)))[::-1]
        value, _, streaming = tables.evaluate(falling)
        assert value <= cheapest(problem, part) + 1e-6
        prices = np.zeros(part.end - part.start)
        prices[tables.slots - part.start] = falling
        for amounts in (8_000, 20):  # single chunks, and larger units
            monkeypatch.setattr("torchedge.streaming.solving.prices.MOST_AMOUNTS", amounts)
            flow = Flow(problem, part, limit, streaming, tables.preload_cost, prices)
            assert flow.bound <= cheapest(problem, part, limit) + 1e-6


@pytest.mark.parametrize("seed", range(40))
def test_a_flow_without_prices_counts_the_fewest_preloads(seed):
    for problem, part in parts(seed, tied=False):
        chunks = [job.chunks for job in part.jobs]
        none = np.zeros(len(chunks))
        for limit in (3, 7, 15):
            flow = Flow(problem, part, limit, none, chunks, np.zeros(part.end - part.start))
            preloaded = {part.jobs[k].weight for k in flow.choice()}
            fewest = min(
                sum(job.chunks for job in subset)
                for subset in subsets(part.jobs)
                if not pack(
                    problem, (left := [j for j in part.jobs if j not in subset]), end=part.end
                ).unfinished
                and max(residency(problem, left)) <= limit
            )
            assert flow.bound == fewest
            assert sum(job.chunks for job in part.jobs if job.weight in preloaded) == fewest
            kept = [job for job in part.jobs if job.weight not in preloaded]
            assert max(residency(problem, kept)) <= limit
