"""LC-OPG: proofs on instances of one window, rolling windows, and each tier of its fallbacks."""

from dataclasses import replace

import overlap_strategies as lc_opg
import pytest
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import layer, random_instance, weight
from overlap_strategies import STRATEGIES, plan_greedily, plan_lc_opg
from paper_model import Answer

from torchedge.streaming.instances import Instance
from torchedge.streaming.verification import check_plan, verify_plan

pytestmark = pytest.mark.slow


def instance_of(capacities, weights, **options):
    layers = tuple(layer(n, c) for n, c in enumerate(capacities, 1))
    return Instance(1024, layers, tuple(weight(n, *w) for n, w in enumerate(weights)), **options)


@pytest.fixture
def narrow(monkeypatch):
    """Windows of a few weights."""
    for name, value in (("WHOLE_SIZE", 5), ("WINDOW_SIZE", 12), ("REACH", 6)):
        monkeypatch.setattr(lc_opg, name, value)


@pytest.mark.parametrize("block", range(5))
def test_one_window_proves_the_optimum(block):
    for seed in range(30 * block, 30 * block + 30):
        instance = random_instance(seed)
        plan, best = plan_lc_opg(instance), best_plan(instance)
        if best.status == "OPTIMAL":
            check_plan(instance, plan)
            assert plan.status == "OPTIMAL" and plan.objective == pytest.approx(best.objective, abs=1e-9)
        else:
            assert plan.solver["proven"] is True


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("residency", ["chunks", "weights"])
def test_rolling_windows_hold(narrow, hybrid, residency):
    for seed in range(25):
        instance = replace(random_instance(seed, "small"), residency=residency, memory_chunks=None)
        plan = plan_lc_opg(instance, hybrid=hybrid, deterministic_limit=5)
        check_plan(instance, plan)
        assert plan.solver["windows"] == 1 or plan.lower_bound is None
        if hybrid:
            assert plan.objective <= plan_greedily(instance).objective


def test_rolling_windows_keep_a_limit_on_memory(narrow):
    for seed in range(40):
        instance = random_instance(seed, "small")
        instance = replace(instance, memory_chunks=9 * instance.total_chunks // 10)
        plan = plan_lc_opg(instance, deterministic_limit=5)
        problems = verify_plan(instance, plan).problems
        assert all(p.startswith("(C3)") for p in problems)
        assert not problems or plan.solver["respects_capacity"] is False


def test_plans_repeat(narrow):
    instance = random_instance(8, "medium")
    first = plan_lc_opg(instance, deterministic_limit=1)
    assert first.solver["windows"] > 3
    assert first == plan_lc_opg(instance, deterministic_limit=1)


def soft(memory):
    return instance_of([3, 0, 0, 0], [(3, 2, 2), (3, 4, 4)], memory_chunks=memory)


def test_soft_thresholds_are_told():
    # Three chunks in layer 1 leave the second weight to layers that can load nothing, or to W: 6 chunks.
    plan = plan_lc_opg(soft(5))
    assert plan.status == "FEASIBLE" and plan.lower_bound is None and plan.solver["proven"] is True
    assert plan.solver["respects_capacity"] is False and plan.solver["capacity_factor"] == 1.1
    assert all(p.startswith("(C3)") for p in verify_plan(soft(5), plan).problems)


def test_soft_thresholds_are_not_taken_where_limits_can_be_kept():
    plan = plan_lc_opg(soft(6))
    assert plan.status == "OPTIMAL" and "capacity_factor" not in plan.solver


def test_what_no_threshold_reaches_is_infeasible():
    plan = plan_lc_opg(instance_of([9, 9], [(4, 1, 1), (2, 2, 2)], memory_chunks=3))
    assert plan.status == "INFEASIBLE" and plan.solver["proven"] is True
    assert "3 chunks of memory" in plan.solver["reason"]


def test_silence_of_the_solver_preloads_the_largest_weight_then_packs_greedily(monkeypatch):
    asked = []

    def ask(window, limits, *, reach):
        asked.append({w.name for w in window.weights})
        return Answer("UNKNOWN", None, None)

    monkeypatch.setattr(lc_opg, "ask", ask)
    instance = instance_of([4] * 4, [(1, 4, 4), (4, 4, 4), (3, 3, 3), (2, 3, 3)])
    plan = plan_lc_opg(instance, hybrid=False)
    assert asked == [{"w0", "w1", "w2", "w3"}, {"w0", "w2", "w3"}, {"w0", "w3"}]
    assert plan.solver["outcomes"] == {"incrementally_preloaded": 3, "greedy": 1}
    assert set(plan.preload) == {"w1", "w2", "w3"}
    check_plan(instance, plan)
    assert plan_lc_opg(instance).objective == plan_greedily(instance).objective


def test_an_answer_after_incremental_preloading_proves_nothing(monkeypatch):
    true, calls = lc_opg.ask, []

    def ask(window, limits, *, reach):
        calls.append(window)
        return Answer("UNKNOWN", None, None) if len(calls) == 1 else true(window, limits, reach=reach)

    monkeypatch.setattr(lc_opg, "ask", ask)
    plan = plan_lc_opg(instance_of([4] * 4, [(1, 4, 4), (4, 4, 4)]), hybrid=False)
    assert (plan.status, plan.lower_bound, plan.preload) == ("FEASIBLE", None, ("w1",))


def test_no_time_still_gives_a_plan():
    instance = replace(random_instance(2, "medium"), memory_chunks=None)
    plan = plan_lc_opg(instance, seconds=0)
    check_plan(instance, plan)


def test_huge_instances_are_left_to_the_heuristic(monkeypatch, narrow):
    monkeypatch.setattr(lc_opg, "MAX_WINDOWS", 2)
    instance = random_instance(8, "medium")
    plan = plan_lc_opg(instance)
    assert set(plan.solver["outcomes"]) == {"greedy"}
    check_plan(instance, plan)


HOSTILE = {
    "no capacity": instance_of([0] * 5, [(2, 3, 3), (1, 5, 5)]),
    "one layer": instance_of([3], [(2, 1, 1)]),
    "no weights": instance_of([3, 3], []),
    "nothing in flight": instance_of([3] * 4, [(2, 2, 3), (1, 4, 4)], m_peak_chunks=0),
    "nothing in flight, whole weights": instance_of(
        [3] * 4, [(2, 2, 3), (1, 4, 4)], m_peak_chunks=0, residency="weights"
    ),
    "all used at once": instance_of([2] * 4, [(n % 3 + 1, 4, 4) for n in range(9)], lam=0.0),
    "millions of chunks": Instance(
        1, (layer(1, 2**31), layer(2, 5)), (replace(weight(0, 1, 2, 2), nbytes=10**7, chunks=10**7),)
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
@pytest.mark.parametrize("strategy", ["lc-opg", "greedy"])
def test_hostile_instances(strategy, name):
    instance = HOSTILE[name]
    plan = STRATEGIES[strategy](instance)
    check_plan(instance, plan)
    if name in ("no capacity", "one layer", "nothing in flight", "nothing in flight, whole weights"):
        assert set(plan.preload) == {w.name for w in instance.weights}


def test_strategies_are_named():
    assert list(STRATEGIES) == ["always-next", "same-type", "preload-all", "greedy", "lc-opg"]
    for name, strategy in STRATEGIES.items():
        assert strategy(random_instance(4)).solver["strategy"] == name
