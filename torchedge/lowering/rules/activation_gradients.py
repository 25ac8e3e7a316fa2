"""Gradients of activation functions with respect to their input."""

from __future__ import annotations

from math import pi, sqrt

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.activations import CUBE, SIGMOID_SCALE, soft_plus
from torchedge.lowering.rules.promotion import arithmetic_dtype, computed
from torchedge.lowering.rules.registry import Result, rule


def _where_else_zero(condition: Scalar, value: Scalar) -> Scalar:
    return where(condition, value, 0)


@rule("threshold_backward")
def threshold_backward(result: Result, grad_output: Node, input: Node, threshold: float) -> Node:
    """Gradient where input is above the threshold, else zero."""
    return computed(lambda g, a: where(a <= threshold, constant(0, g.dtype), g), result, grad_output, input)


@rule("sigmoid_backward")
def sigmoid_backward(result: Result, grad_output: Node, output: Node) -> Node:
    """Gradient · y · (1 - y)."""
    return computed(lambda g, y: g * (1 - y) * y, result, grad_output, output)


@rule("tanh_backward")
def tanh_backward(result: Result, grad_output: Node, output: Node) -> Node:
    """Gradient · (1 - y²)."""
    return computed(lambda g, y: g * (1 - y * y), result, grad_output, output)


@rule("hardtanh_backward")
def hardtanh_backward(result: Result, grad_output: Node, input: Node, min_val: float, max_val: float) -> Node:
    """Gradient strictly between the bounds, else zero."""

    def body(g: Scalar, a: Scalar) -> Scalar:
        return where((a <= min_val) | (a >= max_val), constant(0, g.dtype), g)

    return computed(body, result, grad_output, input)


@rule("leaky_relu_backward")
def leaky_relu_backward(
    result: Result, grad_output: Node, input: Node, negative_slope: float, self_is_result: bool = False
) -> Node:
    """Gradient, times the slope below zero."""
    return computed(lambda g, a: where(a > 0, g, g * negative_slope), result, grad_output, input)


@rule("_prelu_kernel_backward")
def prelu_backward(result: Result, grad_output: Node, input: Node, weight: Node) -> tuple[Node, ...]:
    """Gradients for input and, of input's shape, for the weight."""
    of_input = computed(lambda g, a, w: where(a > 0, g, g * w), result, grad_output, input, weight)
    of_weight = computed(lambda g, a: where(a > 0, constant(0, g.dtype), g * a), result, grad_output, input)
    return of_input, of_weight


@rule("elu_backward")
def elu_backward(
    result: Result,
    grad_output: Node,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Node,
) -> Node:
    """Gradient of ELU from its input, or from its result."""
    slope = input_scale * alpha * scale

    def body(g: Scalar, a: Scalar) -> Scalar:
        if is_result:
            below = g * input_scale * (a + alpha * scale)
        else:
            below = g * slope * apply("exp", a * input_scale)
        return where(a <= 0, below, g * scale)

    return computed(body, result, grad_output, self_or_result)


@rule("gelu_backward")
def gelu_backward(result: Result, grad_output: Node, input: Node, approximate: str = "none") -> Node:
    """Gradient · (Φ(x) + x · φ(x)), or that of the approximation by tanh."""

    def exact(g: Scalar, a: Scalar) -> Scalar:
        below = (apply("erf", a * sqrt(0.5)) + 1) * 0.5
        density = apply("exp", a * a * -0.5) * (1 / sqrt(2 * pi))
        return g * (below + a * density)

    def approximated(g: Scalar, a: Scalar) -> Scalar:
        inner, slope = (a + a * a * a * CUBE) * SIGMOID_SCALE, (a * a * (3 * CUBE) + 1) * SIGMOID_SCALE
        below, above = apply("sigmoid", inner), apply("sigmoid", -inner)
        return g * below * (a * above * slope + 1)

    return computed(approximated if approximate == "tanh" else exact, result, grad_output, input)


