"""`solve`: an overlap plan with a proven lower bound, exact where it can be, always valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchedge.errors import InputError
from torchedge.streaming.decisions import make_plan, refuse
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.solving.limits import Smallest, rooms, smallest_memory, staying_chunks, whole_chunks
from torchedge.streaming.solving.packing import ORDERS, pack, residency
from torchedge.streaming.solving.parts import Solved, solve_part
from torchedge.streaming.solving.problems import Job, Problem, Subproblem, make_problem, segments
from torchedge.streaming.solving.selection import Choice
from torchedge.streaming.solving.small import settle, settle_memory

__all__ = ["solve"]

STRATEGY = "optimal"
PREMIUMS = (0, 1, 4, 1000)
"""What preloading is made dearer by, in whole prices per chunk, where memory limits preloaded weights too."""
FLIGHTS = 8
"""How many limits on chunks in flight are tried there."""
SWEEP = 0.05
"""The share of the effort that each of these drafts gets."""
MOST_FORCED = 1_000
"""Refusals forced one by one; beyond them everything is refused."""


@dataclass(frozen=True)
class _Draft:
    """Refusals and order of service by part, with the cost of everything and a lower bound of it."""

    parts: tuple[tuple[Subproblem, Solved], ...]
    cost: int
    bound: int

    @cached_property
    def refused(self) -> frozenset[int]:
        return frozenset(w for _, solved in self.parts for w in solved.choice.refused)


def solve(instance: Instance, *, effort: float = 1.0) -> OverlapPlan:
    """Plan an instance: the least objective found, a lower bound that holds, and who loads what.

    effort: scales every limit on work (states, rounds, evaluations); the same effort gives the same plan.
    Status OPTIMAL: the bound is met. INFEASIBLE, only where `memory_chunks` is too small: `solver` holds the
    reason and `smallest_memory_chunks`, the smallest limit that was found to work. Its other facts: how the
    parts were solved, jobs, segments.

    Raises:
        InputError: effort is not a number from 0.01 to 1000.
        MissingExtraError: scipy or ortools is needed and not installed.
    """
    if not 0.01 <= effort <= 1000:
        raise InputError(f"effort is {effort!r}; expected a number from 0.01 to 1000")
    problem = make_problem(instance)
    whole = instance.residency == "weights"
    free = _draft(problem, None, effort)
    found: _Draft | None = free
    bound, smallest = free.bound, None
    if not _kept(problem, free, whole):
        if instance.memory_chunks is not None and not whole:
            # without the limit: under it weights larger than it are preloaded for good
            smallest = smallest_memory(make_problem(replace(instance, memory_chunks=None)))
        found, bound = _limited(problem, free, whole, effort, smallest)
    plan = None if found is None else _plan(instance, problem, found, bound)
    if plan is None or plan.status != "OPTIMAL":
        plan = settle(instance, plan, effort=effort) or plan
    return plan if plan is not None else _infeasible(instance, smallest or settle_memory(instance))


# drafts -----------------------------------------------------------------------------------------------------


def _draft(problem: Problem, limit: int | None, effort: float) -> _Draft:
    """Solve every part; equal ones once. `limit`: on chunks in flight."""
    known: dict[object, Solved] = {}
    parts = []
    cost = bound = problem.fixed_cost
    full = residency(problem, problem.jobs) if limit is not None else []
    staying = staying_chunks(problem, problem.jobs) if limit is not None else []
    for part in segments(problem, limit):
        room = None
        if limit is not None and any(x > limit for x in full[max(0, part.start - 1) : part.end]):
            room = rooms(problem, part, limit, staying)
        key = _signature(problem, part, room)
        solved = known.get(key)
        if solved is None:
            solved = solve_part(problem, part, limit=limit, room=room, effort=effort)
            known[key] = solved = _by_rank(part, solved)
        solved = _by_weight(part, solved)
        parts.append((part, solved))
        cost += solved.choice.cost
        bound += solved.bound
    # With less room than the limit a part's bound would be too high: other choices leave it more.
    exact = limit is None or all(job.last == job.release - 1 for job in problem.jobs)
    return _Draft(tuple(parts), cost, bound if exact else 0)


def _signature(problem: Problem, part: Subproblem, room: Sequence[int] | None) -> object:
    """What a part's solution depends on, wherever it lies."""
    start, end = part.start, part.end
    jobs = tuple((j.release - start, j.chunks, j.refusal, j.late, j.last - start) for j in part.jobs)
    capacity = problem.capacity[start:end].tobytes()
    if room is None:
        return tuple(job[:-1] for job in jobs), capacity
    return jobs, capacity, tuple(room[max(0, min(j.last for j in part.jobs)) : end])


