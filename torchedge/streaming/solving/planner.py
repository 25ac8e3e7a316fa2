"""The solver: an overlap plan with a proven lower bound, exact where it can be, always valid.

An instance falls into subproblems that share no slot (`segments`); each is solved on its own (`solve_part`).
Limits on memory couple them: `solve` tries drafts that preload more. Small instances go to CP-SAT whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from torchedge.errors import InputError, MissingExtraError
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan, infeasible_plan, make_plan
from torchedge.streaming.solving.bounds import Ascent, Bound, Floats, Relaxation, ascend
from torchedge.streaming.solving.choices import Choice, Judge, Outlook, improve, judge, repair, search
from torchedge.streaming.solving.cp_sat import count_pairs, direct_cp_sat, whole_window
from torchedge.streaming.solving.problems import (
    ORDERS,
    Job,
    Packing,
    Problem,
    Subproblem,
    make_problem,
    pack,
    residency,
    segments,
)

__all__ = [
    "Smallest",
    "Solved",
    "rooms",
    "settle",
    "settle_memory",
    "smallest_memory",
    "solve",
    "solve_part",
    "staying_chunks",
    "whole_chunks",
]

NODES = 2_000
"""Nodes after which the search for the smallest limit settles for what it has."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """A memory limit that works, the jobs (weights) preloaded with it, whether none smaller works."""

    chunks: int
    preloaded: frozenset[int]
    proven: bool


def whole_chunks(problem: Problem, jobs: Sequence[Job], packing: Packing) -> list[int]:
    """Chunks in flight by slot where a weight counts whole from its first load to its last use."""
    change = [0] * (problem.layers + 1)
    for job in jobs:
        change[job.last] += job.chunks
        change[packing.finish[job.weight] + 1] -= job.chunks
    return [int(x) for x in np.cumsum(change)[:-1]]


def staying_chunks(problem: Problem, jobs: Iterable[Job]) -> list[int]:
    """Chunks in flight by slot of weights that are used again later, between those uses."""
    change = [0] * (problem.layers + 1)
    for job in jobs:
        if job.last < job.release - 1:
            change[job.last] += job.chunks
            change[job.release - 1] -= job.chunks
    return [int(x) for x in np.cumsum(change)[:-1]]


def rooms(problem: Problem, part: Subproblem, limit: int, staying: Sequence[int]) -> list[int]:
    """Most chunks that a part may have in flight by slot.

    staying: of all weights. Those of other parts are counted as if all of them were streamed.
    """
    room = [limit - chunks for chunks in staying]
    for job in part.jobs:
        for slot in range(job.last, job.release - 1):
            room[slot] += job.chunks
    return [max(0, chunks) for chunks in room]


def smallest_memory(problem: Problem) -> Smallest:
    """Find the smallest limit on preloaded chunks and chunks in flight together that allows a plan.

    An integer programme over which jobs to preload. The chunks waiting in a slot are at least those of the
    slot before, less its capacity, plus those released (`residency`: no packing has less in flight).
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as error:
        raise MissingExtraError.of("scipy", extra="plan", purpose="planning a stream of weights") from error
    jobs, slots = problem.jobs, problem.layers
    count = len(jobs)
    total = sum(job.chunks for job in jobs) + problem.fixed_chunks
    preload = count + slots  # variables: streamed (count), waiting (slots), preloaded, the limit
    limit = preload + 1
    chunks = {k: float(job.chunks) for k, job in enumerate(jobs)}
    rows: list[tuple[dict[int, float], float]] = []  # sum <= side
    rows.append(({**{k: -v for k, v in chunks.items()}, preload: -1.0}, -float(total)))
    released: dict[int, dict[int, float]] = {}
    staying: dict[int, dict[int, float]] = {}
    for k, job in enumerate(jobs):
        released.setdefault(job.release, {})[k] = chunks[k]
        for slot in range(job.last, job.release):
            staying.setdefault(slot, {})[k] = chunks[k]
    for slot in range(slots):
        waits = {**released.get(slot, {}), count + slot: -1.0}
        rows.append((waits, 0.0))
        if slot:
            rows.append(({**waits, count + slot - 1: 1.0}, float(problem.capacity[slot - 1])))
        in_flight = {**staying.get(slot, {}), count + slot: 1.0}
        if problem.in_flight is not None:
            rows.append((in_flight, float(problem.in_flight)))
        rows.append(({**in_flight, preload: 1.0, limit: -1.0}, 0.0))
    rows.append(({count + slots - 1: 1.0}, float(problem.capacity[slots - 1])))
    index = [(r, k) for r, (entries, _) in enumerate(rows) for k in entries]
    values = [v for entries, _ in rows for v in entries.values()]
    matrix = csr_matrix((values, np.array(index).T), shape=(len(rows), limit + 1))
    solved = milp(
        np.eye(1, limit + 1, limit)[0],
        constraints=LinearConstraint(matrix, -np.inf, np.array([side for _, side in rows])),
        integrality=np.concatenate([np.ones(count), np.zeros(slots + 2)]),
        bounds=Bounds(0, np.concatenate([np.ones(count), np.full(slots + 2, np.inf)])),
        options={"node_limit": NODES},
    )
    if solved.x is None:
        return Smallest(total, frozenset(job.weight for job in jobs), False)
    preloaded = frozenset(job.weight for k, job in enumerate(jobs) if solved.x[k] < 0.5)
    return Smallest(_needed(problem, jobs, preloaded), preloaded, bool(solved.status == 0))


