"""The invariants of a Graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchedge.errors import CaptureError
from torchedge.graphs.dims import Affine

if TYPE_CHECKING:
    from torchedge.graphs.graph import Graph


def verify(graph: Graph) -> None:
    """Check unique names, reads after writes, sound aliases and releases; raises CaptureError."""
    count = len(graph.values)
    names = {value.name for value in graph.values}
    _require(len(names) == count, graph, "two values share a name")
    for value in graph.values:
        sizes_fit = all(d.slope > 0 if isinstance(d, Affine) else d >= 0 for d in value.shape)
        _require(sizes_fit, graph, f"value {value.name} has a negative dimension: {value.shape}")
    made = {i for i, value in enumerate(graph.values) if value.role != "activation"}
    for position, op in enumerate(graph.ops):
        where = f"operator {position} ({op.kind})"
        for index in op.inputs:
            _require(index is None or index in made, graph, f"{where} reads value {index} before it is made")
        for index in op.outputs:
            _require(0 <= index < count, graph, f"{where} makes value {index}, which does not exist")
            _require(index not in made, graph, f"{where} makes value {index} a second time")
            alias = graph.values[index].alias
            _require(
                alias is None or alias in made,
                graph,
                f"{where}: output {index} shares the storage of a later value",
            )
            made.add(index)
        _require(not op.inplace or op.inputs[:1] != (None,), graph, f"{where} is in-place on nothing")
    for index in (*graph.inputs, *graph.outputs, *(() if graph.loss is None else (graph.loss,))):
        _require(index in made, graph, f"value {index} is returned or fed but never made")
    _verify_releases(graph)


def _verify_releases(graph: Graph) -> None:
    if graph.releases is None:
        return
    _require(len(graph.releases) == len(graph.ops), graph, "releases and operators differ in number")
    released: set[int] = set()
    for position, op in enumerate(graph.ops):
        used = [i for i in op.inputs if i in released]
        _require(not used, graph, f"operator {position} ({op.kind}) reads value {used} after it was released")
        for index in graph.releases[position]:
            _require(index not in released, graph, f"value {index} is released twice")
            released.add(index)


def _require(holds: bool, graph: Graph, what: str) -> None:
    if not holds:
        raise CaptureError(
            f"graph {graph.name} is not well formed: {what}; "
            "this is a defect of the capture, please report it"
        )
