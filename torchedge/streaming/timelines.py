"""What a simulated run did and when: layers, loads, stalls, and memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchedge.devices import Provenance
from torchedge.storage import Document
from torchedge.streaming.instances import MEBIBYTE, Instance

__all__ = [
    "LayerRuns",
    "LoadRuns",
    "MemoryCurve",
    "MemoryUse",
    "RunTimeline",
    "Stalls",
    "join_curves",
    "timeline_document",
]

Times = NDArray[np.float64]
Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in unified memory (weights not yet transformed), in texture memory (weights), of activations.

    `total` is of all three together: of a peak it is the peak of the sum, not the sum of the peaks.
    """

    unified: float
    texture: float
    activations: float
    total: float


@dataclass(frozen=True)
class MemoryCurve:
    """Memory as a step function: entry k holds from `times_ms[k]` to `times_ms[k + 1]`, the last ever after.

    All arrays have the same length of at least 1; times rise strictly. Bytes.
    """

    times_ms: Times
    unified: Bytes
    texture: Bytes
    activations: Bytes

    @cached_property
    def total(self) -> Bytes:
        """Bytes of all three together."""
        return self.unified + self.texture + self.activations

    @cached_property
    def peak(self) -> MemoryUse:
        """The most of each, and of all together."""
        return MemoryUse(*(int(x.max()) for x in self._parts()))

    @cached_property
    def average(self) -> MemoryUse:
        """The average of each over time; where no time passes, what is held at the end."""
        span = float(self.times_ms[-1] - self.times_ms[0])
        if not span > 0:
            return MemoryUse(*(float(x[-1]) for x in self._parts()))
        lasting = np.diff(self.times_ms)
        return MemoryUse(*(float(x[:-1] @ lasting) / span for x in self._parts()))

    def _parts(self) -> tuple[Bytes, ...]:
        return self.unified, self.texture, self.activations, self.total

    def shifted(self, by_ms: float) -> MemoryCurve:
        """Return the same curve, so much later."""
        return MemoryCurve(self.times_ms + by_ms, self.unified, self.texture, self.activations)


def join_curves(curves: Sequence[MemoryCurve]) -> MemoryCurve:
    """Return curves as one, each beginning where the one before ends, which leaves nothing behind."""
    ends = np.cumsum([0.0] + [float(c.times_ms[-1]) for c in curves])
    moved = [c.shifted(float(start)) for c, start in zip(curves, ends[:-1], strict=True)]
    kept = [slice(None, -1)] * (len(moved) - 1) + [slice(None)]
    return MemoryCurve(
        *(
            np.concatenate([getattr(c, name)[part] for c, part in zip(moved, kept, strict=True)])
            for name in ("times_ms", "unified", "texture", "activations")
        )
    )


@dataclass(frozen=True)
class LayerRuns:
    """When each layer (entry 0 is layer 1) starts and ends, ms, and why not sooner.

    A layer waits `waits_ms` for the disk, runs `alone_ms` by itself and `slowed_ms` longer for the
    `load_bytes` that it loads beside.
    """

    starts_ms: Times
    ends_ms: Times
    alone_ms: Times
    waits_ms: Times
    slowed_ms: Times
    load_bytes: Bytes


@dataclass(frozen=True)
class LoadRuns:
    """Every load: its weight (place in the instance), the layer that loads it (0: preloaded), bytes, times.

    The disk reads it into unified memory from `read_starts_ms` to `read_ends_ms`; it moves to texture memory
    from `starts_ms` to `ends_ms`.
    """

    weights: NDArray[np.int64]
    layers: NDArray[np.int64]
    nbytes: Bytes
    read_starts_ms: Times
    read_ends_ms: Times
    starts_ms: Times
    ends_ms: Times


@dataclass(frozen=True, slots=True)
class Stalls:
    """What a run lost, ms: layers waiting for the disk, and layers slowed by the loads beside their work."""

    disk: float
    transform: float


@dataclass(frozen=True)
class RunTimeline:
    """One simulated run of a plan.

    Initialisation is the time until the preloaded weights are in texture memory; the execution of all layers
    follows, and `latency_ms` is both: what the paper calls integrated latency. `provenance` is that of the
    rates it stands on.
    """

    instance: Instance
    strategy: str
    initialisation_ms: float
    layers: LayerRuns
    loads: LoadRuns
    memory: MemoryCurve
    provenance: Provenance

    @property
    def latency_ms(self) -> float:
        """Integrated latency: initialisation and execution."""
        return float(self.layers.ends_ms[-1])

    @property
    def execution_ms(self) -> float:
        """From the end of the initialisation to the end of the last layer."""
        return self.latency_ms - self.initialisation_ms

    @cached_property
    def stalls(self) -> Stalls:
        """What the execution lost: it takes the layers' own latencies and these."""
        return Stalls(float(self.layers.waits_ms.sum()), float(self.layers.slowed_ms.sum()))

    @property
    def preloaded_bytes(self) -> int:
        """Bytes in texture memory before the first layer starts."""
        return int(self.loads.nbytes[self.loads.layers == 0].sum())

    def __str__(self) -> str:
        peak, average = self.memory.peak.total / MEBIBYTE, self.memory.average.total / MEBIBYTE
        return (
            f"{self.instance.name}, {self.strategy}: {self.latency_ms:.1f} ms, of these "
            f"{self.initialisation_ms:.1f} initialisation, {self.stalls.disk:.1f} waiting for the disk, "
            f"{self.stalls.transform:.1f} slowed by loads; memory {peak:.1f} MiB at most, "
            f"{average:.1f} MiB on average ({self.provenance})"
        )


def timeline_document(timeline: RunTimeline) -> Document:
    """Return the JSON document of a run's figures: ms and bytes."""

    def use(memory: MemoryUse) -> Document:
        return {
            "unified_bytes": round(memory.unified),
            "texture_bytes": round(memory.texture),
            "activation_bytes": round(memory.activations),
            "total_bytes": round(memory.total),
        }

    return {
        "model": timeline.instance.name,
        "strategy": timeline.strategy,
        "latency_ms": timeline.latency_ms,
        "initialisation_ms": timeline.initialisation_ms,
        "execution_ms": timeline.execution_ms,
        "stall_ms": {"disk": timeline.stalls.disk, "transform": timeline.stalls.transform},
        "preloaded_bytes": timeline.preloaded_bytes,
        "peak": use(timeline.memory.peak),
        "average": use(timeline.memory.average),
        "provenance": str(timeline.provenance),
    }
