"""Which jobs to refuse, by search: round the relaxation, repair, then flip and swap while it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchedge.streaming.solving.packing import ORDERS, pack, residency
from torchedge.streaming.solving.problems import Job, Problem, Subproblem

__all__ = ["Choice", "improve", "judge", "repair"]

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
