"""Sources that go to rows of a tensor, several perhaps to one: always in the order of the sources.

No kernel adds to what another wrote: each row finds its own sources, so that each run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Bound, Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import RowBuilder, pointwise
from torchedge.lowering.nodes import Node, ReduceKind
from torchedge.lowering.rules.promotion import arithmetic_dtype

Element = Callable[..., Scalar]


@dataclass(frozen=True, slots=True)
class Sources:
    """What goes where. Rows are the first dimension of a result, its tail the others.

    row(source, *tail): which row a source goes to; outside: none. value(source, *tail): what goes there.
    reach: extents of the tail that sources have (None: all). varies: whether `row` depends on the tail.
    """

    count: int
    row: Element
    value: Element
    reach: tuple[int, ...] | None = None
    varies: bool = False

    def within(self, tail: Sequence[Index]) -> list[Bound]:
        """Return the bounds within which there are sources for a tail."""
        return [] if self.reach is None else [(i, 0, n) for i, n in zip(tail, self.reach, strict=True)]

    def is_at(self, row: Index, source: Index, tail: Sequence[Index]) -> Scalar:
        """Return whether a source goes to a row."""
        goal = self.row(source, *tail)
        return goal.equals(Position(row, goal.dtype))


def added(shape: Sequence[int], dtype: str, sources: Sources, base: Element | None) -> Node:
    """Return base(*index), or zero, plus all the sources of each element."""
    rows, tail = shape[0], prod(shape[1:])
    if not sources.varies and rows * sources.count + sources.count**2 * tail < rows * sources.count * tail:
        sources = _merged(shape, dtype, sources)
        return replaced(shape, dtype, sources, base, add=True)
    return combined(shape, dtype, sources, "sum", 0, lambda total, *at: _plus(total, base, dtype, at))


def _plus(total: Scalar, base: Element | None, dtype: str, at: Sequence[Index]) -> Scalar:
    return cast(total if base is None else cast(base(*at), total.dtype) + total, dtype)


def combined(
    shape: Sequence[int],
    dtype: str,
    sources: Sources,
    kind: ReduceKind,
    neutral: float | int,
    finish: Element,
) -> Node:
    """Return `finish(reduction of the element's sources, *index)` for every element."""
    compute = arithmetic_dtype(dtype)
    builder = RowBuilder((*shape, sources.count), (len(shape),), "scatter")

    def mine(row: Index, *rest: Index) -> Scalar:
        *tail, source = rest
        value = cast(sources.value(source, *tail), compute)
        return guarded(sources.within(tail), where(sources.is_at(row, source, tail), value, neutral), neutral)

    total = builder.reduce(kind, mine)
    made = builder.row(lambda *at: finish(total, *at), dtype)
    builder.close()
    return made


def _merged(shape: Sequence[int], dtype: str, sources: Sources) -> Sources:
    """Return sources of which each holds the sum of all that go to the same row."""
    compute = arithmetic_dtype(dtype)
    builder = RowBuilder((sources.count, *shape[1:], sources.count), (len(shape),), "scatter")

    def same(source: Index, *rest: Index) -> Scalar:
        *tail, other = rest
        alike = sources.row(source).equals(sources.row(other))
        return where(alike, cast(sources.value(other, *tail), compute), 0)

    total = builder.reduce("sum", same)
    sums = builder.row(lambda *_: total)
    builder.close()
    return Sources(sources.count, sources.row, lambda source, *tail: sums.at(source, *tail), sources.reach)


def replaced(
    shape: Sequence[int], dtype: str, sources: Sources, base: Element | None, add: bool = False
) -> Node:
    """Return base(*index), or zero, with each element's last source in its place (`add`: added to it)."""
    previous = base or (lambda *_: constant(0, dtype))
    if not sources.count:
        return pointwise(shape, dtype, previous)
    last = _last_sources(shape, sources)

    def element(row: Index, *tail: Index) -> Scalar:
        found = last.at(row, *tail) if sources.varies else last.at(row)
        source = of(Fetched(found, -1, sources.count - 1))
        new = _plus(sources.value(source, *tail), base if add else None, dtype, (row, *tail))
        return guarded([(source, 0, sources.count), *sources.within(tail)], new, previous(row, *tail))

    return pointwise(shape, dtype, element)


def _last_sources(shape: Sequence[int], sources: Sources) -> Node:
    """Return, for every row (and place in the tail, where that matters), its last source or -1."""
    domain = (*(shape if sources.varies else shape[:1]), sources.count)
    builder = RowBuilder(domain, (len(domain) - 1,), "scatter")

    def mine(row: Index, *rest: Index) -> Scalar:
        *tail, source = rest
        place = where(sources.is_at(row, source, tail), Position(source, "int32"), -1)
        return guarded(sources.within(tail) if sources.varies else [], place, -1)

    last = builder.reduce("max", mine)
    made = builder.row(lambda *_: last)
    builder.close()
    return made


def counted(index: Scalar, size: int) -> Scalar:
    """Return an index with negative ones counted from the end."""
    return where(index < 0, apply("add", index, size), index)
