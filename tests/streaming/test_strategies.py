"""Naive strategies: where they load, and that they tell which limits they break."""

from dataclasses import replace

import pytest
from oracles.random_instances import random_instance, weight

from torchedge.streaming.instances import Instance, Layer
from torchedge.streaming.plans import always_next, preload_everything, same_type
from torchedge.streaming.verification import verify_plan

NAIVE = [always_next, preload_everything, same_type]
BROKEN = {"respects_capacity": "(C3)", "respects_m_peak": "(C2)", "respects_memory": "(memory)"}
CLASSES = ("reusable", "elemental", "hierarchical", "reusable", "elemental", "reusable")


@pytest.fixture
def instance():
    layers = tuple(Layer(f"l{n}", 2, 1.0, kind) for n, kind in enumerate(CLASSES, 1))
    weights = (weight(0, 3, 4, 4), weight(1, 1, 6, 6), weight(2, 2, 1, 5), weight(3, 2, 3, 3))
    return Instance(1024, layers, weights, lam=0.5)


def placed(plan):
    return {x.weight: (x.layer, x.chunks) for x in plan.loads}


def test_always_next_loads_in_the_layer_before(instance):
    plan = always_next(instance)
    assert placed(plan) == {"w0": (3, 3), "w1": (5, 1), "w3": (2, 2)}
    assert plan.preload == ("w2",) and plan.objective == 0.5 * (2 + 1 + 1 + 1)
    assert plan.solver["respects_capacity"] is False


def test_same_type_loads_in_the_layer_of_that_class_before(instance):
    plan = same_type(instance)
    assert placed(plan) == {"w0": (1, 3), "w1": (4, 1)}
    assert plan.preload == ("w2", "w3") and plan.objective == 0.5 * (2 + 2 + 3 + 2)


def test_preload_everything_streams_nothing(instance):
    plan = preload_everything(instance)
    assert plan.loads == () and plan.peak_chunks == 0 and plan.objective == 0.5 * 8
    limited = preload_everything(replace(instance, memory_chunks=7))
    assert limited.solver["respects_memory"] is False


@pytest.mark.parametrize("strategy", NAIVE)
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_only_limits_are_broken_and_each_is_told(strategy, size):
    for seed in range(200):
        drawn = random_instance(seed, size)
        plan = strategy(drawn)
        problems = verify_plan(drawn, plan).problems
        assert plan.status == "FEASIBLE" and plan.lower_bound is None
        assert all(problem.startswith(tuple(BROKEN.values())) for problem in problems)
        for fact, mark in BROKEN.items():
            assert plan.solver[fact] is not any(problem.startswith(mark) for problem in problems)
