"""Operators on single elements: arithmetic, functions, comparisons, bits, choices, conversions.

Gradients of activations that read their input several times are rules: the fusion would write parts of their
decompositions to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial, pi, sqrt
from typing import Any

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Constant, Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import Operand, elementwise, full, pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import (
    arithmetic_dtype,
    common_dtype,
    computed,
    converted,
    is_floating,
)
from torchedge.lowering.rules.registry import Result, rule

Body = Callable[..., Scalar]


def formula(*kinds: str) -> Callable[[Body], Body]:
    """Register `body` of the elements of an operator's tensors and numbers, in the schema's order."""

    def register(body: Body) -> Body:
        @rule(*kinds)
        def computed_by(result: Result, **operands: Any) -> Node:  # noqa: ANN401 - nodes or numbers
            return computed(body, result, *operands.values())

        return body

    return register


@rule("add")
def add(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input + alpha · other; of bools, whether either holds."""
    if result.dtype == "bool":
        return elementwise(lambda a, b: a | b, input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: a + b * alpha, result, input, other)


@rule("sub")
def sub(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Input - alpha · other."""
    return computed(lambda a, b: a - b * alpha, result, input, other)


@rule("rsub")
def rsub(result: Result, input: Operand, other: Operand, alpha: float = 1) -> Node:
    """Other - alpha · input."""
    return computed(lambda a, b: b - a * alpha, result, input, other)


@rule("mul")
def mul(result: Result, input: Operand, other: Operand) -> Node:
    """Input · other; of bools, whether both hold."""
    if result.dtype == "bool":
        return elementwise(lambda a, b: a & b, input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: a * b, result, input, other)


@rule("div")
def div(result: Result, input: Operand, other: Operand, rounding_mode: str | None = None) -> Node:
    """Input / other; rounded towards zero ("trunc") or down ("floor")."""
    if rounding_mode is None:
        return computed(lambda a, b: a / b, result, input, other)
    body = _floor_quotient if rounding_mode == "floor" else _truncated_quotient
    return computed(body, result, input, other)


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


@formula("fmod")
def fmod(a: Scalar, b: Scalar) -> Scalar:
    """The remainder with the sign of the input."""
    return apply("fmod", a, b) if is_floating(a.dtype) else apply("int_mod", a, _divisor(b))


@formula("remainder")
def remainder(a: Scalar, b: Scalar) -> Scalar:
    """The remainder with the sign of the divisor."""
    rest = fmod(a, b)
    return where(_crosses_zero(rest, b), rest + b, rest)


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


@rule("maximum", function="maximum")
@rule("minimum", function="minimum")
def bound(result: Result, input: Operand, other: Operand, *, function: str) -> Node:
    """The larger or smaller of both; NaN if either is."""
    if result.dtype == "bool":
        of_bools = "or" if function == "maximum" else "and"
        return elementwise(lambda a, b: apply(of_bools, a, b), input, other, dtype="bool", compute="bool")
    return computed(lambda a, b: apply(function, a, b), result, input, other)


@rule("fmax", function="maximum")
@rule("fmin", function="minimum")
def number_bound(result: Result, input: Operand, other: Operand, *, function: str) -> Node:
    """The larger or smaller of both; of a number and NaN, the number."""
    if not is_floating(result.dtype):
        return bound(result, input, other, function=function)

    def body(a: Scalar, b: Scalar) -> Scalar:
        both = apply(function, a, b)
        return where(apply("isnan", a), b, where(apply("isnan", b), a, both))

    return computed(body, result, input, other)


@rule("clamp")
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


_FUNCTIONS = (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "sigmoid",
    "reciprocal",
)  # fmt: skip
"""Functions of every element; whole numbers become floating first."""
_ROUNDING = ("floor", "ceil", "trunc")
"""Functions that leave whole numbers as they are."""
_OF_TWO = ("copysign", "atan2", "nextafter", "hypot")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_TESTS = ("isnan", "isinf")


def _function(result: Result, input: Node, *, function: str) -> Node:
    keep = function in _ROUNDING and not is_floating(result.dtype)
    return input if keep else computed(lambda a: apply(function, a), result, input)


def _function_of_two(result: Result, input: Operand, other: Operand, *, function: str) -> Node:
    return computed(lambda a, b: apply(function, a, b), result, input, other)


def _comparison(result: Result, input: Operand, other: Operand, *, function: str) -> Node:
    compute = arithmetic_dtype(common_dtype(input, other))
    return elementwise(lambda a, b: apply(function, a, b), input, other, dtype="bool", compute=compute)


def _bitwise(result: Result, input: Operand, other: Operand, *, function: str, of_bits: bool) -> Node:
    """Return a logical function: of the operands' truth, or bit by bit."""
    if of_bits and result.dtype != "bool":
        return computed(lambda a, b: apply(f"bit_{function}", a, b), result, input, other)
    return elementwise(lambda a, b: apply(function, a, b), input, other, dtype="bool", compute="bool")


def _test(result: Result, input: Node, *, function: str) -> Node:
    if not is_floating(input.dtype):
        return full(result.shape, False, "bool")
    return elementwise(lambda a: apply(function, a), input, dtype="bool")


for _kinds, _rule in (
    ((*_FUNCTIONS, *_ROUNDING), _function),
    (_OF_TWO, _function_of_two),
    (_COMPARISONS, _comparison),
    (_TESTS, _test),
):
    for _kind in _kinds:
        rule(_kind, function=_kind)(_rule)
for _kind in ("and", "or", "xor"):
    rule(f"logical_{_kind}", function=_kind, of_bits=False)(_bitwise)
    rule(f"bitwise_{_kind}", function=_kind, of_bits=True)(_bitwise)


@rule("round")
def round_(result: Result, input: Node, decimals: int = 0) -> Node:
    """Round to the nearest number of so many decimals, halves to even."""
    if not is_floating(result.dtype):
        return input
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return computed(lambda a: apply("round", a * scale) / scale, result, input)
    return computed(lambda a: apply("round", a / scale) * scale, result, input)


@formula("neg")
def neg(a: Scalar) -> Scalar:
    """-a."""
    return -a


@formula("abs")
def absolute(a: Scalar) -> Scalar:
    """The element without its sign."""
    return apply("abs" if is_floating(a.dtype) else "abs_int", a)


@rule("sign")
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


@formula("ldexp")
def ldexp(a: Scalar, b: Scalar) -> Scalar:
    """Input · 2^other."""
    return a * apply("exp2", b)


@formula("angle")
def angle(a: Scalar) -> Scalar:
    """Pi below zero, else zero; NaN stays."""
    return where(apply("isnan", a), a, where(a < 0, constant(pi, a.dtype), 0))


@rule("xlogy", function="log")
@rule("special_xlog1py", function="log1p")
def xlogy(result: Result, input: Operand, other: Operand, *, function: str) -> Node:
    """Input · log(other), or log(1 + other); zero where input is."""

    def body(a: Scalar, b: Scalar) -> Scalar:
        product = where(a.equals(0), constant(0, a.dtype), a * apply(function, b))
        return where(apply("isnan", b), b, product)

    return computed(body, result, input, other)


def _refuse_double(name: str, result: Result) -> None:
    if result.dtype == "float64":
        raise LoweringError(f"aten.{name} has a kernel in single precision only; expected float32")


@rule("digamma", function="digamma")
@rule("erfinv", function="erfinv")
def single_function(result: Result, input: Node, *, function: str) -> Node:
    """The derivative of the gamma function's logarithm; the number whose erf is the input."""
    _refuse_double(function, result)
    return computed(lambda a: apply(function, a), result, input)


@rule("polygamma")
def polygamma(result: Result, n: int, input: Node) -> Node:
    """The n-th derivative of digamma."""
    _refuse_double("polygamma", result)
    if n < 2:
        return computed(lambda a: apply("trigamma" if n else "digamma", a), result, input)
    scale = factorial(n) * (1 if n % 2 else -1)
    return computed(lambda a: apply("zeta", a * 0 + (n + 1), a) * scale, result, input)


@rule("special_zeta")
def zeta(result: Result, input: Operand, other: Operand) -> Node:
    """Hurwitz' zeta function: the sum of 1 / (k + other)^input over k from 0 on."""
    _refuse_double("special_zeta", result)
    return computed(lambda a, b: apply("zeta", a, b), result, input, other)


@rule("logical_not")
def logical_not(result: Result, input: Node) -> Node:
    """Whether an element is zero."""
    return elementwise(lambda a: ~a, input, dtype="bool", compute="bool")


@rule("bitwise_not")
def bitwise_not(result: Result, input: Node) -> Node:
    """Every bit inverted."""
    if result.dtype == "bool":
        return elementwise(lambda a: ~a, input, dtype="bool")
    return computed(lambda a: apply("bit_not", a), result, input)


@formula("bitwise_left_shift", "__lshift__")
def left_shift(a: Scalar, b: Scalar) -> Scalar:
    """Input · 2^other; zero where no bit is left."""
    bits = _bits(a)
    return where((b < 0) | (b >= bits), constant(0, a.dtype), apply("shift_left", a, _within(b, bits)))


@formula("bitwise_right_shift", "__rshift__")
def right_shift(a: Scalar, b: Scalar) -> Scalar:
    """Input / 2^other, rounded down."""
    bits = _bits(a)
    shift = where(b < 0, constant(bits - 1, b.dtype), _within(b, bits))
    return apply("shift_right", a, shift)


def _bits(a: Scalar) -> int:
    return 64 if a.dtype == "int64" else 32


def _within(b: Scalar, bits: int) -> Scalar:
    return apply("minimum", apply("maximum", b, 0), bits - 1)


@rule("where")
def where_(result: Result, condition: Node, input: Operand, other: Operand) -> Node:
    """Input where the condition holds, else other."""
    choices = (input, other)

    def body(holds: Scalar, *elements: Scalar) -> Scalar:
        read = iter(elements)
        first, second = [
            cast(next(read), result.dtype) if isinstance(choice, Node) else constant(choice, result.dtype)
            for choice in choices
        ]
        return where(cast(holds, "bool"), first, second)

    tensors = [choice for choice in choices if isinstance(choice, Node)]
    return elementwise(body, condition, *tensors, dtype=result.dtype)


@rule("_to_copy")
def to_copy(result: Result, input: Node, dtype: str | None = None) -> Node:
    """Input as another dtype."""
    return converted(input, result.dtype)


@rule("relu")
def relu(result: Result, input: Node) -> Node:
    """The larger of input and zero; NaN stays."""
    return elementwise(lambda a: apply("relu", a), input, dtype=input.dtype)


@formula("hardswish")
def hardswish(a: Scalar) -> Scalar:
    """Input · (input + 3 between 0 and 6) / 6."""
    return a * apply("minimum", apply("maximum", a + 3, 0), 6) / 6


@formula("silu_backward")
def silu_backward(g: Scalar, a: Scalar) -> Scalar:
    """Gradient · s · (1 + a (1 - s)), s = sigmoid(a)."""
    s = apply("sigmoid", a)
    return g * s * (a * (1 - s) + 1)


@formula("hardswish_backward")
def hardswish_backward(g: Scalar, a: Scalar) -> Scalar:
    """Gradient · (a/3 + 1/2) between -3 and 3, zero below, the gradient itself above."""
    return where(a <= -3, constant(0, g.dtype), where(a < 3, g * (a / 3 + 0.5), g))


@formula("hardsigmoid_backward")
def hardsigmoid_backward(g: Scalar, a: Scalar) -> Scalar:
    """Gradient / 6 strictly between -3 and 3, else zero."""
    return where((a > -3) & (a < 3), g / 6, 0)


@rule("gelu_backward")
def gelu_backward(result: Result, grad_output: Node, input: Node, approximate: str = "none") -> Node:
    """Gradient · (Φ(x) + x · φ(x)), or that of x · sigmoid(2 √(2/π) (x + 0.0447 x³))."""
    scale, cube = 2 * sqrt(2 / pi), 0.044715

    def exact(g: Scalar, a: Scalar) -> Scalar:
        below = (apply("erf", a * sqrt(0.5)) + 1) * 0.5
        density = apply("exp", a * a * -0.5) * (1 / sqrt(2 * pi))
        return g * (below + a * density)

    def approximated(g: Scalar, a: Scalar) -> Scalar:
        inner, slope = (a + a * a * a * cube) * scale, (a * a * (3 * cube) + 1) * scale
        below, above = apply("sigmoid", inner), apply("sigmoid", -inner)
        return g * below * (a * above * slope + 1)

    return computed(approximated if approximate == "tanh" else exact, result, grad_output, input)


@formula("mish_backward")
def mish_backward(g: Scalar, a: Scalar) -> Scalar:
    """Gradient · (t + a s (1 - t²)), t = tanh(log(1 + exp(a))), s = sigmoid(a)."""
    soft_plus = apply("maximum", a, 0) + apply("log1p", apply("exp", -apply("abs", a)))
    t = apply("tanh", soft_plus)
    return g * (t + a * apply("sigmoid", a) * (1 - t * t))


@rule("log_sigmoid_backward")
def log_sigmoid_backward(result: Result, grad_output: Node, input: Node, buffer: Node | None = None) -> Node:
    """Gradient · sigmoid(-x)."""
    return computed(lambda g, a: g * apply("sigmoid", -a), result, grad_output, input)


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
        first = Position(indices[place], "int32") < size
        return where(first, g * s, g * a * (1 - s) * s)

    return pointwise(result.shape, result.dtype, body)
