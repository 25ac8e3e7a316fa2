"""The programme of a small problem is exact: its bound is the cost of the best plan, which its ends reach."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.exhaustive_plans import best_plan, smallest_memory
from oracles.random_instances import random_instance

from torchedge.streaming.solving.labels import ChunkLimits
from torchedge.streaming.solving.problems import (
    Subproblem,
    WorkBudget,
    make_problem,
    pack,
    residency,
    whole_chunks,
)
from torchedge.streaming.solving.programmes import make_programme

PROBLEMS = [
    (instance, problem)
    for seed in range(300)
    for instance in [random_instance(seed)]
    for problem in [make_problem(replace(instance, memory_chunks=None))]
    if problem.jobs
]


def programme_of(instance, problem, *, memory=None, smallest=False):
    part = Subproblem(min(job.release for job in problem.jobs), problem.layers, problem.jobs)
    limits = ChunkLimits(problem.in_flight, instance.residency == "weights", memory=memory)
    return make_programme(problem, part, limits, smallest=smallest)


def chunks_in_flight(instance, problem, ends):
    """The most chunks in flight where jobs are served by their ends; infinite where one is not served."""
    jobs = [job for job in problem.jobs if job.weight in ends.slots]
    packing = pack(problem, jobs, ends)
    if packing.unfinished:
        return np.inf, np.inf
    whole = instance.residency == "weights"
    counted = whole_chunks(problem, jobs, packing) if whole else residency(problem, jobs)
    lost = sum(job.preload_cost for job in problem.jobs if job not in jobs)
    return max(counted, default=0), packing.cost + lost


def chunks_preloaded(problem, ends):
    return sum(job.chunks for job in problem.jobs if job.weight not in ends.slots)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("limited", [False, True], ids=["no limit", "memory"])
def test_the_programme_finds_the_best_plan(block, limited):
    for instance, problem in PROBLEMS[block::6]:
        if limited and instance.memory_chunks is None:
            continue
        memory = instance.memory_chunks - problem.fixed_chunks if limited else None
        programme = programme_of(instance, problem, memory=memory)
        if programme is None:  # nothing can be streamed
            continue
        costs = []

        def offer(ends, instance=instance, problem=problem, memory=memory, costs=costs):
            in_flight, cost = chunks_in_flight(instance, problem, ends)
            total = in_flight + chunks_preloaded(problem, ends)
            most = np.inf if problem.in_flight is None else problem.in_flight
            if in_flight <= most and (memory is None or total <= memory):
                costs.append(cost)
                return cost
            return None

        bound = programme.solve(offer, None, WorkBudget(1e9)) + problem.fixed_cost
        best = best_plan(instance if limited else replace(instance, memory_chunks=None))
        if best.objective is None:
            assert bound == np.inf
            continue
        expected = best.objective * instance.prices[2]
        assert bound == pytest.approx(expected, rel=2e-3, abs=1e-3)
        assert bound <= expected + 1e-3
        assert min(costs) + problem.fixed_cost == pytest.approx(expected, rel=2e-3, abs=1e-3)


def test_the_programme_finds_the_smallest_memory():
    infeasible = [(i, p) for i, p in PROBLEMS if best_plan(i).status == "INFEASIBLE"][:20]
    assert len(infeasible) == 20
    for instance, problem in infeasible:
        programme = programme_of(instance, problem, smallest=True)
        if programme is None:
            continue

        def offer(ends, instance=instance, problem=problem):
            return chunks_in_flight(instance, problem, ends)[0] + chunks_preloaded(problem, ends)

        bound = programme.solve(offer, None, WorkBudget(1e9)) + problem.fixed_chunks
        assert bound == pytest.approx(smallest_memory(instance), rel=1e-3)


def test_nothing_is_printed(capfd):
    for instance, problem in PROBLEMS[:20]:
        programme = programme_of(instance, problem)
        if programme is not None:
            programme.solve(lambda ends: None, None, WorkBudget(1e9))
    print("after")
    assert capfd.readouterr().out == "after\n"
