"""Results that live as long as in the module they come from, in a network written as plain nodes.

A list of nodes lets go of a result at its last use. The code of a module holds some longer: the frame that
called a block keeps the block's input until the block returns, which the peak memory of inference sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph
from torchedge.profiling.topologies import TopologyModule
from torchedge.tracing.capturing import capture
from torchedge.tracing.recorder import TracedTensor

__all__ = ["hold_results"]

Nodes = list[dict[str, Any]]


def hold_results(model: nn.Module, nodes: Nodes, input_size: Sequence[int] | None, label: str) -> Nodes:
    """Return the nodes with others between them that do nothing but read results `model` still holds there.

    Such a node takes element 0 of a list [0, results...]. Raises CaptureError where the module cannot be
    captured, and InputError where the nodes do not run the module's operators.
    """
    size = None if input_size is None else tuple(input_size)
    with torch.device("meta"):
        watched = _Watched(nodes, label)
    theirs = capture(model, input_size=size, method="trace")
    ours = capture(watched, input_size=size, method="trace")
    if [(op.kind, op.inplace) for op in theirs.ops] != [(op.kind, op.inplace) for op in ours.ops]:
        raise InputError(f"{label} cannot be written as a list of layers: rebuilt, it runs other operators")
    kept, released, notes = _releases(theirs), _releases(ours), watched.notes
    held: dict[str, list[str]] = {}
    for name, values in notes.made.items():
        read = any(name in _read(node) for node in nodes)
        until = max((kept.get(v, -1) for v in values), default=-1)
        if read and until > max((released.get(v, len(ours.ops)) for v in values), default=until):
            held.setdefault(notes.node_of(until), []).append(name)
    out: Nodes = []
    for node in nodes:
        if node["op"] == "output" and notes.END in held:
            out.append(_hold(len(out), held[notes.END]))
        out.append(node)
        if node["name"] in held:
            out.append(_hold(len(out), held[node["name"]]))
    return out


class _Notes:
    """Which values of the graph each node makes, and how many operators have run behind it."""

    END = ""

    def __init__(self) -> None:
        self.made: dict[str, tuple[int, ...]] = {}
        self.ends: list[tuple[str, int]] = []

    def node_of(self, op: int) -> str:
        """Return the node that runs an operator; `END` where it runs behind the last one."""
        return next((name for name, end in self.ends if op < end), self.END)


class _Watched(TopologyModule):
    """Takes notes while it is captured."""

    def __init__(self, nodes: Nodes, label: str) -> None:
        super().__init__(nodes, label)
        self.notes = _Notes()

    def _run(self, node: Mapping[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        result = super()._run(node, args, kwargs)
        traced = [leaf for leaf in tree_leaves(result) if isinstance(leaf, TracedTensor)]
        if traced:
            self.notes.made[node["name"]] = tuple(leaf.token.index for leaf in traced)
            self.notes.ends.append((node["name"], len(traced[0].recorder.ops)))
        return result


def _releases(graph: ForwardGraph) -> dict[int, int]:
    """Return the operator behind which each value is let go of for the last time."""
    return {value: op for op, values in enumerate(graph.releases or ()) for value in values}


def _read(node: Mapping[str, Any]) -> set[str]:
    def names(item: Any) -> set[str]:  # noqa: ANN401
        if isinstance(item, Mapping):
            return {item["node"]} if "node" in item else set().union(*map(names, item.values()))
        return set().union(*map(names, item)) if isinstance(item, list) else set()

    return names([node.get("args", []), node.get("kwargs", {})])


def _hold(number: int, names: list[str]) -> dict[str, Any]:
    results: list[Any] = [{"node": name} for name in names]
    return {
        "name": f"hold_{number}",
        "op": "function",
        "target": "getitem",
        "args": [[0, *results], 0],
        "kwargs": {},
    }
