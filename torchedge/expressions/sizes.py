"""Sizes as arguments: numbers in a kernel's text that a launch passes, so that one text serves many shapes.

Text in the making holds marked numbers (`size`). `as_arguments` names them and returns their values in the
order of the arguments; `as_literals` writes them into the text instead.
"""

from __future__ import annotations

import re

_MARKED = re.compile("\x01(-?\\d+)\x02([^\x01-\x03]*)\x03")
_MARKS = re.compile("[\x01-\x03]")


def size(number: int, role: str = "") -> str:
    """Return a number as text that may become an argument.

    role: the place of the number in the computation (a stride of a tensor, an extent of a loop), the same for
    all shapes. Two numbers of a kernel are one argument where number and role agree: numbers that are equal
    by chance have other roles.
    """
    return f"\x01{number}\x02{_MARKS.sub('', role)}\x03"


def as_arguments(text: str) -> tuple[str, tuple[int, ...]]:
    """Return a text whose marked numbers are called n0, n1, ... in their order, and the numbers."""
    names: dict[tuple[str, str], str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault((match[1], match[2]), f"n{len(names)}")

    return _MARKED.sub(name, text), tuple([int(number) for number, _ in names])


def as_literals(text: str) -> str:
    """Return a text with its marked numbers as they are."""
    return _MARKED.sub(lambda match: match[1], text)
