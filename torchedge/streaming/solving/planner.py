"""The solver: an overlap plan with a proven lower bound, within a limit on work, always valid.

An instance falls into parts that share no slot (`segments`); each is solved on its own (`PartSolver`). A
limit on preloaded chunks and chunks in flight together couples the parts: a small problem is solved as one
programme, else the limit is divided between the two in several ways (`_Memory`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil

import numpy as np

from torchedge.errors import InputError
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan, infeasible_plan, make_plan
from torchedge.streaming.solving.labels import ChunkLimits, LabelSearch
from torchedge.streaming.solving.prices import NEVER, Flow, Guide, Tables, ascend, flow_effort
from torchedge.streaming.solving.problems import (
    Job,
    Order,
    Packing,
    Problem,
    Subproblem,
    WorkBudget,
    admit,
    fewest_remaining,
    make_problem,
    most_in_flight,
    pack,
    residency,
    segments,
    whole_chunks,
)
from torchedge.streaming.solving.programmes import Ends, make_programme

STRATEGY = "optimal"
WORK = 5_000_000
"""Work of a solve, in about microseconds of a core."""
CLOSE = 0.001
"""A gap, as a share of the cost, at which the search for better plans ends."""
WIDTH, MOST_WIDTH = 16, 4_096
"""Labels of the first search that drops some, and of the last."""
ROUNDS = 1_500
"""Rounds of an ascent."""
PREMIUMS = 6
"""Premiums on preloaded chunks that are tried under a limit on them."""
MOST_SEARCHED = 20_000
"""Slots and jobs of a part that is searched at all."""


@dataclass(frozen=True, slots=True)
class PreloadChoice:
    """The jobs (weights) preloaded, the order of service, and the cost in whole numbers."""

    cost: int
    preloaded: frozenset[int]
    order: Order


@dataclass(frozen=True, slots=True)
class Solved:
    """The best choice of a part (None: none keeps the limits), its lower bound, and the method behind it."""

    choice: PreloadChoice | None
    bound: int
    method: str

    @property
    def close(self) -> bool:
        """Whether cost and bound meet, nearly."""
        return self.choice is not None and self.choice.cost - self.bound <= CLOSE * self.choice.cost


class PartSolver:
    """Chooses what to preload of a part within limits; `known`: only cheaper choices are of use."""

    def __init__(
        self,
        problem: Problem,
        part: Subproblem,
        limits: ChunkLimits,
        work: WorkBudget,
        known: int | None = None,
    ) -> None:
        self.problem, self.part, self.limits, self.work = problem, part, limits, work
        self.size = part.size
        whole = limits.whole and limits.in_flight is not None
        self.exact = len({job.late for job in part.jobs}) == 1 and not whole  # the order is optimal
        self.best: PreloadChoice | None = None
        self.known = known
        self.chunks = np.array([job.chunks for job in part.jobs], dtype=float)
        self.bound = 0

    @property
    def upper(self) -> int | None:
        """The cost of the best choice so far, or of the one known before."""
        return self.known if self.best is None else self.best.cost

    def solve(self) -> Solved:
        """Try prices, the programme and searches in turn, until nothing can be gained any more."""
        self._try(frozenset())
        premium, guide = self._price()
        if not self.done() and self.work.left > 0 and self.limits.preloaded is None:
            self.programme()
        limits = replace(self.limits, premium=premium)
        width, steps, stalled = WIDTH, 0, 0
        while self.size <= MOST_SEARCHED and width <= MOST_WIDTH and not self.done():
            before, choice = self.work.left, self.best
            if self._search(width, guide, limits):
                return self.solved("exact")
            steps += 1
            stalled = 0 if self.best is not choice else stalled + 1
            if stalled > 1 or self.work.left < 4 * (before - self.work.left):
                break
            width *= 4
        return self.solved("searched" if steps else "priced")

    def done(self) -> bool:
        """Whether nothing (or next to nothing) can be gained any more."""
        return self.upper is not None and self.upper - self.bound <= CLOSE * self.upper

    def solved(self, method: str) -> Solved:
        """Return the best choice so far."""
        bound = self.bound if self.best is None else min(self.bound, self.best.cost)
        return Solved(self.best, bound, method)

    def offer(self, preloaded: frozenset[int], order: Order) -> int | None:
        """Take a set of preloads if it keeps the limits and is the best; return its cost."""
        jobs, most = self.part.jobs, self.limits.preloaded
        if most is not None and most < sum(job.chunks for job in jobs if job.weight in preloaded):
            return None
        self.work.spend(100 + 3 * self.size)
        streamed = [job for job in jobs if job.weight not in preloaded]
        packing = pack(self.problem, streamed, order, end=self.part.end)
        if packing.unfinished or self._exceeds(streamed, packing):
            return None
        cost = packing.cost + sum(job.preload_cost for job in jobs if job.weight in preloaded)
        if self.best is None or cost < self.best.cost:
            self.best = PreloadChoice(cost, preloaded, order)
        return cost

    def _exceeds(self, streamed: list[Job], packing: Packing) -> bool:
        """Whether a limit is broken: a search may break ties between jobs in another way."""
        limit, memory = self.limits.in_flight, self.limits.memory
        if limit is None and memory is None:
            return False
        self.work.spend(self.problem.layers / 10)
        peak = most_in_flight(self.problem, streamed, packing, whole=self.limits.whole)
        preloaded = sum(job.chunks for job in self.part.jobs) - sum(job.chunks for job in streamed)
        return (limit is not None and peak > limit) or (memory is not None and peak + preloaded > memory)

    def _try(self, preloaded: frozenset[int]) -> None:
        """Offer a set of preloads, with more of them if the limit in flight asks for it."""
        limit, whole = self.limits.in_flight, self.limits.whole
        admitted = admit(self.problem, self.part, preloaded, self.work, limit=limit, whole=whole)
        self.offer(admitted, fewest_remaining)

    def _search(self, width: int, guide: Guide | None, limits: ChunkLimits) -> bool:
        """Offer what a search finds; return whether it proves that no plan is cheaper."""
        labels = LabelSearch(
            self.problem, self.part, width=width, work=self.work, limits=limits, guide=guide, best=self.upper
        ).run()
        if labels.preloaded is not None:
            self.offer(labels.preloaded, fewest_remaining)
        if self.exact:
            self.raise_bound(min(labels.bound, NOTHING if self.upper is None else self.upper))
        return self.exact and labels.bound == np.inf

    def programme(self) -> None:
        """Solve the mixed-integer programme of a small part."""
        limits = self.limits
        programme = make_programme(
            self.problem, self.part, whole=limits.whole, in_flight=limits.in_flight, memory=limits.memory
        )
        if programme is not None:
            value = programme.solve(self._offer_ends, self.upper, self.work)
            self.raise_bound(value if self.upper is None else min(value, self.upper))

    def _offer_ends(self, ends: Ends) -> int | None:
        preloaded = frozenset(job.weight for job in self.part.jobs) - ends.slots.keys()
        cost = self.offer(preloaded, ends)
        if cost is None:
            self._try(preloaded)
        return cost

    def _price(self) -> tuple[float, Guide | None]:
        """Bound the cost from below; offer what the prices suggest; return a premium and a guide."""
        tables = Tables(self.problem, self.part)
        if not len(tables.slots):
            self.offer(frozenset(job.weight for job in self.part.jobs), fewest_remaining)
            self.bound = 0 if self.best is None else self.best.cost
            return 0.0, None
        own = tables.preload_cost
        low, high, premium = 0.0, np.inf, 0.0
        best: tuple[float, Guide | None] = (0.0, None)
        for _ in range(PREMIUMS):
            tables.preload_cost = own + premium * self.chunks
            preloaded, guide = self._price_at(tables, premium)
            fits = self.limits.preloaded is None or preloaded <= self.limits.preloaded
            if fits or best[1] is None or np.isinf(high):
                best = premium, guide
            low, high = (low, premium) if fits else (premium, high)
            if (fits and not premium) or self.work.left < 0:
                break
            if np.isinf(high):
                premium = 3 * premium or 0.5 * max(1.0, float(own.sum() / self.chunks.sum()))
            else:
                premium = (low + high) / 2
        return best

    def _price_at(self, tables: Tables, premium: float) -> tuple[float, Guide | None]:
        """Bound the cost with a premium on preloads; return the chunks preloaded then, and a guide."""
        part, limit, work = self.part, self.limits.in_flight, self.work
        returned = premium * (self.limits.slack or 0)
        upper = float(tables.preload_cost.sum()) if self.best is None else self.best.cost + returned
        with work.share(0.7) as own:
            climbed = ascend(tables, upper, rounds=ROUNDS, work=own)
        self.raise_bound(climbed.value - returned)
        flow = None
        candidates = [np.flatnonzero(climbed.streaming > tables.preload_cost)]
        if limit is None:
            limit = max(residency(self.problem, part.jobs)[max(0, part.start - 1) : part.end])
        binds = self.limits.in_flight is not None
        if self.size <= MOST_SEARCHED and work.left > 8 * flow_effort(part, limit) * (not binds):
            prices = np.zeros(part.end - part.start)
            none = prices.copy()
            prices[tables.slots - part.start] = climbed.prices
            free = tables.evaluate(np.zeros(len(tables.slots)))[2]
            for streaming, by_slot in ((free, none), (climbed.streaming, prices)):
                flow = Flow(self.problem, part, limit, streaming, tables.preload_cost, by_slot)
                work.spend(flow.effort)
                self.raise_bound(flow.bound - returned)
                if flow.bound < np.inf:
                    candidates.append(np.array(flow.choice(), dtype=np.int64))
        for candidate in candidates:
            self._try(frozenset(part.jobs[k].weight for k in candidate))
        preloaded = float(self.chunks[candidates[-1]].sum())
        if self.size > MOST_SEARCHED:
            return preloaded, None
        work.spend(200 + 10 * self.size)
        return preloaded, Guide(self.problem, part, tables, climbed.prices, flow)

    def raise_bound(self, value: float) -> None:
        """Take a lower bound if it is the best."""
        self.bound = max(self.bound, _rounded_up(value))


def _rounded_up(value: float) -> int:
    """A bound of whole numbers from one of floats."""
    return NOTHING if value >= NEVER else ceil(max(0.0, value - 1e-6 * max(1.0, value)))


NOTHING = 2**62
"""The bound of a part that has no choice within its limits."""


# memory -----------------------------------------------------------------------------------------------------


FLIGHTS = 6
"""In how many ways a limit on all memory is divided between chunks preloaded and in flight at first."""
FLOWS = 40
"""Divisions that are tried to find the smallest limit on memory."""


class _Memory:
    """A problem with a limit on preloaded chunks and those in flight together."""

    def __init__(self, problem: Problem, whole: bool, work: WorkBudget) -> None:
        self.problem, self.whole, self.work = problem, whole, work
        start = min((job.release for job in problem.jobs), default=problem.layers)
        self.part = Subproblem(start, problem.layers, problem.jobs)
        self.chunks = np.array([job.chunks for job in problem.jobs], dtype=np.int64)
        self.total = int(self.chunks.sum())
        self.every = frozenset(job.weight for job in problem.jobs)
        most = self.total if whole else max(residency(problem, problem.jobs), default=0)
        self.most = most if problem.in_flight is None else min(most, problem.in_flight)
        self.flows: dict[int, Flow] = {}
        self.proven = False
        self.best = PreloadChoice(self.total, self.every, fewest_remaining)

    def fewest(self, limit: int) -> Flow:
        """The fewest chunks preloaded with at most so many in flight."""
        if limit not in self.flows:
            none = np.zeros(len(self.chunks))
            prices = np.zeros(self.part.end - self.part.start)
            if len(self.flows) > FLOWS:
                self.flows.clear()
            self.flows[limit] = Flow(self.problem, self.part, limit, none, self.chunks, prices)
            self.work.spend(self.flows[limit].effort)
        return self.flows[limit]

    def needed(self, preloaded: frozenset[int], order: Order) -> int | None:
        """Memory (chunks) of a set of preloads, beside the fixed ones; None: the others do not fit."""
        self.work.spend(100 + 4 * (len(self.chunks) + self.part.end))
        jobs = [job for job in self.problem.jobs if job.weight not in preloaded]
        packing = pack(self.problem, jobs, order)
        if packing.unfinished:
            return None
        peak = most_in_flight(self.problem, jobs, packing, whole=self.whole)
        if self.problem.in_flight is not None and peak > self.problem.in_flight:
            return None
        return peak + self.total - sum(job.chunks for job in jobs)

    def smallest(self, share: float, enough: int) -> bool:
        """Find the smallest memory that works, `best.cost`; return whether none smaller does.

        share: of the work that is left, that this may take. enough: memory at which the search stops.

        Each range of chunks in flight takes at least its lowest number and what must be preloaded with its
        highest.
        """
        least_work, undecided = self.work.left * (1 - share), [NOTHING]
        bound = max(residency(self.problem, self.problem.jobs), default=0)  # preloads would only add to it
        programme = make_programme(
            self.problem, self.part, whole=self.whole, in_flight=self.problem.in_flight, smallest=True
        )
        if programme is not None:
            with self.work.share(0.95) as own:  # the rest is for a plan within the limit
                value = programme.solve(
                    lambda ends: self._offer(self.every - ends.slots.keys(), ends), self.best.cost, own
                )
            bound = max(bound, min(self.best.cost, _rounded_up(value)))
        ranges = [(bound, -1, self.most)]
        while ranges and ranges[0][0] < self.best.cost and self.best.cost > enough:
            least, low, high = heappop(ranges)
            flow = self.fewest(high)
            least = max(least, low + 1 + int(min(flow.bound, NOTHING)))
            if flow.bound < NOTHING:
                wanted = frozenset(self.problem.jobs[k].weight for k in flow.choice())
                admitted = admit(self.problem, self.part, wanted, self.work, limit=high, whole=self.whole)
                self._offer(admitted, fewest_remaining)
            if least >= self.best.cost:
                continue
            if high - low > 1 and self.work.left > least_work:
                middle = (low + high) // 2
                heappush(ranges, (least, low, middle))
                heappush(ranges, (least, middle, high))
            else:
                undecided.append(least)
        undecided += [least for least, _, _ in ranges]
        return min(undecided) >= self.best.cost

    def _offer(self, preloaded: frozenset[int], order: Order) -> int | None:
        """Take a set of preloads if it needs the least memory so far; return that memory."""
        chunks = self.needed(preloaded, order)
        if chunks is not None and chunks < self.best.cost:
            self.best = PreloadChoice(chunks, preloaded, order)
        return chunks

    def solve(self) -> Solved | None:
        """Find a cheap choice within the limit, and a lower bound; None where no limit so small works."""
        assert self.problem.memory is not None
        budget = self.problem.memory - self.problem.fixed_chunks
        self.proven = self.smallest(0.5, enough=budget)
        if self.proven and self.best.cost > budget:
            return None
        limits = ChunkLimits(self.problem.in_flight, self.whole, memory=budget)
        solver = PartSolver(self.problem, self.part, limits, self.work)
        solver.offer(self.best.preloaded, self.best.order)
        solver.programme()
        bound = self._divide(solver, budget)
        solver.raise_bound(bound)
        return solver.solved("divided")

    def _divide(self, solver: PartSolver, budget: int) -> int:
        """Offer plans of several divisions of the memory; return a lower bound of the cost."""
        edges = sorted({self.most * k // FLIGHTS for k in range(FLIGHTS + 1)})
        ranges = [(0, low, high) for low, high in zip([-1, *edges], edges, strict=False)]
        share = self.work.left / (1.5 * len(ranges))
        done: list[tuple[int, int, int]] = []
        while ranges and not solver.done():
            _, low, high = ranges.pop()
            if self.work.left <= 0:
                return 0
            fewest = self.fewest(high)
            if low + 1 + fewest.bound > budget:
                continue
            limits = ChunkLimits(high, self.whole, budget - high, slack=budget - low - 1, fewest=fewest)
            with self.work.share(min(1.0, share / max(1.0, self.work.left))) as own:
                solved = PartSolver(self.problem, self.part, limits, own, solver.upper).solve()
            if solved.choice is not None:
                solver.offer(solved.choice.preloaded, solved.choice.order)
            done.append((solved.bound, low, high))
            if ranges or solver.upper is None or self.work.left < share:
                continue
            done.sort()
            least, low, high = done[0]
            if high - low > 1 and solver.upper - least > CLOSE * solver.upper:
                middle = (low + high) // 2
                ranges = [(least, low, middle), (least, middle, high)]
                done = done[1:]
        return min([NOTHING, *(bound for bound, _, _ in [*done, *ranges])])


# the whole instance -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """Preloads and order of service by part, with a lower bound of the whole cost."""

    parts: tuple[tuple[Subproblem, PreloadChoice], ...]
    bound: int
    methods: Counter[str]

    def cost(self, problem: Problem) -> int:
        return problem.fixed_cost + sum(choice.cost for _, choice in self.parts)


def solve(instance: Instance, *, effort: float = 1.0) -> OverlapPlan:
    """Plan an instance: minimise the objective, prove a lower bound, assign loads to layers.

    effort: scales the limit on work; the same effort gives the same plan. Status OPTIMAL: the objective meets
    the bound. INFEASIBLE: no plan within `memory_chunks` was found; `solver` holds the reason,
    `smallest_memory_chunks`, a limit that works, and `smallest_is_proven`, whether no smaller one does. Its
    other facts name how parts were solved.

    Raises:
        InputError: effort is not a number from 0.01 to 1000.
        MissingExtraError: scipy is needed and not installed.
    """
    if not 0.01 <= effort <= 1000:
        raise InputError(f"effort is {effort!r}; expected a number from 0.01 to 1000")
    problem = make_problem(instance)
    whole = instance.residency == "weights"
    work = WorkBudget(WORK * effort)
    plan, draft = None, None
    for split in (True, False):  # parts without a limit of their own might, together, still exceed it
        if plan is None or not plan.solver["respects_m_peak"]:
            with work.share(1.0 if problem.memory is None else 0.3) as own:
                draft = _draft(problem, whole, own, split)
            plan = _plan(instance, problem, draft, work)
            if problem.memory is not None and plan.status != "OPTIMAL" and plan.solver["respects_memory"]:
                draft = _draft(problem, whole, work, split)
                plan = min(plan, _plan(instance, problem, draft, work), key=_order)
    assert plan is not None and draft is not None
    if plan.solver["respects_memory"]:
        return plan
    memory = _Memory(problem, whole, work)
    solved = memory.solve()
    if solved is None or solved.choice is None:
        return _infeasible(instance, problem, memory)
    bound = max(solved.bound + problem.fixed_cost, draft.bound)
    parts = ((memory.part, solved.choice),)
    return _plan(instance, problem, _Draft(parts, bound, Counter({solved.method: 1})), work)


def _order(plan: OverlapPlan) -> tuple[bool, float, float]:
    """Plans that keep every limit come first, then cheaper ones, then better proven ones."""
    broken = not (plan.solver["respects_memory"] and plan.solver["respects_m_peak"])
    return broken, plan.objective or 0.0, -(plan.lower_bound or 0.0)


def _draft(problem: Problem, whole: bool, work: WorkBudget, split: bool) -> _Draft:
    """Solve every part, equal ones once; the memory limit does not count.

    split: into parts; else the whole problem is one part, with the limit on chunks in flight.
    """
    limit = problem.in_flight
    packing = pack(problem, problem.jobs)
    full = residency(problem, problem.jobs)
    if whole and not packing.unfinished:
        full = whole_chunks(problem, problem.jobs, packing)
    elif whole:
        full = [sum(job.chunks for job in problem.jobs)] * problem.layers
    most = max(full, default=0) if limit is None else limit
    binds = max(full, default=0) > most
    tied = any(job.last < job.release - 1 for job in problem.jobs)
    if problem.jobs and (not split or (binds and tied)):
        binds, full = limit is not None, [most + 1] * problem.layers
        parts = [Subproblem(min(job.release for job in problem.jobs), problem.layers, problem.jobs)]
    else:
        parts = segments(problem, limit if binds else None, full)
    keys: list[object] = []
    unsolved: dict[object, tuple[Subproblem, ChunkLimits]] = {}
    for part in parts:
        first = max(0, min(job.last for job in part.jobs))
        limits = ChunkLimits(limit, whole) if binds and max(full[first : part.end]) > most else ChunkLimits()
        keys.append(_signature(problem, part, limits))
        unsolved.setdefault(keys[-1], (part, limits))
    left = sum(part.size for part, _ in unsolved.values())
    solutions: dict[object, Solved] = {}
    for key, (part, limits) in sorted(unsolved.items(), key=lambda item: -item[1][0].size):
        with work.share(part.size / left) as own:
            solved = _limited(problem, part, limits, own)
        solutions[key] = _renamed(solved, {job.weight: rank for rank, job in enumerate(part.jobs)})
        left -= part.size
    chosen = []
    bound = problem.fixed_cost
    methods: Counter[str] = Counter()
    for part, key in zip(parts, keys, strict=True):
        solved = _renamed(solutions[key], {rank: job.weight for rank, job in enumerate(part.jobs)})
        assert solved.choice is not None
        chosen.append((part, solved.choice))
        bound += solved.bound
        methods[solved.method] += 1
    return _Draft(tuple(chosen), bound, methods)


def _limited(problem: Problem, part: Subproblem, limits: ChunkLimits, work: WorkBudget) -> Solved:
    """Solve a part; where weights count whole, count their chunks first: often no more is in flight so."""
    if not limits.whole:
        return PartSolver(problem, part, limits, work).solve()
    assert limits.in_flight is not None
    if make_programme(problem, part, whole=True, in_flight=limits.in_flight) is not None:
        return PartSolver(problem, part, limits, work).solve()
    singly = replace(limits, whole=False)
    with work.share(0.3) as own:
        first = PartSolver(problem, part, singly, own).solve()
    whole = not _fits_whole(problem, part, first, limits)
    if not whole and first.close:
        return first
    second = PartSolver(problem, part, limits if whole else singly, work).solve()
    best = second if whole or _fits_whole(problem, part, second, limits) else first
    return replace(best, bound=max(first.bound, second.bound))


def _fits_whole(problem: Problem, part: Subproblem, solved: Solved, limits: ChunkLimits) -> bool:
    """Whether a choice keeps the limit in flight also where weights count whole."""
    assert solved.choice is not None and limits.in_flight is not None
    jobs = [job for job in part.jobs if job.weight not in solved.choice.preloaded]
    packing = pack(problem, jobs, solved.choice.order, end=part.end)
    return most_in_flight(problem, jobs, packing, whole=True) <= limits.in_flight


def _signature(problem: Problem, part: Subproblem, limits: ChunkLimits) -> object:
    """All that the solution of a part depends on; its place in time is not part of it."""
    start = part.start
    jobs = tuple((j.release - start, j.chunks, j.preload_cost, j.late, j.last - start) for j in part.jobs)
    return jobs, problem.capacity[start : part.end].tobytes(), limits


def _renamed(solved: Solved, names: dict[int, int]) -> Solved:
    assert solved.choice is not None
    choice = solved.choice
    preloaded = frozenset(names[x] for x in choice.preloaded)
    order = choice.order
    if isinstance(order, Ends):
        order = Ends({names[weight]: slot for weight, slot in order.slots.items()})
    return replace(solved, choice=replace(choice, preloaded=preloaded, order=order))


def _plan(instance: Instance, problem: Problem, draft: _Draft, work: WorkBudget) -> OverlapPlan:
    streamed: dict[str, dict[int, int]] = {}
    for part, choice in draft.parts:
        jobs = [job for job in part.jobs if job.weight not in choice.preloaded]
        packing = pack(problem, jobs, choice.order, end=part.end, record=True)
        for slot, weight, chunks in packing.served:
            loads = streamed.setdefault(instance.weights[weight].name, {})
            loads[problem.layer(slot)] = loads.get(problem.layer(slot), 0) + chunks
    facts = {
        "strategy": STRATEGY,
        "parts": len(draft.parts),
        "largest_part": max((len(part.jobs) for part, _ in draft.parts), default=0),
        "methods": dict(sorted(draft.methods.items())),
        "work": round(work.spent),
    }
    cost = draft.cost(problem)
    return make_plan(
        instance, streamed, facts, optimal=cost <= draft.bound, bound=max(0, min(draft.bound, cost))
    )


def _infeasible(instance: Instance, problem: Problem, memory: _Memory) -> OverlapPlan:
    facts = {
        "strategy": STRATEGY,
        "smallest_memory_chunks": memory.best.cost + problem.fixed_chunks,
        "smallest_is_proven": memory.proven,
        "work": round(memory.work.spent),
    }
    reason = f"{instance.memory_chunks} chunks of memory are too few for any choice of what is preloaded"
    if not memory.proven:
        reason = (
            f"no plan within {instance.memory_chunks} chunks of memory was found with this effort; whether "
            "there is one is undecided: solve with more effort, or allow more memory"
        )
    return infeasible_plan(facts, reason)
