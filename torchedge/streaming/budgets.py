"""Planning within a budget: all memory of a run under a limit, which is filled and never exceeded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torchedge.errors import InputError, LimitError, PlanError
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import OverlapPlan, used_chunks
from torchedge.streaming.rates import STAGING_BYTES, Rates
from torchedge.streaming.simulation import RunTimeline, simulate_plan
from torchedge.streaming.verification import check_plan, verify_plan

__all__ = [
    "Budgeted",
    "less_read_ahead",
    "parse_bytes",
    "plan_by_strategy",
    "plan_within",
    "preload_also",
    "restate_plan",
    "worth_preloading",
]

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
MOST_BYTES = 2**50

RELAXATIONS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0, 256.0)
"""Factors of the load capacities that may be tried: the paper's soft thresholds (C4)."""

_STAGINGS = tuple(STAGING_BYTES * part // 16 for part in (16, 12, 8, 6, 4, 3, 2, 1, 0))
"""How much may be read ahead, where a tight limit leaves less room for it than is usual."""

_TRIALS = 5
"""How often a plan is tried with an amount of memory for weights between too much and too little."""

_NEAR = 0.02
"""The share of the way from what works to what is too much that is not worth a trial."""

_PRICES, _CHEAPEST, _DEAREST = 9, 1e-3, 0.95
"""How many lambdas are tried, and from which to which, to make plans that preload less."""

_PRICED = "made_with_lambda"
"""What a plan's facts call such a lambda."""

_SLACK = 0.1
"""Below the smallest memory times 1 + this, planning takes long and gains little."""

Solve = Callable[[Instance], OverlapPlan]


def parse_bytes(amount: int | str, what: str = "the limit") -> int:
    """Return an amount of memory in bytes: a whole number of them, or a text such as "500MiB" or "1.5 GiB".

    Raises:
        InputError: it is neither, or not from 1 byte to 1 PiB.
    """
    expected = 'expected bytes as a whole number, or a text such as "500MiB" or "1.5GiB"'
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) and len(amount) < 40 else None
    if found is not None and found[2].lower() in _UNITS:
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    elif type(amount) is int:
        value = amount
    else:
        told = f"{amount[:40]!r}" if isinstance(amount, str) else f"{amount!r:.40}"
        raise InputError(f"{what} is {told}; {expected}")
    if not 1 <= value <= MOST_BYTES:
        raise InputError(f"{what} is {amount!r:.40}; expected 1 byte to 1 PiB")
    return value


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan and its simulated run; `relaxation` is the factor by which load capacities had to be exceeded.

    `instance` holds the device's own capacities, `planned` the relaxed ones that the plan keeps. `rates` are
    those of the run: reading ahead may hold less than usual where the limit leaves no room. `problems` are
    the rules that a strategy for comparison breaks.
    """

    instance: Instance
    planned: Instance
    plan: OverlapPlan
    timeline: RunTimeline
    rates: Rates
    relaxation: float = 1.0
    problems: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that is in memory at any time."""
        return int(self.timeline.memory.peak.total)


def plan_within(
    instance: Instance,
    limit_bytes: int | None,
    rates: Rates,
    activation_bytes: Sequence[int],
    solve: Solve,
    *,
    quick: Solve | None = None,
) -> Budgeted:
    """Plan an instance such that the simulated run stays within `limit_bytes` of memory altogether.

    The limit covers weights preloaded and in flight, unified memory that reading ahead takes, activations.
    Of what keeps it, the first of these is taken: the plan without any limit; one that preloads less, by a
    higher lambda, filled up to the limit; one with less memory for weights, preloaded and in flight; then
    load capacities are exceeded, as little as needed (soft thresholds, FlashMem, section 3.2). Each is tried
    with ever less reading ahead. The run then takes longer, never more memory. Every plan is verified.

    quick: a solver for the search, default `solve`, which gives the plan that is returned.

    Raises:
        LimitError: no plan stays within the limit; the message names a limit that works.
    """
    search = _Search(instance, rates, activation_bytes, quick or solve)
    free = search.simulated(instance, solve(instance), 1.0, limit_bytes)
    if limit_bytes is None or free.peak_bytes <= limit_bytes:
        return free
    found = search.find(limit_bytes, free)
    if found.plan.status == "OPTIMAL" or _PRICED in found.plan.solver:
        return found
    better = solve(found.planned)
    if better.status == "INFEASIBLE":
        return found
    refined = search.simulated(found.planned, better, found.relaxation, limit_bytes)
    return refined if refined.peak_bytes <= limit_bytes else found


