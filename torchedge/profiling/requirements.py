"""The accuracy that a Jetson TX2 profile has to reach, and whether measured scores reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchedge.profiling.accuracy import FitScore, Score

__all__ = ["Verdict", "judge"]

Scores = Mapping[tuple[str, str], Score]

_MEANS = {
    ("gamma", "own"): 2.0,
    ("gamma", "basis"): 4.5,
    ("gamma", "left-out"): 5.0,
    ("phi", "own"): 3.5,
    ("phi", "basis"): 8.0,
    ("phi", "left-out"): 10.0,
    ("allocated", "simulated"): 2.5,
}
"""Mean over networks of the absolute percentage error, at most."""

_GOOGLENET = {("gamma", "basis"): 8.0, ("phi", "basis"): 12.0}
"""GoogLeNet, the network furthest from the basis."""

_COVERAGE = (85.0, 95.0)
_MISSED, _REFUSED = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One requirement in %: what it is of, its bounds, and what was reached."""

    name: str
    low: float
    high: float
    reached: float

    @property
    def met(self) -> bool:
        """Whether the figure lies within the bounds; one that was not measured does not."""
        return math.isfinite(self.reached) and self.low <= self.reached <= self.high

    @property
    def required(self) -> str:
        """The bounds in words."""
        return f"≤ {self.high:g} %" if self.low <= 0 else f"{self.low:g} to {self.high:g} %"


def judge(scores: Scores, fits: FitScore) -> list[Verdict]:
    """Return every requirement with what was reached, in a fixed order; what has no score is left out."""
    found = []
    for key, bound in _MEANS.items():
        score = scores.get(key)
        if score is None:
            continue
        name = f"{key[0]} {key[1]}"
        found.append(Verdict(f"{name}: error, mean over networks", 0.0, bound, score.mean))
        if key in _GOOGLENET and "googlenet" in score.error:
            found.append(
                Verdict(f"{name}: error of googlenet", 0.0, _GOOGLENET[key], score.error["googlenet"])
            )
        if score.coverage:
            found.append(Verdict(f"{name}: coverage of 90 % intervals", *_COVERAGE, score.mean_coverage))
    found.append(Verdict("fits left-out: failed runs called fitting", 0.0, _MISSED, fits.missed))
    found.append(Verdict("fits left-out: passed runs refused", 0.0, _REFUSED, fits.refused))
    return found
