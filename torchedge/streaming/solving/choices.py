"""Which jobs to preload: exact search by dynamic programming, and local search.

For a fixed set of streamed jobs, serving the fewest remaining chunks first is optimal (`pack`). A state of
the exact search is therefore the sorted tuple of remaining chunks, and the only choice is how many of the
equal jobs released in a slot are preloaded. A state is pruned if another state costs no more and has no more
left, or if a lower bound of the cost still to come (`Outlook`) shows that it cannot beat the best known plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from torchedge.streaming.solving.bounds import Floats
from torchedge.streaming.solving.problems import ORDERS, Job, Problem, Subproblem, pack, residency

__all__ = ["Choice", "Labels", "Outlook", "improve", "judge", "repair", "search"]

COMPARED = 128
"""How many states of a slot, the most promising, others are compared with; more would only prune more."""

_State = tuple[int, ...]
_Choice = tuple[object, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Labels:
    """The result of a search: the lowest cost, the jobs (weights) preloaded, whether that is proven."""

    cost: int | None
    preloaded: frozenset[int]
    proven: bool
    states: int


class Outlook:
    """A lower bound of what a state still costs, from prices of capacity (any prices are valid)."""

    def __init__(self, problem: Problem, part: Subproblem, prices: Floats, excess: Floats) -> None:
        start, end, jobs = part.start, part.end, part.jobs
        self._start, self._late = start, jobs[0].late
        capacity = problem.capacity[start:end].astype(float)
        self._thetas = np.unique(prices[capacity > 0]) if capacity.any() else np.zeros(1)
        gains = np.maximum(self._thetas[:, None] - prices[None, :], 0.0) * capacity
        self._table = np.concatenate([np.zeros((len(self._thetas), 1)), np.cumsum(gains, axis=1)], axis=1)
        self._total = np.concatenate([[0.0], np.cumsum(capacity)])
        income = np.concatenate([np.cumsum((prices * capacity)[::-1])[::-1], [0.0]])
        coming = np.zeros(end - start + 1)
        for job, over in zip(jobs, excess, strict=True):
            coming[: job.release - start] += job.preload_cost + min(0.0, float(over))
        self._base = coming - income
        self._known: dict[tuple[int, int], float] = {}

    def base(self, slot: int) -> float:
        """Bound of the jobs released after `slot`, less the price of all capacity from `slot` on."""
        return float(self._base[min(slot - self._start, len(self._base) - 1)])

    def rest(self, slot: int, chunks: int) -> float:
        """Bound of finishing a job with so many chunks left, from `slot` on."""
        bound = self._known.get((slot, chunks))
        if bound is None:
            at = slot - self._start
            first = int(np.searchsorted(self._total, self._total[at] + chunks - 0.5, "left"))
            if first >= self._table.shape[1]:
                bound = float("inf")
            else:
                fills = self._table[:, at, None] - self._table[:, first:] + (self._thetas * chunks)[:, None]
                slots = np.arange(first, self._table.shape[1]) - at
                bound = float((fills.max(axis=0) + self._late * slots).min())
            self._known[slot, chunks] = bound
        return bound


def search(
    problem: Problem,
    part: Subproblem,
    *,
    most_states: int,
    best: int | None = None,
    outlook: Outlook | None = None,
    width: int | None = None,
    room: Sequence[int] | None = None,
) -> Labels:
    """Find the cheapest set of jobs to preload; all jobs must have the same price of lateness.

    best: the cost of a plan that is known; only a cheaper one is looked for. width: keep so many states a
    slot only (a beam; nothing is proven once it cuts). most_states: give up after so many. room: most chunks
    in flight in each slot of the problem. `Labels.cost` is None where no (cheaper) plan was found; proven,
    there is none.
    """
    late = part.jobs[0].late if part.jobs else 0
    released: dict[int, list[Job]] = {}
    for job in part.jobs:
        released.setdefault(job.release, []).append(job)
    states: dict[_State, tuple[int, _Choice]] = {(): (0, None)}
    seen, proven = 0, True
    for slot in range(part.start - 1, part.end):
        choices = list(_choices(released.get(slot + 1, [])))
        capacity = int(problem.capacity[slot]) if slot >= part.start else 0
        most = None if room is None or slot < 0 else room[slot]
        following: dict[_State, tuple[int, _Choice]] = {}
        for state, (cost, past) in states.items():
            in_flight = sum(state) if most is not None else 0
            left = _serve(state, capacity)
            for added, preload_cost, preloaded in choices:
                total = cost + preload_cost + late * len(state)
                if best is not None and total >= best:
                    continue
                if most is not None and in_flight + sum(added) > most:
                    continue
                after = tuple(sorted(left + added)) if added else left
                known = following.get(after)
                if known is None or total < known[0]:
                    following[after] = (total, (past, preloaded) if preloaded else past)
        seen += sum(1 + len(state) // 16 for state in following)
        if seen > most_states:
            return Labels(None, frozenset(), False, seen)
        states = _undominated(following, slot + 1, best, outlook, width)
        proven = proven and (width is None or len(states) < width)
    finished = states.get(())
    if finished is None:
        return Labels(None, frozenset(), proven, seen)
    cost, past = finished
    weights: list[int] = []
    while past is not None:
        weights += past[1]
        past = past[0]  # type: ignore[assignment]
    return Labels(cost, frozenset(weights), proven, seen)


def _choices(jobs: list[Job]) -> Iterator[tuple[_State, int, tuple[int, ...]]]:
    """Each way to preload some of the jobs released together: chunks added, cost, weights preloaded."""
    groups: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.chunks, job.preload_cost), []).append(job)
    for counts in product(*(range(len(group) + 1) for group in groups.values())):
        added: list[int] = []
        cost, preloaded = 0, []
        for count, group in zip(counts, groups.values(), strict=True):
            added += [job.chunks for job in group[count:]]
            cost += sum(job.preload_cost for job in group[:count])
            preloaded += [job.weight for job in group[:count]]
        yield tuple(added), cost, tuple(preloaded)


def _serve(left: _State, capacity: int) -> _State:
    done = 0
    for remaining in left:
        if remaining > capacity:
            break
        capacity -= remaining
        done += 1
    left = left[done:]
    return (left[0] - capacity, *left[1:]) if left and capacity else left


def _undominated(
    states: dict[_State, tuple[int, _Choice]],
    slot: int,
    best: int | None,
    outlook: Outlook | None,
    width: int | None,
) -> dict[_State, tuple[int, _Choice]]:
    """Keep what no other state makes needless.

    That is one that costs no more, each of whose jobs can be matched with one of this state that has at least
    as much left: sorted, the shorter filled up with zeros, no more in any place.
    """
    if len(states) == 1 and best is None:
        return states
    ranked: list[tuple[float, int, _State]] = []
    for state, (cost, _) in states.items():
        value = float(cost)
        if outlook is not None:
            value += outlook.base(slot) + sum(outlook.rest(slot, chunks) for chunks in state)
            if value == float("inf") or (best is not None and value > best - 1 + 1e-6):
                continue
        ranked.append((value, cost, state))
    ranked.sort()
    undominated: dict[_State, tuple[int, _Choice]] = {}
    length = max((len(state) for _, _, state in ranked), default=0)
    rivals = np.zeros((COMPARED, length), dtype=np.int64)
    costs = np.zeros(COMPARED, dtype=np.int64)
    count = 0
    for _, cost, state in ranked:
        if width is not None and len(undominated) >= width:
            break
        row = np.zeros(length, dtype=np.int64)
        row[length - len(state) :] = state
        if bool(((rivals[:count] <= row).all(axis=1) & (costs[:count] <= cost)).any()):
            continue
        undominated[state] = states[state]
        if count < COMPARED:
            rivals[count], costs[count] = row, cost
            count += 1
    return undominated


NEIGHBOURS = 60
"""How many jobs, nearest to indifference first, local search swaps; it flips all of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The jobs (weights) preloaded, the order of service, and the cost in whole numbers."""

    cost: int
    preloaded: frozenset[int]
    order: str


Judge = Callable[[frozenset[int]], Choice | None]


def judge(problem: Problem, part: Subproblem, room: Sequence[int] | None, orders: Sequence[str]) -> Judge:
    """Return a function that prices a set of preloaded jobs by the best order; None: a limit is broken.

    room: most chunks in flight in each slot of the problem, None for no limit.
    """

    def price(preloaded: frozenset[int]) -> Choice | None:
        jobs = [job for job in part.jobs if job.weight not in preloaded]
        if room is not None and _overfull(problem, jobs, room):
            return None
        lost = sum(job.preload_cost for job in part.jobs if job.weight in preloaded)
        best: Choice | None = None
        for order in orders:
            packing = pack(problem, jobs, ORDERS[order], end=part.end)
            if packing.unfinished:
                return None
            if best is None or packing.cost + lost < best.cost:
                best = Choice(packing.cost + lost, preloaded, order)
        return best

    return price


def _overfull(problem: Problem, jobs: Iterable[Job], room: Sequence[int]) -> bool:
    return any(chunks > most for chunks, most in zip(residency(problem, jobs), room, strict=True))


def repair(part: Subproblem, price: Judge, preloaded: frozenset[int], eagerness: Sequence[float]) -> Choice:
    """Preload more jobs, the most eager first, until the others fit.

    eagerness: by job of the subproblem. Preloading all of them always fits.
    """
    ranked = [part.jobs[k].weight for k in sorted(range(len(part.jobs)), key=lambda k: -eagerness[k])]
    pending = [weight for weight in ranked if weight not in preloaded]
    low, high = 0, len(pending)
    while low < high:  # the fewest of the ranking that are enough: fitting is monotone
        middle = (low + high) // 2
        if price(preloaded | frozenset(pending[:middle])) is None:
            low = middle + 1
        else:
            high = middle
    choice = price(preloaded | frozenset(pending[:low]))
    if choice is None:
        choice = price(frozenset(ranked))
    assert choice is not None, "preloading everything is always possible"
    return choice


def improve(
    part: Subproblem, price: Judge, start: Choice, excess: Sequence[float], *, evaluations: int, target: int
) -> Choice:
    """Flip single jobs, then swap pairs, first improvement first, until nothing pays or `target` is met.

    excess: by job, what streaming it costs at the relaxation's prices, less the cost of preloading it.
    """
    ranked = [part.jobs[k].weight for k in sorted(range(len(part.jobs)), key=lambda k: abs(excess[k]))]
    weights = ranked[:NEIGHBOURS]
    best, left, moved = start, evaluations, True
    while moved and left > 0 and best.cost > target:
        moved = False
        inside = [w for w in weights if w in best.preloaded]
        outside = [w for w in weights if w not in best.preloaded]
        moves = [frozenset([w]) for w in ranked]
        moves += [frozenset([a, b]) for a in inside for b in outside]
        for move in moves:
            if left <= 0:
                break
            left -= 1
            neighbour = price(best.preloaded ^ move)
            if neighbour is not None and neighbour.cost < best.cost:
                best, moved = neighbour, True
                if len(move) > 1 or best.cost <= target:
                    break
    return best
