"""Tensors made of nothing: constants, ranges, random numbers."""

from __future__ import annotations

from torchedge.expressions.indices import Index, flatten
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import Operand, expanded, full, pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.conversions import converted
from torchedge.lowering.rules.promotion import is_floating
from torchedge.lowering.rules.registry import Result, rule


@rule("full", "full_like", "new_full", "fill")
def filled(
    result: Result,
    fill_value: Operand | None = None,
    value: Operand | None = None,
    input: Node | None = None,
    size: object = None,
    dtype: str | None = None,
) -> Node:
    """One number everywhere."""
    number = value if fill_value is None else fill_value
    if isinstance(number, Node):
        return expanded(converted(number, result.dtype), result.shape)
    return full(result.shape, number or 0, result.dtype)


@rule(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "zero",
)
def zeros(result: Result, **arguments: object) -> Node:
    """Zero everywhere; what PyTorch leaves undefined is zero too."""
    return full(result.shape, 0, result.dtype)


@rule("ones", "ones_like", "new_ones")
def ones(result: Result, **arguments: object) -> Node:
    """One everywhere."""
    return full(result.shape, 1, result.dtype)


@rule("scalar_tensor")
def scalar_tensor(result: Result, s: float, dtype: str | None = None) -> Node:
    """One number without dimensions."""
    return full((), s, result.dtype)


@rule("arange")
def arange(result: Result, end: float, start: float = 0, step: float = 1, dtype: str | None = None) -> Node:
    """Start, start + step, ... below end."""
    return pointwise(result.shape, result.dtype, lambda i: _spaced(i, start, step, result.dtype))


def _spaced(index: Index, start: float, step: float, dtype: str) -> Scalar:
    compute = dtype if is_floating(dtype) else "int64"
    return Position(index, compute) * step + constant(start, compute)


@rule("linspace")
def linspace(result: Result, start: Operand, end: Operand, steps: int, dtype: str | None = None) -> Node:
    """Numbers at equal distances, both ends included."""
    compute = "float64" if result.dtype == "float64" else "float32"
    low, high = [x if isinstance(x, Node) else full((), x, compute) for x in (start, end)]

    def body(i: Index) -> Scalar:
        first, last = cast(low.at(), compute), cast(high.at(), compute)
        step = (last - first) / max(steps - 1, 1)
        place = Position(i, compute)
        back = constant(steps - 1, compute) - place
        return where(
            Position(i, "int32") < steps // 2 + (steps == 1), first + step * place, last - step * back
        )

    return pointwise(result.shape, result.dtype, body)


@rule("eye")
def eye(result: Result, n: int, m: int | None = None, dtype: str | None = None) -> Node:
    """One on the diagonal, zero elsewhere."""

    def body(row: Index, column: Index) -> Scalar:
        return cast(Position(row, "int32").equals(Position(column, "int32")), result.dtype)

    return pointwise(result.shape, result.dtype, body)


@rule("random_uniform")
def random_uniform(result: Result, seed: Node, counter: Node, shape: object, offset: int = 0) -> Node:
    """Numbers in [0, 1) by a counter: the same for the same seed, counter, offset and place."""

    def body(*indices: Index) -> Scalar:
        place = Position(flatten(indices, result.shape), "int64")
        return apply(
            "uniform", cast(seed.at(), "int64"), cast(counter.at(), "int64"), offset, place, dtype="float32"
        )

    return pointwise(result.shape, result.dtype, body)
