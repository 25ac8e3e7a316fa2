"""The oracle itself: its quick search finds what trying every allocation finds."""

from dataclasses import replace

import pytest
from hypothesis import given
from oracles.exhaustive_plans import best_plan, enumerate_optimum, smallest_memory
from oracles.random_instances import CHUNK_BYTES, instances, layer, random_instance, weight

from torchedge.streaming.instances import Instance


def compare(instance):
    plan, least = best_plan(instance), enumerate_optimum(instance)
    assert (plan.status == "INFEASIBLE") == (least is None)
    if least is not None:
        assert plan.objective == pytest.approx(float(least), abs=1e-12)


@pytest.mark.parametrize("block", range(10))
def test_both_ways_agree_on_seeded_instances(block):
    for seed in range(100 * block, 100 * block + 100):
        instance = random_instance(seed)
        if len(instance.weights) <= 3 or len(instance.layers) <= 4:
            compare(instance)


@given(instances(max_layers=5, max_weights=3, max_chunks=3))
def test_both_ways_agree(instance):
    compare(instance)


def test_the_order_of_consumption_is_not_the_best():
    """Capacities 1; A of 5 chunks for layer 11, B of one for layer 10: 7, and 10 in order of consumption."""
    layers = tuple(layer(n, 1) for n in range(1, 12))
    instance = Instance(CHUNK_BYTES, layers, (weight(0, 5, 11, 11), weight(1, 1, 10, 10)), lam=0.9)
    assert best_plan(instance).objective == pytest.approx(0.7)


def test_the_smallest_memory_that_works():
    """Two weights of two chunks, one chunk a layer: streaming one after the other needs three chunks."""
    instance = Instance(
        CHUNK_BYTES, tuple(layer(n, 1) for n in range(1, 6)), (weight(0, 2, 3, 3), weight(1, 2, 5, 5))
    )
    assert smallest_memory(instance) == 3
    assert best_plan(replace(instance, memory_chunks=2)).status == "INFEASIBLE"
    assert smallest_memory(replace(instance, weights=())) == 0


def test_seeded_instances_are_the_same_each_time_and_of_every_kind():
    drawn = [random_instance(seed) for seed in range(300)]
    assert drawn[:20] == [random_instance(seed) for seed in range(20)]
    assert {x.residency for x in drawn} == {"chunks", "weights"}
    assert {x.distance for x in drawn} == {"layers", "chunks"}
    for limit in ("m_peak_chunks", "memory_chunks"):
        assert {getattr(x, limit) is None for x in drawn} == {True, False}
    assert any(w.last_use > w.first_use for x in drawn for w in x.weights)
    assert any(w.first_use == 1 for x in drawn for w in x.weights)
    assert any(y.capacity_chunks == 0 for x in drawn for y in x.layers)
    plans = [best_plan(x) for x in drawn]
    assert sum(bool(plan.loads) for plan in plans) > 100
    assert any(plan.status == "INFEASIBLE" for plan in plans)
