"""Adaptive fusion: a case worked out by hand, the rules of splitting, and what must always hold."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.greedy_plans import plan_late
from oracles.inference_graphs import graphs, make_graph

from torchedge.errors import InputError
from torchedge.streaming.fusion import (
    assemble,
    count_crossings,
    find_cuts,
    find_groups,
    split_adaptively,
    weigh_kernels,
)
from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.verification import check_plan

LOADS = {"reusable": 1, "elemental": 4, "hierarchical": 0}


def make_instance(graph, memory=None, chunks=4, **options):
    """A launch takes 0.5 ms, each part 0.1 ms; chunks of 250 bytes."""
    layers = tuple(
        Layer(op.name, LOADS[op.load_class], 0.5 + 0.1 * max(1, len(op.parts)), op.load_class)
        for op in graph.operations
    )
    weights = tuple(
        Weight(w.name, chunks * 250, chunks, *graph.uses[w.name])
        for w in graph.weights
        if w.name in graph.uses
    )
    return Instance(250, layers, weights, memory_chunks=memory, **options)


MLP = make_graph(
    ("up", "linear", [], 300, ["a"]),
    ("act", "gelu", ["up"], 300, []),
    ("down", "linear", ["act"], 100, ["b"]),
)


def test_splitting_pays_where_worked_out_by_hand():
    """Fused, the first kernel loads one chunk and b must be preloaded; split, GELU loads it in one layer."""
    found = split_adaptively(MLP, make_instance, plan_late)
    assert found.fused.objective == pytest.approx(0.9 * (4 + 4))
    assert found.fused.latency_ms == pytest.approx(0.7 + 0.6)
    assert found.fused.total == pytest.approx(7.2 + 1.3)
    assert found.chosen.objective == pytest.approx(0.9 * 4 + 0.1 * 1)
    assert found.chosen.latency_ms == pytest.approx(3 * 0.6)
    assert found.chosen == found.unfused and found.gain == pytest.approx(8.5 - 5.5)
    (only,) = found.rounds
    assert only.accepted and only.change == "split"
    assert only.penalty_before == pytest.approx(0.9 * 4) and only.penalty_after == 0
    (split,) = only.splits
    assert split.into == ("linear", "gelu") and split.capacities == (1, 1, 4)
    assert split.penalty == pytest.approx(3.6) and split.latency_ms == pytest.approx(0.5)


def test_a_launch_may_cost_more_than_the_preload():
    found = split_adaptively(MLP, make_instance, plan_late, latency_price=8)
    assert found.chosen == found.fused and found.gain == 0 and not found.rounds
    assert split_adaptively(MLP, make_instance, plan_late, latency_price=6.9).gain > 0


def test_the_gain_of_capacity_must_reach_alpha():
    """1 + 4 chunks are five times the fused kernel's."""
    assert split_adaptively(MLP, make_instance, plan_late, alpha=4).gain > 0
    assert split_adaptively(MLP, make_instance, plan_late, alpha=4.01).gain == 0


def test_a_split_that_is_not_needed_is_taken_back():
    """The last product's 6 chunks: 4 + 1 in the second kernel's parts, and what the first loads fused."""
    graph = make_graph(
        ("one", "linear", [], 300, ["a"]),
        ("act1", "gelu", ["one"], 300, []),
        ("two", "matmul", ["act1"], 300, []),
        ("act2", "gelu", ["two"], 300, []),
        ("three", "linear", ["act2"], 100, ["c"]),
    )
    found = split_adaptively(graph, lambda g: make_instance(g, chunks=6), plan_late)
    assert [(step.change, len(step.splits), step.accepted) for step in found.rounds] == [
        ("split", 2, True),
        ("fuse", 1, True),
    ]
    assert found.groups == ((0, 1), (2,), (3,), (4,))
    assert found.chosen.total == pytest.approx(0.9 * 6 + 0.1 * 3 + 0.7 + 3 * 0.6)


def test_only_splitting_keeps_a_limit():
    def limited(graph):
        return make_instance(graph, memory=5)

    found = split_adaptively(MLP, limited, plan_late)
    assert found.fused.total == math.inf and found.fused.objective is None
    assert found.plan.status == "FEASIBLE" and found.gain == math.inf


def test_kernels_around_a_softmax_stay_intact():
    graph = make_graph(
        ("a", "softmax", [], 300, []),
        ("b", "gelu", ["a"], 300, []),
        ("c", "linear", ["b"], 100, ["w"]),
    )
    found = split_adaptively(graph, make_instance, plan_late)
    assert found.chosen == found.fused and found.unfused.total < found.fused.total
    assert found.groups == ((0, 1), (2,))
    found = split_adaptively(graph, make_instance, plan_late, split_rows=True)
    assert found.chosen == found.unfused and found.rounds[0].splits[0].into == ("softmax", "gelu")


