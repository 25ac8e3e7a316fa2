"""Fusion: blocks written by hand, and what must hold of any graph."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.inference_graphs import graphs, make_graph

from torchedge.errors import InputError
from torchedge.streaming.fusion import assemble, find_groups, fuse, role_of


def kinds(graph):
    return [operation.kind for operation in fuse(graph).operations]


def test_a_residual_block_becomes_one_kernel_a_convolution():
    graph = make_graph(
        ("stem", "conv2d", [], 100, ["s"]),
        ("conv1", "conv2d", ["stem"], 100, ["w1"]),
        ("bn1", "batch_norm", ["conv1"], 100, ["g1"]),
        ("relu1", "relu", ["bn1"], 100, []),
        ("conv2", "conv2d", ["relu1"], 100, ["w2"]),
        ("bn2", "batch_norm", ["conv2"], 100, ["g2"]),
        ("down", "conv2d", ["stem"], 100, ["wd"]),
        ("bnd", "batch_norm", ["down"], 100, ["gd"]),
        ("sum", "add", ["bn2", "bnd"], 100, []),
        ("relu2", "relu", ["sum"], 100, []),
    )
    fused = fuse(graph)
    chain = "conv2d+batch_norm"
    assert kinds(graph) == ["conv2d", f"{chain}+relu", chain, f"{chain}+add+relu"]
    last = fused.operations[3]
    assert (last.name, last.inputs, last.weights) == ("down", (0, 2), ("wd", "gd"))
    assert last.load_class == "reusable" and [p.name for p in last.parts] == ["down", "bnd", "sum", "relu2"]
    assert {part.load_class for part in last.parts} == {"reusable", "elemental"}
    assert last.bytes_moved == 100 + 100 + 2 * 1000 + 100  # stem and bn2 read, two weights, one result
    assert fused.outputs == (3,)


def test_the_mlp_of_a_transformer_keeps_its_norm_apart():
    graph = make_graph(
        ("x", "embedding", [], 100, ["table"]),
        ("norm", "layer_norm", ["x"], 100, ["g"]),
        ("up", "linear", ["norm"], 300, ["wu"]),
        ("act", "gelu", ["up"], 300, []),
        ("down", "linear", ["act"], 100, ["wd"]),
        ("sum", "add", ["x", "down"], 100, []),
    )
    assert kinds(graph) == ["embedding", "layer_norm", "linear+gelu", "linear+add"]
    assert fuse(graph).uses == {"table": (1, 1), "g": (2, 2), "wu": (3, 3), "wd": (4, 4)}


def test_a_result_read_often_is_fused_where_all_readers_are():
    """The tanh form of GELU reads the product three times."""
    graph = make_graph(
        ("up", "linear", [], 300, ["w"]),
        ("half", "mul", ["up"], 300, []),
        ("cube", "mul", ["up"], 300, []),
        ("inner", "add", ["up", "cube"], 300, []),
        ("act", "mul", ["half", "inner"], 300, []),
        ("down", "linear", ["act"], 100, ["v"]),
    )
    assert kinds(graph) == ["linear+mul+mul+add+mul", "linear"]
    assert fuse(graph).operations[0].bytes_moved == 1000 + 300
    assert kinds(replace(graph, outputs=(1, 5))) == ["linear", "mul", "mul+add+mul", "linear"]


def test_attention_fuses_its_mask_and_neither_softmax_nor_what_precedes_it():
    graph = make_graph(
        ("q", "linear", [], 100, ["wq"]),
        ("k", "linear", [], 100, ["wk"]),
        ("v", "linear", [], 100, ["wv"]),
        ("scores", "matmul", ["q", "k"], 300, []),
        ("scaled", "mul", ["scores"], 300, []),
        ("share", "softmax", ["scaled"], 300, []),
        ("out", "matmul", ["share", "v"], 100, []),
    )
    assert kinds(graph) == ["linear", "linear", "linear", "matmul+mul", "softmax", "matmul"]


def test_a_reduction_takes_only_what_follows_element_by_element():
    graph = make_graph(
        ("x", "relu", [], 100, []),
        ("mean", "mean", ["x"], 40, []),
        ("shift", "add", ["mean"], 40, []),
        ("scaled", "mul", ["x", "shift"], 100, []),
        ("next", "softmax", ["scaled"], 100, []),
        ("gate", "mul", ["next"], 100, []),
    )
    fused = fuse(graph)
    assert kinds(graph) == ["relu", "mean+add", "mul", "softmax+mul"]
    assert [op.load_class for op in fused.operations] == [
        "elemental",
        "hierarchical",
        "elemental",
        "hierarchical",
    ]


def test_a_product_is_moved_past_others_only_if_that_holds_no_more():
    def block(size):
        return make_graph(
            ("big", "cat", [], size, []),
            ("conv", "conv2d", ["big"], 100, ["w"]),
            ("time", "linear", [], 40, ["t"]),
            ("sum", "add", ["conv", "time"], 100, []),
        )

    assert kinds(block(100)) == ["cat", "linear", "conv2d+add"]
    assert kinds(block(300)) == ["cat", "conv2d", "linear", "add"]
    both = make_graph(
        ("a", "cat", [], 60, []),
        ("b", "cat", [], 60, []),
        ("conv", "conv2d", ["a", "b"], 100, ["w"]),
        ("time", "linear", ["b"], 40, ["t"]),
        ("more", "linear", ["time"], 40, ["t"]),
        ("sum", "add", ["conv", "more"], 100, []),
    )
    assert kinds(both) == ["cat", "cat", "conv2d", "linear", "linear", "add"]  # b would live longer too


def test_broadcast_results_and_returned_ones_stay_kernels():
    broadcast = make_graph(("a", "linear", [], 40, ["w"]), ("b", "add", ["a"], 100, []))
    assert kinds(broadcast) == ["linear", "add"]
    returned = make_graph(("a", "linear", [], 40, ["w"]), ("b", "relu", ["a"], 40, []), outputs=["a", "b"])
    assert kinds(returned) == ["linear", "relu"]


def test_groups_that_cannot_be_kernels_are_refused():
    graph = make_graph(
        ("a", "relu", [], 40, []), ("b", "relu", ["a"], 40, []), ("c", "add", ["a", "b"], 40, [])
    )
    with pytest.raises(InputError, match="no partition"):
        assemble(graph, ((0, 1),))
    with pytest.raises(InputError, match="a is read outside its kernel"):
        assemble(graph, ((0, 1), (2,)))


@settings(max_examples=400)
@given(graphs())
def test_what_holds_of_any_graph(graph):
    groups = find_groups(graph)
    fused = fuse(graph)
    count = len(graph.operations)
    assert sorted(p for group in groups for p in group) == list(range(count))
    assert [group[-1] for group in groups] == sorted(group[-1] for group in groups)
    for place, operation in enumerate(fused.operations):
        assert all(source < place for source in operation.inputs)
    assert sum(op.flops for op in fused.operations) == sum(op.flops for op in graph.operations)
    assert fused.uses.keys() == graph.uses.keys() and fused.weights == graph.weights
    assert max(fused.activation_bytes) <= max(graph.activation_bytes)
    assert [groups[o][-1] for o in fused.outputs] == list(graph.outputs)
    assert find_groups(graph) == groups


@given(graphs())
def test_a_kernel_is_what_its_parts_are(graph):
    groups = find_groups(graph)
    for group, kernel in zip(groups, fuse(graph).operations, strict=True):
        parts = [graph.operations[p] for p in group]
        if len(group) > 1:
            assert [p.name for p in kernel.parts] == [p.name for p in parts]
        assert sum(role_of(part) != "element" for part in parts) <= 1 or len(parts) == 1
        outside = {source for part in parts for source in part.inputs if source not in group}
        assert {groups[source][-1] for source in kernel.inputs} == outside
        read = sum(graph.operations[s].output_bytes for part in parts for s in part.inputs if s not in group)
        stored = sum(1000 * len(part.weights) for part in parts)
        assert kernel.bytes_moved == read + stored + parts[-1].output_bytes
        assert kernel.output_bytes == parts[-1].output_bytes
        assert set(kernel.weights) == {name for part in parts for name in part.weights}


@given(graphs())
def test_splitting_everything_again_gives_the_graph_back(graph):
    assert assemble(graph, tuple((p,) for p in range(len(graph.operations)))) == graph
