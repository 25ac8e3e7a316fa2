"""Functions of one number: roots, exponentials, logarithms, angles, rounding."""

from __future__ import annotations

from math import log as ln
from math import pi

from torchedge.expressions.scalars import Scalar, apply, constant, where
from torchedge.lowering.building import Operand, elementwise, full
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import computed, is_floating
from torchedge.lowering.rules.registry import Result, rule

_FLOATING = (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid",
    "reciprocal",
)  # fmt: skip
_ALIASES = {"special_expit": "sigmoid", "special_erf": "erf", "special_erfc": "erfc", "special_exp2": "exp2"}
_WHOLE = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "fix": "trunc"}


def _add(kind: str, function: str) -> None:
    """Register a function that is applied to every element; whole numbers become floating first."""

    @rule(kind)
    def each(result: Result, input: Node) -> Node:
        return computed(lambda a: apply(function, a), result, input)

    each.__name__, each.__doc__ = kind, f"{kind} of every element."


def _add_rounding(kind: str, function: str) -> None:
    """Register a way to round; whole numbers stay."""

    @rule(kind)
    def each(result: Result, input: Node) -> Node:
        return computed(lambda a: apply(function, a), result, input) if is_floating(result.dtype) else input

    each.__name__, each.__doc__ = kind, f"{kind} of every element."


for _name in _FLOATING:
    _add(_name, _name)
for _name, _function in _ALIASES.items():
    _add(_name, _function)
for _name, _function in _WHOLE.items():
    _add_rounding(_name, _function)


@rule("round")
def round_(result: Result, input: Node, decimals: int = 0) -> Node:
    """Round to the nearest number of so many decimals, halves to even."""
    if not is_floating(result.dtype):
        return input
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return computed(lambda a: apply("round", a * scale) / scale, result, input)
    return computed(lambda a: apply("round", a / scale) * scale, result, input)


@rule("frac")
def frac(result: Result, input: Node) -> Node:
    """What is left of the number without its whole part."""
    return computed(lambda a: a - apply("trunc", a), result, input)


@rule("neg", "negative")
def neg(result: Result, input: Node) -> Node:
    """-input."""
    return computed(lambda a: -a, result, input)


@rule("positive")
def positive(result: Result, input: Node) -> Node:
    """Input."""
    return input


@rule("abs", "absolute")
def absolute(result: Result, input: Node) -> Node:
    """Input without its sign."""
    return computed(_absolute, result, input)


def _absolute(a: Scalar) -> Scalar:
    return apply("abs" if is_floating(a.dtype) else "abs_int", a)


@rule("sign", "sgn")
def sign(result: Result, input: Node) -> Node:
    """-1, 0 or 1; 0 for NaN."""
    if result.dtype == "bool":
        return input
    return computed(lambda a: apply("sign", a), result, input)


@rule("signbit")
def signbit(result: Result, input: Node) -> Node:
    """Whether the sign is set, that of -0 too."""
    if not is_floating(input.dtype):
        return elementwise(lambda a: a < 0, input, dtype="bool", compute="int64")
    return elementwise(lambda a: apply("copysign", constant(1, a.dtype), a) < 0, input, dtype="bool")


@rule("square")
def square(result: Result, input: Node) -> Node:
    """Input · input."""
    return computed(lambda a: a * a, result, input)


@rule("copysign")
def copysign(result: Result, input: Operand, other: Operand) -> Node:
    """Input's size with other's sign."""
    return computed(lambda a, b: apply("copysign", a, b), result, input, other)


@rule("atan2", "arctan2")
def atan2(result: Result, input: Node, other: Node) -> Node:
    """The angle of the point (other, input)."""
    return computed(lambda a, b: apply("atan2", a, b), result, input, other)


@rule("nextafter")
def nextafter(result: Result, input: Node, other: Node) -> Node:
    """The next number from input towards other."""
    return computed(lambda a, b: apply("nextafter", a, b), result, input, other)


@rule("ldexp")
def ldexp(result: Result, input: Node, other: Node) -> Node:
    """Input · 2^other."""
    return computed(lambda a, b: a * apply("exp2", b), result, input, other)


@rule("angle")
def angle(result: Result, input: Node) -> Node:
    """Pi below zero, else zero; NaN stays."""

    def body(a: Scalar) -> Scalar:
        return where(apply("isnan", a), a, where(a < 0, constant(pi, a.dtype), 0))

    return computed(body, result, input)


@rule("hypot")
def hypot(result: Result, input: Node, other: Node) -> Node:
    """The length of (input, other)."""
    return computed(lambda a, b: apply("hypot", a, b), result, input, other)


@rule("logaddexp")
def logaddexp(result: Result, input: Node, other: Node) -> Node:
    """log(exp(input) + exp(other)), without overflow."""
    return computed(log_add, result, input, other)


@rule("logaddexp2")
def logaddexp2(result: Result, input: Node, other: Node) -> Node:
    """log2(2^input + 2^other), without overflow."""
    return computed(lambda a, b: log_add(a, b, "exp2", 1.0 / ln(2.0)), result, input, other)


def log_add(a: Scalar, b: Scalar, exponential: str = "exp", scale: float = 1.0) -> Scalar:
    """Return larger + log(1 + exp(smaller - larger)); two equal infinities are themselves."""
    larger = apply("maximum", a, b)
    difference = -apply("abs", a - b)
    spread = larger + apply("log1p", apply(exponential, difference)) * scale
    return where(apply("isinf", a) & a.equals(b), a, spread)


