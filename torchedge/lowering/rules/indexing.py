"""Elements at places that other tensors hold: gather, embedding, index, scatter.

Places outside hold NaN (or 0).

Several sources may go to one row. No kernel adds to what another kernel wrote: each row finds its own sources
in their order, so that each run gives the same bits. Few sources are searched by each row; many are sorted by
their rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf, prod
from operator import and_

import numpy as np

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Fetched, Index, flatten, of, unflatten
from torchedge.expressions.scalars import Bound, Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import (
    Operand,
    broadcast_shape,
    elementwise,
    expanded,
    fetched,
    full,
    permuted,
    pointwise,
    reduction,
    reshaped,
)
from torchedge.lowering.nodes import Node, ReduceKind
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.elementwise import div
from torchedge.lowering.rules.promotion import arithmetic_dtype, computed, is_floating
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.sorting import Order, in_order

Element = Callable[..., Scalar]

MOST_SEARCHED = 1 << 20
"""Most pairs of an element and a source for every element to look at every source."""
GATHERED = 8
"""Sources of one row that are joined at once."""


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


def combined(
    shape: Sequence[int], compute: str, sources: Sources, kind: ReduceKind, neutral: float | int
) -> Node:
    """Return the reduction of each element's sources; `neutral` where it has none."""
    if prod(shape) * sources.count > MOST_SEARCHED:
        return _combined_in_order(shape, compute, sources, kind, neutral)

    def mine(row: Index, *rest: Index) -> Scalar:
        *tail, source = rest
        value = cast(sources.value(source, *tail), compute)
        return guarded(sources.within(tail), where(sources.is_at(row, source, tail), value, neutral), neutral)

    return reduction((*shape, sources.count), (len(shape),), "scatter", mine, kind=kind)


