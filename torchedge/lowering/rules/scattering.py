"""Elements written or added along a dimension, at places that another tensor holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from torchedge.expressions.scalars import Scalar, apply, constant, where
from torchedge.lowering.building import Operand, elementwise, full, permuted, reshaped
from torchedge.lowering.nodes import Node, ReduceKind
from torchedge.lowering.rules.arithmetic import div, floor_divide
from torchedge.lowering.rules.promotion import arithmetic_dtype, is_floating
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.sources import Sources, added, combined, counted, replaced

_REDUCTIONS: dict[str, tuple[ReduceKind, str, float]] = {
    "sum": ("sum", "add", 0),
    "mean": ("sum", "add", 0),
    "prod": ("prod", "mul", 1),
    "amax": ("max", "maximum", -inf),
    "amin": ("min", "minimum", inf),
}
"""Of each name in PyTorch: the reduction, the function of two, and what changes nothing."""


def _first(x: Node, dim: int) -> Node:
    """Return x with a dimension moved to the front; a single element has one dimension then."""
    if not x.shape:
        return reshaped(x, (1,))
    place = dim % len(x.shape)
    return permuted(x, [place, *[d for d in range(len(x.shape)) if d != place]])


def _back(x: Node, dim: int, shape: Sequence[int]) -> Node:
    """Return x with its front dimension moved back."""
    if not shape:
        return reshaped(x, shape)
    place = dim % len(shape)
    return permuted(x, [*range(1, place + 1), 0, *range(place + 1, len(shape))])


def _along(input: Node, dim: int, index: Node, src: Operand) -> Sources:
    """Return the sources of a scatter: `index` names a place along a dimension for each element of `src`."""
    rows = input.shape[dim] if input.shape else 1
    where_to = _first(index, dim)
    values = _first(src if isinstance(src, Node) else full(index.shape, src, input.dtype), dim)
    return Sources(
        where_to.shape[0],
        lambda *at: counted(where_to.at(*at), rows),
        values.at,
        where_to.shape[1:],
        len(where_to.shape) > 1,
    )


@rule("scatter")
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
    given = value if src is None else src
    if not index.numel:
        return input
    if reduce is not None:
        return scatter_reduce(result, input, dim, index, given, {"add": "sum", "multiply": "prod"}[reduce])
    base = _first(input, dim)
    made = replaced(base.shape, result.dtype, _along(input, dim, index, given), base.at)
    return _back(made, dim, result.shape)


@rule("scatter_add")
def scatter_add(result: Result, input: Node, dim: int, index: Node, src: Node) -> Node:
    """Input plus src at the places along a dimension that index holds."""
    if not index.numel:
        return input
    base = _first(input, dim)
    made = added(base.shape, result.dtype, _along(input, dim, index, src), base.at)
    return _back(made, dim, result.shape)


@rule("scatter_reduce")
def scatter_reduce(
    result: Result,
    input: Node,
    dim: int,
    index: Node,
    src: Operand,
    reduce: str,
    include_self: bool = True,
) -> Node:
    """Input joined with src (sum, prod, mean, amax or amin) at places along a dimension."""
    if not index.numel:
        return input
    return _joined(result, input, dim, _along(input, dim, index, src), reduce, include_self)


@rule("index_reduce")
def index_reduce(
    result: Result,
    input: Node,
    dim: int,
    index: Node,
    source: Node,
    reduce: str,
    include_self: bool = True,
) -> Node:
    """Input joined with source (prod, mean, amax or amin) at the indices of a dimension that index names."""
    return _joined(result, input, dim, _lines(input, dim, index, source, 1), reduce, include_self)


def _joined(result: Result, input: Node, dim: int, sources: Sources, reduce: str, include_self: bool) -> Node:
    kind, function, neutral = _REDUCTIONS[reduce]
    base = _first(input, dim)
    compute = arithmetic_dtype(result.dtype)
    found = combined(base.shape, compute, sources, kind, _limited(neutral, compute), lambda total, *_: total)
    ones = replace(sources, value=lambda *_: constant(1, "int32"))
    count = combined(base.shape, "int32", ones, "sum", 0, lambda total, *_: total)

    def joined(old: Scalar, new: Scalar, number: Scalar) -> Scalar:
        return apply(function, old, new) if include_self else where(number > 0, new, old)

    made: Node = elementwise(joined, base, found, count, dtype=result.dtype, compute=compute)
    if reduce == "mean":
        parts = elementwise(
            lambda n: n + 1 if include_self else apply("maximum", n, 1), count, dtype=compute, compute=compute
        )
        divide = div if is_floating(result.dtype) else floor_divide
        made = divide(Result((base.shape,), (result.dtype,)), made, parts)
    return _back(made, dim, result.shape)


def _limited(number: float, dtype: str) -> float:
    """Return a number, the dtype's largest or smallest one in place of an infinity it cannot hold."""
    if is_floating(dtype) or np.isfinite(number):
        return number
    return int(np.iinfo(dtype).max if number > 0 else np.iinfo(dtype).min)


@rule("index_add")
def index_add(
    result: Result, input: Node, dim: int, index: Node, source: Node, alpha: float | int = 1
) -> Node:
    """Input plus alpha · source at the indices of a dimension that index names."""
    sources, base = _lines(input, dim, index, source, alpha), _first(input, dim)
    return _back(added(base.shape, result.dtype, sources, base.at), dim, result.shape)


@rule("index_copy")
def index_copy(result: Result, input: Node, dim: int, index: Node, source: Node) -> Node:
    """Input with source at the indices of a dimension that index names."""
    sources, base = _lines(input, dim, index, source, 1), _first(input, dim)
    return _back(replaced(base.shape, result.dtype, sources, base.at), dim, result.shape)


def _lines(input: Node, dim: int, index: Node, source: Node, alpha: float | int) -> Sources:
    """Return the sources of which each goes to a whole line of input."""
    flat, values = reshaped(index, (index.numel,)), _first(source, dim)
    rows = input.shape[dim] if input.shape else 1
    return Sources(index.numel, lambda s, *_: counted(flat.at(s), rows), lambda *at: values.at(*at) * alpha)


@rule("put")
def put(result: Result, input: Node, index: Node, source: Node, accumulate: bool = False) -> Node:
    """Input with source at (or added to) the row-major positions that index names."""
    flat, places = reshaped(input, (input.numel,)), reshaped(index, (index.numel,))
    values = reshaped(source, (source.numel,))
    sources = Sources(index.numel, lambda s, *_: counted(places.at(s), input.numel), values.at)
    made = (added if accumulate else replaced)(flat.shape, result.dtype, sources, flat.at)
    return reshaped(made, result.shape)
