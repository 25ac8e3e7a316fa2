"""From a program to its streaming plan, and to plans of several settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchedge.devices import Device
from torchedge.lowering.programs import Program
from torchedge.streaming.budgets import Budget, Budgeted, parse_bytes
from torchedge.streaming.capacities import (
    CHUNK_BYTES,
    LAMBDA,
    M_PEAK_BYTES,
    make_instance,
    rate_capacities,
)
from torchedge.streaming.instances import Distance, Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import derive_rates
from torchedge.streaming.solving import solve
from torchedge.streaming.streaming_plans import StreamingPlan, predict_run

Amount = int | str | None


def plan_program(
    program: Program,
    device: Device,
    *,
    memory_limit: Amount = None,
    m_peak: Amount = M_PEAK_BYTES,
    lam: float = LAMBDA,
    chunk: int | str = CHUNK_BYTES,
    distance: Distance = "layers",
    effort: float = 1.0,
    strategy: Callable[[Instance], OverlapPlan] | None = None,
    launch_ms: Sequence[float] | None = None,
) -> StreamingPlan:
    """Plan the streaming of the weights of a lowered inference. The options are those of `torchedge.plan`.

    strategy: plans in the solver's place, to be compared with it. It may break capacities and M_peak, which
    `notes` name. launch_ms: measured latency of each launch alone, instead of the device's roofline.

    Raises:
        DeviceError: the device's profile lacks a figure that planning takes.
        InputError: an option is out of range.
        LimitError: no plan stays within the memory limit; the message names the smallest that works.
    """
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    peak = None if m_peak is None else parse_bytes(m_peak, "m_peak")
    chunk_bytes = parse_bytes(chunk, "chunk")
    rates = derive_rates(device)
    capacities = rate_capacities(program, device, chunk_bytes=chunk_bytes, launch_ms=launch_ms)
    instance = make_instance(
        program,
        device,
        chunk_bytes=chunk_bytes,
        m_peak_bytes=peak,
        lam=lam,
        distance=distance,
        capacities=capacities,
    )

    def latency(budgeted: Budgeted) -> float:
        schedule = budgeted.schedule
        run_rates = replace(rates, staging_bytes=schedule.staging_bytes)
        return predict_run(instance, budgeted.plan, schedule, run_rates).latency_ms

    budget = Budget(program, instance, limit, partial(solve, effort=effort), latency)
    budgeted = budget.plan() if strategy is None else budget.by_strategy(strategy)
    budgeted = replace(budgeted, plan=replace(budgeted.plan, program=program.digest))
    notes = (*program.notes, *capacities.notes, *_broken(budgeted))
    return StreamingPlan(
        program,
        device,
        capacities,
        instance,
        budgeted,
        replace(rates, staging_bytes=budgeted.schedule.staging_bytes),
        limit,
        tuple(dict.fromkeys(notes)),
    )


def _broken(budgeted: Budgeted) -> list[str]:
    """Name the rules that a strategy breaks, if any."""
    if not budgeted.problems:
        return []
    name = budgeted.plan.solver.get("strategy", "the strategy")
    more = len(budgeted.problems) - 1
    rest = f", and {more:,} more" if more else ""
    return [f"{name} breaks rules of the overlap problem: {budgeted.problems[0]}{rest}"]


LAMBDAS = (0.9, 0.2, 0.1, 0.05, 0.03)
PARTS = (2, 5)
"""M_peak is lowered to these parts of what is in flight with the first lambda."""

SETTINGS = len(LAMBDAS) + len(PARTS)


@dataclass(frozen=True)
class Tradeoff:
    """One setting, M_peak in bytes, and the plan that it gives."""

    lam: float
    m_peak: int | None
    plan: StreamingPlan


def trade_off(
    program: Program,
    device: Device,
    *,
    m_peak: int | None = M_PEAK_BYTES,
    chunk: int = CHUNK_BYTES,
    effort: float = 1.0,
    progress: Callable[[], object] | None = None,
) -> tuple[Tradeoff, ...]:
    """Plan a program with each of `LAMBDAS` at `m_peak`, and with the first at lower ones.

    Returns the plans, least memory first. progress: called after each of `SETTINGS`. The other options are
    those of `torchedge.plan`, sizes in bytes; its errors are raised here too.
    """

    def planned(lam: float, peak: int | None) -> Tradeoff:
        plan = plan_program(program, device, m_peak=peak, lam=lam, chunk=chunk, effort=effort)
        if progress is not None:
            progress()
        return Tradeoff(lam, peak, plan)

    first = planned(LAMBDAS[0], m_peak)
    in_flight = first.plan.plan.peak_chunks
    settings: list[tuple[float, int | None]] = [(lam, m_peak) for lam in LAMBDAS[1:]]
    settings += [(LAMBDAS[0], max(1, in_flight // part) * chunk) for part in PARTS]
    others = [planned(lam, peak) for lam, peak in settings]
    return tuple(sorted([first, *others], key=lambda point: point.plan.timeline.allocated_bytes))
