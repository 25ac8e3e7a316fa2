"""Where a figure comes from, strongest first; a result inherits the weakest of what it used."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import total_ordering

__all__ = ["Provenance", "weakest"]


@total_ordering
class Provenance(Enum):
    """Where a figure comes from. Ordered: `MEASURED > PUBLIC_DATA > PUBLISHED > ASSUMED`.

    The value is the word used in `device.toml` and in every result.
    """

    MEASURED = "measured"
    """By our probes; the source names date, versions and command."""
    PUBLIC_DATA = "public data"
    """Measured by others and published as data."""
    PUBLISHED = "published"
    """A vendor's or a paper's figure."""
    ASSUMED = "assumed"
    """Derived or guessed; the source gives the reasoning."""

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Provenance):
            return NotImplemented
        return _STRENGTH[self] < _STRENGTH[other]

    def __str__(self) -> str:
        return self.value


_STRENGTH = {provenance: -rank for rank, provenance in enumerate(Provenance)}


def weakest(provenances: Iterable[Provenance]) -> Provenance:
    """Return the weakest of some provenances (DESIGN 5.1: a prediction inherits the weakest).

    Raises:
        ValueError: there is none; a result that used no figure has no provenance to inherit.
    """
    return min(provenances)
