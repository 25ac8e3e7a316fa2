"""Sorting by counting, for every element, how many come before it: n² comparisons for a line of n of them."""

from __future__ import annotations

from math import nan

from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, elementwise, pointwise, reduced, reshaped, unary
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import is_floating
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.views import narrowed


@rule("sort")
def sort(
    result: Result, input: Node, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Node, ...]:
    """The elements along a dimension in order, equal ones as they stood, and where they were."""
    return _ordered(result, input, dim, descending)


@rule("topk")
def topk(
    result: Result, input: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Node, ...]:
    """The k largest or smallest elements along a dimension, in order, and where they were."""
    return _ordered(result, input, dim, largest)


@rule("kthvalue")
def kthvalue(result: Result, input: Node, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Node, ...]:
    """The k-th smallest element along a dimension, and where it was."""
    return _at_rank(result, input, k - 1, dim)


@rule("median")
def median(result: Result, input: Node, dim: int | None = None, keepdim: bool = False) -> tuple[Node, ...]:
    """The element in the middle (the lower one of two) of a line, and where it was; NaN if there is one."""
    whole = reshaped(input, (input.numel,)) if dim is None else input
    size = whole.shape[dim or 0] if whole.shape else 1
    value, place = _at_rank(result, whole, (size - 1) // 2, dim or 0)
    if is_floating(input.dtype) and whole.shape:
        first = unary("isnan", whole, dtype="int32")
        bad = reshaped(reduced("max", first, (dim or 0) % len(whole.shape)), result.shape)
        where_bad = reshaped(reduced("argmax", first, (dim or 0) % len(whole.shape)), result.shape)
        value = elementwise(
            lambda n, v: where(n > 0, constant(nan, v.dtype), v), bad, value, dtype=value.dtype
        )
        place = elementwise(lambda n, w, p: where(n > 0, w, p), bad, where_bad, place, dtype="int64")
    return (value, place)[: len(result.shapes)]


def _at_rank(result: Result, x: Node, rank: int, dim: int) -> tuple[Node, ...]:
    """Return what stands at one place of the order along a dimension, and where it was."""
    shape = list(x.shape) or [1]
    shape[dim] = rank + 1
    line = x if x.shape else reshaped(x, (1,))
    ordered = _ordered(Result((tuple(shape),) * 2, (x.dtype, "int64")), line, dim, descending=False)
    place = dim % len(shape)
    return tuple([reshaped(narrowed(part, place, rank, 1), result.shape) for part in ordered])


def _ordered(result: Result, x: Node, dim: int, descending: bool) -> tuple[Node, ...]:
    if not x.shape:
        return x, pointwise((), "int64", lambda: constant(0, "int64"))
    place = dim % len(x.shape)
    before = _count_before(x, place, descending)
    builder = RowBuilder((*result.shape, x.shape[place]), (len(result.shape),), "sort")

    def here(*indices: Index) -> Scalar:
        *at, other = indices
        rank = before.at(*at[:place], other, *at[place + 1 :])
        return where(rank.equals(Position(at[place], "int32")), Position(other, "int32"), 0)

    found = builder.reduce("max", here)
    where_from = builder.row(lambda *_: found)
    builder.close()

    def value(*at: Index) -> Scalar:
        source = of(Fetched(where_from.at(*at), 0, x.shape[place] - 1))
        return x.at(*at[:place], source, *at[place + 1 :])

    positions = pointwise(result.shape, "int64", lambda *at: cast(where_from.at(*at), "int64"))
    return pointwise(result.shape, x.dtype, value), positions


def _count_before(x: Node, place: int, descending: bool) -> Node:
    """Return for every element how many of its line come before it."""
    size = x.shape[place]
    builder = RowBuilder((*x.shape, size), (len(x.shape),), "sort")

    def is_before(*indices: Index) -> Scalar:
        *at, other = indices
        mine, theirs = x.at(*at), x.at(*at[:place], other, *at[place + 1 :])
        first = _less(mine, theirs) if descending else _less(theirs, mine)
        tied = ~(_less(mine, theirs) | _less(theirs, mine)) & (
            Position(other, "int32") < Position(at[place], "int32")
        )
        return cast(first | tied, "int32")

    total = builder.reduce("sum", is_before)
    made = builder.row(lambda *_: total)
    builder.close()
    return made


def _less(a: Scalar, b: Scalar) -> Scalar:
    """Return whether a is less than b; NaN is the largest number."""
    if a.dtype == "bool":
        return b & ~a
    if not is_floating(a.dtype):
        return a < b
    return (a < b) | (apply("isnan", b) & ~apply("isnan", a))
