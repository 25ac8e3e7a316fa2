"""Planning within a budget: all memory of a run under a limit, which is filled and never exceeded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchedge.errors import InputError, PlanError
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import Plan
from torchedge.streaming.rates import STAGING_BYTES, Rates
from torchedge.streaming.simulation import simulate_plan
from torchedge.streaming.timelines import Timeline
from torchedge.streaming.verification import check_plan

__all__ = ["Budgeted", "parse_bytes", "plan_within"]

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
MOST_BYTES = 2**50

RELAXATIONS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 256.0)
"""Factors of the load capacities that are tried in turn: the paper's soft thresholds (C4)."""

_REFINEMENTS = 6
"""Plans made with ever less memory for weights until the simulated peak is within the limit."""


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
        raise InputError(f"{what} is {amount!r}; {expected}")
    if not 1 <= value <= MOST_BYTES:
        raise InputError(f"{what} is {amount!r}; expected 1 byte to 1 PiB")
    return value


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A plan and its simulated run; `relaxation` is the factor by which load capacities had to be exceeded.

    `instance` holds the device's own capacities, `planned` the relaxed ones that the plan keeps.
    """

    instance: Instance
    planned: Instance
    plan: Plan
    timeline: Timeline
    relaxation: float


def plan_within(
    instance: Instance,
    limit_bytes: int | None,
    rates: Rates,
    activation_bytes: Sequence[int],
    solve: Callable[[Instance], Plan],
) -> Budgeted:
    """Plan an instance such that the simulated run stays within `limit_bytes` of memory altogether.

    The limit covers weights preloaded and in flight, unified memory that reading ahead takes, activations.
    Where no plan keeps the load capacities, they are exceeded as little as possible (soft thresholds,
    FlashMem, section 3.2): the run takes longer, never more memory. Every plan is verified.

    Raises:
        PlanError: no plan stays within the limit; the message names a limit that works.
    """
    if limit_bytes is None:
        return _simulated(instance, instance, solve(instance), rates, activation_bytes, 1.0)
    weights = limit_bytes - max(activation_bytes, default=0) - (rates.staging_bytes or STAGING_BYTES)
    needed: int | None = None
    for factor in RELAXATIONS:
        relaxed = _relaxed(instance, factor)
        room = weights
        for _ in range(_REFINEMENTS):
            if room < 0:
                break
            limited = replace(relaxed, memory_chunks=room // instance.chunk_bytes)
            plan = solve(limited)
            if plan.status == "INFEASIBLE":
                smallest = plan.solver.get("smallest_memory_chunks")
                if isinstance(smallest, int):
                    needed = smallest if needed is None else min(needed, smallest)
                break
            found = _simulated(instance, limited, plan, rates, activation_bytes, factor)
            excess = int(found.timeline.memory.peak.total) - limit_bytes
            if excess <= 0:
                return found
            room = min(room, (found.plan.peak_chunks + _preloaded(limited, plan)) * instance.chunk_bytes)
            room -= max(excess, instance.chunk_bytes)
    raise PlanError(_too_small(instance, limit_bytes, needed, rates, activation_bytes, solve))


def _simulated(
    instance: Instance,
    planned: Instance,
    plan: Plan,
    rates: Rates,
    activation_bytes: Sequence[int],
    factor: float,
) -> Budgeted:
    check_plan(planned, plan)
    return Budgeted(instance, planned, plan, simulate_plan(instance, plan, rates, activation_bytes), factor)


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


def _preloaded(instance: Instance, plan: Plan) -> int:
    chosen = set(plan.preload)
    return sum(w.chunks for w in instance.weights if w.name in chosen)


def _too_small(
    instance: Instance,
    limit_bytes: int,
    needed: int | None,
    rates: Rates,
    activation_bytes: Sequence[int],
    solve: Callable[[Instance], Plan],
) -> str:
    """Say what would do: the run of the plan that takes the least memory for weights."""
    relaxed = _relaxed(instance, RELAXATIONS[-1])
    if needed is None:
        asked = solve(replace(relaxed, memory_chunks=0))
        told = asked.solver.get("smallest_memory_chunks", 0)
        needed = told if isinstance(told, int) else instance.total_chunks
    least = solve(replace(relaxed, memory_chunks=needed))
    peak = max(activation_bytes, default=0) + instance.total_chunks * instance.chunk_bytes
    if least.status != "INFEASIBLE":
        run = simulate_plan(instance, least, rates, activation_bytes)
        peak = int(run.memory.peak.total)
    works = -(-peak // MEBIBYTE)
    return (
        f"{instance.name} does not run within {limit_bytes / MEBIBYTE:,.1f} MiB, whatever is streamed; a "
        f"memory limit of {works:,} MiB works"
    )