@rule("xlogy", "special_xlogy")
def xlogy(result: Result, input: Operand, other: Operand) -> Node:
    """Input · log(other); zero where input is."""
    return computed(lambda a, b: _times_unless_zero(a, b, "log"), result, input, other)


@rule("special_xlog1py")
def xlog1py(result: Result, input: Operand, other: Operand) -> Node:
    """Input · log(1 + other); zero where input is."""
    return computed(lambda a, b: _times_unless_zero(a, b, "log1p"), result, input, other)


def _times_unless_zero(a: Scalar, b: Scalar, function: str) -> Scalar:
    product = where(a.equals(0), constant(0, a.dtype), a * apply(function, b))
    return where(apply("isnan", b), b, product)


@rule("special_entr")
def entr(result: Result, input: Node) -> Node:
    """-input · log(input); zero at zero, -inf below."""

    def body(a: Scalar) -> Scalar:
        inside = where(a.equals(0), constant(0, a.dtype), -a * apply("log", a))
        return where(a < 0, constant(float("-inf"), a.dtype), inside)

    return computed(body, result, input)


@rule("sinc", "special_sinc")
def sinc(result: Result, input: Node) -> Node:
    """sin(pi · input) / (pi · input); 1 at zero."""

    def body(a: Scalar) -> Scalar:
        angle = a * pi
        return where(a.equals(0), constant(1, a.dtype), apply("sin", angle) / angle)

    return computed(body, result, input)


@rule("logit", "special_logit")
def logit(result: Result, input: Node, eps: float | None = None) -> Node:
    """log(input / (1 - input)), input first bounded to eps and 1 - eps."""

    def body(a: Scalar) -> Scalar:
        if eps is not None:
            a = apply("minimum", apply("maximum", a, eps), 1 - eps)
        return apply("log", a / (1 - a))

    return computed(body, result, input)


@rule("logit_backward")
def logit_backward(result: Result, grad_output: Node, input: Node, eps: float | None = None) -> Node:
    """Gradient of logit: zero outside the bounds (NaN outside 0 and 1 without bounds)."""
    low, high, outside = (0.0, 1.0, float("nan")) if eps is None else (eps, 1.0 - eps, 0.0)

    def body(grad: Scalar, a: Scalar) -> Scalar:
        return where((a < low) | (a > high), constant(outside, a.dtype), grad / (a * (1 - a)))

    return computed(body, result, grad_output, input)


@rule("deg2rad")
def deg2rad(result: Result, input: Node) -> Node:
    """Degrees as radians."""
    return computed(lambda a: a * (pi / 180), result, input)


@rule("rad2deg")
def rad2deg(result: Result, input: Node) -> Node:
    """Radians as degrees."""
    return computed(lambda a: a * (180 / pi), result, input)


@rule("heaviside")
def heaviside(result: Result, input: Node, values: Node) -> Node:
    """0 below zero (and of NaN), `values` at zero, 1 above."""

    def body(a: Scalar, b: Scalar) -> Scalar:
        step = where(a > 0, constant(1, a.dtype), 0)
        return where(a.equals(0), b, step)

    return computed(body, result, input, values)


@rule("nan_to_num")
def nan_to_num(
    result: Result,
    input: Node,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Node:
    """Numbers in place of NaN and infinities: 0 and the dtype's largest and smallest ones."""
    if not is_floating(result.dtype):
        return input
    largest = {"float64": 1.7976931348623157e308, "float16": 65504.0}.get(result.dtype, 3.4028234663852886e38)
    above, below = largest if posinf is None else posinf, -largest if neginf is None else neginf

    def body(a: Scalar) -> Scalar:
        infinite = where(a > 0, constant(above, a.dtype), below)
        finite = where(apply("isinf", a), infinite, a)
        return where(apply("isnan", a), constant(nan or 0.0, a.dtype), finite)

    return computed(body, result, input)


@rule("isnan")
def isnan(result: Result, input: Node) -> Node:
    """Whether an element is not a number."""
    if not is_floating(input.dtype):
        return full(result.shape, False, "bool")
    return elementwise(lambda a: apply("isnan", a), input, dtype="bool")


@rule("isinf")
def isinf(result: Result, input: Node) -> Node:
    """Whether an element is infinite."""
    if not is_floating(input.dtype):
        return full(result.shape, False, "bool")
    return elementwise(lambda a: apply("isinf", a), input, dtype="bool")


@rule("isfinite")
def isfinite(result: Result, input: Node) -> Node:
    """Whether an element is neither infinite nor NaN."""
    if not is_floating(input.dtype):
        return full(result.shape, True, "bool")
    return elementwise(lambda a: ~(apply("isinf", a) | apply("isnan", a)), input, dtype="bool")


@rule("isposinf")
def isposinf(result: Result, input: Node) -> Node:
    """Whether an element is infinite and positive."""
    return _is_infinity(result, input, float("inf"))


@rule("isneginf")
def isneginf(result: Result, input: Node) -> Node:
    """Whether an element is infinite and negative."""
    return _is_infinity(result, input, float("-inf"))


def _is_infinity(result: Result, input: Node, value: float) -> Node:
    if not is_floating(input.dtype):
        return full(result.shape, False, "bool")
    return elementwise(lambda a: a.equals(value), input, dtype="bool")
