"""Optimal overlap plans of tiny instances by exhaustive search, which shares no code with the library.

`best_plan` tries every preload set and every first loading layer, and asks for each choice whether loads
exist. That question has an exact answer. Let z_w be the first layer that may load weight w, so that its
window is [z_w, i_w - 1]. Going from the last layer to the first, let each layer load as much as it can of the
weights whose windows are open, those with the latest z_w first. Windows and capacities alone are then kept
whenever they can be (earliest deadline first, in reversed time). What is in flight at layer l is what weights
used by then hold (fixed by the choice) and the chunks that layers <= l load for later ones; no allocation has
fewer of those, as none can load more in layers > l than one that always loads all it can. So the one
allocation is within the limits at every layer, or none is. Whole weights in flight depend on the z_w alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan

Allocation = dict[int, dict[int, int]]
"""Chunks by layer of each streamed weight, which its position names."""


def best_plan(instance: Instance) -> OverlapPlan:
    """Return an optimal plan, or an INFEASIBLE one."""
    return _Search(instance).run()


def smallest_memory(instance: Instance) -> int:
    """Return the smallest `memory_chunks` with which the instance has a plan."""
    total = sum(w.chunks for w in instance.weights)
    for limit in range(total):
        if best_plan(replace(instance, memory_chunks=limit)).status != "INFEASIBLE":
            return limit
    return total


class _Search:
    def __init__(self, instance: Instance) -> None:
        self.instance, self.weights = instance, instance.weights
        self.layers = len(instance.layers)
        lam = Fraction(str(instance.lam)).limit_denominator(10**6)
        self.options = [sorted(self._options(w, lam)) for w in self.weights]
        cheapest = [options[0][0] for options in self.options]
        self.rest = [sum(cheapest[place:], Fraction(0)) for place in range(len(cheapest) + 1)]
        self.best: tuple[Fraction, dict[int, int]] | None = None

    def _options(self, weight: Weight, lam: Fraction) -> Iterator[tuple[Fraction, int]]:
        """Cost and first loading layer of each way to have a weight; layer 0: preloaded."""
        yield lam * weight.chunks, 0
        for start in range(1, weight.first_use):
            distance = weight.first_use - start
            yield (1 - lam) * distance * (weight.chunks if self.instance.distance == "chunks" else 1), start

    def run(self) -> OverlapPlan:
        self._try(0, Fraction(0), {})
        if self.best is None:
            return OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "every choice was tried"})
        cost, starts = self.best
        allocation = pack(self.instance, starts)
        assert allocation is not None
        preload = tuple(w.name for place, w in enumerate(self.weights) if not starts[place])
        peak = max(in_flight(self.instance, allocation, None))
        loads = as_loads(self.instance, allocation)
        return OverlapPlan(
            "OPTIMAL", float(cost), float(cost), preload, loads, peak, {"strategy": "exhaustive"}
        )

    def _try(self, place: int, cost: Fraction, starts: dict[int, int]) -> None:
        """Choose for the weights from `place` on; what is chosen so far has to be possible by itself."""
        if self.best is not None and cost + self.rest[place] >= self.best[0]:
            return
        if not self._possible(starts):
            return
        if place == len(self.weights):
            self.best = cost, dict(starts)
            return
        for price, start in self.options[place]:
            self._try(place + 1, cost + price, {**starts, place: start})

    def _possible(self, starts: dict[int, int]) -> bool:
        allocation = pack(self.instance, starts)
        if allocation is None:
            return False
        preloaded = sum(self.weights[place].chunks for place, start in starts.items() if not start)
        return within_limits(self.instance, preloaded, in_flight(self.instance, allocation, starts))


def pack(instance: Instance, starts: dict[int, int]) -> Allocation | None:
    """Load every streamed weight as late as can be within its window; None where windows are too narrow."""
    left = {place: instance.weights[place].chunks for place, start in starts.items() if start}
    allocation: Allocation = {place: {} for place in left}
    for number in range(len(instance.layers), 0, -1):
        free = instance.layers[number - 1].capacity_chunks
        for place in sorted(left, key=lambda place: -starts[place]):
            chunks = min(left[place], free) if number < instance.weights[place].first_use else 0
            if chunks:
                allocation[place][number] = chunks
                left[place] -= chunks
                free -= chunks
            if left[place] and starts[place] == number:
                return None
    return allocation


def in_flight(instance: Instance, allocation: Allocation, starts: dict[int, int] | None) -> list[int]:
    """Return what is in flight at each layer; whole weights from `starts`, or their first load, on."""
    found = []
    for number in range(1, len(instance.layers) + 1):
        chunks = 0
        for place, loads in allocation.items():
            weight = instance.weights[place]
            if weight.last_use < number:
                continue
            if instance.residency == "weights":
                start = min(loads) if starts is None else starts[place]
                chunks += weight.chunks if start <= number else 0
            else:
                chunks += sum(count for layer, count in loads.items() if layer <= number)
        found.append(chunks)
    return found


def within_limits(instance: Instance, preloaded: int, flying: list[int]) -> bool:
    """Whether M_peak and the memory limit are kept."""
    peak = max(flying)
    return (instance.m_peak_chunks is None or peak <= instance.m_peak_chunks) and (
        instance.memory_chunks is None or preloaded + peak <= instance.memory_chunks
    )


def as_loads(instance: Instance, allocation: Allocation) -> tuple[ChunkLoad, ...]:
    """Return the loads of an allocation, chunks in order of layers."""
    loads = []
    for place, by_layer in allocation.items():
        first = 0
        for number, chunks in sorted(by_layer.items()):
            loads.append(ChunkLoad(instance.weights[place].name, number, chunks, first))
            first += chunks
    return tuple(loads)
