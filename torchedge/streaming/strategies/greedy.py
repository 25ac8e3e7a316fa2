"""The heuristic behind LC-OPG: late loading in order of consumption, the largest weights preloaded."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from itertools import accumulate

from torchedge.streaming.decisions import Chunks, in_flight, make_plan, refuse
from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.strategies.windows import Window, whole_window

__all__ = ["pack", "plan_greedily"]

STRATEGY = "greedy"


def plan_greedily(instance: Instance) -> OverlapPlan:
    """Stream what fits, as late as it fits (FlashMem, section 3.2: the greedy heuristic backup).

    Weights are packed backwards in order of consumption; where a layer's capacity or M_peak is exceeded, the
    largest weight concerned is preloaded. Takes O((layers + weights) log weights). The plan is FEASIBLE
    without a lower bound; INFEASIBLE only where `memory_chunks` is exceeded, and then unproven.
    """
    streamed = pack(whole_window(instance))
    if streamed is None:
        return refuse(
            {"strategy": STRATEGY, "proven": False},
            f"the greedy plan needs more than {instance.memory_chunks} chunks of memory; raise memory_chunks "
            "or solve exactly",
        )
    return make_plan(instance, streamed, {"strategy": STRATEGY})


def pack(window: Window) -> Chunks | None:
    """Return a valid packing of the window's weights; None where it exceeds the window's memory."""
    chosen = _fit_capacity(window)
    streamed = _sweep(window, chosen)
    if len(streamed) < len(chosen):
        # Chunks loaded of weights that ended in W took layers from others: pack those that stay once more.
        again = _sweep(window, [w for w in chosen if w.name in streamed])
        streamed = again if len(again) == len(streamed) else streamed
    return streamed if _fits_memory(window, streamed) else None


def _fits_memory(window: Window, streamed: Chunks) -> bool:
    if window.memory is None:
        return True
    preloaded = sum(w.chunks for w in window.weights if w.name not in streamed)
    used = in_flight(window.instance, window.weights, streamed)
    return all(taken + preloaded <= left for taken, left in zip(used[1:], window.memory[1:], strict=True))


def _fit_capacity(window: Window) -> list[Weight]:
    """Preload the largest weights until D(k) <= C_1 + ... + C_(k-1): the rest can be loaded in time."""
    before = [0, *accumulate(window.capacity)]
    largest: list[tuple[int, int]] = []
    preloaded, demand = set(), 0
    order = sorted(range(len(window.weights)), key=lambda place: window.weights[place].first_use)
    for place in order:
        w = window.weights[place]
        heapq.heappush(largest, (-w.chunks, place))
        demand += w.chunks
        while demand > before[w.first_use]:
            size, dropped = heapq.heappop(largest)
            demand += size
            preloaded.add(dropped)
    return [w for place, w in enumerate(window.weights) if place not in preloaded]


def _sweep(window: Window, weights: Collection[Weight]) -> Chunks:
    """Load backwards from the last layer; preload the largest weight in flight wherever C2 is exceeded."""
    whole = window.instance.residency == "weights"
    dying, ready = _by_layer(weights, last=True), _by_layer(weights, last=False)
    left = {w.name: w.chunks for w in weights}
    loads: dict[str, dict[int, int]] = {w.name: {} for w in weights}
    queue: deque[Weight] = deque()
    largest: list[tuple[int, str]] = []
    flying = 0
    for layer in range(len(window.capacity) - 1, 0, -1):
        for w in dying.get(layer, ()):
            flying += w.chunks
            heapq.heappush(largest, (-w.chunks, w.name))
        while window.in_flight is not None and flying > window.in_flight[layer]:
            size, name = heapq.heappop(largest)
            if name in loads and left[name]:
                flying -= -size if whole else left[name]
                del loads[name]
        queue.extend(ready.get(layer + 1, ()))
        room = window.capacity[layer]
        for w, chunks in _serve(queue, left, loads, room):
            loads[w.name][layer] = chunks
            left[w.name] -= chunks
            if not whole:
                flying -= chunks
            elif not left[w.name]:
                flying -= w.chunks
    return loads


def _serve(
    queue: deque[Weight], left: dict[str, int], loads: dict[str, dict[int, int]], room: int
) -> Iterator[tuple[Weight, int]]:
    """Yield what one layer loads of the queue; finished and preloaded weights leave it."""
    while queue and room:
        w = queue[0]
        if w.name in loads:
            chunks = min(room, left[w.name])
            room -= chunks
            yield w, chunks
        if w.name not in loads or not left[w.name]:
            queue.popleft()


def _by_layer(weights: Collection[Weight], *, last: bool) -> dict[int, list[Weight]]:
    """Weights by last or first use; those first used together smallest first, which shortens distances."""
    found: dict[int, list[Weight]] = {}
    for w in sorted(weights, key=lambda w: (w.chunks, w.name)):
        found.setdefault(w.last_use if last else w.first_use, []).append(w)
    return found
