"""From decisions to plans: what each layer loads of each weight, what that costs, and the plan it makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan, Status

__all__ = ["Chunks", "in_flight", "make_plan", "price", "refuse", "used_chunks"]

Chunks = Mapping[str, Mapping[int, int]]
"""The chunks x_{w,l} of streamed weights by name and layer; a weight that is not in it is preloaded."""


def in_flight(instance: Instance, weights: Sequence[Weight], streamed: Chunks) -> list[int]:
    """Return the chunks in flight (C2) at layers 1..N (entry 0 is 0), as the residency counts them."""
    change = [0] * (len(instance.layers) + 2)
    for w in weights:
        loads = streamed.get(w.name)
        if not loads:
            continue
        if instance.residency == "weights":
            loads = {min(loads): w.chunks}
        for layer, chunks in loads.items():
            change[layer] += chunks
        change[w.last_use + 1] -= w.chunks
    return list(accumulate(change[:-1]))


def price(instance: Instance, weights: Iterable[Weight], streamed: Chunks) -> int:
    """Return what weights cost in whole prices: p * preloaded chunks + d * distances (`Instance.prices`)."""
    p, d, _ = instance.prices
    total = 0
    for w in weights:
        loads = streamed.get(w.name)
        if loads is None:
            total += p * w.chunks
        else:
            total += d * (w.first_use - min(loads)) * (w.chunks if instance.distance == "chunks" else 1)
    return total


def make_plan(
    instance: Instance,
    streamed: Chunks,
    solver: Mapping[str, object],
    *,
    optimal: bool = False,
    bound: int | None = None,
) -> OverlapPlan:
    """Build a plan from what is streamed; `bound` is the lower bound in whole prices (`Instance.prices`).

    The solver facts tell which limits the plan keeps, as naive strategies keep none.
    """
    preload = [w for w in instance.weights if w.name not in streamed]
    preloaded = sum(w.chunks for w in preload)
    unit = instance.prices[2]
    loads = []
    sums = [0] * (len(instance.layers) + 1)
    for w in instance.weights:
        first = 0
        for layer, chunks in sorted(streamed.get(w.name, {}).items()):
            loads.append(ChunkLoad(w.name, layer, chunks, first))
            first += chunks
            sums[layer] += chunks
    loads.sort(key=lambda load: load.layer)
    peak = max(in_flight(instance, instance.weights, streamed))
    facts = {
        "respects_capacity": all(
            used <= layer.capacity_chunks for used, layer in zip(sums[1:], instance.layers, strict=True)
        ),
        "respects_m_peak": instance.m_peak_chunks is None or peak <= instance.m_peak_chunks,
        "respects_memory": instance.memory_chunks is None or peak + preloaded <= instance.memory_chunks,
    }
    return OverlapPlan(
        "OPTIMAL" if optimal else "FEASIBLE",
        float(Fraction(price(instance, instance.weights, streamed), unit)),
        None if bound is None else float(Fraction(bound, unit)),
        tuple(w.name for w in preload),
        tuple(loads),
        peak,
        {**solver, **facts},
    )


def refuse(solver: Mapping[str, object], reason: str) -> OverlapPlan:
    """Build the plan that says that there is none, and why."""
    status: Status = "INFEASIBLE"
    return OverlapPlan(status, None, None, (), (), 0, {**solver, "reason": reason})


def used_chunks(instance: Instance, plan: OverlapPlan) -> int:
    """Return the chunks that a plan preloads and, at most, has in flight together."""
    chosen = set(plan.preload)
    return plan.peak_chunks + sum(w.chunks for w in instance.weights if w.name in chosen)
