"""Joins reductions: with the element-wise work that they decide, and with others over the same rows.

A value that is computed from a row's reduction at every element of that row (x / sqrt(mean(x²) + eps) · w)
becomes an output of the reduction, as it is one of softmax and layer norm by their rules: RMS norm becomes
one kernel. So do products of one vector with several matrices of the same size: queries, keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchedge.expressions.indices import Axis, axes_of, inverse, of, rewrite
from torchedge.expressions.scalars import (
    Local,
    Read,
    Scalar,
    fetched_by,
    reads_of,
    substitute,
    transform,
    walk,
)
from torchedge.lowering.fusion import Expander, at_limits, choose_kept, is_access
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
MOST_ROWS = 1 << 16
"""Most rows of a reduction that is merged: its results are computed earlier, and so live longer."""
MOST_STAGES = 4
"""Most reductions of a merged node: each takes registers of its own."""


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


def join_siblings(roots: Sequence[Node]) -> None:
    """Merge reductions over the same rows that share an operand into one node, in place.

    They have the same form, and neither depends on the other.
    """
    order = nodes_below(roots)
    place = {node: number for number, node in enumerate(order)}
    results: dict[Rows, list[RowsResult]] = defaultdict(list)
    for node in order:
        if isinstance(node, RowsResult):
            results[node.rows].append(node)
    joined: dict[Any, list[Rows]] = defaultdict(list)
    for host in order:
        if not isinstance(host, Rows) or not 0 < host.numel <= MOST_ROWS or not _is_by_row(host):
            continue
        alike = joined[_form_of(host)]
        for first in alike:
            fits = len(first.stages) + len(host.stages) <= MOST_STAGES
            if fits and _sources_of(first) & _sources_of(host) and _is_computable(host, place, place[first]):
                _append(first, host, results)
                break
        else:
            alike.append(host)


def _is_by_row(host: Rows) -> bool:
    """Return whether a node reduces each row once, to numbers, and gives nothing for single elements."""
    chained = any(isinstance(scalar, Local) for stage in host.stages for scalar in walk(stage.body))
    searches = any(stage.kind.startswith("arg") for stage in host.stages)
    return not chained and not searches and all(output.axes == host.outer for output in host.outputs)


def _form_of(host: Rows) -> Any:  # noqa: ANN401 - a key
    """Return a key of reductions whose operands lie in memory alike and are reduced alike."""
    numbered = {axis: of(Axis(f"a{k}", axis.extent)) for k, axis in enumerate((*host.outer, *host.inner))}
    reads = [
        (read.tensor.shape, read.tensor.dtype, tuple([i.substitute(numbered) for i in read.indices]))
        for read in reads_of(*[stage.body for stage in host.stages])
    ]
    kinds = [(stage.kind, stage.dtype) for stage in host.stages]
    return (*[tuple([a.extent for a in loops]) for loops in (host.outer, host.inner)], *kinds, *reads)


def _sources_of(host: Rows) -> set[Node]:
    """Return the nodes that a reduction reads, through views."""
    sources, waiting = set[Node](), list(host.operands)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Pointwise) and is_access(node.body):
            waiting += node.operands
        else:
            sources.add(node)
    return sources


def _is_computable(host: Rows, place: Mapping[Node, int], before: int) -> bool:
    """Return whether all that a node reads is there before the node at a place runs."""
    waiting, seen = list(host.operands), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or isinstance(node, Stored) or place[node] < before:
            continue
        if not isinstance(node, Pointwise):
            return False
        seen.add(node)
        waiting += node.operands
    return True


def _append(first: Rows, host: Rows, results: Mapping[Rows, Sequence[RowsResult]]) -> None:
    """Add the stages and outputs of a node to another one over the same rows."""
    moved = dict(zip((*host.outer, *host.inner), indices_of((*first.outer, *first.inner)), strict=True))
    names = {stage.name: f"s{len(first.stages) + k}" for k, stage in enumerate(host.stages)}

    def renamed(scalar: Scalar) -> Scalar:
        def local(leaf: Scalar) -> Scalar | None:
            return replace(leaf, name=names[leaf.name]) if isinstance(leaf, Local) else None

        return transform(substitute(scalar, moved), rewrite, local)

    stages = [replace(stage, name=names[stage.name], body=renamed(stage.body)) for stage in host.stages]
    outputs = [Output(first.outer, renamed(output.body), output.dtype) for output in host.outputs]
    for result in results[host]:
        result.rows, result.position = first, result.position + len(first.outputs)
    first.stages, first.outputs = (*first.stages, *stages), (*first.outputs, *outputs)
