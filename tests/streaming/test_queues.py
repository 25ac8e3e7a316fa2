"""Queues of models: joint instances, groups within the limit, and what planning together saves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.random_instances import instances
from overlap_strategies import plan_greedily

from torchedge.devices import Figure, Provenance
from torchedge.errors import InputError, PlanError
from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.queues import Share, join_instances, plan_queue, simulate_queue
from torchedge.streaming.rates import Rates
from torchedge.streaming.strategies import preload_everything
from torchedge.streaming.verification import verify_plan

MEGABYTE = 10**6


def figure(value: float, unit: str = "GB/s") -> Figure:
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(0.5), figure(1000, "us"), staging_bytes=None)
"""A chunk of a megabyte takes 1 ms from the disk, 0.5 ms in a kernel, 2 ms (+ 1 ms) in a transform."""


def model(name: str, weights: list[tuple[int, int, int]], layers: int = 2, capacity: int = 4) -> Instance:
    """Layers of 10 ms; weights of chunks, first and last use."""
    return Instance(
        MEGABYTE,
        tuple(Layer(f"l{n}", capacity, 10.0, "elemental") for n in range(layers)),
        tuple(Weight(f"w{n}", c * MEGABYTE, c, first, last) for n, (c, first, last) in enumerate(weights)),
        m_peak_chunks=50,
        name=name,
    )


def test_a_joint_instance_has_all_layers_in_a_row():
    one, other = model("one", [(2, 1, 2)], layers=3), model("other", [(3, 1, 1), (1, 2, 2)])
    joint = join_instances([one, other], 20 * MEGABYTE + 5)
    assert joint.layers == one.layers + other.layers
    assert [(w.name, w.chunks, w.first_use, w.last_use) for w in joint.weights] == [
        ("1/w0", 2, 1, 2),
        ("2/w0", 3, 4, 4),
        ("2/w1", 1, 5, 5),
    ]
    assert (joint.memory_chunks, joint.m_peak_chunks, joint.lam) == (20, None, one.lam)
    assert joint.name == "one + other"
    assert join_instances([replace(one, memory_chunks=7), other], 20 * MEGABYTE).memory_chunks == 7


def test_the_first_weights_of_a_model_are_loaded_in_the_tail_of_the_one_before():
    queue = plan_queue([model("one", [(2, 1, 1)]), model("two", [(3, 1, 1)])], 10 * MEGABYTE, plan_greedily)
    (group,) = queue.groups
    assert (group.first, group.last) == (1, 2)
    assert group.plan.preload == ("1/w0",)
    assert [(x.weight, x.layer, x.chunks) for x in group.plan.loads] == [("2/w0", 2, 3)]
    assert queue.shares == (Share(2, 0, 0), Share(0, 3, 0))
    assert "2. two: 0.0 MiB preloaded, 2.9 MiB loaded by the models before, 0.0 MiB" in str(queue)


def test_what_planning_together_saves_worked_out_by_hand():
    queue = plan_queue([model("one", [(2, 1, 1)]), model("two", [(3, 1, 1)])], 10 * MEGABYTE, plan_greedily)
    run = simulate_queue(queue, RATES)
    # Alone: 2 + 5 ms and 3 + 7 ms of initialisation. Together the second's 3 MB slow layer 2 by 1.5 ms.
    assert [t.initialisation_ms for t in run.apart] == [7, 10]
    assert run.apart_ms == 7 + 20 + 10 + 20
    assert run.latency_ms == 7 + 20 + 1.5 + 20
    joined, apart = run.lanes
    assert joined.spans == (("one", 0, 28.5), ("two", 28.5, 48.5))
    assert apart.spans == (("one", 0, 27), ("two", 27, 57))
    assert joined.memory.total[-1] == 0
    assert joined.memory.times_ms[-1] == run.latency_ms


def test_activations_are_given_for_each_model():
    queue = plan_queue([model("one", []), model("two", [])], 0, preload_everything)
    run = simulate_queue(queue, RATES, [[5, 6], [7, 8]])
    assert run.together[0].memory.activations.tolist() == [5, 6, 7, 8, 0]
    assert [t.memory.activations.tolist() for t in run.apart] == [[5, 6, 0], [7, 8, 0]]
    with pytest.raises(InputError, match="1 models; expected 2"):
        simulate_queue(queue, RATES, [[5, 6]])


def test_models_that_do_not_fit_together_are_planned_in_groups():
    # Preloaded weights stay counted: with 5 chunks, one and two fit together (2 + 3), but not with three.
    queue = [model("one", [(2, 1, 1)]), model("two", [(3, 1, 1)]), model("three", [(4, 1, 1)])]
    asked = []

    def solve(instance: Instance) -> OverlapPlan:
        asked.append(instance.name)
        return plan_greedily(instance)

    found = plan_queue(queue, 5 * MEGABYTE, solve)
    assert [(g.first, g.last) for g in found.groups] == [(1, 2), (3, 3)]
    assert asked == ["one", "two", "three", "one + two + three", "one + two"]
    assert found.groups[1].plan.preload == ("3/w0",)
    assert found.groups[1].instance.m_peak_chunks == 50
    assert found.shares[2] == Share(4, 0, 0)
    run = simulate_queue(found, RATES)
    assert [name for name, _, _ in run.lanes[0].spans] == ["one", "two", "three"]
    assert run.lanes[0].spans[-1][2] == pytest.approx(run.latency_ms)


def test_a_model_by_itself_is_a_queue():
    found = plan_queue([model("one", [(2, 1, 1), (1, 2, 2)])], 9 * MEGABYTE, plan_greedily)
    assert len(found.groups) == 1 and found.shares == (Share(2, 0, 1),)
    run = simulate_queue(found, RATES)
    assert run.latency_ms == run.apart_ms


def test_a_limit_that_is_too_small_names_the_model():
    with pytest.raises(PlanError, match="two alone has no plan within 2000000 bytes"):
        plan_queue([model("one", [(2, 1, 1)]), model("two", [(3, 1, 1)])], 2 * MEGABYTE, plan_greedily)


def test_a_plan_that_breaks_its_rules_is_not_taken():
    def careless(instance: Instance) -> OverlapPlan:
        return replace(preload_everything(instance), preload=())

    with pytest.raises(PlanError, match="breaks its rules"):
        plan_queue([model("one", [(2, 1, 1)])], 9 * MEGABYTE, careless)


@pytest.mark.parametrize(
    ("queue", "limit", "word"),
    [
        ([], 1, "0 models"),
        ([model("one", [])] * 101, 1, "101 models"),
        ([model("one", [])], -1, "-1"),
        ([model("one", [])], 1.5, "1.5"),
        ([model("one", []), replace(model("two", []), chunk_bytes=7)], 1, "chunk_bytes: 1000000, 7"),
        ([model("one", []), replace(model("two", []), lam=0.5)], 1, "lam: 0.5, 0.9"),
        ([model("one", []), replace(model("two", []), residency="weights")], 1, "residency"),
    ],
)
def test_queues_that_make_no_sense_are_refused(queue, limit, word):
    with pytest.raises(InputError, match=word):
        plan_queue(queue, limit, plan_greedily)


@given(st.lists(instances(limits=False), min_size=1, max_size=4), st.integers(0, 80))
def test_groups_follow_each_other_and_keep_their_rules(models, chunks):
    same = [
        replace(m, lam=0.9, residency="chunks", distance="layers", name=f"m{k}") for k, m in enumerate(models)
    ]
    try:
        queue = plan_queue(same, chunks * same[0].chunk_bytes, plan_greedily)
    except PlanError as error:
        assert "alone has no plan" in str(error)
        return
    assert queue.groups[0].first == 1 and queue.groups[-1].last == len(same)
    for one, other in zip(queue.groups, queue.groups[1:], strict=False):
        assert other.first == one.last + 1
    for group in queue.groups:
        assert verify_plan(group.instance, group.plan).ok
        assert group.instance.memory_chunks == chunks
    for m, share in zip(same, queue.shares, strict=True):
        assert share.preloaded + share.carried + share.own == m.total_chunks
    run = simulate_queue(queue, RATES)
    assert len(run.lanes[0].spans) == len(run.lanes[1].spans) == len(same)
    assert run.lanes[0].memory.total[-1] == 0
