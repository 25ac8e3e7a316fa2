"""Numbers and names as people read them, in results, tables and messages."""

from __future__ import annotations

import math
import re

_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m"  # colours and weights of letters
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)


def number(value: float) -> str:
    """Return a figure with about three significant digits and grouped thousands."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def rounded(value: float, digits: int = 4) -> float:
    """Return a figure with so many significant digits, as files hold it."""
    return float(f"{value:.{digits}g}")


def span(low: float, high: float) -> str:
    """Return an interval."""
    return f"{number(low)}-{number(high)}"


def shorten(text: str, columns: int) -> str:
    """Return text in at most so many columns, with an ellipsis where its end is cut off."""
    return text if len(text) <= columns else text[: columns - 1].rstrip(" (,") + "…"


def printable(text: str) -> str:
    """Return text with control codes and marks of direction as escapes; colours, tabs and line feeds stay."""
    return _CONTROL.sub(lambda code: code[0] if code[0].endswith("m") else _escaped(code[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