def test_a_bias_stays_with_its_product_and_a_batch_norm_with_its_convolution():
    mlp = make_graph(
        ("up", "linear", [], 300, ["a"]),
        ("sum", "add", ["up"], 300, ["c"]),
        ("act", "gelu", ["sum"], 300, []),
    )
    (cut,) = find_cuts(mlp, ((0, 1, 2),), (1, 4, 4), 0.1)
    assert (cut.first, cut.second) == ((0, 1), (2,))
    block = make_graph(
        ("conv", "conv2d", [], 300, ["a"]),
        ("bn", "batch_norm", ["conv"], 300, ["c"]),
        ("act", "relu", ["bn"], 300, []),
    )
    (cut,) = find_cuts(block, ((0, 1, 2),), (1, 9, 4), 0.1)
    assert (cut.first, cut.second) == ((0, 1), (2,))
    assert not find_cuts(block, ((0, 1), (2,)), (1, 9, 4), 0.1)


def test_a_kernel_is_cut_only_behind_a_result_read_by_one_side():
    graph = make_graph(
        ("up", "linear", [], 300, ["w"]),
        ("half", "mul", ["up"], 300, []),
        ("cube", "mul", ["up"], 300, []),
        ("act", "mul", ["half", "cube"], 300, []),
    )
    (cut,) = find_cuts(graph, ((0, 1, 2, 3),), (1, 4, 4, 4), 0.1)
    assert (cut.first, cut.second) == ((0,), (1, 2, 3))


def test_the_penalty_by_its_definition():
    """Layers: 1 = {0}, 2 = {1, 2}, 3 = {3}; weights p, q of 4 chunks, used by layer 3."""
    layers = tuple(Layer(str(n), 9, 1.0, "elemental") for n in range(3))
    instance = Instance(250, layers, (Weight("p", 1000, 4, 3, 3), Weight("q", 1000, 4, 3, 3)))
    groups = ((0,), (1, 2), (3,))
    reference = OverlapPlan(
        "FEASIBLE",
        0.0,
        0.0,
        (),
        (ChunkLoad("p", 2, 3, 0), ChunkLoad("p", 3, 1, 3), ChunkLoad("q", 3, 4, 0)),
        8,
    )
    preloaded = OverlapPlan(
        "FEASIBLE", 0.0, 0.0, ("p",), (ChunkLoad("q", 1, 1, 0), ChunkLoad("q", 2, 3, 1)), 8
    )
    assert weigh_kernels(groups, instance, preloaded, reference, 0.5) == (0, pytest.approx(0.9 * 4 + 0.5), 0)
    in_chunks = replace(instance, distance="chunks")
    assert weigh_kernels(groups, in_chunks, preloaded, reference, 0.5)[1] == pytest.approx(0.9 * 4 + 0.5 * 4)
    none = OverlapPlan("INFEASIBLE", None, None, (), (), 0)
    assert weigh_kernels(groups, instance, none, reference, 0.5)[1] == pytest.approx(0.9 * 8)
    assert count_crossings(instance, preloaded) == (1, 1, 0)
    assert count_crossings(in_chunks, preloaded) == (4, 4, 0)


@pytest.mark.parametrize(
    "options", [{"alpha": -1}, {"mu": math.nan}, {"latency_price": math.inf}, {"limit": 1}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} is"):
        split_adaptively(MLP, make_instance, plan_late, **options)


def test_a_fused_graph_is_refused():
    with pytest.raises(InputError, match="expected the graph before fusion"):
        split_adaptively(assemble(MLP, find_groups(MLP)), make_instance, plan_late)


@given(graphs(), st.integers(1, 6), st.sampled_from((0.0, 0.1, 1.0)), st.integers(2, 12))
def test_what_always_holds(graph, chunks, price, limit):
    solved = []

    def solve(instance):
        solved.append(instance)
        return plan_late(instance)

    def instance_of(graph):
        return make_instance(graph, chunks=chunks)

    found = split_adaptively(graph, instance_of, solve, latency_price=price, limit=limit)
    assert 2 <= len(solved) <= limit
    assert found.chosen.total <= found.fused.total and found.gain >= 0
    check_plan(found.instance, found.plan)
    assert found.graph == assemble(graph, found.groups)
    assert [layer.name for layer in found.instance.layers] == [op.name for op in found.graph.operations]
    assert max(found.graph.activation_bytes) <= max(graph.activation_bytes)
    assert sum(op.flops for op in found.graph.operations) == sum(op.flops for op in graph.operations)
    accepted = [step for step in found.rounds if step.accepted]
    for earlier, later in pairwise(accepted):
        assert later.before == earlier.after and later.after.total < later.before.total
    assert found == split_adaptively(graph, instance_of, plan_late, latency_price=price, limit=limit)


@given(graphs(), st.data())
def test_every_cut_gives_two_kernels(graph, data):
    groups = find_groups(graph)
    capacities = data.draw(st.lists(st.integers(0, 9), min_size=14, max_size=14))
    for cut in find_cuts(graph, groups, capacities, 0.2):
        rest = [group for group in groups if group != cut.whole]
        split = assemble(graph, (*rest, cut.first, cut.second))
        assert len(split.operations) == len(groups) + 1
        assert sorted(cut.first + cut.second) == list(cut.whole)
        assert cut.first_capacity + cut.second_capacity >= 1.2 * cut.whole_capacity
