"""Parts of a traced graph that run at different places: what kernels exist for, and what PyTorch runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchedge.tracing.random_numbers import RANDOM


@dataclass(frozen=True)
class Segment:
    """Operators of a graph that run at one place, as a graph of its own.

    inputs, outputs: names of the whole graph's nodes, in the order of the segment's placeholders and results.
    lowered: whether it runs on the device; else PyTorch runs it.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lowered: bool


@dataclass(frozen=True)
class Results:
    """Names of a graph's placeholders, and of the tensors that it returns (None: no tensor).

    forms: of each returned tensor, a fake one of its shape and strides.
    """

    placeholders: tuple[str, ...]
    returned: tuple[str | None, ...]
    forms: Mapping[str, torch.Tensor]


def results_of(module: GraphModule) -> Results:
    """Return what goes into a graph and what comes out."""
    found = [node if isinstance(node, Node) and _is_tensor(node) else None for node in _returned(module)]
    return Results(
        tuple([node.name for node in module.graph.find_nodes(op="placeholder")]),
        tuple([None if node is None else node.name for node in found]),
        {node.name: node.meta["val"] for node in found if node is not None},
    )


def split_graph(module: GraphModule, runs_in_pytorch: Callable[[Node], bool]) -> list[Segment]:
    """Return the segments of a graph in the order in which they run, as few as its dependencies allow.

    runs_in_pytorch: asked of each operator. Constants are made again in each segment that reads them.
    """
    level: dict[Node, int] = {}
    constant: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and _is_constant(node, constant)):
            constant.add(node)
        elif node.op == "call_function":
            before = [level[n] for n in node.all_input_nodes if n in level]
            place = max(before, default=0)
            if node.target is not operator.getitem:
                place += (place % 2) != runs_in_pytorch(node)
            level[node] = place
    if not level:
        level = dict.fromkeys(constant, 0)
    wanted = {r for r in _returned(module) if isinstance(r, Node)}
    return [
        _segment(module, [n for n in level if level[n] == place], level, wanted, place)
        for place in sorted(set(level.values()))
    ]


def one_operator(module: GraphModule, node: Node) -> Segment:
    """Return the segment that holds one operator alone, whatever else the graph does with its results."""
    users = [user for user in node.users if user.target is operator.getitem]
    return _segment(module, [node, *users], dict.fromkeys([node, *users], 0), {*(users or [node])}, 0)


def operator_name(node: Node) -> str:
    """Return an operator's name as users know it, such as "aten.topk"."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).replace("::", ".")
    return str(getattr(target, "__name__", target))


def _returned(module: GraphModule) -> Sequence[Any]:
    returned: Any = next(iter(module.graph.find_nodes(op="output"))).args[0]
    return returned if isinstance(returned, (tuple, list)) else [returned]


def _is_constant(node: Node, constant: set[Node]) -> bool:
    """Return whether a node depends on constants alone and draws no numbers."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        kind = str(target._schema.name).split("::")[-1]
        if kind in RANDOM or torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return False
    return all(source in constant for source in node.all_input_nodes)


def _segment(
    module: GraphModule, members: Sequence[Node], level: dict[Node, int], wanted: set[Node], place: int
) -> Segment:
    """Return the graph of some nodes; what they read from elsewhere becomes placeholders."""
    graph, inside = Graph(), set(members)
    copies: dict[Node, Node] = {}
    outside = dict.fromkeys(s for n in members for s in n.all_input_nodes if s not in inside)
    inputs = [n for n in outside if n.op == "placeholder" or n in level]
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta

    def copied(node: Node) -> Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in members:
        copied(node)
    outputs = [n for n in members if n in wanted or any(u in level and u not in inside for u in n.users)]
    constants = (
        [n for n in wanted if n.op != "placeholder" and n not in level]
        if place == min(level.values())
        else []
    )
    outputs = [n for n in [*outputs, *sorted(constants, key=lambda n: n.name)] if _is_tensor(n)]
    graph.output(tuple([copied(n) for n in outputs]))
    return Segment(
        GraphModule(module, graph),
        tuple([n.name for n in inputs]),
        tuple([n.name for n in outputs]),
        place % 2 == 0,
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
