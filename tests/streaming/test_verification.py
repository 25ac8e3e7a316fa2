"""The verifier: numbers worked out by hand, every broken rule found, agreement with an oracle."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive_plans import best_plan, in_flight
from oracles.played_plans import play
from oracles.random_instances import CHUNK_BYTES, instances, layer, weight

from torchedge.errors import PlanError, TorchedgeError
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.verification import check_plan, verify_plan

# w0 of 3 chunks is used by layers 3 and 4, w1 of one chunk by layer 4, w2 of two chunks by layer 1.
INSTANCE = Instance(
    CHUNK_BYTES,
    tuple(layer(n, 2) for n in range(1, 5)),
    (weight(0, 3, 3, 4), weight(1, 1, 4, 4), weight(2, 2, 1, 2)),
    lam=0.9,
)
LOADS = (ChunkLoad("w0", 2, 2, 1), ChunkLoad("w0", 1, 1, 0), ChunkLoad("w1", 3, 1, 0))
PLAN = OverlapPlan("FEASIBLE", 2.1, 1.5, ("w2",), LOADS, 4)
NO_PLAN = OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "5 chunks do not hold 6"})


def test_a_plan_worked_out_by_hand():
    found = verify_plan(INSTANCE, PLAN)
    assert found.ok and not found.problems
    assert found.objective == Fraction(9, 10) * 2 + Fraction(1, 10) * (2 + 1)
    assert found.resident_chunks == (1, 3, 4, 4) and found.peak_chunks == 4
    assert found.preloaded_chunks == 2


def test_whole_weights_are_resident_from_their_first_load_on():
    found = verify_plan(replace(INSTANCE, residency="weights"), PLAN)
    assert found.ok and found.resident_chunks == (3, 3, 4, 4)


def test_distances_weighted_by_chunks():
    found = verify_plan(replace(INSTANCE, distance="chunks"), replace(PLAN, objective=2.5))
    assert found.ok and found.objective == Fraction(9, 10) * 2 + Fraction(1, 10) * (2 * 3 + 1)


def test_a_weight_leaves_after_its_last_use():
    short = replace(INSTANCE, weights=(weight(0, 3, 3, 3), *INSTANCE.weights[1:]))
    assert verify_plan(short, PLAN).resident_chunks == (1, 3, 4, 1)


def changed(**changes):
    return replace(PLAN, **changes)


def loading(*loads):
    return changed(loads=loads)


W0, W0_FIRST, W1 = LOADS
BROKEN = {
    "unknown weight loaded": (loading(*LOADS, ChunkLoad("w9", 1, 1, 0)), "'w9', which is no weight"),
    "no name loaded": (loading(*LOADS, ChunkLoad(None, 1, 1, 0)), "None, which is no weight"),
    "unknown weight preloaded": (changed(preload=("w2", "w9")), "'w9', which is no weight"),
    "a list preloaded": (changed(preload=("w2", [])), "[], which is no weight"),
    "preloaded twice": (changed(preload=("w2", "w2")), "'w2' twice"),
    "loaded though preloaded": (loading(*LOADS, ChunkLoad("w2", 1, 1, 0)), "'w2', which is preloaded"),
    "forgotten": (changed(preload=()), "(C0) 'w2' is neither preloaded nor loaded"),
    "layer zero": (loading(W0, W1, replace(W0_FIRST, layer=0)), "by layer 0, expected 1 to 4"),
    "layer beyond the last": (loading(W0, W0_FIRST, replace(W1, layer=5)), "by layer 5, expected 1 to 4"),
    "layer of no number": (loading(W0, W0_FIRST, replace(W1, layer="3")), "layer is '3'"),
    "fractional chunks": (loading(W0, W0_FIRST, replace(W1, chunks=1.0)), "chunks is 1.0"),
    "chunks that JSON has not": (loading(W0, W0_FIRST, replace(W1, chunks=np.int64(1))), "whole number"),
    "a truth for chunks": (loading(W0, W0_FIRST, replace(W1, chunks=True)), "chunks is True"),
    "negative chunks": (loading(*LOADS, ChunkLoad("w1", 1, -1, 1)), "loads -1 chunks of 'w1'"),
    "no chunks": (loading(*LOADS, ChunkLoad("w1", 1, 0, 0)), "loads 0 chunks of 'w1'"),
    "negative first chunk": (loading(W0, W0_FIRST, replace(W1, first_chunk=-1)), "from chunk -1"),
    "chunks beyond the last": (loading(W0, W0_FIRST, replace(W1, chunks=2)), "of chunks 0 to 0"),
    "chunks twice": (
        loading(replace(W0, first_chunk=0), W0_FIRST, W1),
        "(C0) 'w0': chunks 0 to 0 are loaded",
    ),
    "first chunk missing": (loading(W0, W1), "(C0) 'w0': chunks 0 to 0 are never loaded"),
    "last chunks missing": (loading(W0_FIRST, W1), "(C0) 'w0': chunks 1 to 2 are never loaded"),
    "middle missing": (loading(W0_FIRST, ChunkLoad("w0", 2, 1, 2), W1), "chunks 1 to 1 are never loaded"),
    "too late": (loading(W0, W0_FIRST, replace(W1, layer=4)), "(C1) loads 'w1' by layer 4"),
    "over capacity": (
        loading(ChunkLoad("w0", 2, 3, 0), W1),
        "(C3) layer 2 loads 3 chunks, expected at most 2",
    ),
    "wrong objective": (changed(objective=2.0), "objective is 2.0, in fact 2.1"),
    "no objective": (changed(objective=None), "objective is None"),
    "objective that is no number": (changed(objective=math.nan), "objective is nan"),
    "infinite objective": (changed(objective=math.inf), "objective is inf"),
    "wrong peak": (changed(peak_chunks=3), "peak_chunks is 3, in fact 4"),
    "fractional peak": (changed(peak_chunks=4.0), "peak_chunks is 4.0"),
    "bound above the objective": (changed(lower_bound=2.2), "lower_bound 2.2 is above the objective 2.1"),
    "bound that is no number": (changed(lower_bound=math.nan), "lower_bound is nan"),
    "infinite bound": (changed(lower_bound=-math.inf), "lower_bound is -inf"),
    "optimal with a gap": (changed(status="OPTIMAL"), "OPTIMAL with lower_bound 1.5"),
    "optimal without bound": (changed(status="OPTIMAL", lower_bound=None), "OPTIMAL with lower_bound None"),
    "optimal by another step": (changed(status="OPTIMAL", lower_bound=2.0), "OPTIMAL with lower_bound 2.0"),
    "unknown status": (changed(status="DONE"), "status is 'DONE'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rules_are_named(case):
    plan, says = BROKEN[case]
    found = verify_plan(INSTANCE, plan)
    assert not found.ok
    assert any(says in problem for problem in found.problems), found.problems
    with pytest.raises(PlanError, match="breaks its rules") as caught:
        check_plan(INSTANCE, plan)
    assert isinstance(caught.value, TorchedgeError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "says", "layers"),
    [
        ({"m_peak_chunks": 3}, "(C2) 4 chunks are in flight", (3, 4)),
        ({"m_peak_chunks": 2, "residency": "weights"}, "(C2)", (1, 2, 3, 4)),
        ({"memory_chunks": 5}, "(memory) 2 chunks are preloaded and 4 in flight", (3, 4)),
        ({"memory_chunks": 1}, "(memory) 2 chunks are preloaded", (1, 2, 3, 4)),
    ],
)
def test_limits_are_kept_at_every_layer(limits, says, layers):
    problems = verify_plan(replace(INSTANCE, **limits), PLAN).problems
    assert len(problems) == len(layers)
    for problem, number in zip(problems, layers, strict=True):
        assert says in problem and f"at layer {number}," in problem


def test_strategies_may_be_excused_from_limits_and_from_nothing_else():
    tight = replace(
        INSTANCE, m_peak_chunks=0, memory_chunks=0, layers=tuple(layer(n, 0) for n in range(1, 5))
    )
    assert len(verify_plan(tight, PLAN).problems) == 3 + 4 + 4
    assert verify_plan(tight, PLAN, limits=False).ok
    for plan, _ in (BROKEN["too late"], BROKEN["wrong peak"], BROKEN["first chunk missing"]):
        assert not verify_plan(tight, plan, limits=False).ok


@pytest.mark.parametrize("limits", [{"m_peak_chunks": 4}, {"memory_chunks": 6}])
def test_limits_may_be_met(limits):
    assert check_plan(replace(INSTANCE, **limits), PLAN).peak_chunks == 4


def test_a_limit_holds_for_preloaded_weights_alone():
    plan = OverlapPlan("FEASIBLE", 0.9 * 6, 0.0, ("w0", "w1", "w2"), (), 0)
    assert verify_plan(INSTANCE, plan).ok
    assert not verify_plan(replace(INSTANCE, memory_chunks=5), plan).ok


def test_rounding_is_forgiven_and_no_more():
    for objective in (2.1 - 4e-16, 2.1000001):
        assert verify_plan(INSTANCE, changed(objective=objective, lower_bound=objective, status="OPTIMAL")).ok
    assert not verify_plan(INSTANCE, changed(objective=2.10001)).ok


def test_a_step_between_objectives_is_not_taken_for_rounding():
    """At a million chunks a step of 0.1 is less than a millionth."""
    chunks = 2**22
    instance = replace(INSTANCE, weights=(weight(0, chunks, 1, 1),))
    plan = OverlapPlan("OPTIMAL", 0.9 * chunks, 0.9 * chunks, ("w0",), (), 0)
    assert verify_plan(instance, plan).ok
    assert not verify_plan(instance, replace(plan, lower_bound=0.9 * chunks - 0.1)).ok
    assert not verify_plan(instance, replace(plan, objective=0.9 * chunks + 0.1)).ok


@pytest.mark.parametrize(
    ("lam", "exact"),
    [
        (0.9, Fraction(9, 10)),
        (1 / 3, Fraction(1, 3)),
        (1, Fraction(1)),
        (0, Fraction(0)),
        (1e-9, Fraction(0)),
    ],
)
def test_lambda_is_the_nearest_simple_fraction(lam, exact):
    instance = replace(INSTANCE, lam=lam)
    found = verify_plan(instance, changed(objective=None))
    assert found.objective == exact * 2 + (1 - exact) * 3
    p, d, unit = instance.prices
    assert (Fraction(p, unit), Fraction(d, unit)) == (exact, 1 - exact)


# INFEASIBLE -------------------------------------------------------------------------------------------------

TIGHT = replace(INSTANCE, memory_chunks=5)


def test_no_plan_is_accepted_with_a_reason():
    found = check_plan(TIGHT, NO_PLAN)
    assert found.objective is None and found.resident_chunks == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"solver": {}}, "no reason"),
        ({"solver": {"reason": ""}}, "no reason"),
        ({"solver": {"reason": 3}}, "no reason"),
        ({"objective": 1.0}, "objective is 1.0"),
        ({"lower_bound": 1.0}, "lower_bound is 1.0"),
        ({"loads": LOADS}, "preloads or loads"),
        ({"preload": ("w2",)}, "preloads or loads"),
        ({"peak_chunks": 4}, "peak_chunks is 4"),
    ],
)
def test_no_plan_has_nothing_in_it(changes, says):
    assert says in str(verify_plan(TIGHT, replace(NO_PLAN, **changes)).problems)


@pytest.mark.parametrize("limit", [None, 6])
def test_no_plan_is_refused_where_preloading_everything_is_one(limit):
    problems = verify_plan(replace(INSTANCE, memory_chunks=limit), NO_PLAN).problems
    assert problems == ("the plan is INFEASIBLE, but preloading every weight breaks no limit",)


# laws -------------------------------------------------------------------------------------------------------


@given(instances())
def test_optimal_plans_are_accepted(instance):
    plan = best_plan(instance)
    found = check_plan(instance, plan)
    if plan.status == "OPTIMAL":
        assert float(found.objective) == pytest.approx(plan.objective)
        allocation = {}
        for load in plan.loads:
            by_layer = allocation.setdefault(int(load.weight[1:]), {})
            by_layer[load.layer] = by_layer.get(load.layer, 0) + load.chunks
        assert list(found.resident_chunks) == in_flight(instance, allocation, None)


@given(
    instances(),
    st.lists(
        st.builds(ChunkLoad, st.sampled_from(["w0", "w1", "w7", ""]), *[st.integers(-2, 9)] * 3), max_size=6
    ),
    st.lists(st.sampled_from(["w0", "w1", "w2", "w7"]), max_size=3),
)
def test_any_plan_gets_a_verdict(instance, loads, preload):
    found = verify_plan(instance, OverlapPlan("FEASIBLE", 1.0, 0.0, tuple(preload), tuple(loads), 0))
    assert len(found.resident_chunks) == len(instance.layers)
    assert min(found.resident_chunks) >= 0


@settings(max_examples=300)
@given(instances(), st.data())
def test_the_verdict_is_that_of_playing_the_plan(instance, data):
    """Plans that are right, and ones with a number changed somewhere."""
    plan = best_plan(replace(instance, m_peak_chunks=None, memory_chunks=None))
    loads = list(plan.loads)
    for _ in range(data.draw(st.integers(0, 2)) if loads else 0):
        place = data.draw(st.integers(0, len(loads) - 1))
        field = data.draw(st.sampled_from(["layer", "chunks", "first_chunk"]))
        loads[place] = replace(
            loads[place], **{field: data.draw(st.integers(1 - (field == "first_chunk"), 7))}
        )
    changed = replace(plan, status="FEASIBLE", loads=tuple(loads), lower_bound=0.0)
    found = verify_plan(instance, changed)
    changed = replace(changed, peak_chunks=found.peak_chunks, objective=float(found.objective))
    found = verify_plan(instance, changed)
    assert found.ok == (play(instance, changed) is not None), found.problems
    if found.ok:
        assert found.peak_chunks == play(instance, changed)


def test_a_hundred_problems_are_enough():
    plan = loading(*[ChunkLoad("w" * 10_000, 1, 1, 0)] * 5000)
    problems = verify_plan(INSTANCE, plan).problems
    assert len(problems) == 101 and problems[-1].endswith("problems more")
    assert max(map(len, problems)) < 300
