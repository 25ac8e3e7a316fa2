"""Sizes as arguments: numbers in a kernel's text that a launch passes, so that one text serves many shapes.

Text in the making holds marked numbers (`size`). `as_arguments` names them and returns their values in the
order of the arguments; `as_literals` writes them into the text instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LITERAL = 4
"""Largest number that stays in the text: strides of windows, lanes of a texel, numbers of taps."""

_MARKED = re.compile("\x01(-?\\d+)\x02([^\x01-\x03]*)\x03")


def size(number: int, role: str = "") -> str:
    """Return a number as text that may become an argument; small ones do not.

    role: the place of the number in the computation (a stride of a tensor, an extent of a loop), the same for
    all shapes. Two numbers of a kernel are one argument where number and role agree: numbers that are equal
    by chance have other roles.
    """
    return str(number) if abs(number) <= LITERAL else argument(number, role)


def quotient(text: str, divisor: int, role: str = "") -> str:
    """Return the quotient of a C expression, at least 0 and below 2^31, by a positive size.

    A division by an argument costs what one by a constant does: the high word of a product (Granlund and
    Montgomery, Division by invariant integers using multiplication, 1994).
    """
    divisor = int(divisor)  # schedules hold numpy's numbers, too
    if divisor <= LITERAL:
        return f"(uint)({text}) / {divisor}" if divisor > 1 else text
    shift = (divisor - 1).bit_length()
    factor = -(-(1 << (31 + shift)) // divisor)
    factor -= (factor >> 31) << 32  # as an int
    role = role or text
    return (
        f"(int)(mul_hi((uint)({text}), (uint){argument(factor, role + ' factor')}) >> "
        f"{argument(shift - 1, role + ' shift')})"
    )


def digits(number: str, extents: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return the digits of a number in a mixed radix as (variable, C expression), the lowest one first.

    number: C text of a value from 0 to the product of the extents, less one. extents: of the digits, by
    variable. Variables of quotients stand between the digits.
    """
    variables = []
    for name, extent in extents[:-1]:
        above = f"{name}_over"
        whole = f"({number})" if " " in number else number
        variables.append((above, quotient(number, extent, name)))
        variables.append((name, f"{whole} - {size(extent, name)} * {above}" if extent > 1 else "0"))
        number = above
    return [*variables, *[(name, number) for name, _ in extents[-1:]]]


def argument(number: int, role: str) -> str:
    """Return a number as text that will become an argument, however small."""
    return f"\x01{number}\x02{_MARKED.sub('#', role)}\x03"


def as_arguments(text: str) -> tuple[str, tuple[int, ...]]:
    """Return a text whose marked numbers are called n0, n1, ... in their order, and the numbers."""
    names: dict[tuple[str, str], str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault((match[1], match[2]), f"n{len(names)}")

    return _MARKED.sub(name, text), tuple([int(number) for number, _ in names])


def as_literals(text: str) -> str:
    """Return a text with its marked numbers as they are."""
    return _MARKED.sub(lambda match: match[1], text)
