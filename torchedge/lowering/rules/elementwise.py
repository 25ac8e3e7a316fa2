"""Arithmetic and functions of single elements, with broadcasting."""

from __future__ import annotations

from torchedge.expressions.scalars import Scalar, where
from torchedge.lowering.building import Operand, elementwise, unary
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.registry import Result, rule


@rule("add")
def add(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input + alpha · other."""
    return elementwise(lambda a, b: a + b * alpha, input, other, dtype=result.dtype, compute=result.dtype)


@rule("sub")
def sub(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input - alpha · other."""
    return elementwise(lambda a, b: a - b * alpha, input, other, dtype=result.dtype, compute=result.dtype)


@rule("mul")
def mul(result: Result, input: Operand, other: Operand) -> Node:
    """Input · other."""
    if result.dtype == "bool":
        return elementwise(lambda a, b: a & b, input, other, dtype="bool", compute="bool")
    return elementwise(lambda a, b: a * b, input, other, dtype=result.dtype, compute=result.dtype)


@rule("relu")
def relu(result: Result, input: Node) -> Node:
    """The larger of input and zero; NaN stays."""
    return unary("relu", input)


@rule("threshold_backward")
def threshold_backward(result: Result, grad_output: Node, input: Node, threshold: float) -> Node:
    """Gradient where input is above the threshold, else zero."""

    def body(grad: Scalar, x: Scalar) -> Scalar:
        return where(x > threshold, grad, 0)

    return elementwise(body, grad_output, input, dtype=result.dtype)
