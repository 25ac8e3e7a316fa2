"""Operators along a line of elements: running sums and extremes, and sorting.

Running sums: each element reduces the elements of its block up to itself and joins the results of the blocks
before; the last elements of the blocks are scanned in the same way. Sorting counts for every element how many
come before it: n² comparisons for a line of n elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Literal, TypeVar

from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import RowBuilder, elements, pointwise, reduction, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.promotion import arithmetic_dtype, converted, is_floating
from torchedge.lowering.rules.reductions import log_of_sum, with_dimension
from torchedge.lowering.rules.registry import Result, rule

_Item = TypeVar("_Item")
_Kind = Literal["sum", "prod", "max", "min", "logsumexp"]
_BLOCK = 32


@rule("cumsum", kind="sum")
@rule("cumprod", kind="prod")
@rule("logcumsumexp", kind="logsumexp")
def running(result: Result, input: Node, dim: int, dtype: str | None = None, *, kind: _Kind) -> Node:
    """The sum, product or logarithm of the sum of exponentials of an element and all before it."""
    x, place = with_dimension(input), dim % max(1, len(input.shape))
    scanned = _scan(kind, _widened(x, result.dtype), place)
    return reshaped(converted(scanned, result.dtype), result.shape)


def _widened(x: Node, dtype: str) -> Node:
    return pointwise(x.shape, arithmetic_dtype(dtype), elements(x, dtype))


@rule("cummax", kind="max")
@rule("cummin", kind="min")
def running_extreme(result: Result, input: Node, dim: int, *, kind: _Kind) -> tuple[Node, ...]:
    """The largest or smallest of an element and all before it, and where it is: the last of equals."""
    x, place = with_dimension(input), dim % max(1, len(input.shape))
    wide = _widened(x, result.dtype)
    values = _scan(kind, wide, place)

    def record(*i: Index) -> Scalar:
        here = wide.at(*i)
        best = here.equals(values.at(*i)) | apply("ne", here, here)
        return where(best, Position(i[place], "int64"), 0)

    places = _scan("max", pointwise(x.shape, "int64", record), place)
    nodes = (converted(values, result.dtype), places)
    return tuple([reshaped(node, shape) for node, shape in zip(nodes, result.shapes, strict=True)])


def _scan(kind: _Kind, x: Node, place: int) -> Node:
    """Return the running reduction of x along a dimension."""
    size = x.shape[place]
    within = _within_blocks(kind, x, place)
    if size <= _BLOCK:
        return within
    full_blocks = (size - 1) // _BLOCK

    def at_end(*i: Index) -> Scalar:
        return within.at(*_moved(i, place, i[place] * _BLOCK + (_BLOCK - 1)))

    before = _scan(kind, pointwise(_moved(x.shape, place, full_blocks), x.dtype, at_end), place)

    def body(*i: Index) -> Scalar:
        block = i[place] // _BLOCK
        carried = before.at(*_moved(i, place, block - 1))
        return _join(
            kind, guarded([(block, 1, full_blocks + 1)], carried, _neutral(kind, x.dtype)), within.at(*i)
        )

    return pointwise(x.shape, x.dtype, body)


def _moved(items: Sequence[_Item], place: int, item: _Item) -> list[_Item]:
    """Return the items with one of them replaced."""
    return [item if d == place else n for d, n in enumerate(items)]


def _within_blocks(kind: _Kind, x: Node, place: int) -> Node:
    """Return, for each element, the reduction of those of its block up to itself."""
    block = min(_BLOCK, x.shape[place])
    domain, dims, name = (*x.shape, block), (len(x.shape),), f"running_{kind}"

    def element(*i: Index) -> Scalar:
        along, k = i[place], i[-1]
        source = x.at(*_moved(i[:-1], place, along // block * block + k))
        return guarded([(along % block - k, 0, block)], source, _neutral(kind, x.dtype))

    if kind != "logsumexp":
        return reduction(domain, dims, name, element, kind=kind)
    builder = RowBuilder(domain, dims, name)
    total = log_of_sum(builder, element)
    return builder.row(lambda *_: total)


def _neutral(kind: _Kind, dtype: str) -> float:
    """Return what changes nothing."""
    if kind in ("sum", "prod"):
        return 0 if kind == "sum" else 1
    if is_floating(dtype):
        return inf if kind == "min" else -inf
    last: int = 2 ** (63 if dtype == "int64" else 31) - 1
    return last if kind == "min" else -last - 1


def _join(kind: _Kind, before: Scalar, within: Scalar) -> Scalar:
    if kind == "logsumexp":
        larger = apply("maximum", before, within)
        difference = -apply("abs", before - within)
        spread = larger + apply("log1p", apply("exp", difference))
        return where(apply("isinf", before) & before.equals(within), before, spread)
    functions = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
    return apply(functions[kind], before, within)


@rule("sort", bounds=partial(ranges.places, output=1, dim=-1))
def sort(
    result: Result, input: Node, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Node, ...]:
    """The elements along a dimension in order, equal ones as they stood, and where they were."""
    return _ordered(result, input, dim, descending)


@rule("topk", bounds=partial(ranges.places, output=1, dim=-1))
def topk(
    result: Result, input: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Node, ...]:
    """The k largest or smallest elements along a dimension, in order, and where they were."""
    return _ordered(result, input, dim, largest)


def _ordered(result: Result, x: Node, dim: int, descending: bool) -> tuple[Node, ...]:
    if not x.shape:
        return x, pointwise((), "int64", lambda: constant(0, "int64"))
    place = dim % len(x.shape)
    before = _count_before(x, place, descending)

    def here(*indices: Index) -> Scalar:
        *at, other = indices
        rank = before.at(*at[:place], other, *at[place + 1 :])
        return where(rank.equals(Position(at[place], "int32")), Position(other, "int32"), 0)

    domain = (*result.shape, x.shape[place])
    where_from = reduction(domain, (len(result.shape),), "sort", here, kind="max")

    def value(*at: Index) -> Scalar:
        source = of(Fetched(where_from.at(*at), 0, x.shape[place] - 1))
        return x.at(*at[:place], source, *at[place + 1 :])

    positions = pointwise(result.shape, "int64", lambda *at: cast(where_from.at(*at), "int64"))
    return pointwise(result.shape, x.dtype, value), positions


def _count_before(x: Node, place: int, descending: bool) -> Node:
    """Return for every element how many of its line come before it."""

    def is_before(*indices: Index) -> Scalar:
        *at, other = indices
        mine, theirs = x.at(*at), x.at(*at[:place], other, *at[place + 1 :])
        first = _less(mine, theirs) if descending else _less(theirs, mine)
        tied = ~(_less(mine, theirs) | _less(theirs, mine)) & (
            Position(other, "int32") < Position(at[place], "int32")
        )
        return cast(first | tied, "int32")

    return reduction((*x.shape, x.shape[place]), (len(x.shape),), "sort", is_before)


def _less(a: Scalar, b: Scalar) -> Scalar:
    """Return whether a is less than b; NaN is the largest number."""
    if a.dtype == "bool":
        return b & ~a
    if not is_floating(a.dtype):
        return a < b
    return (a < b) | (apply("isnan", b) & ~apply("isnan", a))
