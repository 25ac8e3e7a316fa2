"""Planning within a budget: all memory that a run allocates stays under a limit, which is filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchedge.errors import LimitError
from torchedge.lowering.programs import Program
from torchedge.storage.amounts import MOST_BYTES, bytes_of
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import OverlapPlan, always_next, preload_everything
from torchedge.streaming.rates import STAGING_BYTES
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, StreamingSchedule, least_memory, make_schedule
from torchedge.streaming.verification import check_complete, check_plan, verify_plan
from torchedge.textures.layouts import PAGE_BYTES

RELAXATIONS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0)
"""Factors of the load capacities to try: the paper's soft thresholds (C4)."""

NEAR = 1.01
"""Predicted latencies up to this ratio count as the same."""

STAGING_SHARE = 16
"""The staging pool takes at most this part of a limit."""

LAMBDAS = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Prices of preloading to try above the one that was asked for, the highest first."""

Solve = Callable[[Instance], OverlapPlan]


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan and its schedule; `relaxation` is the factor by which layers may exceed their capacities.

    `instance` is the problem that the plan solves: with relaxed capacities, or a higher lambda. `problems`
    are the rules that a strategy for comparison breaks.
    """

    instance: Instance
    plan: OverlapPlan
    schedule: StreamingSchedule
    relaxation: float = 1.0
    problems: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All that a run allocates."""
        return self.schedule.memory.total_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """The search for a plan of a program within `limit` bytes (None: no limit) of all that a run allocates.

    instance: the overlap problem, with the device's own capacities. solve: the solver. latency: predicts the
    run of a plan (ms).
    """

    program: Program
    instance: Instance
    limit: int | None
    solve: Solve
    latency: Callable[[Budgeted], float]

    def plan(self) -> Budgeted:
        """Return the plan, verified.

        The first of these that keeps the limit is the plan: one without a limit; one that preloads less,
        with a lambda as low as works; one whose layers exceed their capacities, as little as needed (soft
        thresholds, FlashMem, section 3.2), so that weights are loaded later; one that loads each weight just
        before its first use, which takes the least memory of all. The last is taken before the others where
        its predicted latency is as low: where the disk is the bottleneck, preloading gains nothing. Where
        nothing else is as fast, as where transfers cost the host more than they hide, all is preloaded.
        Raises LimitError: not even that stays within the limit; the message names the smallest limit.
        """
        best = self.filled(self.search())
        choices = [best]
        if self.limit is not None:
            least = self.least(self.staging())
            if least.total_bytes <= self.most:
                choices += [self.filled(least), self.filled(least, STAGING_BYTES)]
        choices.append(self.whole(best))
        within = [choice for choice in choices if choice.total_bytes <= self.most]
        timed = [(self.latency(choice), choice) for choice in within]
        near = [(ms, choice) for ms, choice in timed if ms <= NEAR * min(ms for ms, _ in timed)]
        return min(near, key=lambda pair: (pair[1].total_bytes, pair[0]))[1]

    def whole(self, best: Budgeted) -> Budgeted:
        """Return the plan that preloads everything; with the bound of the best plan of the same problem."""
        bound = best.plan.lower_bound if best.instance == self.instance else None
        plan = replace(preload_everything(self.instance), lower_bound=bound)
        schedule = make_schedule(self.program, self.instance, plan, self.staging())
        return Budgeted(self.instance, plan, schedule)

    def filled(self, budgeted: Budgeted, most: int = MOST_BYTES) -> Budgeted:
        """Give what a plan leaves of the limit to the staging pool: reads then run further ahead.

        most: bytes of the pool; less makes runs wait whose file the page cache holds, which no plan predicts.
        """
        if self.limit is None:
            return budgeted
        return filled([budgeted], self.limit - budgeted.total_bytes, most)[0]

    def search(self) -> Budgeted:
        """Return the first plan that keeps the limit; raises LimitError as `plan` does."""
        staging = self.staging()
        free = self.within(self.instance, staging)
        if free is not None:
            return free
        least = self.least(staging)
        if least.total_bytes > self.most:
            staging = LEAST_STAGING_BYTES
            least = self.least(staging)
        if least.total_bytes > self.most:
            memory = least.schedule.memory
            raise too_small(
                self.instance.name,
                self.most,
                {
                    "inputs and outputs": memory.ports_bytes,
                    "weights of the first launch": memory.preloaded_bytes,
                    "intermediates and streamed weights": memory.arena_bytes,
                    "staging buffers": memory.staging_bytes,
                },
            )
        lams = [lam for lam in LAMBDAS if lam > self.instance.lam]
        frugal = replace(self.instance, lam=lams[0]) if lams else self.instance
        relaxed = [(_relaxed(frugal, factor), factor) for factor in RELAXATIONS if lams or factor > 1]
        best = self.first_within(relaxed, staging)
        if best is None:
            return least
        if best.relaxation == 1:
            dearer = [(replace(self.instance, lam=lam), 1.0) for lam in reversed(lams[1:])]
            best = self.first_within(dearer, staging) or best
        return best

    @property
    def most(self) -> float:
        """The limit as a number."""
        return math.inf if self.limit is None else self.limit

    def first_within(self, candidates: Sequence[tuple[Instance, float]], staging: int) -> Budgeted | None:
        """Return the first plan that keeps the limit, by bisection: later problems take less memory."""
        low, high, best = 0, len(candidates), None
        while low < high:
            middle = (low + high) // 2
            instance, factor = candidates[middle]
            budgeted = self.within(instance, staging, factor)
            if budgeted is None:
                low = middle + 1
            else:
                best, high = budgeted, middle
        return best

    def within(self, instance: Instance, staging: int, factor: float = 1.0) -> Budgeted | None:
        """Return the plan of a problem, verified; None if its run takes more than the limit."""
        plan = self.solve(instance)
        check_plan(instance, plan)
        if least_memory(self.program, instance, plan, staging).total_bytes > self.most:
            return None
        budgeted = Budgeted(instance, plan, make_schedule(self.program, instance, plan, staging), factor)
        return budgeted if budgeted.total_bytes <= self.most else None

    def by_strategy(self, strategy: Solve) -> Budgeted:
        """Return the plan of a strategy to compare with, which may break capacities and M_peak: `problems`.

        Raises:
            LimitError: its plan exceeds the limit.
            PlanError: it does not load every weight once.
        """
        plan = strategy(self.instance)
        check_complete(self.instance, plan)
        schedule = make_schedule(self.program, self.instance, plan, self.staging())
        problems = verify_plan(self.instance, plan).problems
        budgeted = Budgeted(self.instance, plan, schedule, problems=problems)
        if self.limit is not None and budgeted.total_bytes > self.limit:
            name = plan.solver.get("strategy", "the strategy")
            raise LimitError(
                f"{self.instance.name} as {name} plans it takes {in_mib(budgeted.total_bytes)} MiB, more "
                f"than {in_mib(self.limit)} MiB; raise the memory limit, or plan by the solver"
            )
        return budgeted

    def staging(self) -> int:
        """Return the size of the staging pool: not more than all weights, nor than its share of the limit."""
        weights = sum(weight.nbytes for weight in self.instance.weights)
        return staging_for([self.program], weights, self.limit)

    def least(self, staging: int) -> Budgeted:
        """Return the plan of least memory: each weight is loaded whole by the layer before its first use.

        Weights of the first layer are preloaded.
        """
        relaxed, plan = loaded_whole(replace(self.instance, m_peak_chunks=None))
        pairs = zip(relaxed.layers, self.instance.layers, strict=True)
        factor = max(1.0, *(new.capacity_chunks / max(1, old.capacity_chunks) for new, old in pairs))
        return Budgeted(relaxed, plan, make_schedule(self.program, relaxed, plan, staging), factor)


def loaded_whole(instance: Instance) -> tuple[Instance, OverlapPlan]:
    """Return an instance with room to load each weight just before its first use, and that plan."""
    plan = always_next(instance)
    loads = [0] * (len(instance.layers) + 1)
    for load in plan.loads:
        loads[load.layer] += load.chunks
    layers = tuple(
        [
            replace(layer, capacity_chunks=max(layer.capacity_chunks, chunks))
            for chunks, layer in zip(loads[1:], instance.layers, strict=True)
        ]
    )
    relaxed = replace(instance, layers=layers)
    return relaxed, always_next(relaxed)


def staging_for(programs: Sequence[Program], weights: int, limit: int | None) -> int:
    """Return the size of the staging pool of programs: at most all weights, and its share of the limit."""
    shares = [] if limit is None else [limit // STAGING_SHARE]
    most = min([STAGING_BYTES, *shares, *_allocations(programs)])
    return max(LEAST_STAGING_BYTES, min(most // PAGE_BYTES, -(-weights // PAGE_BYTES)) * PAGE_BYTES)


def filled(plans: Sequence[Budgeted], spare: int, most: int) -> list[Budgeted]:
    """Give spare bytes to the staging pool that plans share, as far as reads can use it, and up to `most`."""
    schedules = [plan.schedule for plan in plans]
    streamed = max(sum(s.program.tensors[index].nbytes for index in s.streamed) for s in schedules)
    staging = schedules[0].staging_bytes
    most = min([most, *_allocations([schedule.program for schedule in schedules])])
    larger = min(staging + spare, max(streamed, staging), most) // PAGE_BYTES * PAGE_BYTES
    return [replace(plan, schedule=replace(plan.schedule, staging_bytes=larger)) for plan in plans]


def _allocations(programs: Sequence[Program]) -> list[int]:
    """Return the largest allocations that programs are planned for, where they have any."""
    return [program.arena.allocation_bytes for program in programs if program.arena.allocation_bytes]


def _relaxed(instance: Instance, factor: float) -> Instance:
    """Return an instance whose layers, hierarchical ones aside, load `factor` times as much, at least 1."""
    if factor == 1:
        return instance
    layers = tuple(
        layer
        if layer.load_class == "hierarchical"
        else replace(layer, capacity_chunks=max(1, int(layer.capacity_chunks * factor)))
        for layer in instance.layers
    )
    return replace(instance, layers=layers)


def too_small(name: str, limit: float, parts: Mapping[str, int]) -> LimitError:
    """Name the smallest limit: the memory of the plan that takes the least, in bytes by what takes it."""
    works = rounded_up(sum(parts.values()))
    listed = ", ".join(f"{in_mib(nbytes)} MiB of {what}" for what, nbytes in parts.items())
    return LimitError(
        f"{name} does not run within {in_mib(limit)} MiB, whatever is streamed. The smallest memory limit "
        f"that works is {works}: {listed}",
        works_bytes=bytes_of(works),
    )


def rounded_up(nbytes: int) -> str:
    """Return at least so many bytes in few digits, as `bytes_of` reads them."""
    if nbytes < MEBIBYTE:
        return f"{max(1, -(-nbytes // 1024))}KiB"
    digits = 1 if nbytes >= 10 * MEBIBYTE else 2
    return f"{math.ceil(10**digits * nbytes / MEBIBYTE) / 10**digits:.{digits}f}MiB"


def in_mib(nbytes: float) -> str:
    """Return bytes in MiB, as messages have them."""
    mib = nbytes / MEBIBYTE
    return f"{mib:,.1f}" if mib >= 1 or not mib else f"{mib:.2g}"
