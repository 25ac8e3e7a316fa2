"""Activation functions; their gradients are in `activation_gradients`."""

from __future__ import annotations

from math import pi, sqrt

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, constant, where
from torchedge.lowering.building import full, unary, view
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import computed
from torchedge.lowering.rules.registry import Result, rule

SIGMOID_SCALE, CUBE = 2 * sqrt(2 / pi), 0.044715
"""Of GELU's approximation: x · sigmoid(SIGMOID_SCALE (x + CUBE x³)), that is x/2 · (1 + tanh(half of it))."""


@rule("relu")
def relu(result: Result, input: Node) -> Node:
    """The larger of input and zero; NaN stays."""
    return unary("relu", input)


@rule("relu6")
def relu6(result: Result, input: Node) -> Node:
    """Input between 0 and 6."""
    return hardtanh(result, input, 0, 6)


@rule("hardtanh")
def hardtanh(result: Result, input: Node, min_val: float = -1, max_val: float = 1) -> Node:
    """Input between two numbers."""
    return computed(lambda a: bounded(a, min_val, max_val), result, input)


def bounded(a: Scalar, low: float, high: float) -> Scalar:
    """Return a scalar, not below low and not above high."""
    return apply("minimum", apply("maximum", a, low), high)


@rule("threshold")
def threshold(result: Result, input: Node, threshold: float, value: float) -> Node:
    """Input where it is above the threshold, else value."""
    return computed(lambda a: where(a <= threshold, constant(value, a.dtype), a), result, input)


@rule("leaky_relu")
def leaky_relu(result: Result, input: Node, negative_slope: float = 0.01) -> Node:
    """Input, times the slope below zero."""
    return computed(lambda a: where(a > 0, a, a * negative_slope), result, input)


@rule("_prelu_kernel")
def prelu(result: Result, input: Node, weight: Node) -> Node:
    """Input, times the weight below zero."""
    return computed(lambda a, w: where(a > 0, a, a * w), result, input, weight)


@rule("elu")
def elu(result: Result, input: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    """Scale · input, below zero scale · alpha · (exp(input_scale · input) - 1)."""

    def body(a: Scalar) -> Scalar:
        return where(a > 0, a * scale, apply("expm1", a * input_scale) * (alpha * scale))

    return computed(body, result, input)


@rule("celu")
def celu(result: Result, input: Node, alpha: float = 1) -> Node:
    """Input, below zero alpha · (exp(input / alpha) - 1)."""
    return elu(result, input, alpha, 1, 1 / alpha)


@rule("selu")
def selu(result: Result, input: Node) -> Node:
    """ELU with the alpha and scale that keep mean and variance."""
    return elu(result, input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@rule("gelu")
def gelu(result: Result, input: Node, approximate: str = "none") -> Node:
    """Input · Φ(input), Φ being the normal distribution's."""

    def exact(a: Scalar) -> Scalar:
        return a * 0.5 * (apply("erf", a * sqrt(0.5)) + 1)

    def approximated(a: Scalar) -> Scalar:
        return a * apply("sigmoid", (a + a * a * a * CUBE) * SIGMOID_SCALE)

    return computed(approximated if approximate == "tanh" else exact, result, input)


@rule("silu")
def silu(result: Result, input: Node) -> Node:
    """Input · sigmoid(input)."""
    return computed(lambda a: a / (apply("exp", -a) + 1), result, input)


@rule("mish")
def mish(result: Result, input: Node) -> Node:
    """Input · tanh(softplus(input))."""
    return computed(lambda a: a * apply("tanh", soft_plus(a)), result, input)


def soft_plus(a: Scalar) -> Scalar:
    """Return log(1 + exp(a)) without overflow."""
    return apply("maximum", a, 0) + apply("log1p", apply("exp", -apply("abs", a)))


@rule("softplus")
def softplus(result: Result, input: Node, beta: float = 1, threshold: float = 20) -> Node:
    """log(1 + exp(beta · input)) / beta; input where beta · input is above the threshold."""

    def body(a: Scalar) -> Scalar:
        return where(a * beta > threshold, a, soft_plus(a * beta) / beta)

    return computed(body, result, input)


@rule("log_sigmoid_forward")
def log_sigmoid(result: Result, input: Node) -> tuple[Node, ...]:
    """log(sigmoid(input)), and the buffer that PyTorch's kernel keeps, which nobody reads here."""
    return computed(lambda a: -soft_plus(-a), result, input), full(result.shapes[1], 0, result.dtypes[1])


@rule("hardsigmoid")
def hardsigmoid(result: Result, input: Node) -> Node:
    """Input / 6 + 1/2, between 0 and 1."""
    return computed(lambda a: bounded(a + 3, 0, 6) / 6, result, input)


@rule("hardswish")
def hardswish(result: Result, input: Node) -> Node:
    """Input · hardsigmoid(input)."""
    return computed(lambda a: a * bounded(a + 3, 0, 6) / 6, result, input)


@rule("hardshrink")
def hardshrink(result: Result, input: Node, lambd: float = 0.5) -> Node:
    """Zero within ±lambd."""
    return computed(lambda a: where((a >= -lambd) & (a <= lambd), constant(0, a.dtype), a), result, input)


@rule("softshrink")
def softshrink(result: Result, input: Node, lambd: float = 0.5) -> Node:
    """Input moved towards zero by lambd, zero within ±lambd; NaN stays."""

    def body(a: Scalar) -> Scalar:
        return where(a > lambd, a - lambd, where(a < -lambd, a + lambd, a * 0))

    return computed(body, result, input)


@rule("glu")
def glu(result: Result, input: Node, dim: int = -1) -> Node:
    """The first half · sigmoid(the second half)."""
    return computed(lambda a, b: a * apply("sigmoid", b), result, *halves(input, dim))


def halves(x: Node, dim: int) -> tuple[Node, Node]:
    """Return both halves of a tensor along a dimension."""
    place = dim % len(x.shape)
    size = x.shape[place] // 2
    shape = [size if d == place else n for d, n in enumerate(x.shape)]

    def half(start: int) -> Node:
        def move(*indices: Index) -> list[Index]:
            return [i + start if d == place else i for d, i in enumerate(indices)]

        return view(x, shape, move)

    return half(0), half(size)
