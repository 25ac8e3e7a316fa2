"""Packing given jobs: closed forms, and the laws that make the fewest remaining chunks first best."""

from itertools import combinations, pairwise

import pytest
from oracles.random_instances import random_instance

from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.solving.problems import (
    Subproblem,
    WorkBudget,
    admit,
    fewest_remaining,
    make_problem,
    pack,
    residency,
    segments,
    whole_chunks,
)

ORDERS = {
    "fewest remaining": fewest_remaining,
    "largest first": lambda job, remaining: -job.chunks,
    "consumption": lambda job, remaining: job.release,
}


def line(capacities, weights, **options):
    layers = tuple(Layer(f"l{k}", c, 1.0, "elemental") for k, c in enumerate(capacities, 1))
    made = tuple(Weight(f"w{k}", c, c, first, last) for k, (c, first, last) in enumerate(weights))
    return Instance(1, layers, made, **options)


def test_the_counter_example_to_consumption_order():
    problem = make_problem(line([1] * 11, [(5, 11, 11), (1, 10, 10)], lam=0.9))
    costs = {name: pack(problem, problem.jobs, order).cost for name, order in ORDERS.items()}
    assert costs["fewest remaining"] == 7
    assert costs["consumption"] == 10


def test_a_slot_serves_several_jobs():
    problem = make_problem(line([4, 4, 4], [(3, 3, 3), (1, 3, 3), (2, 3, 3)], lam=0.9))
    packing = pack(problem, problem.jobs, record=True)
    assert packing.finish == {1: 1, 2: 1, 0: 2}
    assert sorted(packing.served) == [(1, 0, 1), (1, 1, 1), (1, 2, 2), (2, 0, 2)]
    assert packing.cost == 1 + 1 + 2


def test_what_does_not_fit_is_told():
    problem = make_problem(line([1, 1, 1], [(2, 3, 3), (2, 3, 3)], lam=0.9))
    packing = pack(problem, problem.jobs)
    assert len(packing.finish) == 1
    assert len(packing.unfinished) == 1


@pytest.mark.parametrize("seed", range(60))
def test_no_order_beats_the_fewest_remaining_first(seed):
    problem = make_problem(random_instance(seed, "small"))
    if len({job.late for job in problem.jobs}) != 1:
        return
    best = pack(problem, problem.jobs)
    for order in ORDERS.values():
        other = pack(problem, problem.jobs, order)
        assert len(best.unfinished) <= len(other.unfinished)
        if not best.unfinished and not other.unfinished:
            assert best.cost <= other.cost


@pytest.mark.parametrize("seed", range(30))
def test_what_is_in_flight_does_not_depend_on_the_order(seed):
    problem = make_problem(random_instance(seed, "small"))
    for order in ORDERS.values():
        packing = pack(problem, problem.jobs, order, record=True)
        if packing.unfinished:
            return
        held = [0] * problem.layers
        for slot in range(problem.layers):
            for job in problem.jobs:
                if job.last <= slot:
                    held[slot] += sum(c for at, w, c in packing.served if w == job.weight and at >= slot)
        assert residency(problem, problem.jobs) == held


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_independent(seed):
    problem = make_problem(random_instance(seed, "small"))
    parts = segments(problem)
    assert sorted(j.weight for part in parts for j in part.jobs) == sorted(j.weight for j in problem.jobs)
    for one, other in pairwise(parts):
        assert one.end <= other.start
    for preloaded in combinations(problem.jobs, min(2, len(problem.jobs))):
        jobs = [job for job in problem.jobs if job not in preloaded]
        together = pack(problem, jobs)
        apart = [pack(problem, [j for j in part.jobs if j in jobs], end=part.end) for part in parts]
        assert together.cost == sum(packing.cost for packing in apart)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_admitted_keeps_the_limit(seed, whole):
    problem = make_problem(random_instance(seed, "small"))
    part = Subproblem(0, problem.layers, problem.jobs)
    for limit in (2, 6, 20):
        preloaded = admit(problem, part, frozenset(), WorkBudget(1e9), limit=limit, whole=whole)
        jobs = [job for job in problem.jobs if job.weight not in preloaded]
        packing = pack(problem, jobs)
        assert not packing.unfinished
        counted = whole_chunks(problem, jobs, packing) if whole else residency(problem, jobs)
        assert max(counted) <= limit


def test_without_work_everything_is_preloaded():
    problem = make_problem(random_instance(5, "small"))
    part = Subproblem(0, problem.layers, problem.jobs)
    preloaded = admit(problem, part, frozenset(), WorkBudget(0))
    assert preloaded == {job.weight for job in problem.jobs}
