"""Prices of capacity by subgradient ascent, where they fall monotonically in reversed time.

While work waits, capacity earlier in reversed time is worth no less than capacity later. With such prices the
cheapest schedule of a job that ends in slot t takes the last T chunks up to t, so that all jobs of one size
share a table over the slots and a suffix minimum answers each: a round costs (sizes x slots), whatever the
number of jobs. The bound is valid for any prices; where work does not wait all the time it is weak, and
`prices` goes on from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.errors import MissingExtraError
from torchedge.streaming.solving.problems import Problem, Subproblem

__all__ = ["Ascent", "ascend"]

Floats = npt.NDArray[np.float64]

STALLED = 15
SHRINK = 0.7
MOMENTUM = 0.7
NEVER = 1e18


class _Tables:
    """What the rounds share: for each size, where the last T chunks before each slot's end begin."""

    def __init__(self, problem: Problem, part: Subproblem) -> None:
        usable = np.flatnonzero(problem.capacity[part.start : part.end])
        self.slots = usable + part.start
        self.capacity = problem.capacity[self.slots].astype(float)
        self.total = np.cumsum(self.capacity)
        layers = problem.layers - self.slots
        kinds = sorted({(job.chunks, job.late) for job in part.jobs})
        place = {kind: k for k, kind in enumerate(kinds)}
        chunks = np.array([kind[0] for kind in kinds], dtype=float)
        self.late = np.array([kind[1] for kind in kinds], dtype=float)[:, None] * layers[None, :]
        starts = self.total[None, :] - chunks[:, None]
        self.reachable = starts >= 0
        self.first = np.minimum(np.searchsorted(self.total, np.maximum(starts, 0), "right"), len(usable) - 1)
        before = np.concatenate([[0.0], self.total])[self.first]
        self.skipped = np.where(self.reachable, starts - before, 0.0)
        self.kind = np.array([place[job.chunks, job.late] for job in part.jobs])
        self.refusal = np.array([job.refusal for job in part.jobs], dtype=float)
        self.use = np.array([job.late * job.use for job in part.jobs], dtype=float)
        release = np.searchsorted(self.slots, [job.release for job in part.jobs], "left")
        needed = np.concatenate([[0.0], self.total])[release] + [job.chunks for job in part.jobs]
        earliest = np.searchsorted(self.total, needed - 0.5, "left")
        self.possible = earliest < len(usable)
        self.earliest = np.minimum(earliest, len(usable) - 1)

    def evaluate(self, prices: Floats) -> tuple[float, Floats, Floats]:
        """The bound at some prices, how much of each slot's capacity it would use, and each job's excess."""
        cost = prices * self.capacity
        paid = np.cumsum(cost)
        before = np.concatenate([[0.0], paid])[self.first]
        table = paid[None, :] - before - prices[self.first] * self.skipped - self.late
        table = np.where(self.reachable, table, NEVER)
        least = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        ends = np.where(table <= least, np.arange(table.shape[1])[None, :], table.shape[1] - 1)
        ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        streaming = np.where(self.possible, self.use + least[self.kind, self.earliest], NEVER)
        streamed = np.flatnonzero(streaming < self.refusal)
        value = float(np.minimum(streaming, self.refusal).sum() - cost.sum())
        kinds, end = self.kind[streamed], ends[self.kind, self.earliest][streamed]
        cover = np.zeros(len(prices) + 1)
        np.add.at(cover, self.first[kinds, end], 1.0)
        np.add.at(cover, end + 1, -1.0)
        used = np.cumsum(cover[:-1]) * self.capacity
        np.add.at(used, self.first[kinds, end], -self.skipped[kinds, end])
        return value, used, streaming - self.refusal


@dataclass(frozen=True, slots=True)
class Ascent:
    """A lower bound of a part's cost and the prices (by slot of the part) behind it.

    `excess`: by job, what streaming it costs at these prices less what refusing it costs.
    """

    value: float
    prices: Floats
    excess: Floats


def ascend(problem: Problem, part: Subproblem, upper: int, *, rounds: int) -> Ascent:
    """Climb to prices of capacity that bound a part's cost well.

    upper: the cost of a plan that is known, from which step lengths follow.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        from scipy.optimize import isotonic_regression
    except ImportError as error:
        raise MissingExtraError.of("scipy", extra="plan", purpose="planning a stream of weights") from error
    tables = _Tables(problem, part)
    prices = np.zeros(len(tables.slots))
    rate = max(job.refusal / job.chunks for job in part.jobs)
    best, best_prices = -NEVER, prices
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        trial = np.full(len(tables.slots), share * rate)
        value, _, _ = tables.evaluate(trial)
        if value > best:
            best, best_prices = value, trial
    prices, direction = best_prices, np.zeros(len(tables.slots))
    step, stalled = 1.0, 0
    for _ in range(rounds):
        value, used, _ = tables.evaluate(prices)
        if value > best + 1e-7 * abs(best):
            best, best_prices, stalled = value, prices, 0
        else:
            stalled += 1
        if best > upper - 1:
            break
        if stalled >= STALLED:
            step, stalled, prices = step * SHRINK, 0, best_prices
            direction = np.zeros(len(prices))
            value, used, _ = tables.evaluate(prices)
        gradient = used / tables.capacity - 1.0
        direction = MOMENTUM * direction + (1 - MOMENTUM) * gradient
        length = float((direction * direction * tables.capacity).sum())
        if length < 1e-12:
            break
        moved = prices + step * (upper - value) / length * direction
        fitted = isotonic_regression(moved, weights=tables.capacity, increasing=False).x
        prices = np.maximum(fitted, 0.0)
    found = np.zeros(part.end - part.start)
    found[tables.slots - part.start] = best_prices
    _, _, excess = tables.evaluate(best_prices)
    return Ascent(best, found, excess)
