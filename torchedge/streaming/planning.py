"""From a captured graph to a streaming plan: lay out, fuse, rate, solve, verify, simulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torchedge.devices import Device
from torchedge.errors import InputError
from torchedge.graphs import Graph
from torchedge.streaming.budgets import parse_bytes, plan_within
from torchedge.streaming.capacities import CHUNK_BYTES, LAMBDA, M_PEAK_BYTES, make_instance, rate_capacities
from torchedge.streaming.fusion import fuse
from torchedge.streaming.instances import Distance, Instance, Residency
from torchedge.streaming.layering import Precision, lay_out
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.plans import Plan
from torchedge.streaming.rates import derive_rates
from torchedge.streaming.solving import solve
from torchedge.streaming.splitting import split_adaptively
from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["Fusion", "plan_graph"]

Fusion = Literal["adaptive", "all", "none"]
Amount = int | str | None


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
    solver: Callable[[Instance], Plan] | None = None,
) -> StreamingPlan:
    """Plan the streaming of a captured forward pass. The options are those of `torchedge.plan`.

    solver: replaces the solver (a strategy to compare with); its plans are verified all the same.

    Raises:
        DeviceError: the device's profile lacks a figure that planning takes.
        InputError: an option is out of range.
        PlanError: no plan stays within the memory limit; the message names one that works.
    """
    if fusion not in get_args(Fusion):
        raise InputError(f"fusion is {fusion!r}; expected one of {', '.join(get_args(Fusion))}")
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    peak = None if m_peak is None else parse_bytes(m_peak, "m_peak")
    chunk_bytes = parse_bytes(chunk, "chunk")
    laid = graph if isinstance(graph, InferenceGraph) else lay_out(graph, precision=precision)

    def chosen(instance: Instance) -> Plan:
        return solve(instance, effort=effort) if solver is None else solver(instance)

    def quick(instance: Instance) -> Plan:
        return solve(instance, effort=max(0.01, effort / 10)) if solver is None else solver(instance)

    def posed(kernels: InferenceGraph) -> Instance:
        return make_instance(
            kernels,
            device,
            chunk_bytes=chunk_bytes,
            m_peak_bytes=peak,
            lam=lam,
            residency=residency,
            distance=distance,
        )

    if fusion == "adaptive":
        laid = split_adaptively(laid, posed, quick).graph
    elif fusion == "all":
        laid = fuse(laid)
    capacities = rate_capacities(laid, device, chunk_bytes=chunk_bytes)
    rates = derive_rates(device)
    budgeted = plan_within(posed(laid), limit, rates, laid.activation_bytes, chosen)
    notes = (*laid.notes, *capacities.notes)
    return StreamingPlan(laid, device, capacities, rates, budgeted, limit, tuple(dict.fromkeys(notes)))