def _combined_in_order(
    shape: Sequence[int], compute: str, sources: Sources, kind: ReduceKind, neutral: float | int
) -> Node:
    """Return what `combined` does, from the sources in the order of their rows.

    Those of one row stand together. Each place joins the next `GATHERED` of its row, then as many of these
    results, and so on: the first place of a row ends with all of it.
    """
    if sources.varies:
        flat = _flattened(shape, sources)
        return reshaped(_combined_in_order((prod(shape),), compute, flat, kind, neutral), shape)
    order = in_order(sources.row, sources.count)

    def gathered(place: Index, *tail: Index) -> Scalar:
        return cast(sources.value(order.position(place), *tail), compute)

    step = 1
    while step < sources.count:
        count = min(GATHERED, -(-sources.count // step))
        gathered = _of_same_row(order, gathered, (*shape[1:], count), step, kind, neutral)
        step *= count
    first = _first_places(shape[0], order)

    def element(row: Index, *tail: Index) -> Scalar:
        place = of(Fetched(first.at(row), -1, sources.count - 1))
        return guarded([(place, 0, sources.count)], gathered(place, *tail), neutral)

    return pointwise(shape, compute, element)


def _of_same_row(
    order: Order, value: Element, inner: Sequence[int], step: int, kind: ReduceKind, neutral: float | int
) -> Element:
    """Return for each place the reduction of those of its row that follow at a distance.

    inner: extents of the tail, and the number of places that are joined, each `step` behind the one before.
    """

    def mine(place: Index, *rest: Index) -> Scalar:
        *tail, number = rest
        other = place + number * step
        apart = of(Fetched(order.key(other) - order.key(place), 0, 2**31 - 1))
        own = guarded([(apart, 0, 1)], value(other, *tail), neutral)
        return guarded([(other, 0, order.count)], own, neutral)

    return reduction((order.count, *inner), (len(inner),), "scatter", mine, kind=kind).at


def _first_places(rows: int, order: Order) -> Node:
    """Return the first place of each row in the order, -1 for rows without one."""

    def first(row: Index) -> Scalar:
        place = order.first(row)
        there = order.key(of(Fetched(apply("minimum", place, order.count - 1), 0, order.count - 1)))
        return where(there.equals(Position(row, "int32")), place, -1)

    return pointwise((rows,), "int32", first)


def _flattened(shape: Sequence[int], sources: Sources) -> Sources:
    """Return sources of single elements, where the row of a source depends on its place in the tail."""
    reach = shape[1:] if sources.reach is None else sources.reach
    sizes = (sources.count, *reach)

    def row(source: Index) -> Scalar:
        at, *tail = unflatten(source, sizes)
        place = cast(sources.row(at, *tail), "int32")
        within = place * prod(shape[1:]) + Position(flatten(tail, shape[1:]), "int32")
        return where((place >= 0) & (place < shape[0]), within, -1)

    return Sources(prod(sizes), row, lambda source: sources.value(*unflatten(source, sizes)))


def replaced(base: Node, dtype: str, sources: Sources) -> Node:
    """Return base with each element's last source in its place."""
    if not sources.count:
        return base
    numbers = replace(sources, value=lambda source, *_: Position(source, "int32"))
    whole = base.shape if sources.varies else base.shape[:1]
    last = combined(whole, "int32", numbers, "max", -1)

    def element(*at: Index) -> Scalar:
        source = of(Fetched(last.at(*at[: len(whole)]), -1, sources.count - 1))
        new = cast(sources.value(source, *at[1:]), dtype)
        return guarded([(source, 0, sources.count), *sources.within(at[1:])], new, cast(base.at(*at), dtype))

    return pointwise(base.shape, dtype, element)


def counted(index: Scalar, size: int) -> Scalar:
    """Return an index with negative ones counted from the end."""
    return where(index < 0, apply("add", index, size), index)


def read_at(x: Node, indices: Sequence[Index], places: dict[int, Scalar]) -> Scalar:
    """Return x at indices, of which those of some dimensions are themselves elements."""
    at = list(indices)
    bounds = []
    for dim, place in places.items():
        at[dim], bound = fetched(place, x.shape[dim])
        bounds.append(bound)
    outside = float("nan") if is_floating(x.dtype) else 0
    return guarded(bounds, x.at(*at), outside)


@rule("embedding", indexes=ranges.rows)
def embedding(
    result: Result,
    weight: Node,
    indices: Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    """The rows of weight that indices name."""
    rank = len(indices.shape)
    return pointwise(
        result.shape, result.dtype, lambda *i: read_at(weight, (i[0], *i[rank:]), {0: indices.at(*i[:rank])})
    )


@rule("index_select", indexes=ranges.along_dim, bounds=ranges.among)
def index_select(result: Result, input: Node, dim: int, index: Node) -> Node:
    """Input at the indices of a dimension that index names."""
    if not input.shape:
        return reshaped(input, result.shape)
    place, flat = dim % len(input.shape), reshaped(index, (index.numel,))

    def element(*at: Index) -> Scalar:
        return read_at(input, at, {place: counted(flat.at(at[place]), input.shape[place])})

    return pointwise(result.shape, result.dtype, element)


@rule("gather", indexes=ranges.along_dim)
def gather(result: Result, input: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    """Input at the places along a dimension that index holds."""
    if not input.shape:
        return expanded(input, result.shape)
    place = dim % len(input.shape)
    places = index if index.shape else reshaped(index, (1,))

    def element(*at: Index) -> Scalar:
        return read_at(input, at, {place: counted(places.at(*at), input.shape[place])})

    return reshaped(pointwise(places.shape, result.dtype, element), result.shape)


@rule("index", indexes=ranges.every_dim)
def index(result: Result, input: Node, indices: Sequence[Node | None]) -> Node:
    """Input at the places that tensors hold, together, for some of its dimensions."""
    listed, shape, first = _index_tensors("index", indices)
    space = len(shape)

    def element(*at: Index) -> Scalar:
        block, others = at[first : first + space], iter((*at[:first], *at[first + space :]))
        indices = [Index(()) if d in listed else next(others) for d in range(len(input.shape))]
        places = {d: counted(n.at(*block[space - len(n.shape) :]), input.shape[d]) for d, n in listed.items()}
        return read_at(input, indices, places)

    return pointwise(result.shape, result.dtype, element)


def _index_tensors(kind: str, indices: Sequence[Node | None]) -> tuple[dict[int, Node], tuple[int, ...], int]:
    """Return the index tensors by dimension, their common shape, and where it stands in the result.

    It stands in place if they are together, else first. Raises LoweringError for masks.
    """
    listed = {d: n for d, n in enumerate(indices) if n is not None}
    masks = [n for n in listed.values() if n.dtype in ("bool", "uint8")]
    if masks:
        raise LoweringError(
            f"aten.{kind} was called with a mask; how many elements it takes is not known beforehand: "
            "use torch.where, or run this part of the model in PyTorch"
        )
    dims = [*listed]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    return listed, broadcast_shape(*[n.shape for n in listed.values()]), dims[0] if together else 0


@rule("index_put", indexes=ranges.every_dim)
def index_put(
    result: Result, input: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False
) -> Node:
    """Input with values at (or added to) the places that tensors hold for some of its dimensions."""
    masks = [n for n in indices if n is not None and n.dtype == "bool"]
    if len(masks) == 1 and len(indices) == 1 and values.numel == 1:
        return _masked(result, input, masks[0], values, accumulate)
    listed, shape, first = _index_tensors("index_put", indices)
    space = len(shape)
    others = [d for d in range(len(input.shape)) if d not in listed]
    sizes, tail = [input.shape[d] for d in listed], [input.shape[d] for d in others]
    spread = expanded(values, [*tail[:first], *shape, *tail[first:]])
    lead = permuted(
        spread, [*range(first, first + space), *range(first), *range(first + space, len(spread.shape))]
    )
    count = prod(shape)
    flat_values = reshaped(lead, (count, *tail))
    flat_indices = [reshaped(expanded(n, shape), (count,)) for n in listed.values()]

    def row(source: Index, *_: Index) -> Scalar:
        places = [n.at(source) for n in flat_indices]
        indices = [counted(place, size) for place, size in zip(places, sizes, strict=True)]
        inside = [(index >= 0) & (index < size) for index, size in zip(indices, sizes, strict=True)]
        position = indices[0]
        for index, size in zip(indices[1:], sizes[1:], strict=True):
            position = position * size + index
        return where(reduce(and_, inside), position, -1)

    order = [*listed, *others]
    base = reshaped(permuted(input, order), (prod(sizes), *tail))
    sources = Sources(count, row, flat_values.at)
    flat = joined(base, result.dtype, sources) if accumulate else replaced(base, result.dtype, sources)
    back = [order.index(d) for d in range(len(order))]
    return permuted(reshaped(flat, (*sizes, *tail)), back)


def _masked(result: Result, input: Node, mask: Node, value: Node, accumulate: bool) -> Node:
    """Return input with one value where a mask over its first dimensions holds."""
    wide = reshaped(mask, (*mask.shape, *[1] * (len(input.shape) - len(mask.shape))))
    single = reshaped(value, [1] * len(input.shape))

    def body(holds: Scalar, old: Scalar, new: Scalar) -> Scalar:
        return where(holds, old + new if accumulate else new, old)

    return elementwise(body, wide, input, single, dtype=result.dtype)


_REDUCTIONS: dict[str, tuple[ReduceKind, str, float]] = {
    "sum": ("sum", "add", 0),
    "mean": ("sum", "add", 0),
    "prod": ("prod", "mul", 1),
    "amax": ("max", "maximum", -inf),
    "amin": ("min", "minimum", inf),
}
"""Of each name in PyTorch: the reduction, the function of two, and what changes nothing."""


def _dim_first(x: Node, dim: int) -> Node:
    """Return x with a dimension moved to the front; a single element has one dimension then."""
    if not x.shape:
        return reshaped(x, (1,))
    place = dim % len(x.shape)
    return permuted(x, [place, *[d for d in range(len(x.shape)) if d != place]])


def _dim_back(x: Node, dim: int, shape: Sequence[int]) -> Node:
    """Return x with its front dimension moved back."""
    if not shape:
        return reshaped(x, shape)
    place = dim % len(shape)
    return permuted(x, [*range(1, place + 1), 0, *range(place + 1, len(shape))])


def _along(input: Node, dim: int, index: Node, src: Operand) -> Sources:
    """Return the sources of a scatter: `index` names a place along a dimension for each element of `src`."""
    rows = input.shape[dim] if input.shape else 1
    where_to = _dim_first(index, dim)
    values = _dim_first(src if isinstance(src, Node) else full(index.shape, src, input.dtype), dim)
    return Sources(
        where_to.shape[0],
        lambda *at: counted(where_to.at(*at), rows),
        values.at,
        where_to.shape[1:],
        len(where_to.shape) > 1,
    )


@rule("scatter", indexes=ranges.along_dim)
def scatter(
    result: Result,
    input: Node,
    dim: int,
    index: Node,
    src: Node | None = None,
    value: float | int | bool = 0,
    reduce: str | None = None,
) -> Node:
    """Input with src, or a value, at the places along a dimension that index holds."""
    sources = value if src is None else src
    if not index.numel:
        return input
    if reduce is not None:
        return scatter_reduce(result, input, dim, index, sources, {"add": "sum", "multiply": "prod"}[reduce])
    replacing = replaced(_dim_first(input, dim), result.dtype, _along(input, dim, index, sources))
    return _dim_back(replacing, dim, result.shape)


@rule("scatter_add", indexes=ranges.along_dim)
@rule("scatter_reduce", indexes=ranges.along_dim)
def scatter_reduce(
    result: Result,
    input: Node,
    dim: int,
    index: Node,
    src: Operand,
    reduce: str = "sum",
    include_self: bool = True,
) -> Node:
    """Input joined with src (sum, prod, mean, amax or amin) at places along a dimension."""
    if not index.numel:
        return input
    sources = _along(input, dim, index, src)
    output = joined(_dim_first(input, dim), result.dtype, sources, reduce, include_self)
    return _dim_back(output, dim, result.shape)


@rule("index_reduce", indexes=ranges.along_dim)
def index_reduce(
    result: Result, input: Node, dim: int, index: Node, source: Node, reduce: str, include_self: bool = True
) -> Node:
    """Input joined with source (prod, mean, amax or amin) at the indices of a dimension that index names."""
    flat, rows = reshaped(index, (index.numel,)), input.shape[dim] if input.shape else 1
    sources = Sources(index.numel, lambda s, *_: counted(flat.at(s), rows), _dim_first(source, dim).at)
    output = joined(_dim_first(input, dim), result.dtype, sources, reduce, include_self)
    return _dim_back(output, dim, result.shape)


def joined(base: Node, dtype: str, sources: Sources, reduce: str = "sum", include_self: bool = True) -> Node:
    """Return base joined with all the sources of each element; without base where it has some."""
    kind, function, neutral = _REDUCTIONS[reduce]
    compute = arithmetic_dtype(dtype)
    totals = combined(base.shape, compute, sources, kind, _limited(neutral, compute))
    ones = replace(sources, value=lambda *_: constant(1, "int32"))
    count = combined(base.shape, "int32", ones, "sum", 0)

    def body(old: Scalar, new: Scalar, number: Scalar) -> Scalar:
        return apply(function, old, new) if include_self else where(cast(number, "bool"), new, old)

    output: Node = elementwise(body, base, totals, count, dtype=dtype, compute=compute)
    if reduce == "mean":
        parts = elementwise(
            lambda n: n + 1 if include_self else apply("maximum", n, 1), count, dtype=compute, compute=compute
        )
        rounding = None if is_floating(dtype) else "floor"
        flat = Result((base.shape,), (dtype,))
        output = computed(partial(div, rounding_mode=rounding), flat, output, parts)
    return output


def _limited(number: float, dtype: str) -> float:
    """Return a number, the dtype's largest or smallest one in place of an infinity it cannot hold."""
    if is_floating(dtype) or np.isfinite(number):
        return number
    return int(np.iinfo(dtype).max if number > 0 else np.iinfo(dtype).min)
