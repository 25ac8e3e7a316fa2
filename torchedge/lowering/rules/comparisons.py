"""Comparisons, logic, bits, and the choice between elements."""

from __future__ import annotations

from torchedge.expressions.scalars import Scalar, apply, cast, constant, where
from torchedge.lowering.building import Operand, elementwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype, common_dtype, computed
from torchedge.lowering.rules.registry import Result, rule

_COMPARISONS = {
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "not_equal": "ne", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip
_LOGIC = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}
_BITS = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}


def _add_comparison(kind: str, function: str) -> None:
    @rule(kind)
    def compare(result: Result, input: Operand, other: Operand) -> Node:
        compute = arithmetic_dtype(common_dtype(input, other))
        return elementwise(lambda a, b: apply(function, a, b), input, other, dtype="bool", compute=compute)

    compare.__name__, compare.__doc__ = kind, f"Whether input {function} other."


def _add_logic(kind: str, function: str) -> None:
    @rule(kind)
    def combine(result: Result, input: Operand, other: Operand) -> Node:
        return elementwise(lambda a, b: apply(function, a, b), input, other, dtype="bool", compute="bool")

    combine.__name__, combine.__doc__ = kind, f"Input {function} other; what is not zero counts as true."


def _add_bits(kind: str, function: str) -> None:
    @rule(kind)
    def combine(result: Result, input: Operand, other: Operand) -> Node:
        if result.dtype == "bool":
            return elementwise(lambda a, b: apply(function, a, b), input, other, dtype="bool", compute="bool")
        return computed(lambda a, b: apply(f"bit_{function}", a, b), result, input, other)

    combine.__name__, combine.__doc__ = kind, f"Input {function} other, bit by bit."


for _name, _function in _COMPARISONS.items():
    _add_comparison(_name, _function)
for _name, _function in _LOGIC.items():
    _add_logic(_name, _function)
for _name, _function in _BITS.items():
    _add_bits(_name, _function)


@rule("logical_not")
def logical_not(result: Result, input: Node) -> Node:
    """Whether an element is zero."""
    return elementwise(lambda a: ~a, input, dtype="bool", compute="bool")


@rule("bitwise_not")
def bitwise_not(result: Result, input: Node) -> Node:
    """Every bit turned over."""
    if result.dtype == "bool":
        return elementwise(lambda a: ~a, input, dtype="bool")
    return computed(lambda a: apply("bit_not", a), result, input)


@rule("bitwise_left_shift", "__lshift__")
def bitwise_left_shift(result: Result, input: Operand, other: Operand) -> Node:
    """Input · 2^other; zero where no bit is left."""

    def body(a: Scalar, b: Scalar) -> Scalar:
        bits = _bits(a)
        return where((b < 0) | (b >= bits), constant(0, a.dtype), apply("shift_left", a, _within(b, bits)))

    return computed(body, result, input, other)


@rule("bitwise_right_shift", "__rshift__")
def bitwise_right_shift(result: Result, input: Operand, other: Operand) -> Node:
    """Input / 2^other, rounded down."""

    def body(a: Scalar, b: Scalar) -> Scalar:
        bits = _bits(a)
        shift = where(b < 0, constant(bits - 1, b.dtype), _within(b, bits))
        return apply("shift_right", a, shift)

    return computed(body, result, input, other)


def _bits(a: Scalar) -> int:
    return 64 if a.dtype == "int64" else 32


def _within(b: Scalar, bits: int) -> Scalar:
    return apply("minimum", apply("maximum", b, 0), bits - 1)


@rule("where")
def where_(result: Result, condition: Node, input: Operand, other: Operand) -> Node:
    """Input where the condition holds, else other."""
    return _chosen(result, condition, input, other)


@rule("masked_fill")
def masked_fill(result: Result, input: Node, mask: Node, value: Operand) -> Node:
    """Value where the mask holds, else input."""
    return _chosen(result, mask, value, input)


def _chosen(result: Result, condition: Node, *choices: Operand) -> Node:
    """Return the first choice where the condition holds, else the second one."""

    def body(holds: Scalar, *found: Scalar) -> Scalar:
        loaded = iter(found)
        first, second = [
            cast(next(loaded), result.dtype) if isinstance(choice, Node) else constant(choice, result.dtype)
            for choice in choices
        ]
        return where(cast(holds, "bool"), first, second)

    given = [choice for choice in choices if isinstance(choice, Node)]
    return elementwise(body, condition, *given, dtype=result.dtype)
