"""Content hash of a Graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchedge.graphs.dims import Affine

if TYPE_CHECKING:
    from torchedge.graphs.graph import Graph

SCHEMA = "torchedge-graph-1"


def canonical(item: Any) -> str:  # noqa: ANN401 - attributes are any plain data
    """Return plain data as text that is the same in every process and on every platform."""
    if isinstance(item, Affine):
        return str(item)
    if isinstance(item, Mapping):
        return "{" + ",".join(f"{k}:{canonical(item[k])}" for k in sorted(item)) + "}"
    if isinstance(item, (tuple, list)):
        return "(" + ",".join(map(canonical, item)) + ")"
    if isinstance(item, slice):
        return f"slice({canonical(item.start)},{canonical(item.stop)},{canonical(item.step)})"
    return repr(item)


def digest(graph: Graph) -> str:
    """Return the sha256 of what the graph computes: shapes, dtypes, roles, operators, attributes."""
    state = hashlib.sha256(SCHEMA.encode())
    for value in graph.values:
        state.update(
            f"{canonical(value.shape)}{value.dtype}{value.role}{value.alias}{value.trainable};".encode()
        )
    for op in graph.ops:
        line = f"{op.kind}{op.inputs}{op.outputs}{canonical(op.attrs)}{op.inplace}{op.grad}{op.region};"
        state.update(line.encode())
    tail = (graph.inputs, graph.outputs, graph.loss, graph.training, graph.releases, graph.fixed_batch)
    state.update(repr(tail).encode())
    return state.hexdigest()
