"""Which jobs to preload: exact search over what is left unfinished, and search by single moves."""

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
    """What a search found: the cheapest cost, the jobs it refuses (weights), whether that is proven."""

    cost: int | None
    refused: frozenset[int]
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
            coming[: job.release - start] += job.refusal + min(0.0, float(over))
        self._base = coming - income
        self._known: dict[tuple[int, int], float] = {}

    def base(self, slot: int) -> float:
        """Bound of the jobs released after `slot`, less the price of all capacity from `slot` on."""
        return float(self._base[min(slot - self._start, len(self._base) - 1)])

    def rest(self, slot: int, chunks: int) -> float:
        """Bound of finishing a job with so many chunks left, from `slot` on."""
        found = self._known.get((slot, chunks))
        if found is None:
            at = slot - self._start
            first = int(np.searchsorted(self._total, self._total[at] + chunks - 0.5, "left"))
            if first >= self._table.shape[1]:
                found = float("inf")
            else:
                fills = self._table[:, at, None] - self._table[:, first:] + (self._thetas * chunks)[:, None]
                slots = np.arange(first, self._table.shape[1]) - at
                found = float((fills.max(axis=0) + self._late * slots).min())
            self._known[slot, chunks] = found
        return found


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
    """Find the cheapest choice of refusals; every job must be late at the same price.

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
            held = sum(state) if most is not None else 0
            left = _serve(state, capacity)
            for added, refusal, refused in choices:
                total = cost + refusal + late * len(state)
                if best is not None and total >= best:
                    continue
                if most is not None and held + sum(added) > most:
                    continue
                after = tuple(sorted(left + added)) if added else left
                known = following.get(after)
                if known is None or total < known[0]:
                    following[after] = (total, (past, refused) if refused else past)
        seen += sum(1 + len(state) // 16 for state in following)
        if seen > most_states:
            return Labels(None, frozenset(), False, seen)
        states = _undominated(following, slot + 1, best, outlook, width)
        proven = proven and (width is None or len(states) < width)
    finished = states.get(())
    if finished is None:
        return Labels(None, frozenset(), proven, seen)
    cost, past = finished
    refused_weights: list[int] = []
    while past is not None:
        refused_weights += past[1]
        past = past[0]  # type: ignore[assignment]
    return Labels(cost, frozenset(refused_weights), proven, seen)


def _choices(jobs: list[Job]) -> Iterator[tuple[_State, int, tuple[int, ...]]]:
    """Each way to refuse some of the jobs released together: chunks added, cost, weights refused."""
    groups: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.chunks, job.refusal), []).append(job)
    for counts in product(*(range(len(group) + 1) for group in groups.values())):
        added: list[int] = []
        cost, refused = 0, []
        for count, group in zip(counts, groups.values(), strict=True):
            added += [job.chunks for job in group[count:]]
            cost += sum(job.refusal for job in group[:count])
            refused += [job.weight for job in group[:count]]
        yield tuple(added), cost, tuple(refused)


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
    kept: dict[_State, tuple[int, _Choice]] = {}
    length = max((len(state) for _, _, state in ranked), default=0)
    rivals = np.zeros((COMPARED, length), dtype=np.int64)
    costs = np.zeros(COMPARED, dtype=np.int64)
    count = 0
    for _, cost, state in ranked:
        if width is not None and len(kept) >= width:
            break
        row = np.zeros(length, dtype=np.int64)
        row[length - len(state) :] = state
        if bool(((rivals[:count] <= row).all(axis=1) & (costs[:count] <= cost)).any()):
            continue
        kept[state] = states[state]
        if count < COMPARED:
            rivals[count], costs[count] = row, cost
            count += 1
    return kept


NEIGHBOURS = 60
"""How many jobs, nearest to indifference first, local search swaps; it flips all of them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The jobs (weights) refused, the order of service, and the cost in whole numbers."""

    cost: int
    refused: frozenset[int]
    order: str


Judge = Callable[[frozenset[int]], Choice | None]


def judge(problem: Problem, part: Subproblem, room: Sequence[int] | None, orders: Sequence[str]) -> Judge:
    """Return a function that prices a set of refusals by the best order; None for what breaks a limit.

    room: most chunks in flight in each slot of the problem, None for no limit.
    """

    def price(refused: frozenset[int]) -> Choice | None:
        jobs = [job for job in part.jobs if job.weight not in refused]
        if room is not None and _overfull(problem, jobs, room):
            return None
        lost = sum(job.refusal for job in part.jobs if job.weight in refused)
        best: Choice | None = None
        for order in orders:
            packing = pack(problem, jobs, ORDERS[order], end=part.end)
            if packing.unfinished:
                return None
            if best is None or packing.cost + lost < best.cost:
                best = Choice(packing.cost + lost, refused, order)
        return best

    return price


def _overfull(problem: Problem, jobs: Iterable[Job], room: Sequence[int]) -> bool:
    return any(held > most for held, most in zip(residency(problem, jobs), room, strict=True))


def repair(part: Subproblem, price: Judge, refused: frozenset[int], eagerness: Sequence[float]) -> Choice:
    """Refuse more jobs, the most eager first, until the rest fits; then take back what can be.

    eagerness: by job of the part. Refusing all of them always fits.
    """
    ranked = [part.jobs[k].weight for k in sorted(range(len(part.jobs)), key=lambda k: -eagerness[k])]
    pending = [weight for weight in ranked if weight not in refused]
    low, high = 0, len(pending)
    while low < high:  # the fewest of the ranking that are enough: fitting is monotone
        middle = (low + high) // 2
        if price(refused | frozenset(pending[:middle])) is None:
            low = middle + 1
        else:
            high = middle
    found = price(refused | frozenset(pending[:low]))
    if found is None:
        found = price(frozenset(ranked))
    assert found is not None, "preloading everything is always possible"
    return found


def improve(
    part: Subproblem, price: Judge, start: Choice, excess: Sequence[float], *, evaluations: int, target: int
) -> Choice:
    """Flip single jobs, then swap pairs, first improvement first, until nothing pays or `target` is met.

    excess: by job, what streaming it costs at the relaxation's prices less refusing it.
    """
    ranked = [part.jobs[k].weight for k in sorted(range(len(part.jobs)), key=lambda k: abs(excess[k]))]
    weights = ranked[:NEIGHBOURS]
    best, left, moved = start, evaluations, True
    while moved and left > 0 and best.cost > target:
        moved = False
        inside = [w for w in weights if w in best.refused]
        outside = [w for w in weights if w not in best.refused]
        moves = [frozenset([w]) for w in ranked]
        moves += [frozenset([a, b]) for a in inside for b in outside]
        for move in moves:
            if left <= 0:
                break
            left -= 1
            found = price(best.refused ^ move)
            if found is not None and found.cost < best.cost:
                best, moved = found, True
                if len(move) > 1 or best.cost <= target:
                    break
    return best
