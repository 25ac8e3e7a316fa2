"""What a strategy still has to decide, and what decided weights leave of each limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchedge.streaming.decisions import Chunks, in_flight
from torchedge.streaming.instances import Instance, Weight

__all__ = ["Window", "decide", "whole_window"]


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
