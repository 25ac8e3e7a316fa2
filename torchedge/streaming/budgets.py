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
"""Factors of the load capacities to try: the paper's soft thresholds (C4)."""

_STAGINGS = tuple(STAGING_BYTES * part // 16 for part in (16, 12, 8, 6, 4, 3, 2, 1, 0))
"""Smaller read-ahead limits, for memory limits that leave no room for the usual one."""

_TRIALS = 5
"""Trials of an amount of memory for weights between too much and too little."""

_NEAR = 0.02
"""No trial closer than this to the amount that works, as a share of the interval."""

_PRICES, _CHEAPEST, _DEAREST = 9, 1e-3, 0.95
"""Number of lambdas tried, and their range, for plans that preload less."""

_PRICED = "made_with_lambda"
"""The key of such a lambda in a plan's solver facts."""

_SLACK = 0.1
"""Plan with at least the smallest memory times 1 + this: below, planning takes long and gains little."""

Solve = Callable[[Instance], OverlapPlan]


def parse_bytes(amount: int | str, what: str = "the limit") -> int:
    """Return an amount of memory in bytes: a whole number of them, or a text such as "500MiB" or "1.5 GiB".

    Raises:
        InputError: it is neither, or not from 1 byte to 1 PiB.
    """
    expected = 'expected bytes as a whole number, or a text such as "500MiB" or "1.5GiB"'
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) and len(amount) < 40 else None
    if match is not None and match[2].lower() in _UNITS:
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    elif type(amount) is int:
        value = amount
    else:
        shown = f"{amount[:40]!r}" if isinstance(amount, str) else f"{amount!r:.40}"
        raise InputError(f"{what} is {shown}; {expected}")
    if not 1 <= value <= MOST_BYTES:
        raise InputError(f"{what} is {amount!r:.40}; expected 1 byte to 1 PiB")
    return value


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan and its simulated run; `relaxation` is the factor by which layers may exceed their capacities.

    `instance` holds the device's own capacities, `planned` the relaxed ones that the plan keeps. `rates` are
    those of the run: a tight limit reduces reading ahead. `problems` are the rules that a strategy for
    comparison breaks.
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

    The limit covers weights preloaded and in flight, unified memory for reading ahead, and activations. The
    first of these that keeps it is the plan: one without any limit; one that preloads less, by a higher
    lambda, filled up to the limit; one with less memory for weights; one that exceeds load capacities, as
    little as needed (soft thresholds, FlashMem, section 3.2). Each is tried with less and less reading ahead:
    the run then takes longer, never more memory. Every plan is verified.

    quick: a faster solver for the search, default `solve`.

    Raises:
        LimitError: no plan stays within the limit; the message names a limit that works.
    """
    search = _Search(instance, rates, activation_bytes, quick or solve)
    free = search.simulated(instance, solve(instance), 1.0, limit_bytes)
    if limit_bytes is None or free.peak_bytes <= limit_bytes:
        return free
    limited = search.find(limit_bytes, free)
    if limited.plan.status == "OPTIMAL" or _PRICED in limited.plan.solver:
        return limited
    better = solve(limited.planned)
    if better.status == "INFEASIBLE":
        return limited
    refined = search.simulated(limited.planned, better, limited.relaxation, limit_bytes)
    return refined if refined.peak_bytes <= limit_bytes else limited


def plan_by_strategy(
    instance: Instance,
    limit_bytes: int | None,
    rates: Rates,
    activation_bytes: Sequence[int],
    strategy: Solve,
) -> Budgeted:
    """Plan an instance by a strategy to compare with, which may break capacities and M_peak: `problems`.

    Weights get the part of the limit that activations and reading ahead leave. Capacities stay as they are.

    Raises:
        LimitError: the strategy finds no plan within the limit.
        PlanError: it does not load every weight once.
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
            f"{name} finds no plan of {instance.name} ({reason}); raise the memory limit, or plan "
            "by the solver"
        )
    checked = verify_plan(asked, plan, limits=False)
    if not checked.ok:
        raise PlanError(
            f"the plan of {name} does not load every weight once: {checked.problems[0]}; plan by the solver"
        )
    search = _Search(instance, rates, activation_bytes, strategy)
    budgeted = search.run(asked, plan, 1.0, limit_bytes)
    if limit_bytes is not None and budgeted.peak_bytes > limit_bytes:
        raise LimitError(
            f"{instance.name} as {name} plans it takes {_mib(budgeted.peak_bytes)} MiB, more than "
            f"{_mib(limit_bytes)} MiB; raise the memory limit, or plan by the solver"
        )
    return replace(budgeted, problems=verify_plan(asked, plan).problems)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for a plan of one instance that keeps a limit."""

    instance: Instance
    rates: Rates
    activation_bytes: Sequence[int]
    solve: Solve

    def find(self, limit: int, free: Budgeted) -> Budgeted:
        """Return a plan within the limit, which `free` exceeds, with as little relaxation as works.

        The plan of least memory does not depend on the limit: if a limit works, every higher one does.
        """
        least = min(self.least(RELAXATIONS[-1], slack=0.0), free, key=lambda budgeted: budgeted.peak_bytes)
        if least.peak_bytes > limit:
            raise _too_small(self.instance, limit, least)
        budgeted = self.within(1.0, limit, free)
        low, high = 1, len(RELAXATIONS) - 1
        best = least
        while budgeted is None and low < high:
            middle = (low + high) // 2
            factor = RELAXATIONS[middle]
            relaxed = _relaxed(self.instance, factor)
            wide = self.simulated(relaxed, self.solve(relaxed), factor, limit)
            keeps = self.within(factor, limit, wide)
            if keeps is None:
                low = middle + 1
            else:
                best, high = keeps, middle
        return best if budgeted is None else budgeted

    def within(self, factor: float, limit: int, wide: Budgeted) -> Budgeted | None:
        """Return the plan with the most memory for weights that keeps the limit; None if there is none.

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
            trial = self.simulated(planned, plan, factor, limit)
            if trial.peak_bytes <= limit:
                best, low = trial, chunks
            else:
                high, over = chunks, trial.peak_bytes
        return best

    def priced(self, factor: float, limit: int, wide: Budgeted) -> Budgeted | None:
        """Return a plan that keeps the limit because a higher lambda makes preloading dearer, if any does.

        Such plans are quick to find. The rest of the limit is filled with weights that the next lower lambda
        preloads.
        """
        low, high, lam = max(wide.planned.lam, _CHEAPEST), _DEAREST, _DEAREST
        best, over = None, wide
        for _ in range(_PRICES if low < high else 0):
            planned = replace(wide.planned, lam=round(lam, 6))
            trial = self.simulated(planned, self.solve(planned), factor, limit)
            if trial.peak_bytes <= limit:
                best, high = trial, lam
            elif best is None:
                return None
            else:
                over, low = trial, lam
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
            budgeted = self.simulated(wide.planned, plan, best.relaxation, limit)
            return replace(
                budgeted,
                planned=replace(wide.planned, memory_chunks=used_chunks(budgeted.planned, budgeted.plan)),
            )

        low, high, budgeted = 0, len(worth), filled(0)
        while low < high:
            middle = (low + high + 1) // 2
            more = filled(middle)
            if more.peak_bytes <= limit:
                low, budgeted = middle, more
            else:
                high = middle - 1
        return budgeted

    def least(self, factor: float, *, slack: float, limit: int = 0) -> Budgeted:
        """Return the plan of least memory for weights, or of a share of `slack` more."""
        relaxed = _relaxed(self.instance, factor)
        planned = replace(relaxed, memory_chunks=0)
        plan = self.solve(planned)
        if plan.status == "INFEASIBLE":
            smallest_chunks = plan.solver.get("smallest_memory_chunks")
            smallest = smallest_chunks if isinstance(smallest_chunks, int) else self.instance.total_chunks
            chunks = min(self.instance.total_chunks, smallest + int(slack * smallest))
            planned = replace(relaxed, memory_chunks=chunks)
            plan = self.solve(planned)
        if plan.status == "INFEASIBLE":  # not even within the limit that the solver named
            planned, plan = relaxed, self.solve(relaxed)
        return self.simulated(planned, plan, factor, limit)

    def simulated(self, planned: Instance, plan: OverlapPlan, factor: float, limit: int | None) -> Budgeted:
        """Verify a plan and run it."""
        check_plan(planned, plan)
        return self.run(planned, plan, factor, limit)

    def run(self, planned: Instance, plan: OverlapPlan, factor: float, limit: int | None) -> Budgeted:
        """Run a plan with as much reading ahead as keeps the limit; with none if no amount keeps it."""
        for rates in less_read_ahead(self.rates):
            timeline = simulate_plan(self.instance, plan, rates, self.activation_bytes)
            budgeted = Budgeted(self.instance, planned, plan, timeline, rates, factor)
            if limit is None or budgeted.peak_bytes <= limit:
                break
        return budgeted


