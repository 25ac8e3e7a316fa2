"""Operators on single elements: arithmetic, functions, comparisons, bits, choices, conversions.

Most are formulas. Most activations and their gradients need no rule: the fusion joins the parts of
PyTorch's own decompositions. It would write parts of mish and glu to memory, so these are rules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from math import factorial, inf, pi
from typing import Any, Literal

from torchedge.errors import LoweringError
from torchedge.expressions.functions import BINARY, COMPARISONS, UNARY
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Constant, Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import Operand, elementwise, full, pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.promotion import (
    arithmetic_dtype,
    common_dtype,
    computed,
    converted,
    is_floating,
)
from torchedge.lowering.rules.registry import Result, rule

Body = Callable[..., Scalar]
ORDER = ("grad_output", "input", "other", "exponent")
"""How PyTorch's schemas order the operands of formulas; a step that was stored has them in any order."""


def formula(
    *kinds: str,
    of: Literal["result", "operands", "bool"] = "result",
    of_bools: str = "",
    **settings: Any,  # noqa: ANN401 - as `rule` takes them
) -> Callable[[Body], Body]:
    """Register `body` of the elements of an operator's tensors and numbers, in the schema's order.

    The operator's other arguments, and the settings, are keyword-only in `body`. of: the arithmetic is in the
    dtype of the result, in that of the operands together, or in bools. of_bools: the function that takes the
    place of `body` where the result is a bool.
    """

    def register(body: Body) -> Body:
        parameters = signature(body).parameters.values()
        names = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]

        @rule(*kinds, **settings)
        def computed_by(result: Result, **operands: Any) -> Node:  # noqa: ANN401 - nodes or numbers
            function: Body = partial(body, **{name: operands.pop(name) for name in names if name in operands})
            elements = [operands[name] for name in sorted(operands, key=ORDER.index)]
            if of_bools and result.dtype == "bool":
                function, compute = partial(apply, of_bools), "bool"
            elif of == "bool":
                compute = "bool"
            else:
                dtype = result.dtype if of == "result" else common_dtype(*elements)
                compute = arithmetic_dtype(dtype)
            return elementwise(function, *elements, dtype=result.dtype, compute=compute)

        return body

    return register


