"""The solver against exhaustive search on a thousand tiny instances, and every plan through the verifier."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.exhaustive_plans import best_plan, smallest_memory
from oracles.random_instances import instances, random_instance

from torchedge.streaming.solving.planner import solve
from torchedge.streaming.verification import check_plan

pytest.importorskip("scipy")


def blocks(count, fast):
    """Numbers of blocks of seeds; all but the first few run with the slow tests."""
    return [*range(fast), *(pytest.param(k, marks=pytest.mark.slow) for k in range(fast, count))]


def compare(instance):
    """Hold a solved instance against the best there is."""
    plan, best = solve(instance), best_plan(instance)
    check_plan(instance, plan)
    assert plan.status == best.status
    if best.status == "INFEASIBLE":
        smallest = plan.solver["smallest_memory_chunks"]
        assert best_plan(replace(instance, memory_chunks=smallest)).status == "OPTIMAL"
        return
    assert plan.objective == pytest.approx(best.objective, abs=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", blocks(20, 4))
def test_a_thousand_tiny_instances(block):
    for seed in range(50 * block, 50 * block + 50):
        compare(random_instance(seed))


@settings(max_examples=50)
@given(instances())
def test_instances_that_shrink(instance):
    compare(instance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", blocks(10, 3))
def test_small_and_medium_plans_are_accepted(seed):
    for size in ("small", "medium"):
        instance = random_instance(seed, size)
        check_plan(instance, solve(instance))


@pytest.mark.parametrize("seed", range(3))
def test_the_same_plan_each_time(seed):
    instance = random_instance(seed, "small")
    assert solve(instance) == solve(instance)


def test_the_smallest_limit_that_works_is_told():
    tight = (random_instance(seed) for seed in range(400))
    infeasible = [x for x in tight if best_plan(x).status == "INFEASIBLE"][:40]
    assert len(infeasible) == 40
    for instance in infeasible:
        assert solve(instance).solver["smallest_memory_chunks"] == smallest_memory(instance)


@pytest.mark.parametrize("seed", blocks(9, 3))
def test_larger_instances_against_the_papers_model(seed):
    """Neither solver's bound is beyond the other's plan."""
    oracle = pytest.importorskip("oracles.cp_sat_plans", reason="OR-Tools is not installed")
    instance = random_instance(seed, "small")
    plan, other = solve(instance), oracle.plan_by_cp_sat(instance)
    check_plan(instance, plan)
    if other is None:
        return
    assert (plan.status == "INFEASIBLE") == (other.status == "INFEASIBLE")
    if other.objective is not None:
        check_plan(instance, other)
        assert plan.lower_bound <= other.objective + 1e-9 and other.lower_bound <= plan.objective + 1e-9
        if "OPTIMAL" == plan.status == other.status:
            assert plan.objective == pytest.approx(other.objective, abs=1e-9)


# what the solver is held against ----------------------------------------------------------------------------
