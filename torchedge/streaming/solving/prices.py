"""Prices of capacity: a lower bound of a part's cost by weak duality, and estimates for its search.

Whatever the prices, streaming a job costs at least its cheapest schedule: capacity at its price, and
lateness. Sum over jobs that or the cost of preloading, whichever is less; subtract the price of all capacity:
no plan costs less. `ascend` finds good prices by subgradient ascent. They fall in reversed time: while work
waits, earlier capacity is worth no less than later capacity. The cheapest schedule that ends in slot t then
takes the last T chunks up to t, and all jobs of one size share a table over the slots.

`Flow` makes the bound exact in the number of waiting chunks. The streamed jobs alone determine how many
chunks wait in each slot. Dynamic programming over that number finds the cheapest jobs to stream at some
prices, within a limit on chunks in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.errors import needed
from torchedge.streaming.solving.problems import Problem, Subproblem, WorkBudget

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STALLED, SHRINK, MOMENTUM = 15, 0.7, 0.7
NEVER = 1e18
LEAST_ROUNDS = 20
CELLS = 1_000_000
"""Sizes x slots of a table at most; beyond, sizes are rounded down to fewer."""


def kinds_of(part: Subproblem, most: int) -> tuple[Floats, Floats, Ints]:
    """Chunks and lateness of at most so many kinds of jobs, and each job's kind, which is never larger."""
    sizes = np.array([job.chunks for job in part.jobs], dtype=float)
    late = np.array([job.late for job in part.jobs], dtype=float)
    grid = np.unique(sizes)
    if len(grid) > most:
        spread = np.geomspace(grid[0], grid[-1], most)
        grid = np.unique(grid[np.searchsorted(grid, spread, "right") - 1])
    place = np.searchsorted(grid, sizes, "right") - 1
    least = np.full(len(grid), np.inf)
    np.minimum.at(least, place, late)
    return grid, least, place


