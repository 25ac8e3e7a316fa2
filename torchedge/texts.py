"""Numbers and names as people read them, in results, tables and messages."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Return a figure with about three significant digits and grouped thousands."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def span(low: float, high: float) -> str:
    """Return an interval."""
    return f"{number(low)}-{number(high)}"


def shorten(text: str, columns: int) -> str:
    """Return text in at most so many columns, with an ellipsis where its end is cut off."""
    return text if len(text) <= columns else text[: columns - 1].rstrip(" (,") + "…"
