"""The simulated execution of an overlap plan, event by event: disk, transforms, layers; memory over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from torchedge.devices import Provenance
from torchedge.errors import InputError, PlanError
from torchedge.storage import Document
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.rates import Rates

__all__ = [
    "LayerRuns",
    "LoadRuns",
    "MemoryCurve",
    "MemoryUse",
    "RunTimeline",
    "Stalls",
    "join_curves",
    "simulate_plan",
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
        """The average of each over time; the last value if no time passes."""
        span = float(self.times_ms[-1] - self.times_ms[0])
        if not span > 0:
            return MemoryUse(*(float(x[-1]) for x in self._parts()))
        lasting = np.diff(self.times_ms)
        return MemoryUse(*(float(x[:-1] @ lasting) / span for x in self._parts()))

    def _parts(self) -> tuple[Bytes, ...]:
        return self.unified, self.texture, self.activations, self.total

    def shifted(self, by_ms: float) -> MemoryCurve:
        """Return the same curve, later by `by_ms`."""
        return MemoryCurve(self.times_ms + by_ms, self.unified, self.texture, self.activations)


def join_curves(curves: Sequence[MemoryCurve]) -> MemoryCurve:
    """Return curves one after the other as one; each frees all memory at its end."""
    ends = np.cumsum([0.0] + [float(c.times_ms[-1]) for c in curves])
    moved = [c.shifted(float(start)) for c, start in zip(curves, ends[:-1], strict=True)]
    slices = [slice(None, -1)] * (len(moved) - 1) + [slice(None)]
    return MemoryCurve(
        *(
            np.concatenate([getattr(c, name)[part] for c, part in zip(moved, slices, strict=True)])
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
    """The time a run lost (ms): waiting for the disk, and slowed by loads beside the layers' work."""

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
        """The time lost: the execution takes the layers' own latencies and these."""
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


MOST_BYTES = 2**60
"""Sums of bytes stay within 64 bits."""

MOST_REQUESTS = 2**17
"""In larger models a request reads more, so that the time of a simulation stays bounded."""


