"""A Graph as text a person can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchedge.graphs.dims import format_shape

if TYPE_CHECKING:
    from torchedge.graphs.graph import Graph, Op


def print_graph(graph: Graph) -> str:
    """Return the whole graph: one line a parameter-free header, then one line an operator."""
    parameters = sum(v.numel[0] for v in graph.parameters)
    mode = "train" if graph.training else "eval"
    lines = [f"graph {graph.name} ({mode}, {len(graph.ops)} ops, {parameters:,} parameters)"]
    lines += [f"  {_label(graph, i)} = input" for i in graph.inputs]
    lines += [f"  {_line(graph, op)}" for op in graph.ops]
    lines.append("  return " + ", ".join(f"%{graph.values[i].name}" for i in graph.outputs))
    if graph.loss is not None:
        lines.append(f"  loss %{graph.values[graph.loss].name}")
    lines += [f"  note: {note}" for note in graph.notes]
    return "\n".join(lines)


def _label(graph: Graph, index: int) -> str:
    value = graph.values[index]
    return f"%{value.name}: {value.dtype}[{format_shape(value.shape)}]"


def _line(graph: Graph, op: Op) -> str:
    made = ", ".join(_label(graph, i) for i in op.outputs)
    read = ", ".join("None" if i is None else f"%{graph.values[i].name}" for i in op.inputs)
    mark = "!" if op.inplace else ""
    unknown = "" if op.known else "  # unknown to torchedge.ops"
    where = f"  # {op.scope}" if op.scope else ""
    return f"{made} = {op.kind}{mark}({read}){_attributes(op.attrs)}{where}{unknown}"


def _attributes(attrs: Mapping[str, Any]) -> str:
    return " {" + ", ".join(f"{k}={v}" for k, v in attrs.items()) + "}" if attrs else ""