@rule("silu_backward")
def silu_backward(result: Result, grad_output: Node, input: Node) -> Node:
    """Gradient · s · (1 + x (1 - s)), s = sigmoid(x)."""

    def body(g: Scalar, a: Scalar) -> Scalar:
        s = apply("sigmoid", a)
        return g * s * (a * (1 - s) + 1)

    return computed(body, result, grad_output, input)


@rule("mish_backward")
def mish_backward(result: Result, grad_output: Node, input: Node) -> Node:
    """Gradient · (t + x s (1 - t²)), t = tanh(softplus(x)), s = sigmoid(x)."""

    def body(g: Scalar, a: Scalar) -> Scalar:
        t = apply("tanh", soft_plus(a))
        return g * (t + a * apply("sigmoid", a) * (1 - t * t))

    return computed(body, result, grad_output, input)


@rule("softplus_backward")
def softplus_backward(result: Result, grad_output: Node, input: Node, beta: float, threshold: float) -> Node:
    """Gradient · sigmoid(beta · x); the gradient itself above the threshold."""

    def body(g: Scalar, a: Scalar) -> Scalar:
        return where(a * beta > threshold, g, g * apply("sigmoid", a * beta))

    return computed(body, result, grad_output, input)


@rule("log_sigmoid_backward")
def log_sigmoid_backward(result: Result, grad_output: Node, input: Node, buffer: Node | None = None) -> Node:
    """Gradient · sigmoid(-x)."""
    return computed(lambda g, a: g * apply("sigmoid", -a), result, grad_output, input)


@rule("hardsigmoid_backward")
def hardsigmoid_backward(result: Result, grad_output: Node, input: Node) -> Node:
    """Gradient / 6 strictly between -3 and 3, else zero."""
    return computed(lambda g, a: _where_else_zero((a > -3) & (a < 3), g / 6), result, grad_output, input)


@rule("hardswish_backward")
def hardswish_backward(result: Result, grad_output: Node, input: Node) -> Node:
    """Gradient · (x/3 + 1/2) between -3 and 3, zero below, the gradient itself above."""

    def body(g: Scalar, a: Scalar) -> Scalar:
        return where(a <= -3, constant(0, g.dtype), where(a < 3, g * (a / 3 + 0.5), g))

    return computed(body, result, grad_output, input)


@rule("hardshrink_backward", "softshrink_backward")
def shrink_backward(
    result: Result, input: Node, lambd: float, grad_out: Node | None = None, grad_output: Node | None = None
) -> Node:
    """Gradient outside ±lambd, zero within."""
    gradient = grad_output if grad_out is None else grad_out
    assert gradient is not None

    def body(g: Scalar, a: Scalar) -> Scalar:
        return where((a >= -lambd) & (a <= lambd), constant(0, g.dtype), g)

    return computed(body, result, gradient, input)


@rule("glu_backward")
def glu_backward(result: Result, grad_output: Node, input: Node, dim: int) -> Node:
    """Gradient of glu: the first half · s, the second half · a · s (1 - s), each times the gradient."""
    place = dim % len(input.shape)
    size = input.shape[place] // 2
    compute = arithmetic_dtype(result.dtype)

    def body(*indices: Index) -> Scalar:
        within = [i % size if d == place else i for d, i in enumerate(indices)]
        other = [i + size if d == place else i for d, i in enumerate(within)]
        g, a, b = [cast(x, compute) for x in (grad_output.at(*within), input.at(*within), input.at(*other))]
        s = apply("sigmoid", b)
        first = _is_below(indices[place], size)
        return where(first, g * s, g * a * (1 - s) * s)

    return pointwise(result.shape, result.dtype, body)


def _is_below(index: Index, size: int) -> Scalar:
    """Return whether an index lies below a size, as a bool."""
    return Position(index, "int32") < size


@rule("native_dropout_backward")
def dropout_backward(result: Result, grad_output: Node, mask: Node, scale: float) -> Node:
    """Gradient · mask · scale."""
    return computed(lambda g, m: g * (m * scale), result, grad_output, mask)
