"""The paper's model in CP-SAT against exhaustive search, its windows, hints, sizes and limits."""

from dataclasses import replace

import paper_model
import pytest
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import layer, random_instance, weight
from overlap_strategies import plan_greedily
from paper_model import count_pairs, direct_cp_sat, whole_window, widest_reach

from torchedge.errors import InputError, MissingExtraError
from torchedge.streaming.instances import Instance
from torchedge.streaming.verification import check_plan


def instance_of(capacities, weights, **options):
    layers = tuple(layer(n, c) for n, c in enumerate(capacities, 1))
    return Instance(1024, layers, tuple(weight(n, *w) for n, w in enumerate(weights)), **options)


@pytest.mark.parametrize("block", range(10))
def test_equals_exhaustive_search(block):
    for seed in range(30 * block, 30 * block + 30):
        instance = random_instance(seed)
        plan, best = direct_cp_sat(instance), best_plan(instance)
        check_plan(instance, plan)
        assert plan.status == best.status, instance.name
        if best.objective is not None:
            assert plan.objective == pytest.approx(best.objective, abs=1e-9), instance.name
            assert plan.lower_bound == plan.objective


def test_the_order_of_consumption_is_not_the_best():
    # One chunk a layer: the large weight, used last, makes the small one wait: 5 + 5 layers against 6 + 1.
    instance = instance_of([1] * 11, [(5, 11, 11), (1, 10, 10)], lam=0.9)
    assert plan_greedily(instance).objective == 1.0
    assert direct_cp_sat(instance).objective == 0.7


@pytest.mark.slow
def test_plans_repeat():
    instance = random_instance(5, "small")
    assert direct_cp_sat(instance, deterministic_limit=0.5) == direct_cp_sat(
        instance, deterministic_limit=0.5
    )


def test_a_limit_in_seconds_is_told():
    plan = direct_cp_sat(instance_of([1, 1], [(1, 2, 2)]), seconds=20)
    assert plan.solver["limit"] == "20 s" and plan.status == "OPTIMAL"


def test_no_time_finds_nothing():
    assert direct_cp_sat(random_instance(1, "medium"), seconds=0) is None


def test_a_window_that_cuts_loads_off_proves_nothing():
    instance = instance_of([1] * 9, [(4, 9, 9), (3, 5, 5)], lam=0.9)
    whole, narrow = direct_cp_sat(instance), direct_cp_sat(instance, window=3)
    check_plan(instance, narrow)
    assert (whole.status, narrow.status, narrow.lower_bound) == ("OPTIMAL", "FEASIBLE", None)
    assert narrow.preload == ("w0",) and whole.objective < narrow.objective
    assert direct_cp_sat(instance, window=8) == whole


def test_a_window_that_leaves_no_plan_is_no_proof():
    instance = instance_of([1] * 9, [(4, 9, 9)], memory_chunks=3)
    assert direct_cp_sat(instance, window=2) is None
    assert direct_cp_sat(instance).status == "INFEASIBLE"


@pytest.mark.parametrize("seed", range(20))
def test_a_hint_changes_no_optimum(seed):
    instance = replace(random_instance(seed), memory_chunks=None)
    plan = direct_cp_sat(instance, hint=plan_greedily(instance))
    assert plan.objective == direct_cp_sat(instance).objective


def test_pairs_are_counted_by_hand():
    window = whole_window(instance_of([1, 0, 2, 1], [(1, 4, 4), (2, 3, 4), (1, 1, 1)]))
    assert count_pairs(window, 10) == [2, 1, 0]
    assert count_pairs(window, 1) == [1, 0, 0]
    assert [widest_reach(window, n) for n in (0, 1, 2, 3)] == [0, 1, 2, 4]


def test_large_models_are_refused_with_the_window_that_fits(monkeypatch):
    instance = instance_of([1] * 9, [(4, 9, 9), (3, 5, 5)])
    monkeypatch.setattr(paper_model, "MAX_PAIRS", 7)
    with pytest.raises(InputError, match=r"12 pairs.*at most 7: give a window of 3 layers"):
        direct_cp_sat(instance)
    assert direct_cp_sat(instance, window=3) is not None


def test_prices_beyond_64_bits_are_refused():
    layers = tuple(layer(n, 2**31) for n in range(1, 4001))
    weights = tuple(replace(weight(n, 1, 4000, 4000), nbytes=2**41, chunks=2**31) for n in range(900))
    instance = Instance(1024, layers, weights, lam=0.123457)
    with pytest.raises(InputError, match=r"2\^60"):
        direct_cp_sat(instance, window=1)


@pytest.mark.parametrize(
    "options", [{"window": -1}, {"seconds": -1}, {"seconds": float("nan")}, {"workers": 0}]
)
def test_limits_that_are_none_are_refused(options):
    with pytest.raises(InputError, match="expected a"):
        direct_cp_sat(random_instance(0), **options)


def test_a_missing_solver_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtraError, match="pip install ortools"):
        direct_cp_sat(random_instance(0))
