"""Element-wise arithmetic with broadcasting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchedge.ops.specs import Call, Sizes, keep, spec


def broadcast(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """The broadcast shape of all tensor inputs; None where they do not fit (the framework then says why)."""
    shapes = [s for s in ins if s is not None]
    first = shapes[0]
    if all(s == first for s in shapes[1:]):
        return first
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if out[axis] not in (1, size):
                    return None
                out[axis] = size
    return tuple(out)


def product_saves(call: Call) -> tuple[int, ...]:
    """A product keeps each factor for the gradient of the other."""
    return tuple(
        a for a, b in ((0, 1), (1, 0)) if call.need(b) and a < len(call.ins) and call.ins[a] is not None
    )


def quotient_saves(call: Call) -> tuple[int, ...]:
    """A / b keeps b for a's gradient, both for b's."""
    if len(call.ins) < 2 or call.ins[1] is None:
        return ()
    return (0, 1) if call.need(1) else (1,)


def addcmul_saves(call: Call) -> tuple[int, ...]:
    """Input + value · t1 · t2."""
    return tuple(a for a, b in ((1, 2), (2, 1)) if call.need(b))


OPS = (
    spec("add", "input other alpha", "__radd__", infer=broadcast, grads=("pass", "pass")),
    spec(
        "sub",
        "input other alpha",
        "rsub subtract __rsub__",
        infer=broadcast,
        grads=("pass", "new"),
        broadcasts=True,
    ),
    spec("mul", "input other", "multiply __rmul__", infer=broadcast, saves=product_saves, broadcasts=True),
    spec(
        "div",
        "input other rounding_mode",
        "true_divide divide",
        infer=broadcast,
        saves=quotient_saves,
        broadcasts=True,
    ),
    spec("__rtruediv__", "other input", "__rdiv__ reciprocal_mul", saves=keep(-1)),
    spec("floor_divide", "input other", "__rfloordiv__ fmod remainder __rmod__", grads=("none",)),
    spec(
        "pow",
        "input exponent",
        "float_power __rpow__",
        saves=lambda c: (0, 1, -1) if c.need(1) else (0,),
        broadcasts=True,
    ),
    spec("square", "input", saves=keep(0)),
    spec("sqrt", "input", "rsqrt exp exp2 expm1 reciprocal tan", saves=keep(-1)),
    spec(
        "log",
        "input",
        "log2 log10 log1p sin cos abs absolute asin acos atan sinh cosh erf erfc erfinv lgamma digamma "
        "sinc angle atan2 logit xlogy",
        saves=keep(0),
    ),
    spec("neg", "input", "negative positive", grads=("new",)),
    spec("sign", "input", "round floor ceil trunc sgn frac", grads=("new",)),
    spec("clamp", "input min max", "clip clamp_min clamp_max", saves=keep(0)),
    spec(
        "maximum",
        "input other",
        "minimum fmax fmin hypot",
        infer=broadcast,
        saves=keep(0, 1),
        broadcasts=True,
    ),
    spec("where", "condition input other", saves=keep(0), grads=("none", "new", "new"), broadcasts=True),
    spec("masked_fill", "input mask value", saves=keep(1), grads=("new", "none", "new")),
    spec("lerp", "input end weight", saves=lambda c: (0, 1, 2) if c.need(2) else (2,), broadcasts=True),
    spec(
        "addcmul",
        "input tensor1 tensor2 value",
        saves=addcmul_saves,
        grads=("pass", "new", "new"),
        broadcasts=True,
    ),
    spec(
        "addcdiv",
        "input tensor1 tensor2 value",
        saves=lambda c: (1, 2),
        grads=("pass", "new", "new"),
        broadcasts=True,
    ),
    spec(
        "eq",
        "input other",
        "ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor "
        "bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift isclose "
        "signbit __and__ __or__ __xor__ __invert__ __rand__ __ror__ __lshift__ __rshift__",
        grads=("none",),
    ),
    spec("diff", "input n dim prepend append"),
    spec("nan_to_num", "input nan posinf neginf", saves=keep(0)),
    spec("polar", "abs angle", "complex view_as_complex_copy", saves=keep(-1)),
    spec("heaviside", "input values", grads=("none",)),
)
