"""From a captured graph to a streaming plan: lay out, fuse, rate, solve, verify, simulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from torchedge.devices import Device
from torchedge.errors import DeviceError, InputError
from torchedge.graphs import Graph
from torchedge.streaming.budgets import Budgeted, parse_bytes, plan_by_strategy, plan_within
from torchedge.streaming.capacities import (
    CHUNK_BYTES,
    LAMBDA,
    M_PEAK_BYTES,
    Capacities,
    make_instance,
    rate_capacities,
)
from torchedge.streaming.fusion import fuse
from torchedge.streaming.instances import Distance, Instance, Residency
from torchedge.streaming.layering import Precision, lay_out
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import Rates, derive_rates
from torchedge.streaming.solving import solve
from torchedge.streaming.splitting import split_adaptively
from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["Fusion", "check_rates", "plan_graph"]

Fusion = Literal["adaptive", "all", "none"]
Amount = int | str | None

QUICK = 0.1
"""The share of the effort with which kernels are chosen and a memory limit is searched for."""


def plan_graph(
    graph: Graph | InferenceGraph,
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