def _by_rank(part: Subproblem, solved: Solved) -> Solved:
    """Tell refused jobs by their rank in the part, which equal parts share."""
    ranks = {job.weight: rank for rank, job in enumerate(part.jobs)}
    return _renamed(solved, ranks.__getitem__)


def _by_weight(part: Subproblem, solved: Solved) -> Solved:
    return _renamed(solved, lambda rank: part.jobs[rank].weight)


def _renamed(solved: Solved, rename: Callable[[int], int]) -> Solved:
    refused = frozenset(rename(x) for x in solved.choice.refused)
    return replace(solved, choice=replace(solved.choice, refused=refused))


def _kept(problem: Problem, draft: _Draft, whole: bool) -> bool:
    """Whether a draft keeps the limits on memory."""
    if problem.in_flight is None and problem.memory is None:
        return True
    held = max(_held(problem, draft, whole), default=0)
    preloaded = problem.fixed_chunks + sum(j.chunks for j in problem.jobs if j.weight in draft.refused)
    return (problem.in_flight is None or held <= problem.in_flight) and (
        problem.memory is None or preloaded + held <= problem.memory
    )


def _held(problem: Problem, draft: _Draft, whole: bool) -> list[int]:
    """Chunks in flight by slot."""
    refused = draft.refused
    if not whole:
        return residency(problem, [job for job in problem.jobs if job.weight not in refused])
    held = [0] * problem.layers
    for part, solved in draft.parts:
        jobs = [job for job in part.jobs if job.weight not in refused]
        packing = pack(problem, jobs, ORDERS[solved.choice.order], end=part.end)
        held = [a + b for a, b in zip(held, whole_chunks(problem, jobs, packing), strict=True)]
    return held


def _limited(
    problem: Problem, free: _Draft, whole: bool, effort: float, smallest: Smallest | None
) -> tuple[_Draft | None, int]:
    """The cheapest draft that keeps the limits (None: none was found), and a lower bound."""
    bound = free.bound
    drafts: list[_Draft] = []
    if problem.memory is not None and smallest is not None:
        if smallest.proven and smallest.chunks > problem.memory:
            return None, bound
        drafts += _refusing(problem, smallest.refused)
    if problem.memory is None and not whole:
        draft = _draft(problem, problem.in_flight, effort)
        bound = max(bound, draft.bound)
        drafts.append(_forced(problem, draft, whole))
    elif problem.memory is not None:
        for flight in _flights(problem):
            for premium in PREMIUMS:
                draft = _repriced(problem, _draft(_dearer(problem, premium), flight, effort * SWEEP))
                drafts.append(draft)
                if _kept(problem, draft, whole):
                    break
    kept = [draft for draft in drafts if _kept(problem, draft, whole)]
    if not kept:
        drafts = [_forced(problem, free, whole)]
        kept = [draft for draft in drafts if _kept(problem, draft, whole)]
    return (min(kept, key=lambda d: d.cost) if kept else None), bound


def _forced(problem: Problem, draft: _Draft, whole: bool) -> _Draft:
    """Refuse the largest of what is in flight where most is, until the limits are kept or nothing is left."""
    for _ in range(MOST_FORCED):
        if _kept(problem, draft, whole):
            return draft
        held = _held(problem, draft, whole)
        worst = max(range(len(held)), key=held.__getitem__)
        streamed = [job for job in problem.jobs if job.weight not in draft.refused]
        there = [job for job in streamed if job.last <= worst] or streamed
        if not there:
            return draft
        victim = max(there, key=lambda job: (job.release > worst, job.chunks, job.weight))
        draft = _without(draft, problem, victim)
    return _refusing(problem, frozenset(job.weight for job in problem.jobs))[0]