@formula("add", of_bools="or", bounds=ranges.sums)
def add(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    """Input + alpha · other; of bools, whether either holds."""
    return a + b * alpha


@formula("sub", bounds=ranges.differences)
def sub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    """Input - alpha · other."""
    return a - b * alpha


@formula("rsub", bounds=ranges.reversed_differences)
def rsub(a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    """Other - alpha · input."""
    return b - a * alpha


@formula("mul", of_bools="and", bounds=ranges.products)
def mul(a: Scalar, b: Scalar) -> Scalar:
    """Input · other; of bools, whether both hold."""
    return a * b


@formula("div", bounds=ranges.quotients, divides=True)
def div(a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Scalar:
    """Input / other; rounded towards zero ("trunc") or down ("floor")."""
    if rounding_mode is None:
        return a / b
    if not is_floating(a.dtype):
        quotient = apply("int_div", a, _divisor(b))
        if not isinstance(b, Constant) or b.value == -1:
            quotient = where(b.equals(-1), apply("neg_int", a), quotient)
        if rounding_mode == "trunc":
            return quotient
        down = _crosses_zero(apply("int_mod", a, _divisor(b)), b)
        return where(down, quotient - 1, quotient)
    rest = apply("fmod", a, b)
    quotient = (a - rest) / b
    if rounding_mode == "trunc":  # a device may divide 3 by 3 to just below 1
        return where(apply("abs", a / b) < 2**22, apply("round", quotient), apply("trunc", a / b))
    quotient = where(_crosses_zero(rest, b), quotient - 1, quotient)
    floor = apply("floor", quotient)
    floor = where(quotient - floor > 0.5, floor + 1, floor)
    return where(b.equals(0), a / b, floor)


def _divisor(b: Scalar) -> Scalar:
    """Return a whole divisor with 1 in place of 0 and -1: 1 / 0 and -2^31 / -1 would stop some devices."""
    if isinstance(b, Constant) and b.value not in (0, -1):
        return b
    return where(b.equals(0) | b.equals(-1), constant(1, b.dtype), b)


def _crosses_zero(rest: Scalar, b: Scalar) -> Scalar:
    """Return whether a remainder is not zero and has another sign than the divisor."""
    return apply("ne", rest, 0) & apply("xor", rest < 0, b < 0)


@formula("fmod", divides=True)
def fmod(a: Scalar, b: Scalar) -> Scalar:
    """The remainder with the sign of the input."""
    return apply("fmod", a, b) if is_floating(a.dtype) else apply("int_mod", a, _divisor(b))


@formula("remainder", bounds=ranges.below, divides=True)
def remainder(a: Scalar, b: Scalar) -> Scalar:
    """The remainder with the sign of the divisor."""
    rest = fmod(a, b)
    return where(_crosses_zero(rest, b), rest + b, rest)


@formula("pow")
def power(a: Scalar, b: Scalar) -> Scalar:
    """Input to the power of the exponent; by what computes a constant one most accurately."""
    floating, exponent = is_floating(a.dtype), b.value if isinstance(b, Constant) else 0.3
    if exponent < 0 and not floating:
        raise LoweringError(
            f"whole numbers are raised to the power {exponent}; expected a power from 0 on, as in PyTorch; "
            "convert them to floats"
        )
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in special and floating:
        return apply(special[exponent], a)
    if exponent % 1 == 0 and 0 <= exponent <= (4 if floating else 64):
        return _whole_power(a, int(exponent))
    return apply("pow" if floating else "int_pow", a, b)


def _whole_power(a: Scalar, exponent: int) -> Scalar:
    if exponent == 0:
        return constant(1, a.dtype)
    half = _whole_power(a, exponent // 2)
    if exponent == 1:
        return a
    return half * half * a if exponent % 2 else half * half


@formula("maximum", of_bools="or", function="maximum", bounds=ranges.either)
@formula("minimum", of_bools="and", function="minimum", bounds=ranges.either)
def bound(a: Scalar, b: Scalar, *, function: str) -> Scalar:
    """The larger or smaller of both; NaN if either is."""
    return apply(function, a, b)


@formula("fmax", of_bools="or", function="maximum")
@formula("fmin", of_bools="and", function="minimum")
def number_bound(a: Scalar, b: Scalar, *, function: str) -> Scalar:
    """The larger or smaller of both; of a number and NaN, the number."""
    both = apply(function, a, b)
    if not is_floating(a.dtype):
        return both
    return where(apply("isnan", a), b, where(apply("isnan", b), a, both))


@rule("clamp", bounds=ranges.clamped)
def clamp(result: Result, input: Node, min: Operand | None = None, max: Operand | None = None) -> Node:
    """Input, not below min and not above max; NaN stays."""
    limits = {function: x for function, x in (("maximum", min), ("minimum", max)) if x is not None}

    def body(a: Scalar, *bounds: Scalar) -> Scalar:
        for function, bound in zip(limits, bounds, strict=True):
            a = apply(function, a, bound)
        return a

    return computed(body, result, input, *limits.values())


_ROUNDING = ("floor", "ceil", "trunc", "round")


def _rounded(a: Scalar, *, function: str, decimals: int = 0) -> Scalar:
    """Return a number of so many decimals, halves rounded to even; whole numbers as they are."""
    scale = 10.0 ** abs(decimals)
    if not is_floating(a.dtype):
        return a
    return apply(function, a * scale) / scale if decimals > 0 else apply(function, a / scale) * scale


def _applied(*elements: Scalar, function: str) -> Scalar:
    return apply(function, *elements)


def _test(a: Scalar, *, function: str) -> Scalar:
    return apply(function, a) if is_floating(a.dtype) else constant(False, "bool")


for _kind in (*UNARY, *BINARY, "sigmoid", "reciprocal", "sign", "relu"):
    if _kind not in (*_ROUNDING, "fmod", "lgamma", "tanh"):
        formula(_kind, function=_kind)(_applied)
for _kind in _ROUNDING:
    formula(_kind, function=_kind)(_rounded)
for _kind in COMPARISONS:
    formula(_kind, of="operands", function=_kind)(_applied)
for _kind in ("isnan", "isinf"):
    formula(_kind, of="operands", function=_kind)(_test)
for _kind in ("and", "or", "xor", "not"):
    formula(f"logical_{_kind}", of="bool", function=_kind)(_applied)
    _bounds = partial(ranges.below, included=1) if _kind == "and" else None
    formula(f"bitwise_{_kind}", of_bools=_kind, function=f"bit_{_kind}", bounds=_bounds)(_applied)


@formula("tanh")
def tanh(a: Scalar) -> Scalar:
    """The hyperbolic tangent; 1 where it rounds to that: a driver may have 1 - 6e-8, and gradients 1 - y²."""
    limit = 19.1 if a.dtype == "float64" else 9.02
    one = apply("copysign", constant(1, a.dtype), a)
    return where(apply("abs", a) > limit, one, apply("tanh", a))


@formula("neg")
def neg(a: Scalar) -> Scalar:
    """-a."""
    return -a


@formula("abs")
def absolute(a: Scalar) -> Scalar:
    """The element without its sign."""
    return apply("abs" if is_floating(a.dtype) else "abs_int", a)


@formula("signbit", of="operands")
def signbit(a: Scalar) -> Scalar:
    """Whether the sign is set, that of -0 too."""
    return (apply("copysign", constant(1, a.dtype), a) if is_floating(a.dtype) else a) < 0


@formula("ldexp")
def ldexp(a: Scalar, b: Scalar) -> Scalar:
    """Input · 2^other."""
    return a * apply("exp2", b)


@formula("angle")
def angle(a: Scalar) -> Scalar:
    """Pi below zero, else zero; NaN stays."""
    return where(apply("isnan", a), a, where(a < 0, constant(pi, a.dtype), 0))


@formula("digamma", function="digamma")
@formula("erfinv", function="erfinv")
@formula("special_erfcx", function="erfcx")
@formula("special_zeta", function="zeta")
def single_function(*elements: Scalar, function: str) -> Scalar:
    """The derivative of the gamma function's logarithm; the number whose erf is the input; Hurwitz' zeta.

    And exp(input²) · erfc(input), which does not underflow. Zeta is the sum of 1 / (k + other)^input over k
    from 0 on.
    """
    if elements[0].dtype == "float64":
        raise LoweringError(f"aten.{function} has a kernel in single precision only; expected float32")
    return apply(function, *elements)


@formula("polygamma")
def polygamma(a: Scalar, *, n: int) -> Scalar:
    """The n-th derivative of digamma."""
    if n < 2 and a.dtype != "float64":
        return apply("trigamma" if n else "digamma", a)
    return single_function(a * 0 + (n + 1), a, function="zeta") * (factorial(n) * (1 if n % 2 else -1))


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


@rule("where", bounds=ranges.either)
def where_(result: Result, condition: Node, input: Operand, other: Operand) -> Node:
    """Input where the condition holds, else other."""
    choices = [x if isinstance(x, Node) else full((), x, result.dtype) for x in (input, other)]

    def body(holds: Scalar, *elements: Scalar) -> Scalar:
        first, second = [cast(element, result.dtype) for element in elements]
        return where(cast(holds, "bool"), first, second)

    return elementwise(body, condition, *choices, dtype=result.dtype)


@rule("_to_copy", bounds=ranges.same)
def to_copy(result: Result, input: Node, dtype: str | None = None) -> Node:
    """Input as another dtype."""
    return converted(input, result.dtype)


@formula("lgamma")
def lgamma(a: Scalar) -> Scalar:
    """Logarithm of |Γ(input)|; rusticl's is not infinity at -infinity."""
    return where(apply("isinf", a), constant(inf, a.dtype), apply("lgamma", a))


@formula("mish")
def mish(a: Scalar) -> Scalar:
    """Input · tanh(log(1 + exp(input))), by a root that is no denormal where mish is none."""
    root = apply("exp", apply("abs", a) * -0.5)
    small = root * root
    right, left = constant(1, a.dtype) + small * 2, small + 2
    above = right / (right + small * small * 2)
    return where(a > 0, a * above, a * root * (root * left / (small * left + 2)))


@formula("mish_backward")
def mish_backward(g: Scalar, a: Scalar) -> Scalar:
    """Gradient · (t + a s (1 - t²)), t = tanh(log(1 + exp(a))), s = sigmoid(a).

    By exponentials below 1, so that 1 - t vanishes as it should, whatever a driver's tanh rounds to.
    """
    small = apply("exp", -apply("abs", a))
    right = constant(1, a.dtype) + small * 2
    left = small * (small + 2)
    above = a > 0
    whole = where(above, right + small * small * 2, left + 2)
    t = where(above, right, left) / whole
    rest = where(above, small * small * 2, constant(2, a.dtype)) / whole
    return g * (t + a * apply("sigmoid", a) * (rest * (t + 1)))


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
