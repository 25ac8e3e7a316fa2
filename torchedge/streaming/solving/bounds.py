"""Lower bounds of a subproblem from prices of capacity; by weak duality any prices give a bound.

`ascend` finds prices by subgradient ascent over prices that fall monotonically in reversed time: while work
waits, capacity earlier in reversed time is worth no less than capacity later. The cheapest schedule that ends
in slot t then takes the last T chunks up to t. All jobs of one size share a table over the slots, so a round
costs (sizes x slots).

`Relaxation` goes on from there where work does not always wait: a Dantzig-Wolfe relaxation whose columns are
whole schedules of one job, coupled by slots' capacities and limits on memory. Its prices come from the linear
programme over the schedules so far (column generation). The cheapest schedule that ends in slot t takes the
cheapest T chunks of its window: max over theta of theta * T - sum of capacity * (theta - price)+, for every t
at once; any choice of thetas bounds it from below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite

import numpy as np
import numpy.typing as npt

from torchedge.errors import MissingExtraError
from torchedge.streaming.solving.problems import Problem, Subproblem

__all__ = ["Ascent", "Bound", "JobSchedule", "Relaxation", "ascend"]

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
        self.preload_cost = np.array([job.preload_cost for job in part.jobs], dtype=float)
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
        streamed = np.flatnonzero(streaming < self.preload_cost)
        value = float(np.minimum(streaming, self.preload_cost).sum() - cost.sum())
        kinds, end = self.kind[streamed], ends[self.kind, self.earliest][streamed]
        cover = np.zeros(len(prices) + 1)
        np.add.at(cover, self.first[kinds, end], 1.0)
        np.add.at(cover, end + 1, -1.0)
        used = np.cumsum(cover[:-1]) * self.capacity
        np.add.at(used, self.first[kinds, end], -self.skipped[kinds, end])
        return value, used, streaming - self.preload_cost


@dataclass(frozen=True, slots=True)
class Ascent:
    """A lower bound of a part's cost and the prices (by slot of the part) behind it.

    `excess`: by job, what streaming it costs at these prices less the cost of preloading it.
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
    rate = max(job.preload_cost / job.chunks for job in part.jobs)
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
    by_slot = np.zeros(part.end - part.start)
    by_slot[tables.slots - part.start] = best_prices
    _, _, excess = tables.evaluate(best_prices)
    return Ascent(best, by_slot, excess)


LEVELS = 64
"""How many thetas a round tries; the last evaluation tries every price."""
EXACT_LEVELS = 1024
SMOOTHING = 0.5
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class JobSchedule:
    """One schedule of a job: chunks by slot, ending in the largest of them."""

    job: int
    cost: int
    slots: tuple[int, ...]
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """A proven lower bound, the prices behind it, and by job what streaming costs at them, less preloading.

    `value` counts the costs of the relaxation's jobs only. `capacity_prices`: per chunk and slot.
    `shares`: how much of each job the relaxation streams.
    """

    value: float
    capacity_prices: Floats
    excess: Floats
    shares: Floats

    @property
    def whole(self) -> int:
        """The bound rounded up: costs are whole numbers."""
        return ceil(self.value - TOLERANCE * max(1.0, abs(self.value)))


@dataclass
class _Duals:
    """Prices of capacity (by usable slot) and of chunks in flight (by slot)."""

    capacity: Floats
    in_flight: Floats

    def mixed(self, other: _Duals, share: float) -> _Duals:
        return _Duals(
            share * self.capacity + (1 - share) * other.capacity,
            share * self.in_flight + (1 - share) * other.in_flight,
        )


