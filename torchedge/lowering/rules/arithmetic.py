"""Arithmetic of single elements: sums, products, quotients, powers, bounds."""

from __future__ import annotations

from torchedge.errors import LoweringError
from torchedge.expressions.scalars import Constant, Scalar, apply, constant, where
from torchedge.lowering.building import Operand, elementwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import computed, is_floating
from torchedge.lowering.rules.registry import Result, rule


@rule("add")
def add(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input + alpha · other; of bools, whether either holds."""
    if result.dtype == "bool":
        return elementwise(lambda a, b: a | b, input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: a + b * alpha, result, input, other)


@rule("sub", "subtract")
def sub(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input - alpha · other."""
    return computed(lambda a, b: a - b * alpha, result, input, other)


@rule("rsub")
def rsub(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Other - alpha · input."""
    return computed(lambda a, b: b - a * alpha, result, input, other)


@rule("mul", "multiply")
def mul(result: Result, input: Operand, other: Operand) -> Node:
    """Input · other; of bools, whether both hold."""
    if result.dtype == "bool":
        return elementwise(lambda a, b: a & b, input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: a * b, result, input, other)


@rule("div", "true_divide", "divide")
def div(result: Result, input: Operand, other: Operand, rounding_mode: str | None = None) -> Node:
    """Input / other; rounded towards zero ("trunc") or down ("floor")."""
    if rounding_mode is None:
        return computed(lambda a, b: a / b, result, input, other)
    body = _floor_quotient if rounding_mode == "floor" else _truncated_quotient
    return computed(body, result, input, other)


@rule("floor_divide")
def floor_divide(result: Result, input: Operand, other: Operand) -> Node:
    """Input / other, rounded down."""
    return computed(_floor_quotient, result, input, other)


def _divisor(b: Scalar) -> Scalar:
    """Return a whole divisor with 1 in place of 0, which would stop some devices."""
    if isinstance(b, Constant) and b.value:
        return b
    return where(b.equals(0), constant(1, b.dtype), b)


def _truncated_quotient(a: Scalar, b: Scalar) -> Scalar:
    if not is_floating(a.dtype):
        return apply("int_div", a, _divisor(b))
    return apply("trunc", a / b)


def _floor_quotient(a: Scalar, b: Scalar) -> Scalar:
    if not is_floating(a.dtype):
        down = _crosses_zero(apply("int_mod", a, _divisor(b)), b)
        return where(down, apply("int_div", a, _divisor(b)) - 1, apply("int_div", a, _divisor(b)))
    rest = apply("fmod", a, b)
    quotient = (a - rest) / b
    quotient = where(_crosses_zero(rest, b), quotient - 1, quotient)
    floor = apply("floor", quotient)
    floor = where(quotient - floor > 0.5, floor + 1, floor)
    return where(b.equals(0), a / b, floor)


def _crosses_zero(rest: Scalar, b: Scalar) -> Scalar:
    """Return whether a remainder is not zero and has another sign than the divisor."""
    return apply("ne", rest, 0) & apply("xor", rest < 0, b < 0)


@rule("fmod")
def fmod(result: Result, input: Operand, other: Operand) -> Node:
    """The remainder with the sign of the input."""
    if is_floating(result.dtype):
        return computed(lambda a, b: apply("fmod", a, b), result, input, other)
    return computed(lambda a, b: apply("int_mod", a, _divisor(b)), result, input, other)


@rule("remainder")
def remainder(result: Result, input: Operand, other: Operand) -> Node:
    """The remainder with the sign of the divisor."""

    def body(a: Scalar, b: Scalar) -> Scalar:
        floating = is_floating(a.dtype)
        rest = apply("fmod", a, b) if floating else apply("int_mod", a, _divisor(b))
        return where(_crosses_zero(rest, b), rest + b, rest)

    return computed(body, result, input, other)


@rule("pow")
def power(result: Result, input: Operand, exponent: Operand) -> Node:
    """Input to the power of the exponent; small whole exponents by multiplication."""
    floating = is_floating(result.dtype)

    def body(a: Scalar, b: Scalar) -> Scalar:
        if isinstance(exponent, Node):
            return apply("pow" if floating else "int_pow", a, b)
        return _constant_power(a, exponent)

    return computed(body, result, input, exponent)


def _constant_power(a: Scalar, exponent: int | float | bool) -> Scalar:
    """Return a power by what computes it most accurately."""
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in special and is_floating(a.dtype):
        return apply(special[exponent], a)
    if exponent == int(exponent) and 0 <= exponent <= (4 if is_floating(a.dtype) else 64):
        return _whole_power(a, int(exponent))
    return apply("pow" if is_floating(a.dtype) else "int_pow", a, exponent)


def _whole_power(a: Scalar, exponent: int) -> Scalar:
    if exponent == 0:
        return constant(1, a.dtype)
    half = _whole_power(a, exponent // 2)
    if exponent == 1:
        return a
    return half * half * a if exponent % 2 else half * half


@rule("addcmul")
def addcmul(result: Result, input: Node, tensor1: Node, tensor2: Node, value: float = 1) -> Node:
    """Input + value · tensor1 · tensor2."""
    return computed(lambda a, b, c: a + b * c * value, result, input, tensor1, tensor2)


@rule("addcdiv")
def addcdiv(result: Result, input: Node, tensor1: Node, tensor2: Node, value: float = 1) -> Node:
    """Input + value · tensor1 / tensor2."""
    return computed(lambda a, b, c: a + b / c * value, result, input, tensor1, tensor2)


@rule("lerp")
def lerp(result: Result, input: Node, end: Node, weight: Operand) -> Node:
    """Input + weight · (end - input), worked out from the nearer end."""

    def body(a: Scalar, b: Scalar, w: Scalar) -> Scalar:
        near = apply("abs", w) < 0.5
        return where(near, a + w * (b - a), b - (b - a) * (1 - w))

    return computed(body, result, input, end, weight)


@rule("maximum")
def maximum(result: Result, input: Operand, other: Operand) -> Node:
    """The larger of both; NaN if either is."""
    return _bound("maximum", "or", result, input, other)


@rule("minimum")
def minimum(result: Result, input: Operand, other: Operand) -> Node:
    """The smaller of both; NaN if either is."""
    return _bound("minimum", "and", result, input, other)


def _bound(function: str, of_bools: str, result: Result, input: Operand, other: Operand) -> Node:
    if result.dtype == "bool":
        return elementwise(lambda a, b: apply(of_bools, a, b), input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: apply(function, a, b), result, input, other)


@rule("fmax")
def fmax(result: Result, input: Operand, other: Operand) -> Node:
    """The larger of both; of a number and NaN, the number."""
    return _number_bound("maximum", result, input, other)


@rule("fmin")
def fmin(result: Result, input: Operand, other: Operand) -> Node:
    """The smaller of both; of a number and NaN, the number."""
    return _number_bound("minimum", result, input, other)


def _number_bound(function: str, result: Result, input: Operand, other: Operand) -> Node:
    if not is_floating(result.dtype):
        return _bound(function, "or" if function == "maximum" else "and", result, input, other)

    def body(a: Scalar, b: Scalar) -> Scalar:
        both = apply(function, a, b)
        return where(apply("isnan", a), b, where(apply("isnan", b), a, both))

    return computed(body, result, input, other)


@rule("clamp", "clip")
def clamp(result: Result, input: Node, min: Operand | None = None, max: Operand | None = None) -> Node:
    """Input, not below min and not above max; NaN stays."""
    if min is None and max is None:
        raise LoweringError("aten.clamp has neither min nor max; expected at least one")
    if min is not None and max is not None:
        return computed(
            lambda a, low, high: apply("minimum", apply("maximum", a, low), high), result, input, min, max
        )
    function, bound = ("maximum", min) if max is None else ("minimum", max)
    assert bound is not None
    return computed(lambda a, b: apply(function, a, b), result, input, bound)


@rule("clamp_min")
def clamp_min(result: Result, input: Node, min: Operand) -> Node:
    """Input, not below min."""
    return clamp(result, input, min=min)


@rule("clamp_max")
def clamp_max(result: Result, input: Node, max: Operand) -> Node:
    """Input, not above max."""
    return clamp(result, input, max=max)
