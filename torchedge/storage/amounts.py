"""Amounts of memory as people write them: a number of MiB, or a text with a unit."""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import TypeAlias

from torchedge.errors import InputError

Amount: TypeAlias = int | float | str
"""A number of MiB, or a text such as "500MiB", "1.5 GiB" or "4GB"."""

MIB = 2**20
MOST_MIB = 2**24
"""No number without a unit is larger: bytes are not MiB."""
MOST_BYTES = 2**50
"""No amount is larger: 1 PiB."""

_BINARY = {letter: 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}
_UNITS: dict[str, int] = {
    "": MIB,
    "b": 1,
    **{f"{letter}ib": size for letter, size in _BINARY.items()},
    **_BINARY,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
"""Bytes of each unit: "4G" is 4 GiB, "4GB" is 4 x 10^9 bytes."""
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_LONGEST = 40
_EXPECTED = 'expected a number of MiB such as 4096, or a text with its unit such as "4GiB"'


def bytes_of(amount: object, name: str = "the limit") -> int:
    """Return an amount of memory in bytes.

    name: of the argument, for errors.
    Raises InputError: it is no amount, not from 1 byte to 1 PiB, or a number above `MOST_MIB`.
    """
    return int(_checked(amount, name))


def mib_of(amount: object, name: str = "the limit") -> float:
    """Return an amount of memory in MiB. Raises InputError as `bytes_of` does."""
    return _checked(amount, name) / MIB


def _checked(amount: object, name: str) -> float:
    shown = f"{amount[:_LONGEST]!r}" if isinstance(amount, str) else f"{amount!r:.{_LONGEST}}"
    size = _size(amount)
    if size is None:
        raise InputError(f"{name} is {shown}; {_EXPECTED}")
    number, unit = size
    if unit == "" and number > MOST_MIB:
        raise InputError(
            f"{name} is {shown} MiB, more than any device has; numbers are MiB. For bytes write "
            f'"{number:.0f}B", else pass at most {MOST_MIB}'
        )
    nbytes = number * _UNITS[unit]
    if not 1 <= nbytes <= MOST_BYTES:
        raise InputError(f"{name} is {shown}; expected 1 byte to 1 PiB")
    return float(nbytes)


def _size(amount: object) -> tuple[float, str] | None:
    """Return the number and the unit of an amount; None if it is none."""
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount) if len(amount) < _LONGEST else None
        if match is None or match[2].lower() not in _UNITS:
            return None
        return float(match[1]), match[2].lower()
    if isinstance(amount, bool) or not isinstance(amount, Real) or not math.isfinite(amount):
        return None
    return float(amount), ""


def with_unit(nbytes: int | None) -> str | None:
    """Return bytes as the amount that means them, None for none."""
    return None if nbytes is None else f"{nbytes}B"


def is_ambiguous(text: str) -> bool:
    """Return whether the unit of an amount has two meanings among people: 4G and 4GB."""
    size = _size(text)
    return size is not None and size[1] != "b" and not size[1].endswith("ib") and size[1] != ""
