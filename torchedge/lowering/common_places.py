"""Nodes of whole numbers that compute the same become one: each layer's cache is written at the same places.

Floating-point nodes stay apart: what a checkpoint computes again is not to be kept from the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchedge.expressions.indices import Axis, of
from torchedge.expressions.scalars import Read, Scalar, substitute
from torchedge.lowering.nodes import Node, Pointwise, Rows, RowsResult, nodes_below

LARGEST = 1 << 16
"""Most elements of a node that is shared: it stays in memory until its last reader has run."""


def share_places(roots: Sequence[Node]) -> None:
    """Replace equal nodes by the first of them wherever they are read, in place. Roots stay."""
    firsts: dict[Any, Node] = {}
    same: dict[Node, Node] = {}
    for node in nodes_below(roots):
        _redirect(node, same)
        if node.numel > LARGEST or not _is_whole(node):
            continue
        first = firsts.setdefault(_key(node), node)
        if first is not node and node not in roots:
            same[node] = first


def _is_whole(node: Node) -> bool:
    kinds = [output.dtype for output in node.outputs] if isinstance(node, Rows) else [node.dtype]
    return not any(kind.startswith("float") for kind in kinds)


def _redirect(node: Node, same: Mapping[Node, Node]) -> None:
    """Replace what a node reads by the first of its equals."""
    if not any(operand in same for operand in node.operands):
        return

    def changed(scalar: Scalar) -> Scalar:
        return substitute(scalar, {}, lambda read: _first(read, same))

    if isinstance(node, Pointwise):
        node.body = changed(node.body)
    elif isinstance(node, RowsResult):
        node.rows = same[node.rows]  # type: ignore[assignment]
    elif isinstance(node, Rows):
        node.stages = tuple([replace(stage, body=changed(stage.body)) for stage in node.stages])
        node.outputs = tuple([replace(output, body=changed(output.body)) for output in node.outputs])
    else:
        node.a, node.b = changed(node.a), changed(node.b)  # type: ignore[attr-defined]


def _first(read: Read, same: Mapping[Node, Node]) -> Read | None:
    return Read(same[read.tensor], read.indices, read.dtype) if read.tensor in same else None


def _key(node: Node) -> Any:  # noqa: ANN401
    """Return a key that two nodes share if they compute the same from the same nodes."""
    if isinstance(node, Pointwise):
        return node.shape, node.dtype, _numbered(node.axes, node.body)
    if isinstance(node, RowsResult):
        return node.rows, node.position
    if isinstance(node, Rows):
        loops = (*node.outer, *node.inner)
        stages = [(s.name, s.kind, s.dtype, _numbered(loops, s.body)) for s in node.stages]
        outputs = [(tuple(map(loops.index, o.axes)), o.dtype, _numbered(loops, o.body)) for o in node.outputs]
        return tuple([a.extent for a in loops]), len(node.outer), tuple(stages), tuple(outputs)
    return node


def _numbered(loops: Sequence[Axis], scalar: Scalar) -> Scalar:
    """Return an expression with numbers in place of the loops' names."""
    return substitute(scalar, {axis: of(Axis(f"a{k}", axis.extent)) for k, axis in enumerate(loops)})
