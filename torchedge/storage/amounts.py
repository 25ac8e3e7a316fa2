"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from torchedge.errors import InputError

MOST_BYTES = 2**50
"""No amount is larger: 1 PiB."""

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_LONGEST = 40
_LEAST_BARE = 2**16


def check_not_bare(name: str, amount: object) -> None:
    """Raise InputError for a whole number of bytes below 64 KiB: MiB are meant, as limits are elsewhere."""
    if isinstance(amount, int) and not isinstance(amount, bool) and 0 < amount < _LEAST_BARE:
        raise InputError(
            f'{name} is {amount}, which means {amount} bytes; write "{amount}MiB" for MiB. Whole numbers are '
            "expected to be bytes from 64 KiB on"
        )


def with_unit(amount: int | None) -> str | None:
    """Return bytes as a text with their unit, None for none."""
    return None if amount is None else f"{amount}B"


def bytes_of(text: str, unit: int = 1) -> int | None:
    """Return the bytes of a text such as "500MiB" or "1.5 GiB", None if it is no such text.

    unit: bytes of a number without a unit.
    """
    match = _AMOUNT.fullmatch(text) if len(text) < _LONGEST else None
    size = None if match is None else {"": unit, **_UNITS}.get(match[2].lower())
    return None if match is None or size is None else int(float(match[1]) * size)