def plan_by_strategy(
    instance: Instance,
    limit_bytes: int | None,
    rates: Rates,
    activation_bytes: Sequence[int],
    strategy: Solve,
) -> Budgeted:
    """Plan an instance by a strategy to compare with, which may break capacities and M_peak: `problems`.

    Of the limit weights get what activations and reading ahead leave; nothing is relaxed for it.

    Raises:
        LimitError: the strategy finds no plan within the limit.
        PlanError: its plan is none.
    """
    asked = instance
    if limit_bytes is not None:
        room = limit_bytes - max(activation_bytes, default=0) - (rates.staging_bytes or 0)
        asked = replace(instance, memory_chunks=max(0, room) // instance.chunk_bytes)
    plan = strategy(asked)
    name = str(plan.solver.get("strategy", "the strategy"))
    if plan.status == "INFEASIBLE":
        reason = plan.solver.get("reason", "no reason was given")
        raise LimitError(
            f"{name} finds no plan of {instance.name} ({reason}); raise the memory limit, or leave out the "
            "strategy"
        )
    kept = verify_plan(asked, plan, limits=False)
    if not kept.ok:
        raise PlanError(f"the plan of {name} is none: {kept.problems[0]}; leave out the strategy")
    search = _Search(instance, rates, activation_bytes, strategy)
    found = search.run(asked, plan, 1.0, limit_bytes)
    if limit_bytes is not None and found.peak_bytes > limit_bytes:
        raise LimitError(
            f"{instance.name} as {name} plans it takes {_mib(found.peak_bytes)} MiB, more than "
            f"{_mib(limit_bytes)} MiB; raise the memory limit, or leave out the strategy"
        )
    return replace(found, problems=verify_plan(asked, plan).problems)


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for the plan of one instance that keeps a limit."""

    instance: Instance
    rates: Rates
    activation_bytes: Sequence[int]
    solve: Solve

    def find(self, limit: int, free: Budgeted) -> Budgeted:
        """Return a plan within the limit, which `free` exceeds; its relaxation is the least that was found.

        What can be done at all does not depend on the limit: a limit that works goes on working if raised.
        """
        least = min(self.least(RELAXATIONS[-1], slack=0.0), free, key=lambda found: found.peak_bytes)
        if least.peak_bytes > limit:
            raise _too_small(self.instance, limit, least)
        found = self.within(1.0, limit, free)
        low, high = 1, len(RELAXATIONS) - 1
        best = least
        while found is None and low < high:
            middle = (low + high) // 2
            factor = RELAXATIONS[middle]
            relaxed = _relaxed(self.instance, factor)
            wide = self.simulated(relaxed, self.solve(relaxed), factor, limit)
            keeps = self.within(factor, limit, wide)
            if keeps is None:
                low = middle + 1
            else:
                best, high = keeps, middle
        return best if found is None else found

    def within(self, factor: float, limit: int, wide: Budgeted) -> Budgeted | None:
        """Return the plan with the most memory for weights that keeps the limit; None: none was found.

        wide: the plan without a limit on it.
        """
        if wide.peak_bytes <= limit:
            return wide
        priced = self.priced(factor, limit, wide)
        if priced is not None:
            return priced
        best = self.least(factor, slack=_SLACK, limit=limit)
        if best.peak_bytes > limit:
            return None
        low, high = best.planned.memory_chunks or 0, used_chunks(wide.planned, wide.plan)
        over = wide.peak_bytes
        for _ in range(_TRIALS):
            share = (limit - best.peak_bytes) / (over - best.peak_bytes)
            chunks = low + int(min(max(share, 0.1), 0.9) * (high - low))
            if chunks <= low or share < _NEAR:
                break
            planned = replace(best.planned, memory_chunks=chunks)
            plan = self.solve(planned)
            if plan.status == "INFEASIBLE":
                break
            found = self.simulated(planned, plan, factor, limit)
            if found.peak_bytes <= limit:
                best, low = found, chunks
            else:
                high, over = chunks, found.peak_bytes
        return best

    def priced(self, factor: float, limit: int, wide: Budgeted) -> Budgeted | None:
        """Return a plan that keeps the limit because preloading is dearer in it, by as little as is needed.

        Such plans come quickly, one for each price: none is better with what it preloads. What then is left
        of the limit is filled with weights that the next cheaper price preloads.
        """
        low, high, lam = max(wide.planned.lam, _CHEAPEST), _DEAREST, _DEAREST
        best, over = None, wide
        for _ in range(_PRICES if low < high else 0):
            planned = replace(wide.planned, lam=round(lam, 6))
            found = self.simulated(planned, self.solve(planned), factor, limit)
            if found.peak_bytes <= limit:
                best, high = found, lam
            elif best is None:
                return None
            else:
                over, low = found, lam
            lam = math.sqrt(low * high)
        return None if best is None else self.filled(best, over, limit, wide)

    def filled(self, best: Budgeted, over: Budgeted, limit: int, wide: Budgeted) -> Budgeted:
        """Return a plan with as many of the weights preloaded that `over` preloads as the limit allows.

        Its objective is that of the lambda of `wide`, whose bound holds for it.
        """
        worth = worth_preloading(wide.planned, best.plan, over.plan.preload)
        facts = {_PRICED: best.planned.lam}

        def filled(count: int) -> Budgeted:
            plan = preload_also(best.plan, worth[:count])
            plan = restate_plan(wide.planned, plan, wide.plan.lower_bound, **facts)
            found = self.simulated(wide.planned, plan, best.relaxation, limit)
            return replace(
                found, planned=replace(wide.planned, memory_chunks=used_chunks(found.planned, found.plan))
            )

        low, high, found = 0, len(worth), filled(0)
        while low < high:
            middle = (low + high + 1) // 2
            more = filled(middle)
            if more.peak_bytes <= limit:
                low, found = middle, more
            else:
                high = middle - 1
        return found

    def least(self, factor: float, *, slack: float, limit: int = 0) -> Budgeted:
        """Return the plan that takes the least memory for weights, or a share of `slack` more."""
        relaxed = _relaxed(self.instance, factor)
        planned = replace(relaxed, memory_chunks=0)
        plan = self.solve(planned)
        if plan.status == "INFEASIBLE":
            told = plan.solver.get("smallest_memory_chunks")
            smallest = told if isinstance(told, int) else self.instance.total_chunks
            chunks = min(self.instance.total_chunks, smallest + int(slack * smallest))
            planned = replace(relaxed, memory_chunks=chunks)
            plan = self.solve(planned)
        if plan.status == "INFEASIBLE":  # none was found with what was said to do
            planned, plan = relaxed, self.solve(relaxed)
        return self.simulated(planned, plan, factor, limit)

    def simulated(self, planned: Instance, plan: OverlapPlan, factor: float, limit: int | None) -> Budgeted:
        """Verify a plan and run it."""
        check_plan(planned, plan)
        return self.run(planned, plan, factor, limit)

    def run(self, planned: Instance, plan: OverlapPlan, factor: float, limit: int | None) -> Budgeted:
        """Run a plan with as much reading ahead as keeps the limit, without any if nothing does."""
        for rates in less_read_ahead(self.rates):
            timeline = simulate_plan(self.instance, plan, rates, self.activation_bytes)
            found = Budgeted(self.instance, planned, plan, timeline, rates, factor)
            if limit is None or found.peak_bytes <= limit:
                break
        return found


def less_read_ahead(rates: Rates) -> list[Rates]:
    """Return rates, then the same with ever less unified memory for reading ahead, down to none."""
    usual = rates.staging_bytes
    less = [staging for staging in _STAGINGS if usual is None or staging < usual]
    return [rates, *(replace(rates, staging_bytes=staging) for staging in less)]


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


def _too_small(instance: Instance, limit: int, least: Budgeted) -> LimitError:
    """Say what would do: the run of the plan that takes the least memory for weights."""
    works = _rounded_up(least.peak_bytes)
    activations = least.timeline.memory.peak.activations
    preloaded = least.timeline.preloaded_bytes
    parts = f"activations take up to {_mib(activations)} MiB"
    if preloaded:
        parts += (
            f", and weights of {_mib(preloaded)} MiB have to be preloaded, each of them held twice while it "
            "is transformed"
        )
    return LimitError(
        f"{instance.name} does not run within {_mib(limit)} MiB, whatever is streamed; a memory limit of "
        f"{works} works ({parts})",
        works_bytes=parse_bytes(works),
    )


def _rounded_up(nbytes: int) -> str:
    """Return at least so many bytes in few digits, as `parse_bytes` reads them."""
    if nbytes < MEBIBYTE:
        return f"{max(1, -(-nbytes // 1024))}KiB"
    digits = 1 if nbytes >= 10 * MEBIBYTE else 2
    return f"{math.ceil(10**digits * nbytes / MEBIBYTE) / 10**digits:.{digits}f}MiB"


def _mib(nbytes: float) -> str:
    mib = nbytes / MEBIBYTE
    return f"{mib:,.1f}" if mib >= 1 or not mib else f"{mib:.2g}"


def worth_preloading(instance: Instance, plan: OverlapPlan, names: Iterable[str]) -> list[str]:
    """Return those of the streamed weights named that are cheaper preloaded, the most by chunk first."""
    p, d, _ = instance.prices
    wanted = set(names)
    first: dict[str, int] = {}
    for load in plan.loads:
        first[load.weight] = min(first.get(load.weight, load.layer), load.layer)
    found = []
    for w in instance.weights:
        if w.name in wanted and w.name in first:
            times = w.chunks if instance.distance == "chunks" else 1
            saved = d * (w.first_use - first[w.name]) * times - p * w.chunks
            if saved > 0:
                found.append((-saved / w.chunks, w.first_use, w.name))
    return [name for _, _, name in sorted(found)]


def preload_also(plan: OverlapPlan, names: Iterable[str]) -> OverlapPlan:
    """Return a plan that preloads some of its streamed weights; `restate_plan` makes its figures right."""
    more = [name for name in names if name not in plan.preload]
    loads = tuple(load for load in plan.loads if load.weight not in set(more))
    return replace(plan, preload=(*plan.preload, *more), loads=loads)


def restate_plan(instance: Instance, plan: OverlapPlan, bound: float | None, **facts: object) -> OverlapPlan:
    """Return a plan with its objective, peak and status as of this instance.

    bound: a lower bound of the instance, if one is known; `facts` are added to those of the solver.
    """
    found = verify_plan(instance, plan, limits=False)
    objective = float(found.objective or 0)
    return replace(
        plan,
        status="OPTIMAL" if bound is not None and objective <= bound else "FEASIBLE",
        objective=objective,
        lower_bound=bound if bound is None else min(bound, objective),
        peak_chunks=found.peak_chunks,
        solver={**plan.solver, **facts},
    )
