"""Planning within a budget: a run allocates no more than the limit, or the smallest limit is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.streaming_programs import instance_of, weighted_chain

from torchedge.errors import LimitError, PlanError
from torchedge.streaming.budgets import Budget
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.plans import OverlapPlan, always_next, preload_everything
from torchedge.streaming.rates import STAGING_BYTES
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule
from torchedge.streaming.verification import verify_plan

pytest.importorskip("scipy")

CHUNK = 4096


def solve(instance):
    from torchedge.streaming.solving import planner

    return planner.solve(instance, effort=0.1)


def streamed_chunks(budgeted):
    """A latency that falls with every weight that is preloaded."""
    return 1.0 + sum(load.chunks for load in budgeted.plan.loads)


def budget(program, limit, capacity=2, lam=0.5, solver=solve, latency=streamed_chunks):
    """Layers that load a few pages each."""
    instance = instance_of(program, CHUNK)
    layers = tuple(replace(layer, capacity_chunks=capacity) for layer in instance.layers)
    return Budget(
        program, replace(instance, layers=layers, lam=lam, residency="weights"), limit, solver, latency
    )


CHAIN = weighted_chain([4096] * 6)
"""Six weights of four pages, one a launch; a launch loads half of one."""


# limits -----------------------------------------------------------------------------------------------------


def smallest(program):
    """The memory of a run that loads each weight just before its first use, by the definition."""
    instance = instance_of(program, CHUNK)
    plan = always_next(instance)
    return make_schedule(program, instance, plan, LEAST_STAGING_BYTES).memory.total_bytes


@pytest.mark.parametrize("limit", [None, 10**6])
def test_all_is_preloaded_where_that_alone_is_the_fastest(limit):
    free = budget(CHAIN, limit, lam=0.9).plan()
    assert not free.plan.loads and free.relaxation == 1
    alike = budget(CHAIN, limit, lam=0.9, latency=lambda _: 1.0).plan()
    assert alike.plan.loads and alike.total_bytes <= free.total_bytes
    most = free.total_bytes - 1
    assert budget(CHAIN, most, lam=0.9).plan().total_bytes <= most


def test_without_a_limit_nothing_is_relaxed():
    free = budget(CHAIN, None, latency=lambda _: 1.0).plan()
    assert free.relaxation == 1 and free.plan.status == "OPTIMAL"
    assert free.instance == budget(CHAIN, None).instance
    assert free.schedule.staging_bytes == 6 * 4 * CHUNK  # as much as there is to read


@pytest.mark.sampled(18)
@pytest.mark.parametrize("spare", [0, 1000, 20_000, 40_000, 10**6])
@pytest.mark.parametrize("capacity", [0, 1, 2, 4, 100])
@pytest.mark.parametrize("lam", [0.0, 0.05, 0.9])
def test_a_limit_is_kept(spare, capacity, lam):
    limit = smallest(CHAIN) + spare
    budgeted = budget(CHAIN, limit, capacity, lam).plan()
    assert budgeted.total_bytes == budgeted.schedule.memory.total_bytes <= limit
    assert verify_plan(budgeted.instance, budgeted.plan).ok
    most = max(layer.capacity_chunks for layer in budgeted.instance.layers)
    assert most <= max(1, capacity) * budgeted.relaxation + 1


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=7), st.floats(0, 1.5), st.integers(0, 6))
def test_any_limit_is_kept_or_the_smallest_is_named(sizes, share, capacity):
    program = weighted_chain(sizes)
    least = smallest(program)
    limit = max(1, int(share * (least + sum(sizes) * 4)))
    try:
        budgeted = budget(program, limit, capacity).plan()
    except LimitError as error:
        assert limit < least <= error.works_bytes <= 1.01 * least + 1024
        assert budget(program, error.works_bytes, capacity).plan().total_bytes <= error.works_bytes
    else:
        assert limit >= least and budgeted.total_bytes <= limit


def test_the_plan_of_least_memory_wins_where_it_is_as_fast():
    everything = 2**20
    least = budget(CHAIN, everything).least(LEAST_STAGING_BYTES)
    plan = budget(CHAIN, everything, latency=lambda budgeted: 1.0).plan()
    assert plan.plan == least.plan
    assert plan.total_bytes <= budget(CHAIN, everything).plan().total_bytes


def test_more_memory_preloads_more_where_that_is_cheap():
    sizes = [smallest(CHAIN) + spare for spare in (0, 30_000, 60_000, 10**6)]
    preloaded = [len(budget(CHAIN, size, 4, lam=0.0).plan().plan.preload) for size in sizes]
    assert preloaded == sorted(preloaded) and preloaded[0] < 6 == preloaded[-1]


def test_the_staging_pool_is_a_small_part_of_the_limit():
    roomy = weighted_chain([2**20] * 12)
    assert budget(roomy, None).staging() == STAGING_BYTES
    assert budget(roomy, 64 * MEBIBYTE).staging() == 4 * MEBIBYTE
    assert budget(roomy, 1).staging() == LEAST_STAGING_BYTES


def test_the_message_of_a_limit_that_is_too_small():
    with pytest.raises(LimitError, match="does not run within") as caught:
        budget(CHAIN, 1024).plan()
    assert "The smallest memory limit that works is" in str(caught.value)
    assert "of weights of the first launch" in str(caught.value)


# strategies -------------------------------------------------------------------------------------------------


def test_a_strategy_may_break_the_rules_of_the_problem():
    eager = budget(CHAIN, None, capacity=1).by_strategy(always_next)
    assert "(C3)" in eager.problems[0] and eager.plan.solver["strategy"] == "always-next"
    assert not budget(CHAIN, None, capacity=4).by_strategy(always_next).problems


def test_a_strategy_has_to_keep_the_limit():
    with pytest.raises(LimitError, match="as preload-all plans it takes"):
        budget(CHAIN, smallest(CHAIN)).by_strategy(preload_everything)


@pytest.mark.parametrize("status", ["FEASIBLE", "INFEASIBLE"])
def test_a_strategy_that_loads_nothing(status):
    def nothing(instance):
        return OverlapPlan(status, None, None, (), (), 0, {"strategy": "none"})

    with pytest.raises(PlanError, match=r"cannot run: (it is INFEASIBLE|\(C0\))"):
        budget(CHAIN, None).by_strategy(nothing)


def test_plans_of_a_solver_are_verified():
    def wrong(instance):
        return replace(preload_everything(instance), objective=1.0)

    with pytest.raises(PlanError, match="objective"):
        budget(CHAIN, None, solver=wrong).plan()
