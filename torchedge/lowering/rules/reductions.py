"""Sums, products, extremes, tests and norms over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torchedge.expressions.scalars import Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, normal_dims, reduced, reshaped
from torchedge.lowering.nodes import Node, ReduceKind
from torchedge.lowering.rules.arithmetic import maximum, minimum
from torchedge.lowering.rules.promotion import arithmetic_dtype, is_floating
from torchedge.lowering.rules.registry import Result, rule

Dims = Sequence[int] | int | None


@rule("sum")
def total(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, dtype: str | None = None
) -> Node:
    """The sum over dimensions."""
    return _over("sum", result, input, dim, keepdim)


@rule("nansum")
def nansum(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, dtype: str | None = None
) -> Node:
    """The sum over dimensions of what is not NaN."""

    def body(a: Scalar) -> Scalar:
        return where(apply("isnan", a), constant(0, a.dtype), a) if is_floating(a.dtype) else a

    return reduced("sum", input, dim, keepdim, body=lambda a: _wide(body(a), result), dtype=result.dtype)


@rule("prod")
def product(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, dtype: str | None = None
) -> Node:
    """The product over dimensions."""
    return _over("prod", result, input, dim, keepdim)


@rule("mean")
def mean(
    result: Result, input: Node, dim: Dims = None, keepdim: bool = False, dtype: str | None = None
) -> Node:
    """The mean over dimensions."""
    count = row_length(input, dim)
    return reduced(
        "sum",
        input,
        dim,
        keepdim,
        body=lambda a: _wide(a, result),
        finish=lambda s: s / count,
        dtype=result.dtype,
    )


def row_length(x: Node, dims: Dims) -> int:
    """Return over how many elements a reduction of x goes."""
    count = 1
    for dim in normal_dims(dims, len(x.shape)):
        count *= x.shape[dim]
    return count


def _wide(a: Scalar, result: Result) -> Scalar:
    return cast(cast(a, result.dtype), arithmetic_dtype(result.dtype))


def _over(kind: ReduceKind, result: Result, input: Node, dim: Dims, keepdim: bool) -> Node:
    return reduced(kind, input, dim, keepdim, body=lambda a: _wide(a, result), dtype=result.dtype)


@rule("any")
def any_(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """Whether an element is not zero."""
    return reduced("any", input, dim, keepdim, body=lambda a: cast(a, "bool"), dtype=result.dtype)


@rule("all")
def all_(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """Whether no element is zero."""
    return reduced("all", input, dim, keepdim, body=lambda a: cast(a, "bool"), dtype=result.dtype)


@rule("count_nonzero")
def count_nonzero(result: Result, input: Node, dim: Dims = None) -> Node:
    """How many elements are not zero."""
    return reduced("sum", input, dim, body=lambda a: cast(cast(a, "bool"), "int64"), dtype=result.dtype)


@rule("amax")
def amax(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """The largest element over dimensions."""
    return _extreme("max", result, input, dim, keepdim)


@rule("amin")
def amin(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    """The smallest element over dimensions."""
    return _extreme("min", result, input, dim, keepdim)


def _extreme(kind: ReduceKind, result: Result, input: Node, dim: Dims, keepdim: bool) -> Node:
    of_bools: dict[str, ReduceKind] = {"max": "any", "min": "all"}
    if result.dtype == "bool":
        return reduced(of_bools[kind], input, dim, keepdim)
    return _over(kind, result, input, dim, keepdim)


@rule("aminmax")
def aminmax(result: Result, input: Node, dim: Dims = None, keepdim: bool = False) -> tuple[Node, ...]:
    """The smallest and the largest element."""
    return amin(result, input, dim, keepdim), amax(result, input, dim, keepdim)


@rule("max")
def max_(
    result: Result,
    input: Node,
    dim: int | None = None,
    keepdim: bool = False,
    other: Node | None = None,
) -> Node | tuple[Node, ...]:
    """The largest element, with its place where a dimension is given; the larger one of two tensors."""
    if other is not None:
        return maximum(result, input, other)
    return amax(result, input) if dim is None else _with_place("max", result, input, dim, keepdim)


@rule("min")
def min_(
    result: Result,
    input: Node,
    dim: int | None = None,
    keepdim: bool = False,
    other: Node | None = None,
) -> Node | tuple[Node, ...]:
    """The smallest element, with its place where a dimension is given; the smaller one of two tensors."""
    if other is not None:
        return minimum(result, input, other)
    return amin(result, input) if dim is None else _with_place("min", result, input, dim, keepdim)


def _with_place(kind: ReduceKind, result: Result, input: Node, dim: int, keepdim: bool) -> tuple[Node, ...]:
    """Return the extremes over a dimension and where they are, in one pass."""
    place: dict[str, ReduceKind] = {"max": "argmax", "min": "argmin"}
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), kind)
    value = builder.reduce(kind, lambda *i: _comparable(x.at(*i)))
    index = builder.reduce(place[kind], lambda *i: _comparable(x.at(*i)))
    made = [
        builder.row(lambda *_: value, result.dtypes[0], keepdim),
        builder.row(lambda *_: index, "int64", keepdim),
    ]
    builder.close()
    return tuple([reshaped(node, shape) for node, shape in zip(made, result.shapes, strict=True)])


def with_dimension(x: Node) -> Node:
    """Return x, as one row of one element if it has no dimension."""
    return x if x.shape else reshaped(x, (1,))


def _comparable(a: Scalar) -> Scalar:
    return cast(a, arithmetic_dtype(a.dtype))


@rule("argmax")
def argmax(result: Result, input: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    """Where the largest element is: along a dimension, or in the flattened tensor."""
    return reduced("argmax", input, dim, keepdim, body=_comparable, dtype="int64")


@rule("argmin")
def argmin(result: Result, input: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    """Where the smallest element is: along a dimension, or in the flattened tensor."""
    return reduced("argmin", input, dim, keepdim, body=_comparable, dtype="int64")


@rule("logsumexp")
def logsumexp(result: Result, input: Node, dim: Dims, keepdim: bool = False) -> Node:
    """The logarithm of the sum of exponentials, without overflow."""
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), "logsumexp")
    largest = builder.reduce("max", lambda *i: _wide(x.at(*i), result))
    shift = where(apply("isinf", largest), constant(0, largest.dtype), largest)
    spread = builder.reduce("sum", lambda *i: apply("exp", _wide(x.at(*i), result) - shift))
    made = builder.row(lambda *_: apply("log", spread) + shift, result.dtype, keepdim)
    builder.close()
    return reshaped(made, result.shape)


@rule("linalg_vector_norm", "norm")
def vector_norm(
    result: Result,
    input: Node,
    ord: float = 2,
    p: float | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: str | None = None,
) -> Node:
    """The p-norm over dimensions: of orders 0 (how many are not zero), inf and -inf too."""
    order = ord if p is None else p

    def size(a: Scalar) -> Scalar:
        return apply("abs", _wide(a, result))

    if order in (inf, -inf):
        return reduced("max" if order > 0 else "min", input, dim, keepdim, body=size, dtype=result.dtype)
    if order == 0:
        return reduced(
            "sum", input, dim, keepdim, body=lambda a: cast(apply("ne", a, 0), "float32"), dtype=result.dtype
        )
    if order == 1:
        return reduced("sum", input, dim, keepdim, body=size, dtype=result.dtype)
    if order == 2:
        return reduced(
            "sum",
            input,
            dim,
            keepdim,
            body=lambda a: _wide(a, result) * _wide(a, result),
            finish=lambda s: apply("sqrt", s),
            dtype=result.dtype,
        )
    return reduced(
        "sum",
        input,
        dim,
        keepdim,
        body=lambda a: apply("pow", size(a), order),
        finish=lambda s: apply("pow", s, 1 / order),
        dtype=result.dtype,
    )