@dataclass
class Relaxation:
    """The relaxation of a part of a problem; holds its columns. `in_flight` as in `Problem`."""

    problem: Problem
    part: Subproblem
    in_flight: int | None = None
    _columns: list[JobSchedule] = field(default_factory=list)
    _seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    _limited: list[int] = field(default_factory=list)
    _known_held: list[list[int]] = field(default_factory=list)
    _best: float = float("-inf")
    _prices: _Duals | None = None
    _levels: int = LEVELS
    tight: bool = False

    def __post_init__(self) -> None:
        self.jobs, self.start, self.end = self.part.jobs, self.part.start, self.part.end
        self._shares = np.zeros(len(self.jobs))
        whole = self.problem.capacity[self.start : self.end]
        self._usable = np.flatnonzero(whole) + self.start
        self._capacity = self.problem.capacity[self._usable].astype(float)
        self._place = {int(slot): place for place, slot in enumerate(self._usable)}
        self._layers = self.problem.layers - self._usable
        self._chunks = np.array([job.chunks for job in self.jobs], dtype=float)
        self._preload_cost = np.array([job.preload_cost for job in self.jobs], dtype=float)
        total = np.concatenate([[0.0], np.cumsum(self._capacity)])
        self._first = np.searchsorted(self._usable, [job.release for job in self.jobs], "left")
        needed = total[self._first] + self._chunks - 0.5
        self._earliest = np.searchsorted(total, needed, "left") - 1

    def add(self, columns: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Add one schedule a job: `(slot, chunks)` pairs by the job's position."""
        for position, served in columns.items():
            merged: dict[int, int] = {}
            for slot, chunks in served:
                merged[slot] = merged.get(slot, 0) + chunks
            slots = tuple(sorted(merged))
            self._store(position, slots, tuple(merged[slot] for slot in slots))

    def _store(self, position: int, slots: tuple[int, ...], chunks: tuple[int, ...]) -> bool:
        key = (position, slots, chunks)
        if key in self._seen:
            return False
        self._seen.add(key)
        cost = self.problem.cost(self.jobs[position], slots[-1])
        self._columns.append(JobSchedule(position, cost, slots, chunks))
        self._known_held.append([])
        return True

    def seed(self, guess: Floats) -> None:
        """Start from guessed prices of capacity, by slot of the part, instead of from none."""
        prices = self._no_prices()
        prices.capacity = guess[self._usable - self.start]
        bound, _ = self._price(prices, LEVELS)
        if bound > self._best:
            self._best, self._prices = bound, prices

    def improve(self, rounds: int, target: float = float("inf")) -> Bound:
        """Generate columns for some more rounds, or until the bound is tight or reaches `target`."""
        if self._prices is None:
            self._prices = self._no_prices()
        if not self._columns:
            self.tight = not self._tried(self._prices)
        for _ in range(rounds):
            if self.tight or self._best > target - 1 + TOLERANCE:
                break
            value, latest, self._shares = self._master()
            trial = self._prices.mixed(latest, SMOOTHING) if isfinite(self._best) else latest
            added = self._tried(trial)
            if not added:
                added = self._tried(latest)
            if value - self._best < TOLERANCE * max(1.0, abs(value)):
                self.tight = True
            elif not added:
                self.tight = self._levels >= EXACT_LEVELS
                self._levels *= 4
        return self._bound()

    def _tried(self, trial: _Duals) -> int:
        bound, added = self._price(trial, self._levels)
        if bound > self._best:
            self._best, self._prices = bound, trial
        return added

    def _no_prices(self) -> _Duals:
        return _Duals(np.zeros(len(self._usable)), np.zeros(self.end - self.start))

    def _bound(self) -> Bound:
        assert self._prices is not None
        exact, cost = self._values(self._prices, EXACT_LEVELS)
        capacity = np.zeros(self.end - self.start)
        capacity[self._usable - self.start] = self._prices.capacity
        return Bound(max(self._best, exact), capacity, cost - self._preload_cost, self._shares)

    def _unit_prices(self, prices: _Duals) -> tuple[Floats, Floats]:
        """Price of a chunk by usable slot, holding it to slot `start` included, and the holding by slot."""
        holding = np.concatenate([[0.0], np.cumsum(prices.in_flight)])
        return prices.capacity + holding[self._usable - self.start + 1], holding

    def _income(self, prices: _Duals) -> float:
        income = float((prices.capacity * self._capacity).sum())
        if self.in_flight is not None:
            income += self.in_flight * float(prices.in_flight.sum())
        return income

    def _tables(self, unit: Floats, levels: int) -> tuple[Floats, Floats]:
        """Thetas (L,) and (L, slots + 1): capacity cheaper than each theta, times the difference, summed."""
        thetas = np.unique(unit)
        if len(thetas) > levels:
            thetas = np.unique(np.quantile(thetas, np.linspace(0, 1, levels), method="nearest"))
        gains = np.maximum(thetas[:, None] - unit[None, :], 0.0) * self._capacity
        return thetas, np.concatenate([np.zeros((len(thetas), 1)), np.cumsum(gains, axis=1)], axis=1)

    def _cheapest(self, position: int, thetas: Floats, table: Floats, refund: float) -> tuple[float, int]:
        """Cost of the cheapest schedule of a job, and the usable slot it ends in."""
        job = self.jobs[position]
        low, high = int(self._earliest[position]), len(self._usable)
        if job.late:
            reach = self.problem.layers - job.use + int((job.preload_cost + max(refund, 0.0)) // job.late) + 1
            high = min(high, int(np.searchsorted(self._usable, reach, "right")))
        if low >= high:
            return float("inf"), -1
        first = int(self._first[position])
        fills = table[:, first, None] - table[:, low + 1 : high + 1] + (thetas * job.chunks)[:, None]
        fill = fills.max(axis=0)
        costs = fill + job.late * (job.use - self._layers[low:high])
        end = int(costs.argmin())
        return float(costs[end]) - refund, low + end

    def _refunds(self, holding: Floats) -> Floats:
        """By job: the price of the slots in which its chunks stay for its last use only."""
        last = np.array([max(job.last, self.start) - self.start for job in self.jobs], dtype=np.int64)
        refunds: Floats = self._chunks * holding[last]
        return refunds

    def _values(self, prices: _Duals, levels: int) -> tuple[float, Floats]:
        """The bound at some prices, and what streaming each job costs at them."""
        unit, holding = self._unit_prices(prices)
        thetas, table = self._tables(unit, levels)
        refunds = self._refunds(holding)
        cost = np.array(
            [self._cheapest(p, thetas, table, float(refunds[p]))[0] for p in range(len(self.jobs))]
        )
        return float(np.minimum(cost, self._preload_cost).sum()) - self._income(prices), cost

    def _price(self, prices: _Duals, levels: int) -> tuple[float, int]:
        """The bound at some prices; adds the schedules that it uses. Returns it and how many were new."""
        unit, holding = self._unit_prices(prices)
        thetas, table = self._tables(unit, levels)
        refunds = self._refunds(holding)
        total, added = -self._income(prices), 0
        for position, job in enumerate(self.jobs):
            cost, end = self._cheapest(position, thetas, table, float(refunds[position]))
            total += min(cost, job.preload_cost)
            if cost < job.preload_cost + TOLERANCE:
                slots, chunks = self._filled(position, end, unit)
                added += self._store(position, slots, chunks)
        return total, added

    def _filled(self, position: int, end: int, unit: Floats) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Take the job's chunks from the cheapest slots of its window that ends at a usable slot."""
        first = int(self._first[position])
        window = np.arange(first, end + 1)
        order = window[np.lexsort((-window, unit[first : end + 1]))]
        room = self._capacity[order]
        taken = np.minimum(room, np.maximum(self._chunks[position] - np.cumsum(room) + room, 0.0))
        used = taken > 0
        slots, chunks = self._usable[order[used]], taken[used]
        rank = np.argsort(slots)
        return tuple(int(s) for s in slots[rank]), tuple(int(c) for c in chunks[rank])

    def _master(self) -> tuple[float, _Duals, Floats]:
        """Solve the linear programme over the columns: its value, prices, and the streamed share by job."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import csc_matrix
        except ImportError as error:
            raise MissingExtraError.of(
                "scipy", extra="plan", purpose="planning a stream of weights"
            ) from error
        while True:
            rows = len(self._usable) + len(self.jobs)
            index: list[int] = []
            values: list[float] = []
            starts = [0]
            cost = []
            for place, column in enumerate(self._columns):
                index += [self._place[slot] for slot in column.slots]
                values += column.chunks
                index.append(len(self._usable) + column.job)
                values.append(1.0)
                self._limit_entries(place, rows, index, values)
                starts.append(len(index))
                cost.append(column.cost - self.jobs[column.job].preload_cost)
            right = [*self._capacity, *np.ones(len(self.jobs)), *[self.in_flight] * len(self._limited)]
            matrix = csc_matrix((values, index, starts), shape=(len(right), len(cost)))
            solved = linprog(cost, A_ub=matrix, b_ub=right, bounds=(0, None), method="highs")
            if solved.x is None:
                raise RuntimeError(f"the linear programme of the bound ended with: {solved.message}")
            if not self._separate(solved.x):
                break
        duals = -solved.ineqlin.marginals
        shares = np.zeros(len(self.jobs))
        np.add.at(shares, [column.job for column in self._columns], solved.x)
        prices = self._no_prices()
        prices.capacity = np.maximum(duals[: len(self._usable)], 0.0)
        for offset, slot in enumerate(self._limited):
            prices.in_flight[slot - self.start] = max(0.0, duals[rows + offset])
        return float(solved.fun) + float(self._preload_cost.sum()), prices, shares

    def _limit_entries(self, place: int, rows: int, index: list[int], values: list[float]) -> None:
        """Add a column's chunks in flight in the limited slots; they never change, so they are cached."""
        known = self._known_held[place]
        for slot in self._limited[len(known) :]:
            known.append(self._held(self._columns[place], slot))
        for offset, chunks in enumerate(known):
            if chunks:
                index.append(rows + offset)
                values.append(float(chunks))

    def _held(self, column: JobSchedule, slot: int) -> int:
        """Chunks of a column in flight in a slot."""
        if slot < self.jobs[column.job].last:
            return 0
        return sum(column.chunks[bisect_left(column.slots, slot) :])

    def _separate(self, shares: Floats) -> bool:
        """Add the slots in which the solution exceeds the limit most; False if it exceeds it nowhere."""
        if self.in_flight is None:
            return False
        change = np.zeros(self.end - self.start + 1)
        for column, share in zip(self._columns, shares, strict=True):
            if share > TOLERANCE:
                job = self.jobs[column.job]
                change[max(job.last - self.start, 0)] += share * job.chunks
                for slot, chunks in zip(column.slots, column.chunks, strict=True):
                    change[slot + 1 - self.start] -= share * chunks
        over = np.cumsum(change)[:-1] - self.in_flight
        over[[slot - self.start for slot in self._limited]] = 0.0
        worst = [
            int(t)
            for t in np.argsort(-over, kind="stable")[:200]
            if over[t] > 1e-6 * max(1.0, self.in_flight)
        ]
        picked: list[int] = []
        for slot in worst:
            if all(abs(slot - other) > 8 for other in picked):
                picked.append(slot)
        self._limited += [slot + self.start for slot in picked[:16]]
        return bool(picked)
