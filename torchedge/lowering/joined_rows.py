"""Joins a reduction and the element-wise work that its result decides: RMS norm becomes one kernel.

A value that is computed from a row's reduction at every element of that row (x / sqrt(mean(x²) + eps) · w)
becomes an output of the reduction, as it is one of softmax and layer norm by their rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torchedge.expressions.indices import Axis, axes_of, inverse, of
from torchedge.expressions.scalars import Read, Scalar, fetched_by, reads_of, substitute
from torchedge.lowering.fusion import Expander, at_limits, choose_kept
from torchedge.lowering.nodes import (
    Node,
    Output,
    Pointwise,
    Rows,
    RowsResult,
    Stored,
    axes,
    indices_of,
    nodes_below,
)

LONGEST_ROW = 16_384
"""Elements of a row up to which one work-group computes all of it."""


def join_rows(roots: Sequence[Node]) -> None:
    """Make element-wise nodes outputs of the reductions that they read, in place.

    The reductions are those along the last dimension of a node.
    """
    order = nodes_below(roots)
    rows = [node for node in order if isinstance(node, Rows) and _is_joinable(node)]
    if not rows:
        return
    place = {node: number for number, node in enumerate(order)}
    kept = choose_kept(roots)
    limits = at_limits(order, kept)
    kept |= limits
    readers: dict[Node, list[Pointwise]] = defaultdict(list)
    for node in order:
        if isinstance(node, Pointwise):
            for operand in node.operands:
                readers[operand].append(node)
    results: dict[Rows, list[Node]] = defaultdict(list)
    for node in order:
        if isinstance(node, RowsResult):
            results[node.rows].append(node)
    for host in rows:
        below = _computed_of(results[host], readers, kept, host.numel)
        again = {node for node in below if node not in limits and _is_row_by_row(node, host.numel)}
        expander = Expander(kept - again)
        for node in below:
            if node in kept and _has_elements_of(node, host):
                _join(host, node, expander.expand(node.body), place)


def _is_joinable(host: Rows) -> bool:
    whole = [axis for axis in host.inner if axis.extent > 1]
    plain = all(not stage.kind.startswith("arg") for stage in host.stages)
    by_row = all(output.axes == host.outer for output in host.outputs)
    return len(whole) == 1 and whole[0].extent <= LONGEST_ROW and plain and by_row


def _computed_of(
    results: Sequence[Node], readers: Mapping[Node, Sequence[Pointwise]], kept: Collection[Node], count: int
) -> list[Pointwise]:
    """Return the element-wise nodes computed from results, up to those in memory that are not one a row."""
    nodes: dict[Pointwise, None] = {}
    waiting = list(results)
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            if node not in nodes:
                nodes[node] = None
                waiting += [node] if node not in kept or _is_row_by_row(node, count) else []
    return list(nodes)


def _is_row_by_row(node: Pointwise, count: int) -> bool:
    """Return whether a node has one element for each of `count` rows, and reads no places that data decides.

    Those are many reads for one element, as in a merge of sorted runs: computed again and again they explode.
    """
    return node.numel == count and not any(fetched_by(read.indices) for read in reads_of(node.body))


def _has_elements_of(node: Pointwise, host: Rows) -> bool:
    """Return whether a node has as many elements as all rows, the innermost dimension being a row."""
    (inner,) = [axis for axis in host.inner if axis.extent > 1]
    return (
        node.numel == host.numel * inner.extent and bool(node.axes) and node.axes[-1].extent == inner.extent
    )


def _join(host: Rows, node: Pointwise, body: Scalar, place: Mapping[Node, int]) -> None:
    """Make a node an output of a reduction, unless its elements are not those of the rows."""
    (inner,) = [axis for axis in host.inner if axis.extent > 1]
    reads = reads_of(body)
    results = [read for read in reads if isinstance(read.tensor, RowsResult) and read.tensor.rows is host]
    others = [read.tensor for read in reads if read not in results]
    if not results or any(not isinstance(t, Stored) and place[t] > place[host] for t in others):
        return
    wide = [axis for axis in node.axes[:-1] if axis.extent > 1]
    moved = inverse(results[0].indices, indices_of(host.outer), wide)
    if moved is None or any(node.axes[-1] in axes_of(i) for read in results for i in read.indices):
        return
    moved[node.axes[-1]] = of(inner)
    here = indices_of(host.outer)
    if any(tuple(i.substitute(moved) for i in read.indices) != here for read in results):
        return
    loops = [moved[axis].atom if axis.extent > 1 else axes((1,))[0] for axis in node.axes]
    output_axes = tuple([axis for axis in loops if isinstance(axis, Axis)])
    if len(output_axes) != len(loops):
        return

    def result(read: Read) -> Scalar | None:
        at_row = isinstance(read.tensor, RowsResult) and read.tensor.rows is host
        return host.outputs[read.tensor.position].body if at_row else None

    host.outputs = (*host.outputs, Output(output_axes, substitute(body, moved, result), node.dtype))
    element = RowsResult(node.shape, node.dtype, host, len(host.outputs) - 1, scope=node.scope)
    node.body = element.at(*indices_of(node.axes))
