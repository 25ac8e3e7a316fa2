"""One part of a problem: its best choice of refusals found, and a proven lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torchedge.streaming.solving.ascent import Ascent, ascend
from torchedge.streaming.solving.labels import Outlook, search
from torchedge.streaming.solving.packing import ORDERS, pack
from torchedge.streaming.solving.prices import Bound, Floats, Relaxation
from torchedge.streaming.solving.problems import Problem, Subproblem
from torchedge.streaming.solving.selection import Choice, Judge, improve, judge, repair

__all__ = ["Solved", "solve_part"]

SMALL_STATES = 1_500
"""States after which exact search stops; with the last bound at hand it may take ten times as many."""
STAGES = 4
ROUNDS = 10
"""Rounds of column generation a stage."""
EVALUATIONS = 6_000
ASCENT, CLIMBED = 1_000, 10_000_000
"""Rounds of subgradient ascent, and rounds x slots at most."""
FULL_WORK = 200_000
"""Jobs x slots up to which all rounds are made; beyond, fewer in proportion."""
MOST_WORK = 2_000_000
"""Jobs x slots of a part beyond which its bound is that of the ascent."""
PASSES, PACKED = 3, 6_000_000
"""How often local search goes over the jobs of such a part, and jobs and slots that it packs at most."""
BEAM_WIDTH = 24
BEAM_WORK = 40_000
"""A beam is tried where slots x jobs are fewer."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A part's best choice, its lower bound (whole), and how it was found."""

    choice: Choice
    bound: int
    method: str


def solve_part(
    problem: Problem,
    part: Subproblem,
    *,
    limit: int | None = None,
    room: Sequence[int] | None = None,
    effort: float,
) -> Solved:
    """Choose what to refuse of a part; `limit` on chunks in flight binds where `room` is given.

    room: most chunks in flight in each slot, at most `limit` (less where other parts' weights stay longer).
    """
    uniform = len({job.late for job in part.jobs}) == 1
    orders = ["fewest remaining"] if uniform else list(ORDERS)
    if uniform:
        quick = search(problem, part, most_states=int(SMALL_STATES * effort), room=room)
        if quick.cost is not None and quick.proven:
            return Solved(Choice(quick.cost, quick.refused, orders[0]), quick.cost, "exact")
    price = judge(problem, part, room, orders)
    choice = repair(part, price, frozenset(), [float(job.chunks) for job in part.jobs])
    rounds = min(ASCENT, CLIMBED // (part.end - part.start))
    climbed = ascend(problem, part, choice.cost, rounds=int(rounds * effort))
    work = len(part.jobs) * (part.end - part.start)
    lowest = max(0, ceil(climbed.value - 1e-6 * max(1.0, abs(climbed.value))))
    choice = _ascended(part, price, choice, climbed, effort, lowest)
    if work > MOST_WORK:
        return Solved(choice, min(choice.cost, lowest), "ascent")
    relaxation = Relaxation(problem, part, in_flight=limit if room is not None else None)
    _begin(problem, part, choice, climbed.prices, relaxation)
    method = "priced"
    rounds = max(1, int(ROUNDS * effort * min(1.0, FULL_WORK / work)))
    for stage in range(1, STAGES + 1):
        bound = relaxation.improve(rounds, target=choice.cost)
        lowest = max(lowest, bound.whole)
        final = stage == STAGES or relaxation.tight
        if choice.cost > lowest and uniform and room is None:
            outlook = Outlook(problem, part, bound.capacity_prices, bound.excess)
            choice = _beam(problem, part, choice, outlook, int(BEAM_WIDTH * effort))
            states = int((10 if final else 1) * SMALL_STATES * effort)
            last = search(problem, part, most_states=states, best=choice.cost, outlook=outlook)
            if last.cost is not None:
                choice = Choice(last.cost, last.refused, orders[0])
            if last.proven:
                lowest, method = choice.cost, "exact with bounds"
        if choice.cost > lowest and (stage == 1 or final):
            choice = _refined(part, price, choice, bound, effort / 2)
        if choice.cost <= lowest or final:
            break
    return Solved(choice, min(lowest, choice.cost), method)


def _ascended(
    part: Subproblem, price: Judge, first: Choice, climbed: Ascent, effort: float, target: int
) -> Choice:
    """Refuse what is dearer to stream at the ascent's prices, and flip every job a few times."""
    dear = frozenset(job.weight for job, over in zip(part.jobs, climbed.excess, strict=True) if over > 0)
    excess = [min(float(over), 1e15) for over in climbed.excess]
    flips = min(PASSES * len(part.jobs), PACKED // (len(part.jobs) + part.end - part.start))
    choice = _cheaper(first, repair(part, price, dear, excess))
    return improve(part, price, choice, excess, evaluations=int(flips * effort), target=target)


def _begin(
    problem: Problem, part: Subproblem, choice: Choice, prices: Floats, relaxation: Relaxation
) -> None:
    """Give a relaxation the schedules of a plan, and prices to start from."""
    positions = {job.weight: k for k, job in enumerate(part.jobs)}
    streamed = [job for job in part.jobs if job.weight not in choice.refused]
    served: dict[int, list[tuple[int, int]]] = {}
    for slot, weight, chunks in pack(
        problem, streamed, ORDERS[choice.order], end=part.end, record=True
    ).served:
        served.setdefault(positions[weight], []).append((slot, chunks))
    relaxation.add(served)
    relaxation.seed(prices)


def _beam(problem: Problem, part: Subproblem, choice: Choice, outlook: Outlook, width: int) -> Choice:
    """Look for something better with few states a slot, where that is affordable."""
    if (part.end - part.start) * len(part.jobs) > BEAM_WORK:
        return choice
    found = search(problem, part, most_states=10**9, best=choice.cost, outlook=outlook, width=max(2, width))
    return choice if found.cost is None else Choice(found.cost, found.refused, choice.order)


def _refined(part: Subproblem, price: Judge, first: Choice, bound: Bound, effort: float) -> Choice:
    """Refuse what the relaxation streams less than half of, and search on from there."""
    excess = [float(x) for x in bound.excess]
    refused = frozenset(job.weight for job, share in zip(part.jobs, bound.shares, strict=True) if share < 0.5)
    eager = [1.0 - float(share) + 1e-6 * x for share, x in zip(bound.shares, excess, strict=True)]
    work = max(1, len(part.jobs) * (part.end - part.start) // 100_000)
    evaluations = int(EVALUATIONS * effort / work)
    rounded = repair(part, price, refused, eager)
    found = improve(part, price, rounded, excess, evaluations=evaluations, target=bound.whole)
    return _cheaper(first, found)


def _cheaper(one: Choice, other: Choice) -> Choice:
    """Return the choice that costs less; of equal ones always the same."""
    return min(one, other, key=lambda choice: (choice.cost, sorted(choice.refused)))
