"""Which jobs to preload: a search over slots that keeps the most promising labels.

A label is the state of a partial plan: its cost, the remaining chunks of its streamed jobs, its preloaded
chunks. Each slot serves the jobs of a label, fewest remaining chunks first, then streams or preloads every
job whose last use it is. A label is dropped if another one costs no more and leaves no more to load
(dominance), if its lower bound exceeds a known cost, and, beyond `width` labels, if it promises least. All
labels of a slot are rows of the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.streaming.solving.prices import Flow, Guide, Ints
from torchedge.streaming.solving.problems import Problem, Subproblem, WorkBudget

COMPARED = 48
"""How many labels of a slot, the most promising, all others are compared with; more would only drop more."""
MOST_EXACT = 2.0**52
"""Costs are floats: above this nothing is called proven."""


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Most chunks in flight, counted whole from first load to last use or not; most chunks preloaded.

    `fewest`: the fewest chunks that must still be preloaded, by slot and chunks waiting. `premium`: what a
    preloaded chunk costs beyond its price when labels are compared. `slack`: most chunks preloaded in a
    relaxation that the lower bound is taken of. `memory`: most chunks preloaded and in flight together, which
    no search counts.
    """

    in_flight: int | None = None
    whole: bool = False
    preloaded: int | None = None
    premium: float = 0.0
    slack: int | None = None
    fewest: Flow | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """The result of a search: the jobs (weights) preloaded; None if no plan keeps the limits.

    `bound`: of the cost of all plans that were dropped for want of width; infinite where none was: then no
    plan served in this order is cheaper than the one found and the one known before.
    """

    preloaded: frozenset[int] | None
    bound: float


