"""Softmax and its logarithm, with their gradients: one pass over the data a stage, rows kept together."""

from __future__ import annotations

from collections.abc import Callable

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, normal_dims, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.reductions import with_dimension
from torchedge.lowering.rules.registry import Result, rule

Finish = Callable[[Scalar, Scalar, Scalar], Scalar]
"""An element from itself, the row's largest element and the row's sum of exp(element - largest)."""


def _softmax(result: Result, input: Node, dim: int, name: str, finish: Finish) -> Node:
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), name)
    compute = arithmetic_dtype(result.dtype)

    def element(*indices: Index) -> Scalar:
        return cast(x.at(*indices), compute)

    largest = builder.reduce("max", element)
    spread = builder.reduce("sum", lambda *i: apply("exp", element(*i) - largest))
    made = builder.element(lambda *i: finish(element(*i), largest, spread), result.dtype)
    builder.close()
    return reshaped(made, result.shape)


@rule("_softmax", "softmax")
def softmax(
    result: Result, input: Node, dim: int, half_to_float: bool = False, dtype: str | None = None
) -> Node:
    """Exponentials over their sum along a dimension (the paper's SoftMax)."""
    return _softmax(result, input, dim, "softmax", lambda a, largest, s: apply("exp", a - largest) / s)


@rule("_log_softmax", "log_softmax")
def log_softmax(
    result: Result, input: Node, dim: int, half_to_float: bool = False, dtype: str | None = None
) -> Node:
    """The logarithm of softmax."""
    return _softmax(result, input, dim, "log_softmax", lambda a, largest, s: a - largest - apply("log", s))


@rule("_safe_softmax")
def safe_softmax(result: Result, input: Node, dim: int, dtype: str | None = None) -> Node:
    """Softmax, zero where a whole row is -inf."""

    def finish(a: Scalar, largest: Scalar, s: Scalar) -> Scalar:
        empty = largest.equals(float("-inf"))
        return where(empty, constant(0, a.dtype), apply("exp", a - largest) / s)

    return _softmax(result, input, dim, "softmax", finish)


@rule("_softmax_backward_data")
def softmax_backward(result: Result, grad_output: Node, output: Node, dim: int, input_dtype: str) -> Node:
    """Output · (gradient - sum of gradient · output)."""
    return _backward(
        result,
        (grad_output, output),
        dim,
        "softmax_backward",
        lambda g, y: g * y,
        lambda g, y, s: y * (g - s),
    )


@rule("_log_softmax_backward_data")
def log_softmax_backward(result: Result, grad_output: Node, output: Node, dim: int, input_dtype: str) -> Node:
    """Gradient - exp(output) · sum of gradient."""
    return _backward(
        result,
        (grad_output, output),
        dim,
        "log_softmax_backward",
        lambda g, y: g,
        lambda g, y, s: g - apply("exp", y) * s,
    )


def _backward(
    result: Result,
    given: tuple[Node, Node],
    dim: int,
    name: str,
    summed: Callable[[Scalar, Scalar], Scalar],
    finish: Callable[[Scalar, Scalar, Scalar], Scalar],
) -> Node:
    gradient, output = map(with_dimension, given)
    builder = RowBuilder(output.shape, normal_dims(dim, len(output.shape)), name)
    compute = arithmetic_dtype(result.dtype)

    def both(*indices: Index) -> tuple[Scalar, Scalar]:
        return cast(gradient.at(*indices), compute), cast(output.at(*indices), compute)

    total = builder.reduce("sum", lambda *i: summed(*both(*i)))
    made = builder.element(lambda *i: finish(*both(*i), total), result.dtype)
    builder.close()
    return reshaped(made, result.shape)
