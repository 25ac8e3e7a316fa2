"""From a graph to its streaming plan, and to plans of several settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torchedge.devices import Device
from torchedge.errors import DeviceError, InputError
from torchedge.graphs import ForwardGraph
from torchedge.streaming.budgets import Budgeted, parse_bytes, plan_by_strategy, plan_within
from torchedge.streaming.capacities import (
    CHUNK_BYTES,
    LAMBDA,
    M_PEAK_BYTES,
    Capacities,
    make_instance,
    rate_capacities,
)
from torchedge.streaming.fusion import fuse, split_adaptively
from torchedge.streaming.instances import Distance, Instance, Residency
from torchedge.streaming.layering import InferenceGraph, Precision, lay_out
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import Rates, derive_rates
from torchedge.streaming.solving import solve
from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["LAMBDAS", "SETTINGS", "Fusion", "Tradeoff", "check_rates", "plan_graph", "trade_off"]

Fusion = Literal["adaptive", "all", "none"]
Amount = int | str | None

QUICK = 0.1
"""The share of the effort with which kernels are chosen and a memory limit is searched for."""


def plan_graph(
    graph: ForwardGraph | InferenceGraph,
    device: Device,
    *,
    memory_limit: Amount = None,
    m_peak: Amount = M_PEAK_BYTES,
    lam: float = LAMBDA,
    chunk: int | str = CHUNK_BYTES,
    precision: Precision = "float16",
    fusion: Fusion = "adaptive",
    residency: Residency = "chunks",
    distance: Distance = "layers",
    effort: float = 1.0,
    strategy: Callable[[Instance], OverlapPlan] | None = None,
) -> StreamingPlan:
    """Plan the streaming of a captured forward pass. The options are those of `torchedge.plan`.

    graph: a graph of inference, or an InferenceGraph, whose kernels are fused as `fusion` says unless they
    are already ("none").
    strategy: plans in the solver's place, to be compared with it; kernels are chosen as without it. It may
    break capacities and M_peak: `notes` tell.

    Raises:
        DeviceError: the device's profile lacks a figure that planning takes.
        InputError: an option is out of range.
        LimitError: no plan stays within the memory limit; the message names one that works.
    """
    if fusion not in get_args(Fusion):
        raise InputError(f"fusion is {fusion!r}; expected one of {', '.join(get_args(Fusion))}")
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    peak = None if m_peak is None else parse_bytes(m_peak, "m_peak")
    chunk_bytes = parse_bytes(chunk, "chunk")
    rates = check_rates(device)
    laid = graph if isinstance(graph, InferenceGraph) else lay_out(graph, precision=precision)
    solver = partial(solve, effort=effort)
    quick = partial(solve, effort=max(0.01, QUICK * effort))

    def posed(kernels: InferenceGraph, capacities: Capacities | None = None) -> Instance:
        return make_instance(
            kernels,
            device,
            chunk_bytes=chunk_bytes,
            m_peak_bytes=peak,
            lam=lam,
            residency=residency,
            distance=distance,
            capacities=capacities,
        )

    if fusion == "adaptive":
        laid = split_adaptively(laid, posed, quick).graph
    elif fusion == "all":
        laid = fuse(laid)
    capacities = rate_capacities(laid, device, chunk_bytes=chunk_bytes)
    instance, alive = posed(laid, capacities), laid.activation_bytes
    if strategy is None:
        budgeted = plan_within(instance, limit, rates, alive, solver, quick=quick)
    else:
        budgeted = plan_by_strategy(instance, limit, rates, alive, strategy)
    notes = (*laid.notes, *capacities.notes, *_broken(budgeted))
    return StreamingPlan(laid, device, capacities, budgeted, limit, tuple(dict.fromkeys(notes)))


def check_rates(device: Device) -> Rates:
    """Return how fast a device moves weights.

    Raises:
        DeviceError: its profile does not say how fast its storage is read.
    """
    if "disk_read_gb_s" not in device.figures:
        raise DeviceError(
            f"{device.name} gives no disk_read_gb_s, the rate at which weights are read from storage; add "
            f"[figures.disk_read_gb_s] with value, unit, provenance and source to "
            f"{device.folder / 'device.toml'}, or plan for another device, such as adreno-750"
        )
    return derive_rates(device)


def _broken(budgeted: Budgeted) -> list[str]:
    """Say which rule a strategy breaks, if any."""
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
    graph: ForwardGraph | InferenceGraph,
    device: Device,
    *,
    m_peak: int | None = M_PEAK_BYTES,
    chunk: int = CHUNK_BYTES,
    precision: Precision = "float16",
    fusion: Fusion = "adaptive",
    effort: float = 1.0,
    progress: Callable[[], object] | None = None,
) -> tuple[Tradeoff, ...]:
    """Plan a model with every of `LAMBDAS` at `m_peak`, and with the first at lower ones; least memory first.

    All use the kernels of the first setting. progress: called after each of `SETTINGS`. The
    other options are those of `torchedge.plan`, sizes in bytes; what it raises of them is raised here.
    """

    def planned(
        kernels: ForwardGraph | InferenceGraph, lam: float, peak: int | None, how: Fusion
    ) -> Tradeoff:
        plan = plan_graph(
            kernels, device, m_peak=peak, lam=lam, chunk=chunk, precision=precision, fusion=how, effort=effort
        )
        if progress is not None:
            progress()
        return Tradeoff(lam, peak, plan)

    first = planned(graph, LAMBDAS[0], m_peak, fusion)
    in_flight = first.plan.plan.peak_chunks
    settings: list[tuple[float, int | None]] = [(lam, m_peak) for lam in LAMBDAS[1:]]
    settings += [(LAMBDAS[0], max(1, in_flight // part) * chunk) for part in PARTS]
    others = [planned(first.plan.graph, lam, peak, "none") for lam, peak in settings]
    return tuple(sorted([first, *others], key=lambda point: point.plan.timeline.memory.average.total))