def less_read_ahead(rates: Rates) -> list[Rates]:
    """Return rates, then the same with less and less memory for reading ahead, down to none."""
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
    """Name a limit that works: the peak of the plan of least memory for weights."""
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
    """Return the streamed weights among `names` that cost less if preloaded, by gain a chunk."""
    p, d, _ = instance.prices
    wanted = set(names)
    first: dict[str, int] = {}
    for load in plan.loads:
        first[load.weight] = min(first.get(load.weight, load.layer), load.layer)
    worthwhile = []
    for w in instance.weights:
        if w.name in wanted and w.name in first:
            times = w.chunks if instance.distance == "chunks" else 1
            saved = d * (w.first_use - first[w.name]) * times - p * w.chunks
            if saved > 0:
                worthwhile.append((-saved / w.chunks, w.first_use, w.name))
    return [name for _, _, name in sorted(worthwhile)]


def preload_also(plan: OverlapPlan, names: Iterable[str]) -> OverlapPlan:
    """Return a plan that preloads more weights; its figures are stale until `restate_plan`."""
    more = [name for name in names if name not in plan.preload]
    loads = tuple(load for load in plan.loads if load.weight not in set(more))
    return replace(plan, preload=(*plan.preload, *more), loads=loads)


def restate_plan(instance: Instance, plan: OverlapPlan, bound: float | None, **facts: object) -> OverlapPlan:
    """Return a plan with the objective, peak and status that it has for this instance.

    bound: a lower bound of the instance, if known. facts: added to the plan's solver facts.
    """
    verified = verify_plan(instance, plan, limits=False)
    objective = float(verified.objective or 0)
    return replace(
        plan,
        status="OPTIMAL" if bound is not None and objective <= bound else "FEASIBLE",
        objective=objective,
        lower_bound=bound if bound is None else min(bound, objective),
        peak_chunks=verified.peak_chunks,
        solver={**plan.solver, **facts},
    )
