"""Derivatives of the gamma function's logarithm, zeta, the inverse of erf: in single precision."""

from __future__ import annotations

from math import factorial

from torchedge.errors import LoweringError
from torchedge.expressions.scalars import apply
from torchedge.lowering.building import Operand
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import computed
from torchedge.lowering.rules.registry import Result, rule


def _refuse_double(name: str, result: Result) -> None:
    if result.dtype == "float64":
        raise LoweringError(f"aten.{name} has a kernel in single precision only; expected float32")


@rule("digamma", "special_digamma", "special_psi")
def digamma(result: Result, input: Node) -> Node:
    """The derivative of the gamma function's logarithm."""
    _refuse_double("digamma", result)
    return computed(lambda a: apply("digamma", a), result, input)


@rule("polygamma", "special_polygamma")
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


@rule("erfinv", "special_erfinv")
def erfinv(result: Result, input: Node) -> Node:
    """The number whose erf is the input."""
    _refuse_double("erfinv", result)
    return computed(lambda a: apply("erfinv", a), result, input)
