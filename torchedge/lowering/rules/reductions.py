"""Sums, products, extremes, means and variances over dimensions.

Means and variances take one pass: for the variance, distances from the row's middle element and their squares
are summed, which is as exact as two passes unless that element lies far outside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Literal

from torchedge.expressions.indices import Index, as_index
from torchedge.expressions.scalars import Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, elements, normal_dims, reduced, reshaped
from torchedge.lowering.nodes import Node, ReduceKind
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.registry import Result, rule

Dims = Sequence[int] | int | None


@rule("sum", kind="sum")
@rule("prod", kind="prod")
def total(
    result: Result,
    input: Node,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: str | None = None,
    *,
    kind: ReduceKind,
) -> Node:
    """The sum, product or extreme over dimensions."""
    return reduced(kind, input, dim, keepdim, body=lambda a: _wide(a, result), dtype=result.dtype)


@rule("mean")
def mean(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, dtype: str | None = None
) -> Node:
    """The mean over dimensions."""
    count = prod([input.shape[d] for d in normal_dims(dim, len(input.shape))])
    return reduced(
        "sum",
        input,
        dim,
        keepdim,
        body=lambda a: _wide(a, result),
        finish=lambda s: s / count,
        dtype=result.dtype,
    )


def _wide(a: Scalar, result: Result) -> Scalar:
    return cast(cast(a, result.dtype), arithmetic_dtype(result.dtype))


@rule("any")
def any_(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """Whether an element is not zero."""
    return reduced("any", input, dim, keepdim, body=lambda a: cast(a, "bool"), dtype=result.dtype)


@rule("amax", kind="max", bounds=ranges.among)
@rule("amin", kind="min", bounds=ranges.among)
def extreme(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, *, kind: Literal["max", "min"]
) -> Node:
    """The largest or smallest element over dimensions."""
    if result.dtype == "bool":
        return reduced("any" if kind == "max" else "all", input, dim, keepdim)
    return total(result, input, dim, keepdim, kind=kind)


@rule("max", kind="max", bounds=partial(ranges.places, output=1))
@rule("min", kind="min", bounds=partial(ranges.places, output=1))
def placed_extreme(
    result: Result, input: Node, dim: int | None = None, keepdim: bool = False, *, kind: Literal["max", "min"]
) -> Node | tuple[Node, ...]:
    """The extreme element, with its place where a dimension is given."""
    if dim is None:
        return extreme(result, input, kind=kind)
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), kind)
    element = elements(x, arithmetic_dtype(x.dtype))
    value = builder.reduce(kind, element)
    index = builder.reduce("argmax" if kind == "max" else "argmin", element)
    nodes = [
        builder.row(lambda *_: value, result.dtypes[0], keepdim),
        builder.row(lambda *_: index, "int64", keepdim),
    ]
    return tuple([reshaped(node, shape) for node, shape in zip(nodes, result.shapes, strict=True)])


def with_dimension(x: Node) -> Node:
    """Return x, as one row of one element if it has no dimension."""
    return x if x.shape else reshaped(x, (1,))


@rule("argmax", kind="argmax", bounds=ranges.places)
@rule("argmin", kind="argmin", bounds=ranges.places)
def extreme_place(
    result: Result, input: Node, dim: int | None = None, keepdim: bool = False, *, kind: ReduceKind
) -> Node:
    """Where the largest or smallest element is: along a dimension, or in the flattened tensor."""
    return reduced(
        kind, input, dim, keepdim, body=lambda a: cast(a, arithmetic_dtype(a.dtype)), dtype="int64"
    )


@rule("logsumexp")
def logsumexp(result: Result, input: Node, dim: Dims, keepdim: bool = False) -> Node:
    """The logarithm of the sum of exponentials, without overflow."""
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), "logsumexp")
    total = log_of_sum(builder, lambda *i: _wide(x.at(*i), result))
    return reshaped(builder.row(lambda *_: total, result.dtype, keepdim), result.shape)


def log_of_sum(builder: RowBuilder, element: Callable[..., Scalar]) -> Scalar:
    """Add the stages of the logarithm of a row's sum of exponentials."""
    largest = builder.reduce("max", element)
    shift = where(apply("isinf", largest), constant(0, largest.dtype), largest)
    return apply("log", builder.reduce("sum", lambda *i: apply("exp", element(*i) - shift))) + shift


def moments(builder: RowBuilder, element: Callable[..., Scalar]) -> tuple[Callable[..., Scalar], Scalar]:
    """Add the stages of a row's mean and variance; `element` takes the whole index.

    Returns the mean, a function of the row's index, and the sum of squared distances from it.
    """
    if not builder.count:
        nothing = builder.reduce("sum", element)
        return lambda *_: nothing / 0, nothing

    def middle(*row: Index) -> Scalar:
        outer = iter(row)
        places = [
            as_index(n // 2) if d in builder.dims else next(outer) for d, n in enumerate(builder.domain)
        ]
        return element(*places)

    def distance(*indices: Index) -> Scalar:
        return element(*indices) - middle(*[i for d, i in enumerate(indices) if d not in builder.dims])

    plain = builder.reduce("sum", element)
    total = builder.reduce("sum", distance)
    squares = builder.reduce("sum", lambda *i: distance(*i) * distance(*i))
    shift = total / builder.count
    return lambda *_: plain / builder.count, apply("maximum", squares - total * shift, 0)


@rule("var")
@rule("var_mean", with_mean=True)
def variance(
    result: Result,
    input: Node,
    dim: Dims = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
    *,
    with_mean: bool = False,
) -> tuple[Node, ...]:
    """The variance over dimensions, and the mean; `correction` is taken from the number of elements."""
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), "variance")
    taken = correction if correction is not None else float(unbiased)
    mean, squares = moments(builder, elements(x, arithmetic_dtype(result.dtype)))
    spread = squares / max(0.0, builder.count - taken)
    nodes = [builder.row(lambda *_: spread, result.dtype, keepdim)]
    if with_mean:
        nodes.append(builder.row(mean, result.dtype, keepdim))
    return tuple([reshaped(node, result.shape) for node in nodes])
