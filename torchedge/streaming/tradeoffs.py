"""Latency against memory, as lambda and M_peak sweep (FlashMem, section 5.4, Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchedge.devices import Device
from torchedge.graphs import Graph
from torchedge.streaming.capacities import CHUNK_BYTES, M_PEAK_BYTES
from torchedge.streaming.layering import Precision
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.planning import Fusion, plan_graph
from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["LAMBDAS", "SETTINGS", "Tradeoff", "trade_off"]

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
    graph: Graph | InferenceGraph,
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

    The kernels are those of the first setting in all of them. progress: called after each of `SETTINGS`. The
    other options are those of `torchedge.plan`, sizes in bytes; what it raises of them is raised here.
    """

    def planned(kernels: Graph | InferenceGraph, lam: float, peak: int | None, how: Fusion) -> Tradeoff:
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