def _needed(problem: Problem, jobs: Iterable[Job], preloaded: frozenset[int]) -> int:
    """Memory that preloading these jobs takes, in chunks."""
    streamed = [job for job in jobs if job.weight not in preloaded]
    chunks = problem.fixed_chunks + sum(job.chunks for job in jobs if job.weight in preloaded)
    return chunks + max(residency(problem, streamed), default=0)


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
    """The best choice of a subproblem, its lower bound (whole), and the method behind it."""

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
    """Choose what to preload of a subproblem; `limit` on chunks in flight binds if `room` is given.

    room: most chunks in flight in each slot, at most `limit` (less where other parts' weights stay longer).
    """
    uniform = len({job.late for job in part.jobs}) == 1
    orders = ["fewest remaining"] if uniform else list(ORDERS)
    if uniform:
        quick = search(problem, part, most_states=int(SMALL_STATES * effort), room=room)
        if quick.cost is not None and quick.proven:
            return Solved(Choice(quick.cost, quick.preloaded, orders[0]), quick.cost, "exact")
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
                choice = Choice(last.cost, last.preloaded, orders[0])
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
    """Preload what costs more to stream at the ascent's prices, then flip every job a few times."""
    dear = frozenset(job.weight for job, over in zip(part.jobs, climbed.excess, strict=True) if over > 0)
    excess = [min(float(over), 1e15) for over in climbed.excess]
    flips = min(PASSES * len(part.jobs), PACKED // (len(part.jobs) + part.end - part.start))
    choice = _cheaper(first, repair(part, price, dear, excess))
    return improve(part, price, choice, excess, evaluations=int(flips * effort), target=target)


def _begin(
    problem: Problem, part: Subproblem, choice: Choice, prices: Floats, relaxation: Relaxation
) -> None:
    """Start a relaxation from the schedules of a plan and from prices."""
    positions = {job.weight: k for k, job in enumerate(part.jobs)}
    streamed = [job for job in part.jobs if job.weight not in choice.preloaded]
    served: dict[int, list[tuple[int, int]]] = {}
    for slot, weight, chunks in pack(
        problem, streamed, ORDERS[choice.order], end=part.end, record=True
    ).served:
        served.setdefault(positions[weight], []).append((slot, chunks))
    relaxation.add(served)
    relaxation.seed(prices)


def _beam(problem: Problem, part: Subproblem, choice: Choice, outlook: Outlook, width: int) -> Choice:
    """Search with few states a slot, if the subproblem is small enough."""
    if (part.end - part.start) * len(part.jobs) > BEAM_WORK:
        return choice
    labels = search(problem, part, most_states=10**9, best=choice.cost, outlook=outlook, width=max(2, width))
    return choice if labels.cost is None else Choice(labels.cost, labels.preloaded, choice.order)


def _refined(part: Subproblem, price: Judge, first: Choice, bound: Bound, effort: float) -> Choice:
    """Preload what the relaxation streams less than half of, then improve that choice."""
    excess = [float(x) for x in bound.excess]
    preloaded = frozenset(
        job.weight for job, share in zip(part.jobs, bound.shares, strict=True) if share < 0.5
    )
    eager = [1.0 - float(share) + 1e-6 * x for share, x in zip(bound.shares, excess, strict=True)]
    work = max(1, len(part.jobs) * (part.end - part.start) // 100_000)
    evaluations = int(EVALUATIONS * effort / work)
    rounded = repair(part, price, preloaded, eager)
    improved = improve(part, price, rounded, excess, evaluations=evaluations, target=bound.whole)
    return _cheaper(first, improved)


def _cheaper(one: Choice, other: Choice) -> Choice:
    """Return the choice that costs less; of equal ones always the same."""
    return min(one, other, key=lambda choice: (choice.cost, sorted(choice.preloaded)))


MAX_PAIRS = 400
"""Pairs of a weight and a layer up to which the paper's model is solved whole."""
LIMIT = 20.0
"""CP-SAT's deterministic time."""


def _pairs(instance: Instance) -> int:
    return sum(count_pairs(whole_window(instance), len(instance.layers)))


def settle(instance: Instance, known: OverlapPlan | None, *, effort: float = 1.0) -> OverlapPlan | None:
    """Solve a small instance exactly, starting from a plan; None where it is too large or stays open.

    effort: scales the time of CP-SAT. None for an infeasible instance, too.
    """
    if _pairs(instance) > MAX_PAIRS:
        return None
    plan = direct_cp_sat(instance, deterministic_limit=LIMIT * effort, hint=known)
    if plan is None or plan.status != "OPTIMAL":
        return None
    return replace(plan, solver={**plan.solver, "strategy": "optimal", "methods": {"CP-SAT": 1}})


def settle_memory(instance: Instance) -> Smallest:
    """Find the smallest memory limit with which an instance has a plan, by bisection.

    Of an instance too large for CP-SAT: the memory of preloading everything, which always works.
    """
    total = instance.total_chunks
    low, high = 0, total  # high works
    if _pairs(instance) > MAX_PAIRS:
        return Smallest(total, frozenset(), False)
    while low < high:
        middle = (low + high) // 2
        plan = direct_cp_sat(replace(instance, memory_chunks=middle), deterministic_limit=LIMIT)
        if plan is not None and plan.status != "INFEASIBLE":
            high = middle
        else:
            low = middle + 1
    return Smallest(high, frozenset(), True)


STRATEGY = "optimal"
PREMIUMS = (0, 1, 4, 1000)
"""What is added to the price of preloading a chunk, if memory limits preloaded weights too."""
FLIGHTS = 8
"""How many limits on chunks in flight are tried then."""
SWEEP = 0.05
"""The share of the effort for each of these drafts."""
MOST_FORCED = 1_000
"""Preloads forced one by one; beyond them everything is preloaded."""


@dataclass(frozen=True)
class _Draft:
    """Preloads and order of service by subproblem, with the whole cost and a lower bound of it."""

    parts: tuple[tuple[Subproblem, Solved], ...]
    cost: int
    bound: int

    @cached_property
    def preloaded(self) -> frozenset[int]:
        return frozenset(w for _, solved in self.parts for w in solved.choice.preloaded)


def solve(instance: Instance, *, effort: float = 1.0) -> OverlapPlan:
    """Plan an instance: minimise the objective, prove a lower bound, assign loads to layers.

    effort: scales every limit on work (states, rounds, evaluations); the same effort gives the same plan.
    Status OPTIMAL: the objective meets the bound. INFEASIBLE: `memory_chunks` is too small; `solver` holds
    the reason and `smallest_memory_chunks`, a limit that works. Its other facts say how subproblems were
    solved.

    Raises:
        InputError: effort is not a number from 0.01 to 1000.
        MissingExtraError: scipy or ortools is needed and not installed.
    """
    if not 0.01 <= effort <= 1000:
        raise InputError(f"effort is {effort!r}; expected a number from 0.01 to 1000")
    problem = make_problem(instance)
    whole = instance.residency == "weights"
    free = _draft(problem, None, effort)
    draft: _Draft | None = free
    bound, smallest = free.bound, None
    if not _kept(problem, free, whole):
        if instance.memory_chunks is not None and not whole:
            # without the limit: under it weights larger than it are preloaded for good
            smallest = smallest_memory(make_problem(replace(instance, memory_chunks=None)))
        draft, bound = _limited(problem, free, whole, effort, smallest)
    plan = None if draft is None else _plan(instance, problem, draft, bound)
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
    """All that the solution of a subproblem depends on; its place in time is not part of it."""
    start, end = part.start, part.end
    jobs = tuple((j.release - start, j.chunks, j.preload_cost, j.late, j.last - start) for j in part.jobs)
    capacity = problem.capacity[start:end].tobytes()
    if room is None:
        return tuple(job[:-1] for job in jobs), capacity
    return jobs, capacity, tuple(room[max(0, min(j.last for j in part.jobs)) : end])


def _by_rank(part: Subproblem, solved: Solved) -> Solved:
    """Name preloaded jobs by their rank in the subproblem, which equal ones share."""
    ranks = {job.weight: rank for rank, job in enumerate(part.jobs)}
    return _renamed(solved, ranks.__getitem__)


def _by_weight(part: Subproblem, solved: Solved) -> Solved:
    return _renamed(solved, lambda rank: part.jobs[rank].weight)


def _renamed(solved: Solved, rename: Callable[[int], int]) -> Solved:
    preloaded = frozenset(rename(x) for x in solved.choice.preloaded)
    return replace(solved, choice=replace(solved.choice, preloaded=preloaded))


def _kept(problem: Problem, draft: _Draft, whole: bool) -> bool:
    """Whether a draft keeps the limits on memory."""
    if problem.in_flight is None and problem.memory is None:
        return True
    in_flight = max(_held(problem, draft, whole), default=0)
    chunks = problem.fixed_chunks + sum(j.chunks for j in problem.jobs if j.weight in draft.preloaded)
    return (problem.in_flight is None or in_flight <= problem.in_flight) and (
        problem.memory is None or chunks + in_flight <= problem.memory
    )


def _held(problem: Problem, draft: _Draft, whole: bool) -> list[int]:
    """Chunks in flight by slot."""
    preloaded = draft.preloaded
    if not whole:
        return residency(problem, [job for job in problem.jobs if job.weight not in preloaded])
    in_flight = [0] * problem.layers
    for part, solved in draft.parts:
        jobs = [job for job in part.jobs if job.weight not in preloaded]
        packing = pack(problem, jobs, ORDERS[solved.choice.order], end=part.end)
        in_flight = [a + b for a, b in zip(in_flight, whole_chunks(problem, jobs, packing), strict=True)]
    return in_flight


def _limited(
    problem: Problem, free: _Draft, whole: bool, effort: float, smallest: Smallest | None
) -> tuple[_Draft | None, int]:
    """The cheapest draft that keeps the limits (None: there is none), and a lower bound."""
    bound = free.bound
    drafts: list[_Draft] = []
    if problem.memory is not None and smallest is not None:
        if smallest.proven and smallest.chunks > problem.memory:
            return None, bound
        drafts += _preloading(problem, smallest.preloaded)
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
    within = [draft for draft in drafts if _kept(problem, draft, whole)]
    if not within:
        drafts = [_forced(problem, free, whole)]
        within = [draft for draft in drafts if _kept(problem, draft, whole)]
    return (min(within, key=lambda d: d.cost) if within else None), bound


def _forced(problem: Problem, draft: _Draft, whole: bool) -> _Draft:
    """Preload the largest job in flight in the fullest slot, until the limits hold or nothing is left."""
    for _ in range(MOST_FORCED):
        if _kept(problem, draft, whole):
            return draft
        in_flight = _held(problem, draft, whole)
        worst = max(range(len(in_flight)), key=in_flight.__getitem__)
        streamed = [job for job in problem.jobs if job.weight not in draft.preloaded]
        there = [job for job in streamed if job.last <= worst] or streamed
        if not there:
            return draft
        victim = max(there, key=lambda job: (job.release > worst, job.chunks, job.weight))
        draft = _without(draft, problem, victim)
    return _preloading(problem, frozenset(job.weight for job in problem.jobs))[0]


def _without(draft: _Draft, problem: Problem, victim: Job) -> _Draft:
    """Preload one more job."""
    parts, cost = [], problem.fixed_cost
    for part, solved in draft.parts:
        choice = solved.choice
        if any(job.weight == victim.weight for job in part.jobs):
            preloaded = choice.preloaded | {victim.weight}
            jobs = [job for job in part.jobs if job.weight not in preloaded]
            lost = sum(job.preload_cost for job in part.jobs if job.weight in preloaded)
            packing = pack(problem, jobs, ORDERS[choice.order], end=part.end)
            solved = replace(solved, choice=replace(choice, cost=packing.cost + lost, preloaded=preloaded))
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
    jobs = tuple(replace(job, preload_cost=job.preload_cost + premium * job.chunks) for job in problem.jobs)
    return replace(problem, jobs=jobs)


def _repriced(problem: Problem, draft: _Draft) -> _Draft:
    """Restore the true costs in a draft of a dearer problem."""
    true = {job.weight: job.preload_cost for job in problem.jobs}
    less = 0
    for part, solved in draft.parts:
        preload_costs = {job.weight: job.preload_cost for job in part.jobs}
        less += sum(preload_costs[w] - true[w] for w in solved.choice.preloaded)
    return replace(draft, cost=draft.cost - less, bound=0)


def _preloading(problem: Problem, preloaded: frozenset[int]) -> list[_Draft]:
    """Drafts of one subproblem that preload these jobs, one for each order of service."""
    part = Subproblem(0, problem.layers, problem.jobs)
    jobs = [job for job in problem.jobs if job.weight not in preloaded]
    lost = sum(job.preload_cost for job in problem.jobs if job.weight in preloaded)
    drafts = []
    for order in ORDERS:
        packing = pack(problem, jobs, ORDERS[order])
        if not packing.unfinished:
            solved = Solved(Choice(packing.cost + lost, preloaded, order), 0, "smallest memory")
            drafts.append(_Draft(((part, solved),), packing.cost + lost + problem.fixed_cost, 0))
    return drafts


# plans ------------------------------------------------------------------------------------------------------


def _plan(instance: Instance, problem: Problem, draft: _Draft, bound: int) -> OverlapPlan:
    streamed: dict[str, dict[int, int]] = {}
    preloaded = draft.preloaded
    for part, solved in draft.parts:
        jobs = [job for job in part.jobs if job.weight not in preloaded]
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
    return infeasible_plan(
        facts, f"{instance.memory_chunks} chunks of memory are too few for any choice of what is preloaded"
    )