def simulate_plan(
    instance: Instance,
    plan: OverlapPlan,
    rates: Rates,
    activation_bytes: Sequence[int] | None = None,
    *,
    keep_preloaded: bool = True,
) -> RunTimeline:
    """Run a plan on a device of three queues that work side by side: disk, transforms, layers.

    The disk reads in the order in which the plan needs the weights: the preloaded ones by first use, then the
    loads layer by layer, in requests of `rates.request_bytes` at most. A stand-alone transform moves each
    preloaded weight to texture memory once it is read; layer 1 may start when the last has arrived. A layer
    starts when the one before has ended and all that it loads has been read: a kernel is not launched on
    weights that are not there. It takes `rates.loaded_ms` and moves its loads to texture memory one after the
    other, spread evenly over its run.

    A read starts when the bytes in unified memory leave room for it within `rates.staging_bytes`; the limit
    gives way for a weight, or the loads of one layer, that alone are larger. Bytes are in unified memory from
    the start of their read to the end of their transform, in texture memory from its start to the end of the
    last layer that uses the weight. Preloaded ones stay to the end of the run, or, where `keep_preloaded` is
    False, to their last use too. `activation_bytes` (one entry a layer) are held from the end of the layer
    before to the end of the layer.

    Capacities and limits of the instance are not enforced: what exceeds a layer's capacity costs time.

    Raises:
        PlanError: the plan is INFEASIBLE, names unknown weights or layers, or a weight is not wholly in
            texture memory before the first layer that uses it.
        InputError: `activation_bytes` has not one entry a layer.
    """
    if activation_bytes is not None and len(activation_bytes) != len(instance.layers):
        count = len(instance.layers)
        raise InputError(
            f"activation_bytes has {len(activation_bytes)} entries; expected {count}, one a layer"
        )
    loads = _order(instance, plan, rates)
    run = _Run(rates)
    _preload(run, [x for x in loads if x.layer == 0])
    initialisation = run.now
    layers = _execute(run, instance, loads)
    done = LoadRuns(
        np.array([x.weight for x in loads], np.int64),
        np.array([x.layer for x in loads], np.int64),
        np.array([x.nbytes for x in loads], np.int64),
        np.array(run.read_starts, np.float64),
        np.array(run.read_ends, np.float64),
        np.array(run.starts, np.float64),
        np.array(run.ends, np.float64),
    )
    memory = _memory(instance, initialisation, layers, done, activation_bytes, keep_preloaded=keep_preloaded)
    strategy = str(plan.solver.get("strategy", "plan"))
    return RunTimeline(instance, strategy, initialisation, layers, done, memory, rates.provenance)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One read: bytes of a weight (its place in the instance), for the layer that loads them."""

    layer: int
    first_use: int
    weight: int
    first_chunk: int
    nbytes: int


def _order(instance: Instance, plan: OverlapPlan, rates: Rates) -> list[_Piece]:
    """Return all loads in the order in which they are needed; preloaded weights are loads of layer 0."""
    if plan.status == "INFEASIBLE":
        raise PlanError("the plan is INFEASIBLE; expected one that can run: raise the limits and plan anew")
    total = sum(w.nbytes for w in instance.weights)
    if total > MOST_BYTES:
        raise InputError(f"the weights of {instance.name} are more than 2^60 bytes; expected fewer")
    places = {w.name: place for place, w in enumerate(instance.weights)}
    for name in (*plan.preload, *(x.weight for x in plan.loads)):
        if name not in places:
            raise PlanError(
                f"the plan loads {name[:80]!r}, which is no weight of {instance.name}; plan it anew"
            )
    early = [x for x in plan.loads if x.layer < 1]
    if early:
        raise PlanError(f"layer {early[0].layer} loads {early[0].weight[:80]!r}; expected layers from 1 on")
    preloads = [ChunkLoad(name, 0, instance.weights[places[name]].chunks, 0) for name in plan.preload]
    ranges: list[list[ChunkLoad]] = [[] for _ in instance.weights]
    for load in (*preloads, *plan.loads):
        ranges[places[load.weight]].append(load)
    request = max(1, max(rates.request_bytes, total // MOST_REQUESTS) // instance.chunk_bytes)
    pieces = [x for place, loads in enumerate(ranges) for x in _pieces(instance, place, loads, request)]
    return sorted(pieces, key=lambda x: (x.layer, x.first_use, x.weight, x.first_chunk))


def _pieces(instance: Instance, place: int, loads: Sequence[ChunkLoad], request: int) -> Iterator[_Piece]:
    """Yield the loads of a weight, streamed ones in requests of so many chunks at most.

    Raises PlanError where they are not all of its chunks, each once and in time.
    """
    w, size = instance.weights[place], instance.chunk_bytes
    ordered = sorted(loads, key=lambda x: x.first_chunk)
    begins = [0, *accumulate(x.chunks for x in ordered)]
    in_time = all(x.chunks > 0 and x.layer < w.first_use for x in ordered)
    if not in_time or begins != [*(x.first_chunk for x in ordered), w.chunks]:
        raise PlanError(
            f"the plan does not load {w.name[:80]!r} once and whole, expected chunks 0 to {w.chunks - 1} by "
            f"layers before its first use by layer {w.first_use}; check it with verify_plan"
        )
    for x in ordered:
        end = x.first_chunk + x.chunks
        for first in range(x.first_chunk, end, request if x.layer else x.chunks):
            nbytes = min(min(first + request, end) * size, w.nbytes) - first * size if x.layer else w.nbytes
            yield _Piece(x.layer, w.first_use, place, first, nbytes)


@dataclass
class _Run:
    """The state of a run: when disk and GPU are free, bytes in unified memory, times of all loads."""

    rates: Rates
    now: float = 0.0
    disk_free: float = 0.0
    unified: int = 0
    leaving: deque[tuple[float, int]] = field(default_factory=deque)
    """When bytes leave unified memory, and how many; times rise."""
    read_starts: list[float] = field(default_factory=list)
    read_ends: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def read(self, nbytes: int, alone: int) -> float:
        """Read bytes once there is room for them; `alone` bytes fit whatever the limit. Return its end."""
        start = self.disk_free
        if self.rates.staging_bytes is not None:
            limit = max(self.rates.staging_bytes, alone)
            while self.unified + nbytes > limit and self.leaving:
                time, left = self.leaving.popleft()
                self.unified -= left
                start = max(start, time)
        self.unified += nbytes
        self.disk_free = start + self.rates.read_ms(nbytes)
        self.read_starts.append(start)
        self.read_ends.append(self.disk_free)
        return self.disk_free

    def transform(self, nbytes: int, start: float, end: float) -> None:
        """Note when bytes move from unified to texture memory."""
        self.starts.append(start)
        self.ends.append(end)
        self.leaving.append((end, nbytes))


def _preload(run: _Run, pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        start = max(run.now, run.read(piece.nbytes, piece.nbytes))
        run.now = start + run.rates.transform_ms(piece.nbytes)
        run.transform(piece.nbytes, start, run.now)


def _execute(run: _Run, instance: Instance, loads: Sequence[_Piece]) -> LayerRuns:
    """Run all layers; `loads` are in order, those of layer 0 done."""
    by_layer: list[list[_Piece]] = [[] for _ in range(len(instance.layers) + 1)]
    for piece in loads:
        by_layer[piece.layer].append(piece)
    rows = []
    for layer, pieces in zip(instance.layers, by_layer[1:], strict=True):
        total = sum(piece.nbytes for piece in pieces)
        start = run.now
        for piece in pieces:
            start = max(start, run.read(piece.nbytes, total))
        takes = run.rates.loaded_ms(layer, total, instance.chunk_bytes)
        end = start + takes
        done, begin = 0, start
        for piece in pieces:
            done += piece.nbytes
            until = end if done == total else start + takes * (done / total)
            run.transform(piece.nbytes, begin, until)
            begin = until
        rows.append((start, end, layer.latency_ms, start - run.now, takes - layer.latency_ms, total))
        run.now = end
    starts, ends, alone, waits, slowed, loaded = np.array(rows, np.float64).T
    return LayerRuns(starts, ends, alone, waits, slowed, loaded.astype(np.int64))


def _memory(
    instance: Instance,
    initialisation: float,
    layers: LayerRuns,
    loads: LoadRuns,
    activation_bytes: Sequence[int] | None,
    *,
    keep_preloaded: bool,
) -> MemoryCurve:
    """Return the memory curve, from the times at which bytes come and go."""
    last_use = np.array([w.last_use for w in instance.weights], np.int64)
    leaves = layers.ends_ms[last_use[loads.weights] - 1]
    gone = np.ones(len(leaves), bool) if not keep_preloaded else loads.layers > 0
    changes = [
        (0, loads.read_starts_ms, loads.nbytes),
        (0, loads.ends_ms, -loads.nbytes),
        (1, loads.starts_ms, loads.nbytes),
        (1, leaves[gone], -loads.nbytes[gone]),
    ]
    if activation_bytes is not None:
        alive = np.array(activation_bytes, np.int64)
        changes.append((2, np.concatenate([[initialisation], layers.ends_ms[:-1]]), alive))
        changes.append((2, layers.ends_ms, -alive))
    moments = np.concatenate([[0.0, layers.ends_ms[-1]], *(times for _, times, _ in changes)])
    times, places = np.unique(moments, return_inverse=True)
    curves = np.zeros((3, len(times)), np.int64)
    begin = 2
    for kind, at, nbytes in changes:
        np.add.at(curves[kind], places[begin : begin + len(at)], nbytes)
        begin += len(at)
    unified, texture, activations = np.cumsum(curves, axis=1)
    return MemoryCurve(times, unified, texture, activations)