class Tables:
    """What the rounds share: for each kind of job, where the last T chunks before each slot's end begin."""

    def __init__(self, problem: Problem, part: Subproblem) -> None:
        usable = np.flatnonzero(problem.capacity[part.start : part.end])
        self.slots = usable + part.start
        self.capacity = problem.capacity[self.slots].astype(float)
        self.total = np.cumsum(self.capacity)
        chunks, late, self.kind = kinds_of(part, max(8, CELLS // max(1, len(usable))))
        self.ends = LastChunks(self.capacity, self.total, chunks)
        self.late = late[:, None] * (problem.layers - self.slots)[None, :]
        self.preload_cost = np.array([job.preload_cost for job in part.jobs], dtype=float)
        self.use = late[self.kind] * np.array([job.use for job in part.jobs], dtype=float)
        release = np.searchsorted(self.slots, [job.release for job in part.jobs], "left")
        sizes = np.array([job.chunks for job in part.jobs], dtype=float)
        needed = np.concatenate([[0.0], self.total])[release] + sizes
        earliest = np.searchsorted(self.total, needed - 0.5, "left")
        self.possible = earliest < len(usable)
        self.earliest = np.minimum(earliest, len(usable) - 1)

    @property
    def effort(self) -> float:
        """Work of one evaluation."""
        return 100 + self.late.size / 60

    def evaluate(self, prices: Floats) -> tuple[float, Floats, Floats]:
        """The bound at some prices, how much of each slot's capacity it would use, each job's cost."""
        cost = prices * self.capacity
        table = self.ends.fills(prices, cost) - self.late
        least = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        ends = np.where(table <= least, np.arange(table.shape[1])[None, :], table.shape[1] - 1)
        ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        streaming = np.where(self.possible, self.use + least[self.kind, self.earliest], NEVER)
        streamed = np.flatnonzero(streaming < self.preload_cost)
        value = float(np.minimum(streaming, self.preload_cost).sum() - cost.sum())
        kinds, end = self.kind[streamed], ends[self.kind, self.earliest][streamed]
        cover = np.zeros(len(prices) + 1)
        first = self.ends.first[kinds, end]
        np.add.at(cover, first, 1.0)
        np.add.at(cover, end + 1, -1.0)
        used = np.cumsum(cover[:-1]) * self.capacity
        np.add.at(used, first, -self.ends.skipped[kinds, end])
        return value, used, streaming


class LastChunks:
    """Where the last chunks of each of some amounts before each slot's end begin."""

    def __init__(self, capacity: Floats, total: Floats, chunks: Floats) -> None:
        starts = total[None, :] - chunks[:, None]
        self.reachable = starts >= 0
        self.first = np.minimum(np.searchsorted(total, np.maximum(starts, 0), "right"), len(total) - 1)
        before = np.concatenate([[0.0], total])[self.first]
        self.skipped = np.where(self.reachable, starts - before, 0.0)

    def fills(self, prices: Floats, cost: Floats) -> Floats:
        """The price of the last chunks before each slot's end: (amounts, slots)."""
        paid = np.cumsum(cost)
        before = np.concatenate([[0.0], paid])[self.first]
        return np.where(self.reachable, paid[None, :] - before - prices[self.first] * self.skipped, NEVER)


@dataclass(frozen=True, slots=True)
class Ascent:
    """A lower bound of a part's cost, the prices of its usable slots, and what streaming each job costs."""

    value: float
    prices: Floats
    streaming: Floats


def ascend(tables: Tables, upper: float, *, rounds: int, work: WorkBudget) -> Ascent:
    """Climb to prices of capacity that bound a part's cost well.

    upper: the cost of a plan that is known, from which step lengths follow.
    Raises MissingExtraError: scipy is not installed.
    """
    with needed("scipy", extra="plan", purpose="planning a stream of weights"):
        from scipy.optimize import isotonic_regression
    best = Ascent(-NEVER, np.zeros(len(tables.slots)), tables.preload_cost)
    rate = float(upper) / max(1.0, float(tables.total[-1]))
    for share in (0.0, 0.25, 0.5, 1.0, 2.0):
        best = _better(best, tables, np.full(len(tables.slots), share * rate))[0]
        work.spend(tables.effort)
    prices, direction = best.prices, np.zeros(len(tables.slots))
    step, stalled = 1.0, 0
    for done in range(rounds):
        if (not work.spend(tables.effort) and done >= LEAST_ROUNDS) or best.value > upper - 1:
            break
        before = best.value
        best, value, used = _better(best, tables, prices)
        stalled = 0 if best.value > before + 1e-7 * abs(before) else stalled + 1
        if stalled >= STALLED:
            step, stalled, prices = step * SHRINK, 0, best.prices
            direction = np.zeros(len(prices))
            value, used, _ = tables.evaluate(prices)
        gradient = used / tables.capacity - 1.0
        direction = MOMENTUM * direction + (1 - MOMENTUM) * gradient
        length = float((direction * direction * tables.capacity).sum())
        if length < 1e-12 or step < 1e-4:
            break
        moved = prices + step * (upper - value) / length * direction
        fitted = isotonic_regression(moved, weights=tables.capacity, increasing=False).x
        prices = np.maximum(fitted, 0.0)
    return best


def _better(best: Ascent, tables: Tables, prices: Floats) -> tuple[Ascent, float, Floats]:
    value, used, streaming = tables.evaluate(prices)
    return (Ascent(value, prices, streaming) if value > best.value else best), value, used


FLOW_CELLS, MOST_AMOUNTS = 10_000_000, 8_000
"""Most slots and jobs x chunks in flight of a flow, and chunks in flight; beyond, it counts larger units."""


_Entry = tuple[int, int, float, float]
"""A job by position, its chunks in units, the costs of streaming and of preloading it."""


class Flow:
    """The least cost to go, by slot and chunks waiting, with a limit on chunks in flight.

    streaming, preloading: costs by job. prices: of the capacity that is used, by slot of the part. In flight
    are the chunks that wait and those in use; of weights with several uses only the first use counts. Where
    weights count whole, no fewer chunks are in flight: the bound holds.
    """

    def __init__(
        self,
        problem: Problem,
        part: Subproblem,
        limit: int,
        streaming: Sequence[float] | Floats | Ints,
        preloading: Sequence[float] | Floats | Ints,
        prices: Floats,
    ) -> None:
        self.start, self.end = part.start, part.end
        self.effort = flow_effort(part, limit)
        self.unit = unit_of(part, limit)
        # Rounding may let a unit too many wait: capacity is rounded up in its running total only.
        most = limit // self.unit + (self.unit > 1)
        total = -(-np.cumsum(problem.capacity) // self.unit)
        self.capacity: list[int] = np.minimum(most + 1, np.diff(total, prepend=0)).tolist()
        self.prices, self.most, self.whole_capacity = prices, most, problem.capacity
        self.jobs: dict[int, list[_Entry]] = {}
        for k, job in enumerate(part.jobs):
            if streaming[k] < NEVER:
                entry = (k, job.chunks // self.unit, float(streaming[k]), float(preloading[k]))
            else:
                entry = (k, most + 1, 0.0, float(preloading[k]))
            self.jobs.setdefault(job.release, []).append(entry)
        self.least = np.full((self.end - self.start + 2, most + 1), np.inf)
        self.least[-1, : 1 + (self.unit > 1)] = 0.0
        for slot in range(self.end - 1, self.start - 2, -1):
            following = self.least[slot + 2 - self.start]
            self.least[slot + 1 - self.start] = self._row(slot, following, self.jobs.get(slot + 1, []))

    @property
    def bound(self) -> float:
        """The least cost of the whole part."""
        return float(self.least[0, 0])

    def _served(self, slot: int) -> int:
        return self.capacity[slot] if slot >= self.start else 0

    def _row(self, slot: int, following: Floats, own: list[_Entry]) -> Floats:
        """The costs to go by chunks waiting before a slot, after which its own jobs are streamed or not."""
        size, served = self.most + 1, self._served(slot)
        row = np.empty(size)
        row[served:] = following[: size - served]  # where work is left after the slot
        for _, chunks, streaming, preloading in own:
            loaded = row[served + chunks :] + streaming
            row[served:] += preloading
            if len(loaded):
                np.minimum(row[served : size - chunks], loaded, out=row[served : size - chunks])
        if served:  # where none is left: what is added is all that waits
            added = np.full(size, np.inf)
            added[0] = 0.0
            for _, chunks, streaming, preloading in own:
                loaded = added[: max(0, size - chunks)] + streaming
                added += preloading
                np.minimum(added[chunks:], loaded, out=added[chunks:])
            row[:served] = np.minimum.accumulate(added + following)[size - 1 - np.arange(min(served, size))]
        price = self.prices[slot - self.start] if slot >= self.start else 0.0
        if price and self.unit == 1:
            row -= price * np.minimum(np.arange(size), served)
        elif price:  # more may wait than is counted
            row -= price * self.whole_capacity[slot]
        return row

    def choice(self) -> list[int]:
        """The jobs that the cheapest flow preloads, by position."""
        chosen: list[int] = []
        waiting, size = 0, self.most + 1
        for slot in range(self.start - 1, self.end):
            before, own = waiting, self.jobs.get(slot + 1, ())
            waiting = left = max(0, before - self._served(slot))
            if not own:
                continue
            added, taken = np.full(size, np.inf), []
            added[0] = 0.0
            for _, chunks, streaming, preloading in own:
                streamed = np.full(size, np.inf)
                streamed[chunks:] = added[: max(0, size - chunks)] + streaming
                added = added + preloading
                taken.append(streamed < added)
                np.minimum(added, streamed, out=added)
            # What is in flight in the slot are the chunks that wait before it is served.
            room = size - max(left, before)
            amount = int((added[:room] + self.least[slot + 2 - self.start][left : left + room]).argmin())
            waiting = left + amount
            for (k, chunks, _, _), streams in zip(reversed(own), reversed(taken), strict=True):
                if streams[amount]:
                    amount -= chunks
                else:
                    chosen.append(k)
        return chosen

    def rest(self, slot: int, waiting: Ints) -> Floats:
        """The least cost from a slot on, by chunks that wait before it."""
        row = self.least[min(slot, self.end) + 1 - self.start]
        costs: Floats = row[np.minimum(waiting // self.unit, self.most)]
        return costs


def unit_of(part: Subproblem, limit: int) -> int:
    """In how many chunks at a time a flow counts."""
    most = min(MOST_AMOUNTS, FLOW_CELLS // (part.end - part.start + len(part.jobs) + 2))
    return -(-(limit + 1) // max(1, most))


def flow_effort(part: Subproblem, limit: int) -> float:
    """Work of building a flow."""
    amounts = limit // unit_of(part, limit)
    slots, jobs = part.end - part.start, len(part.jobs)
    return (slots + 4 * jobs) * (6 + amounts / 1500) + slots * amounts / 150


PARTS = 8
GUIDE_CELLS = 3_000_000


class Guide:
    """An estimate of what streamed jobs with some chunks remaining still cost, at some prices."""

    def __init__(
        self, problem: Problem, part: Subproblem, tables: Tables, prices: Floats, flow: Flow | None
    ) -> None:
        slots = part.end - part.start
        chunks, late, self.kind = kinds_of(part, max(2, min(64, GUIDE_CELLS // (PARTS * slots))))
        self.chunks, self.flow, self.start, self.end = chunks, flow, part.start, part.end
        amounts = (chunks[:, None] * (np.arange(1, PARTS + 1) / PARTS)).ravel()
        late = np.repeat(late, PARTS)
        table = LastChunks(tables.capacity, tables.total, amounts).fills(prices, prices * tables.capacity)
        table += late[:, None] * tables.slots[None, :]
        least = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        place = np.searchsorted(tables.slots, np.arange(part.start, part.end + 1), "left")
        before = np.concatenate([[0.0], tables.total])[place]
        earliest = np.searchsorted(tables.total, before[None, :] + amounts[:, None] - 0.5, "left")
        rows = np.arange(len(amounts))[:, None]
        costs = least[rows, np.minimum(earliest, len(tables.total) - 1)]
        costs -= late[:, None] * (np.arange(part.start, part.end + 1) - 1)[None, :]
        costs = np.where(costs < NEVER / 2, costs, late[:, None] * slots)
        self.table = np.zeros((slots + 1, len(chunks) + 1, PARTS + 1))
        self.table[:, :-1, 1:] = costs.T.reshape(slots + 1, len(chunks), PARTS)
        self.kind = np.append(self.kind, len(chunks))
        self.sizes = np.append([job.chunks for job in part.jobs], 1)

    def rest(self, slot: int, remaining: Ints, names: Ints) -> tuple[Floats, Floats]:
        """Estimate the cost to go of each label (row), and bound it: jobs by position, -1 for none.

        The bounds are -inf where the part has no flow in single chunks.
        """
        slot = max(slot, self.start)
        share = remaining / self.sizes[names] * PARTS
        low = np.minimum(share.astype(np.int64), PARTS - 1)
        flat = self.table[min(slot, self.end) - self.start].ravel()
        at = self.kind[names] * (PARTS + 1) + low
        below, above = flat[at], flat[at + 1]
        least = np.where(share >= PARTS, above, below).sum(axis=1)
        cost: Floats = (below + (share - low) * (above - below)).sum(axis=1)
        if self.flow is None:
            return cost, np.full(len(cost), -np.inf)
        follows = self.flow.rest(slot, remaining.sum(axis=1))
        if self.flow.unit > 1:
            return cost + follows, np.full(len(cost), -np.inf)
        return cost + follows, least + follows
