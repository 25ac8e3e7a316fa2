"""The result of a search: the winner, the Pareto fronts, the counts, or the unmet constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.prediction.results import Prediction
from torchedge.searching.evaluation import FIGURES
from torchedge.storage.documents import plain
from torchedge.texts import number

if TYPE_CHECKING:
    from torch import nn

    from torchedge.searching.spaces import SearchSpace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate: its encoding, its figures by name (MiB, ms) and its score (None where it is not valid)."""

    encoding: Any
    figures: Mapping[str, float]
    score: float | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that no candidate meets together with the others.

    limit: the constraint; nearest: the nearest candidate's figure; smallest: the smallest figure of any
    candidate. If `smallest` is above `limit`, the constraint cannot be met even alone.
    """

    name: str
    limit: float
    nearest: float
    smallest: float

    @property
    def excess(self) -> float:
        """Excess of the nearest candidate over the limit, in the figure's unit; 0 where it is within."""
        return max(self.nearest - self.limit, 0.0)

    def __str__(self) -> str:
        figure = FIGURES[self.name]
        name = f"{self.name} {figure.letter}"
        if self.excess == 0:
            return f"{name}: met, {number(self.nearest)} of {number(self.limit)} {figure.unit}"
        reach = (
            "cannot be met at all" if self.smallest > self.limit else "can be met, but not with the others"
        )
        return (
            f"{name}: {number(self.nearest)} {figure.unit} against a limit of {number(self.limit)} "
            f"(+{100 * self.excess / self.limit:.1f} %); {reach}, the least seen is {number(self.smallest)}"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of candidates of a search.

    drawn: all draws; known: repeated draws; evaluated: different candidates evaluated; valid: those of them
    within all constraints; rejected: the others, by the first violated constraint (the cheapest figure is
    computed first).
    """

    drawn: int
    known: int
    evaluated: int
    valid: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Search:
    """The result of `torchedge.search`.

    best: the valid candidate with the highest score; None where no candidate is within the constraints, and
    then `violations` lists the constraints that `nearest`, the candidate with the least excess, does not
    meet, and by how much. fronts: by constrained figure, the valid candidates that no other beats in both
    score and figure, cheapest first. history: the best score after each iteration, the initial population
    first. predictions: of best (or nearest), by mode, in full.
    """

    best: Candidate | None
    nearest: Candidate | None
    violations: tuple[Violation, ...]
    fronts: Mapping[str, tuple[Candidate, ...]]
    history: tuple[float, ...]
    counts: Counts
    predictions: Mapping[str, Prediction]
    constraints: Mapping[str, float]
    device: str
    seed: int
    seconds: float
    space: SearchSpace = field(repr=False)

    @property
    def feasible(self) -> bool:
        """Whether a candidate is within all constraints."""
        return self.best is not None

    def build(self) -> nn.Module:
        """Build the winner's module; raises InputError where there is none."""
        if self.best is None:
            raise InputError(f"no candidate is within the constraints: {self._why()}; raise a limit")
        return self.space.build(self.best.encoding)

    def _why(self) -> str:
        return "; ".join(str(v) for v in self.violations if v.excess > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return {"space": self.space.name, "feasible": self.feasible, **plain(self)}

    def __str__(self) -> str:
        counts = self.counts
        lines = [
            f"{self.space.name} on {self.device}: {counts.evaluated:,} candidates in {self.seconds:.1f} s, "
            f"{counts.valid:,} within the constraints"
        ]
        if self.best is None:
            lines.append("  no candidate is within the constraints")
            lines += [f"  {v}" for v in self.violations]
            return "\n".join(lines)
        lines.append(f"  best score {self.best.score:.6g}")
        for name, value in self.best.figures.items():
            figure = FIGURES[name]
            lines.append(
                f"  {name} {figure.letter}: {number(value)} of {number(self.constraints[name])} {figure.unit}"
            )
        lines.append(f"  encoding {self.best.encoding}")
        return "\n".join(lines)


def pareto(scores: npt.NDArray[np.float64], costs: npt.NDArray[np.float64]) -> list[int]:
    """Return the rows (C,) that no other row beats in both score (higher) and cost (lower); cheapest first.

    Of equal rows the first is returned.
    """
    best = -np.inf
    front: list[int] = []
    for row in np.lexsort((np.arange(len(scores)), -scores, costs)).tolist():
        if scores[row] > best:
            best = scores[row]
            front.append(row)
    return front
