"""What a strategy still has to decide, what decided weights leave of each limit, and plans from decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import Load, Plan, Status

__all__ = ["Chunks", "Window", "decide", "in_flight", "make_plan", "price", "refuse", "whole_window"]

Chunks = Mapping[str, Mapping[int, int]]
"""The chunks x_{w,l} of streamed weights by name and layer; a weight that is not in it is preloaded."""


@dataclass(frozen=True, slots=True)
class Window:
    """Weights to decide, and what is left for them at layers 1..N (entry 0 of each tuple is unused).

    `capacity` is left of C3, `in_flight` of C2 and `memory` of the limit on preloaded chunks and those in
    flight together (both in chunks; None: no limit).
    """

    instance: Instance
    weights: tuple[Weight, ...]
    capacity: tuple[int, ...]
    in_flight: tuple[int, ...] | None
    memory: tuple[int, ...] | None


def whole_window(instance: Instance) -> Window:
    """Return the window in which nothing is decided yet."""

    def level(limit: int | None) -> tuple[int, ...] | None:
        # More than all chunks is no limit: small numbers keep solvers' sums from overflowing.
        return None if limit is None else (min(limit, instance.total_chunks),) * (len(instance.layers) + 1)

    most = instance.total_chunks
    capacity = (0, *(min(layer.capacity_chunks, most) for layer in instance.layers))
    return Window(
        instance, instance.weights, capacity, level(instance.m_peak_chunks), level(instance.memory_chunks)
    )


def decide(window: Window, weights: Iterable[Weight], streamed: Chunks) -> Window:
    """Return what is left after `weights` are decided: loaded as `streamed` says, else preloaded."""
    decided = tuple(weights)
    names = {w.name for w in decided}
    capacity = list(window.capacity)
    for w in decided:
        for layer, chunks in streamed.get(w.name, {}).items():
            capacity[layer] -= chunks
    taken = in_flight(window.instance, decided, streamed)
    preloaded = sum(w.chunks for w in decided if w.name not in streamed)
    room, memory = window.in_flight, window.memory
    return replace(
        window,
        weights=tuple(w for w in window.weights if w.name not in names),
        capacity=tuple(capacity),
        in_flight=room and tuple(left - used for left, used in zip(room, taken, strict=True)),
        memory=memory and tuple(left - used - preloaded for left, used in zip(memory, taken, strict=True)),
    )


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
) -> Plan:
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
            loads.append(Load(w.name, layer, chunks, first))
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
    return Plan(
        "OPTIMAL" if optimal else "FEASIBLE",
        float(Fraction(price(instance, instance.weights, streamed), unit)),
        None if bound is None else float(Fraction(bound, unit)),
        tuple(w.name for w in preload),
        tuple(loads),
        peak,
        {**solver, **facts},
    )


def refuse(solver: Mapping[str, object], reason: str) -> Plan:
    """Build the plan that says that there is none, and why."""
    status: Status = "INFEASIBLE"
    return Plan(status, None, None, (), (), 0, {**solver, "reason": reason})
