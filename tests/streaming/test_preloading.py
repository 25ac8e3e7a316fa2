"""Preloading more than a plan does: which weights pay, and that the plan stays one."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.random_instances import instances
from overlap_strategies import plan_greedily

from torchedge.streaming.budgets import preload_also, restate_plan, worth_preloading
from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.verification import verify_plan

LAYERS = tuple(Layer(f"l{n}", 4, 1.0, "elemental") for n in range(6))
WEIGHTS = (Weight("near", 2, 2, 3, 3), Weight("far", 2, 2, 6, 6), Weight("large", 4, 4, 6, 6))
LOADS = (
    ChunkLoad("near", 2, 2, 0),
    ChunkLoad("far", 1, 1, 0),
    ChunkLoad("far", 4, 1, 1),
    ChunkLoad("large", 3, 4, 0),
)


def test_what_is_far_and_small_is_worth_most():
    instance = Instance(1, LAYERS, WEIGHTS, lam=0.5)
    plan = restate_plan(instance, OverlapPlan("FEASIBLE", None, None, (), LOADS, 0), None)
    # Distances 1, 5 and 3 against 2, 2 and 4 chunks: only the second is cheaper preloaded.
    assert plan.objective == 0.5 * (1 + 5 + 3) and plan.peak_chunks == 7
    assert worth_preloading(instance, plan, ["near", "far", "large", "none"]) == ["far"]
    cheap = Instance(1, LAYERS, WEIGHTS, lam=0.1)
    assert worth_preloading(cheap, plan, ["near", "far", "large"]) == ["far", "large", "near"]
    assert worth_preloading(cheap, plan, ["near"]) == ["near"] and worth_preloading(cheap, plan, []) == []
    more = restate_plan(instance, preload_also(plan, ["far"]), 2.0, why="a test")
    assert (
        more.objective == 0.5 * (1 + 2 + 3) and more.preload == ("far",) and more.solver == {"why": "a test"}
    )
    assert (more.status, more.lower_bound) == ("FEASIBLE", 2.0)
    assert restate_plan(instance, more, 3.0).status == "OPTIMAL"


@given(instances(limits=False), st.data())
@settings(max_examples=60)
def test_a_plan_that_preloads_more_keeps_its_rules(instance, data):
    plan = plan_greedily(instance)
    streamed = sorted({load.weight for load in plan.loads})
    worth = worth_preloading(instance, plan, streamed)
    assert set(worth) <= set(streamed)
    names = data.draw(st.sets(st.sampled_from(streamed))) if streamed else set()
    more = restate_plan(instance, preload_also(plan, sorted(names)), None)
    assert verify_plan(instance, more).ok and set(more.preload) == {*plan.preload, *names}
    best = restate_plan(instance, preload_also(plan, worth), None)
    assert best.objective <= plan.objective
    if worth:
        assert Fraction(best.objective) < Fraction(plan.objective)
    assert best.objective == pytest.approx(float(verify_plan(instance, best).objective))