class LabelSearch:
    """A search for a cheap set of jobs to preload that keeps the limits, with at most `width` labels.

    best: the cost of a plan that is known; only a cheaper one is looked for.
    """

    def __init__(
        self,
        problem: Problem,
        part: Subproblem,
        *,
        width: int,
        work: WorkBudget,
        limits: ChunkLimits = ChunkLimits(),
        guide: Guide | None = None,
        best: int | None = None,
    ) -> None:
        self.problem, self.part, self.width, self.work = problem, part, width, work
        self.limits, self.guide = limits, guide
        jobs = part.jobs  # the entry at -1, of no job, is zero
        self.chunks = np.array([job.chunks for job in jobs] + [0], dtype=np.int64)
        self.release = np.array([job.release for job in jobs] + [0], dtype=np.int64)
        self.late = np.array([float(job.late) for job in jobs] + [0.0])
        self.tied = any(job.last < job.release - 1 for job in jobs)
        self.alike = len({job.late for job in jobs}) == 1
        self.left = np.append(np.cumsum(problem.capacity[: part.end][::-1])[::-1], 0)
        self.bound = np.inf
        self.best = np.inf if best is None else best - 1 + 1e-6 * max(1.0, best)
        self.remaining: Ints = np.zeros((1, 0), np.int64)
        self.names: Ints = np.zeros((1, 0), np.int64)
        self.cost = np.zeros(1)
        self.preload_chunks = np.zeros(1, np.int64)
        self.origin: Ints = np.zeros(1, np.int64)  # label of the last decision
        # Of every decision: the job, each label's label of the decision before, and whether it preloads.
        self.decisions: list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.bool_]]] = []

    def run(self) -> Labels:
        """Search slot by slot, and return the best label of the last one."""
        decided: dict[int, list[int]] = {}
        for position, job in enumerate(self.part.jobs):
            decided.setdefault(job.last, []).append(position)
        for slot in range(min(decided, default=0), self.part.end):
            own = decided.get(slot, ())
            if not own and not self.remaining.size:
                continue
            if not len(self.cost):
                return Labels(None, self.bound)
            if not self._step(slot, own):
                return Labels(None, -np.inf)
        unfinished = self.remaining.any(axis=1)
        if not len(self.cost) or unfinished.all():
            return Labels(None, self.bound)
        best = int(np.where(unfinished, np.inf, self.cost).argmin())
        if self.cost[best] > self.best:
            return Labels(None, self.bound)
        label, chosen = int(self.origin[best]), set()
        for position, parents, preloads in reversed(self.decisions):
            if preloads[label]:
                chosen.add(self.part.jobs[position].weight)
            label = int(parents[label])
        exact = self.cost[best] < MOST_EXACT
        return Labels(frozenset(chosen), self.bound if exact else -np.inf)

    def _step(self, slot: int, own: list[int] | tuple[int, ...]) -> bool:
        """Serve one slot and decide its jobs; False if the work is spent or no label is left."""
        in_flight = self._in_flight() if own and self.limits.in_flight is not None else None
        waiting = self.release[self.names] <= slot
        self.cost = self.cost + (self.late[self.names] * waiting).sum(axis=1)
        capacity = int(self.problem.capacity[slot])
        if capacity and slot >= self.part.start:
            self._serve(waiting, capacity)
        for position in own:
            in_flight = self._decide(position, in_flight)
            if len(self.cost) > 4 * self.width:
                in_flight = self._prune(slot, in_flight)
            if not self.work.spend(80 + self.remaining.size / 12):
                return False
        # As the next slot serves them: none, then waiting ones, then later ones.
        released = self.release[self.names]
        rank = self.remaining / np.maximum(1.0, self.late[self.names])
        rank = np.where(released > slot + 1, np.inf, rank)
        rank = np.where(self.names < 0, -1.0, rank)
        order = np.argsort(rank, axis=1, kind="stable")
        self.remaining = np.take_along_axis(self.remaining, order, axis=1)
        self.names = np.take_along_axis(self.names, order, axis=1)
        first = int((self.remaining.sum(axis=0) == 0).sum())
        self.remaining, self.names = self.remaining[:, first:], self.names[:, first:]
        if own:
            self._prune(slot, None)
        return self.work.spend(160 + self.remaining.size / 20)

    def _in_flight(self) -> Ints:
        amounts = self.chunks[self.names] if self.limits.whole else self.remaining
        total: Ints = amounts.sum(axis=1)
        return total

    def _serve(self, waiting: npt.NDArray[np.bool_], capacity: int) -> None:
        served = np.where(waiting, self.remaining, 0)
        before = np.cumsum(served, axis=1) - served
        self.remaining = self.remaining - np.minimum(served, np.maximum(capacity - before, 0))
        self.names = np.where(self.remaining > 0, self.names, -1)

    def _decide(self, position: int, in_flight: Ints | None) -> Ints | None:
        """Let every label stream the job, and preload it."""
        job, limits = self.part.jobs[position], self.limits
        stream = np.ones(len(self.cost), dtype=bool)
        if in_flight is not None and limits.in_flight is not None:
            stream = in_flight + job.chunks <= limits.in_flight
        preload = np.ones(len(self.cost), dtype=bool)
        if limits.preloaded is not None:
            preload = self.preload_chunks + job.chunks <= limits.preloaded
        one, other = np.flatnonzero(stream), np.flatnonzero(preload)
        rows = np.concatenate([one, other])
        preloads = np.arange(len(rows)) >= len(one)
        self.decisions.append((position, self.origin[rows].astype(np.int32), preloads))
        self._take(rows)
        self.origin = np.arange(len(rows))
        self.remaining = np.column_stack([self.remaining, np.where(preloads, 0, job.chunks)])
        self.names = np.column_stack([self.names, np.where(preloads, -1, position)])
        self.cost[len(one) :] += job.preload_cost
        self.preload_chunks[len(one) :] += job.chunks
        if in_flight is None:
            return None
        following: Ints = in_flight[rows] + np.where(preloads, 0, job.chunks)
        return following

    def _take(self, rows: Ints) -> None:
        self.remaining, self.names = self.remaining[rows], self.names[rows]
        self.cost, self.preload_chunks = self.cost[rows], self.preload_chunks[rows]
        self.origin = self.origin[rows]

    def _prune(self, slot: int, in_flight: Ints | None) -> Ints | None:
        """Drop dominated labels, then the least promising ones beyond the width."""
        if len(self.cost) < 2:
            return in_flight
        self.work.spend(80 + self.remaining.size / 5)
        value = self.cost + self.limits.premium * self.preload_chunks
        value[self.remaining.sum(axis=1) > self.left[slot + 1]] = np.inf  # never served within the part
        lower = np.full(len(value), -np.inf)
        if self.guide is not None:
            estimate, least = self.guide.rest(slot + 1, self.remaining, self.names)
            if not self.tied:
                lower = np.where(value < np.inf, value, 0.0) + least
                lower -= self.limits.premium * (self.limits.slack or 0)
            value = np.where(lower > self.best, np.inf, value + estimate)
        if self.limits.fewest is not None and self.limits.preloaded is not None:
            # Jobs that are decided already and released later: they may be preloaded already.
            ahead = sum(job.chunks for job in self.part.jobs if job.last <= slot < job.release - 1)
            fewest = self.limits.fewest.rest(slot + 1, self.remaining.sum(axis=1)) - ahead
            value = np.where(self.preload_chunks + fewest > self.limits.preloaded, np.inf, value)
        ranked = np.lexsort((self.cost, value))
        alive = self._undominated(slot, ranked)
        ranked = ranked[alive[ranked] & np.isfinite(value[ranked])]
        if len(ranked) > self.width:
            self.bound = min(self.bound, float(lower[ranked[self.width :]].min()))
            ranked = ranked[: self.width]
        self._take(ranked)
        return None if in_flight is None else in_flight[ranked]

    def _undominated(self, slot: int, ranked: Ints) -> npt.NDArray[np.bool_]:
        """Which labels none of the most promising ones dominates."""
        alive = np.ones(len(ranked), dtype=bool)
        names, remaining = self.names, self.remaining
        # Without a limit on whole weights and jobs to come, only what remains matters, sorted.
        plain = not self.limits.whole and not self.tied and self.alike
        totals = remaining.sum(axis=1)
        preloaded = self.preload_chunks * (self.limits.preloaded is not None)
        self.work.spend(len(ranked) / 5)
        for rival in ranked[:COMPARED]:
            if not alive[rival]:
                continue
            others = alive & (self.cost[rival] <= self.cost) & (totals[rival] <= totals)
            others &= preloaded[rival] <= preloaded
            others[rival] = False
            rows = np.flatnonzero(others)
            less = remaining[rival] <= remaining[rows]
            if not plain:
                one, other = names[rival], names[rows]
                less &= (self.chunks[one] <= self.chunks[other]) & (self.late[one] <= self.late[other])
                waiting = (self.release[one] <= slot + 1) & (self.release[other] <= slot + 1)
                less &= waiting | (one == other)
                less |= one < 0
            alive[rows[less.all(axis=1)]] = False
        return alive
