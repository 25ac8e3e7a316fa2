"""Writes of few rows into a large tensor: a kernel that loops over what is written, not over the tensor.

`rules.indexing.replaced` gives each element of a tensor its last source, or what it holds. In place that is a
launch over all elements, most of which stay: the cache of a language model, for one new token. By source it
is the same: each goes to its row, unless a later one goes there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchedge.expressions.indices import ZERO, Atom, Axis, Fetched, Index, of, rewrite
from torchedge.expressions.scalars import Apply, Guarded, Position, Read, Scalar, substitute, transform, where
from torchedge.lowering.building import clamped, fetched
from torchedge.lowering.nodes import Node, Pointwise, RowsResult, Stored, axes, indices_of


@dataclass(frozen=True, slots=True)
class RowWrites:
    """The new rows of a tensor. host: their values by source; value, element: what the tensor gets, where."""

    host: Pointwise
    value: Scalar
    element: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class _Search:
    """The last source of each row: a number of the loop `source`; row: where a source goes, in its terms."""

    last: Node
    source: Axis
    row: Scalar


def row_writes(
    node: Pointwise, body: Scalar, target: Stored, expand: Callable[[Scalar], Scalar]
) -> RowWrites | None:
    """Return a tensor's new content by source, None where it does not replace fewer rows than there are.

    body: of the new content, over tensors in memory. target: the tensor that it overwrites. expand: gives an
    expression over tensors in memory.
    """
    if not isinstance(body, Guarded) or body.other != target.at(*indices_of(node.axes)):
        return None
    (index, low, high), *others = body.bounds
    number = index.terms[0][0] if len(index.terms) == 1 else None
    if not isinstance(number, Fetched) or not isinstance(number.value, Read):
        return None
    search = _search(number.value.tensor)
    over = [axis for axis in node.axes if number.value.indices == (of(axis),)]
    if search is None or not over or index != of(number) or (low, high) != (0, search.source.extent):
        return None
    (axis,), count = over, search.source.extent
    if count >= axis.extent:
        return None
    (loop,) = axes((count,))
    source = of(loop) if count > 1 else ZERO
    row = expand(substitute(search.row, {search.source: source}))
    place, bound = fetched(row, axis.extent)
    changes: dict[Atom, Index] = {number: source, axis: place}
    bounds = [bound]
    if count > 1:
        last = search.last.at(clamped(row, axis.extent - 1))  # bounds are tested together
        bounds.append((of(Fetched(last, -1, count - 1)) - source, 0, 1))
    bounds += [(_moved_index(i, changes), low, high) for i, low, high in others]
    value, loops = _moved(body.value, changes), tuple([loop if a is axis else a for a in node.axes])
    element = tuple([_moved_index(i, changes) for i in indices_of(node.axes)])
    host = Pointwise(tuple([a.extent for a in loops]), node.dtype, loops, value, scope=node.scope)
    return RowWrites(host, Guarded(tuple(bounds), value, target.at(*element)), element)


def _search(last: Node) -> _Search | None:
    """Return how a tensor of each row's last source is found, None where it is something else."""
    if not isinstance(last, RowsResult) or len(last.rows.outer) != 1 or len(last.rows.stages) != 1:
        return None
    (row,), (source,), (stage,) = last.rows.outer, last.rows.inner, last.rows.stages
    test = stage.body.args[0] if isinstance(stage.body, Apply) else None
    if stage.kind != "max" or not isinstance(test, Apply) or test.function != "eq":
        return None
    goal, (place, number) = test.args[0], indices_of((row, source))
    found = where(goal.equals(Position(place, goal.dtype)), Position(number, "int32"), -1)
    return _Search(last, source, goal) if stage.body == found else None


def _moved(scalar: Scalar, changes: dict[Atom, Index]) -> Scalar:
    def index(item: Index, fetched: Callable[[Atom], Index | None]) -> Index:
        return rewrite(item, lambda atom: changes[atom] if atom in changes else fetched(atom))

    return transform(scalar, index, lambda leaf: None)


def _moved_index(index: Index, changes: dict[Atom, Index]) -> Index:
    def change(atom: Atom) -> Index | None:
        if atom in changes or not isinstance(atom, Fetched):
            return changes.get(atom)
        return of(Fetched(_moved(atom.value, changes), atom.low, atom.high))

    return rewrite(index, change)