def _without(draft: _Draft, problem: Problem, victim: Job) -> _Draft:
    """Refuse one more job."""
    parts, cost = [], problem.fixed_cost
    for part, solved in draft.parts:
        choice = solved.choice
        if any(job.weight == victim.weight for job in part.jobs):
            refused = choice.refused | {victim.weight}
            jobs = [job for job in part.jobs if job.weight not in refused]
            lost = sum(job.refusal for job in part.jobs if job.weight in refused)
            packing = pack(problem, jobs, ORDERS[choice.order], end=part.end)
            solved = replace(solved, choice=replace(choice, cost=packing.cost + lost, refused=refused))
        parts.append((part, solved))
        cost += solved.choice.cost
    return _Draft(tuple(parts), cost, 0)


def _flights(problem: Problem) -> list[int]:
    """Limits on chunks in flight to try, the largest first."""
    most = max(residency(problem, problem.jobs), default=0)
    for limit in (problem.in_flight, problem.memory):
        most = most if limit is None else min(most, limit)
    return sorted({max(0, round(most * (FLIGHTS - k) / FLIGHTS)) for k in range(FLIGHTS)} | {0}, reverse=True)


def _dearer(problem: Problem, premium: int) -> Problem:
    jobs = tuple(replace(job, refusal=job.refusal + premium * job.chunks) for job in problem.jobs)
    return replace(problem, jobs=jobs)


def _repriced(problem: Problem, draft: _Draft) -> _Draft:
    """Give a draft of a dearer problem the true costs."""
    true = {job.weight: job.refusal for job in problem.jobs}
    less = 0
    for part, solved in draft.parts:
        refusals = {job.weight: job.refusal for job in part.jobs}
        less += sum(refusals[w] - true[w] for w in solved.choice.refused)
    return replace(draft, cost=draft.cost - less, bound=0)


def _refusing(problem: Problem, refused: frozenset[int]) -> list[_Draft]:
    """Drafts of one part that refuse given jobs, one for each order of service."""
    part = Subproblem(0, problem.layers, problem.jobs)
    jobs = [job for job in problem.jobs if job.weight not in refused]
    lost = sum(job.refusal for job in problem.jobs if job.weight in refused)
    drafts = []
    for order in ORDERS:
        packing = pack(problem, jobs, ORDERS[order])
        if not packing.unfinished:
            solved = Solved(Choice(packing.cost + lost, refused, order), 0, "smallest memory")
            drafts.append(_Draft(((part, solved),), packing.cost + lost + problem.fixed_cost, 0))
    return drafts


# plans ------------------------------------------------------------------------------------------------------


def _plan(instance: Instance, problem: Problem, draft: _Draft, bound: int) -> OverlapPlan:
    streamed: dict[str, dict[int, int]] = {}
    refused = draft.refused
    for part, solved in draft.parts:
        jobs = [job for job in part.jobs if job.weight not in refused]
        packing = pack(problem, jobs, ORDERS[solved.choice.order], end=part.end, record=True)
        for slot, weight, chunks in packing.served:
            loads = streamed.setdefault(instance.weights[weight].name, {})
            loads[problem.layer(slot)] = loads.get(problem.layer(slot), 0) + chunks
    methods = Counter(solved.method for _, solved in draft.parts)
    facts = {
        "strategy": STRATEGY,
        "parts": len(draft.parts),
        "largest_part": max((len(part.jobs) for part, _ in draft.parts), default=0),
        "methods": dict(sorted(methods.items())),
    }
    optimal, bound = draft.cost <= bound, min(bound, draft.cost)
    return make_plan(instance, streamed, facts, optimal=optimal, bound=bound)


def _infeasible(instance: Instance, smallest: Smallest) -> OverlapPlan:
    facts = {
        "strategy": STRATEGY,
        "smallest_memory_chunks": smallest.chunks,
        "smallest_is_proven": smallest.proven,
    }
    return refuse(
        facts, f"{instance.memory_chunks} chunks of memory are too few for any choice of what is preloaded"
    )
