"""Predicts the run of a streaming plan as times and memory: disk, copies, launches side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchedge.devices import Provenance
from torchedge.errors import InputError
from torchedge.storage import Document
from torchedge.storage.locks import cached_property
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.rates import Rates
from torchedge.streaming.verification import check_complete

Times = NDArray[np.float64]
Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use: staging buffers, weights, and activations (inputs and outputs among them).

    `total` is of all three together: of a peak it is the peak of the sum, not the sum of the peaks.
    """

    staging: float
    weights: float
    activations: float
    total: float


@dataclass(frozen=True)
class MemoryCurve:
    """Memory in use as a step function: entry k holds from `times_ms[k]` to `times_ms[k + 1]`.

    The last entry holds ever after. Arrays have the same length of at least 1; times rise strictly. Bytes.
    """

    times_ms: Times
    staging: Bytes
    weights: Bytes
    activations: Bytes

    @cached_property
    def total(self) -> Bytes:
        """Bytes of all three together."""
        return self.staging + self.weights + self.activations

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
        return self.staging, self.weights, self.activations, self.total

    def between(self, start: float, end: float) -> MemoryCurve:
        """Return the memory in use from one time to another, counted from the first (ms)."""
        first = max(int(np.searchsorted(self.times_ms, start, "right")) - 1, 0)
        stop = max(int(np.searchsorted(self.times_ms, end, "left")), first + 1)
        times = np.maximum(self.times_ms[first:stop] - start, 0.0)
        last = [max(end - start, 0.0)] if end - start > times[-1] else []
        places = [*range(first, stop), *[stop - 1] * len(last)]
        return MemoryCurve(np.append(times, last), *[part[places] for part in self._parts()[:3]])


def in_turn(curves: Sequence[MemoryCurve]) -> MemoryCurve:
    """Return curves that begin at 0, each from the end of the one before."""
    parts, begin = [], 0.0
    for number, curve in enumerate(curves):
        part = slice(None, -1) if number + 1 < len(curves) else slice(None)
        times = curve.times_ms[part] + begin
        parts.append((times, curve.staging[part], curve.weights[part], curve.activations[part]))
        begin += float(curve.times_ms[-1])
    return MemoryCurve(*[np.concatenate(arrays) for arrays in zip(*parts, strict=True)])


def memory_curve(changes: Iterable[tuple[int, ArrayLike, ArrayLike]], end_ms: float) -> MemoryCurve:
    """Return the memory in use from 0 to `end_ms`, and after it.

    changes: of staging (0), weights (1) and activations (2): times, and bytes that come (or go: below 0).
    """
    listed = [(kind, np.atleast_1d(times), np.atleast_1d(nbytes)) for kind, times, nbytes in changes]
    moments = np.concatenate([[0.0, end_ms], *(times for _, times, _ in listed)])
    times, places = np.unique(moments, return_inverse=True)
    curves = np.zeros((3, len(times)), np.int64)
    begin = 2
    for kind, at, nbytes in listed:
        np.add.at(curves[kind], places[begin : begin + len(at)], nbytes)
        begin += len(at)
    return MemoryCurve(times, *np.cumsum(curves, axis=1))


@dataclass(frozen=True)
class LayerRuns:
    """When each layer (entry 0 is layer 1) starts and ends, ms, and why not sooner.

    A layer waits `waits_ms` for its weights or for the host, runs `alone_ms` by itself and takes `slowed_ms`
    longer because of the copies beside it.
    """

    starts_ms: Times
    ends_ms: Times
    alone_ms: Times
    waits_ms: Times
    slowed_ms: Times


@dataclass(frozen=True)
class LoadRuns:
    """Every load: its weight (place in the instance), the layer beside which it begins (0: preloaded), bytes.

    The disk reads it into a staging buffer from `read_starts_ms` to `read_ends_ms`; it is copied to the
    device's memory from `starts_ms` to `ends_ms`.
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
    """The time a run lost (ms): layers waiting for their weights, and slowed by copies beside them."""

    waiting: float
    slowed: float


@dataclass(frozen=True)
class RunTimeline:
    """One simulated run of a plan.

    Initialisation is the time until the preloaded weights are on the device; the execution of all layers
    follows, and `latency_ms` is both: the paper's integrated latency. `memory` is in use, `allocated_bytes`
    what the run allocates: constant, at least the most in use. `provenance` is that of the rates.
    """

    instance: Instance
    strategy: str
    initialisation_ms: float
    layers: LayerRuns
    loads: LoadRuns
    memory: MemoryCurve
    provenance: Provenance
    allocated_bytes: int

    @property
    def title(self) -> str:
        """The model, the strategy, and the provenance of the rates."""
        return f"{self.instance.name}, {self.strategy} (simulated; rates {self.provenance})"

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
        """Bytes of weights on the device before the first layer starts."""
        return int(self.loads.nbytes[self.loads.layers == 0].sum())

    def __str__(self) -> str:
        average = self.memory.average.total / MEBIBYTE
        return (
            f"{self.instance.name}, {self.strategy}: {self.latency_ms:.1f} ms, of these "
            f"{self.initialisation_ms:.1f} initialisation, {self.stalls.waiting:.1f} waiting for weights, "
            f"{self.stalls.slowed:.1f} slowed by copies; memory {self.allocated_bytes / MEBIBYTE:.1f} MiB "
            f"allocated, {average:.1f} MiB in use on average (simulated from {self.provenance} figures)"
        )


def timeline_document(timeline: RunTimeline) -> Document:
    """Return the JSON document of a run's figures: ms and bytes."""

    def use(memory: MemoryUse) -> Document:
        return {
            "staging_bytes": round(memory.staging),
            "weight_bytes": round(memory.weights),
            "activation_bytes": round(memory.activations),
            "total_bytes": round(memory.total),
        }

    return {
        "model": timeline.instance.name,
        "strategy": timeline.strategy,
        "simulated": True,
        "latency_ms": timeline.latency_ms,
        "initialisation_ms": timeline.initialisation_ms,
        "execution_ms": timeline.execution_ms,
        "stall_ms": {"waiting": timeline.stalls.waiting, "slowed": timeline.stalls.slowed},
        "preloaded_bytes": timeline.preloaded_bytes,
        "allocated_bytes": timeline.allocated_bytes,
        "peak_in_use": use(timeline.memory.peak),
        "average_in_use": use(timeline.memory.average),
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
    allocated_bytes: int | None = None,
) -> RunTimeline:
    """Predict the run of a plan on three queues that work side by side: disk, copies, launches.

    The disk reads in the order in which the plan needs the weights: the preloaded ones by first use, then the
    loads layer by layer, in requests of at most `rates.request_bytes` or a third of the staging pool
    (`rates.staging_bytes`), but of a chunk at least. Reads for layers start when all preloaded weights are
    there, and when the pool has room; one larger than the pool starts when it is empty. What is read is
    copied to the device's memory, one copy at a time and in order; a copy beside a layer begins no sooner
    than the layer. Its staging buffer is free when it ends.

    A layer starts when the one before has ended and the weights that it is the first to use are there; layer
    1 also when all preloaded weights are. While a copy runs, the layer makes less progress
    (`Rates.slowing`).

    All copies and layers are enqueued by one thread of the host, which takes `host_transfer` and
    `host_launch` for each, and waits at a layer until the weights that it is the first to use were read.

    Weights are in use whole from the start of their first copy to the end of the last layer that uses them
    (preloaded ones: of the run).
    `activation_bytes`: what else is in use while each layer runs: inputs, outputs and intermediates.
    `allocated_bytes`: what the run allocates, by default the most in use.

    Capacities and limits of the instance are not enforced: what exceeds a layer's capacity costs time.

    Raises:
        PlanError: the plan is INFEASIBLE, names unknown weights or layers, or a weight is not wholly loaded
            before the first layer that uses it.
        InputError: `activation_bytes` has not one entry a layer.
    """
    if activation_bytes is not None and len(activation_bytes) != len(instance.layers):
        count = len(instance.layers)
        raise InputError(
            f"activation_bytes has {len(activation_bytes)} entries; expected {count}, one a layer"
        )
    pieces = _order(instance, plan, rates)
    run = _Run(rates)
    begin = 0
    while begin < len(pieces) and pieces[begin].layer == 0:
        run.load(pieces[begin].nbytes, 0.0)
        begin += 1
    initialisation = run.read = run.copied
    layers = _execute(run, instance, pieces[begin:], initialisation)
    loads = LoadRuns(
        np.array([x.weight for x in pieces], np.int64),
        np.array([x.layer for x in pieces], np.int64),
        np.array([x.nbytes for x in pieces], np.int64),
        *(np.array(times, np.float64) for times in (run.read_starts, run.read_ends, run.starts, run.ends)),
    )
    memory = _memory(instance, initialisation, layers, loads, activation_bytes)
    allocated = int(memory.peak.total) if allocated_bytes is None else allocated_bytes
    strategy = str(plan.solver.get("strategy", "plan"))
    return RunTimeline(instance, strategy, initialisation, layers, loads, memory, rates.provenance, allocated)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One read and copy: bytes of a weight (its place in the instance), for the layer that loads them."""

    layer: int
    first_use: int
    weight: int
    first_chunk: int
    nbytes: int


def _order(instance: Instance, plan: OverlapPlan, rates: Rates) -> list[_Piece]:
    """Return all loads in the order in which they are needed; preloaded weights are loads of layer 0."""
    total = sum(w.nbytes for w in instance.weights)
    if total > MOST_BYTES:
        raise InputError(f"the weights of {instance.name} are more than 2^60 bytes; expected fewer")
    check_complete(instance, plan)
    places = {w.name: place for place, w in enumerate(instance.weights)}
    preloads = [ChunkLoad(name, 0, instance.weights[places[name]].chunks, 0) for name in plan.preload]
    ranges: list[list[ChunkLoad]] = [[] for _ in instance.weights]
    for load in (*preloads, *plan.loads):
        ranges[places[load.weight]].append(load)
    most = min(rates.request_bytes, rates.staging_bytes // 3)
    request = max(1, max(most, total // MOST_REQUESTS) // instance.chunk_bytes)
    pieces = [x for place, loads in enumerate(ranges) for x in _pieces(instance, place, loads, request)]
    return sorted(pieces, key=lambda x: (x.layer, x.first_use, x.weight, x.first_chunk))


def _pieces(instance: Instance, place: int, loads: Sequence[ChunkLoad], request: int) -> Iterator[_Piece]:
    """Yield the loads of a weight, in requests of so many chunks at most."""
    w, size = instance.weights[place], instance.chunk_bytes
    for x in loads:
        end = x.first_chunk + x.chunks
        for first in range(x.first_chunk, end, request):
            nbytes = min(min(first + request, end) * size, w.nbytes) - first * size
            yield _Piece(x.layer, w.first_use, place, first, nbytes)


@dataclass
class _Run:
    """The state of a run: when disk and copy queue are free, bytes in staging buffers, times of all loads."""

    rates: Rates
    read: float = 0.0
    copied: float = 0.0
    staged: int = 0
    leaving: deque[tuple[float, int]] = field(default_factory=deque)
    """When bytes leave their staging buffers, and how many; times rise."""
    read_starts: list[float] = field(default_factory=list)
    read_ends: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    passed: int = 0
    """Copies that ended before the present layer."""

    def load(self, nbytes: int, begin: float) -> float:
        """Read bytes as soon as there is room, copy them from `begin` on; return the end of the copy."""
        start, limit = self.read, max(self.rates.staging_bytes, nbytes)
        while self.staged + nbytes > limit:
            time, left = self.leaving.popleft()
            self.staged -= left
            start = max(start, time)
        self.staged += nbytes
        self.read = start + self.rates.read_ms(nbytes)
        copy = max(self.copied, self.read + self.rates.host_transfer_ms, begin)
        self.copied = copy + self.rates.copy_ms(nbytes)
        self.leaving.append((self.copied, nbytes))
        self.read_starts.append(start)
        self.read_ends.append(self.read)
        self.starts.append(copy)
        self.ends.append(self.copied)
        return self.copied

    def work(self, start: float, takes: float, slowing: float) -> float:
        """Return the end of a layer that alone takes so long, beside the copies of the queue."""
        time, left, progress = start, takes, 1 - slowing
        while self.passed < len(self.ends):
            begin, end = self.starts[self.passed], self.ends[self.passed]
            if end > time:
                ahead = max(begin, time)
                if left <= ahead - time:
                    break
                left -= ahead - time
                if left <= (end - ahead) * progress:
                    return ahead + left / progress
                time, left = end, left - (end - ahead) * progress
            self.passed += 1
        return time + left


def _execute(run: _Run, instance: Instance, pieces: Sequence[_Piece], initialisation: float) -> LayerRuns:
    """Run all layers; `pieces` are in order."""
    by_layer: list[list[_Piece]] = [[] for _ in range(len(instance.layers) + 1)]
    for piece in pieces:
        by_layer[piece.layer].append(piece)
    ready = [0.0] * (len(instance.layers) + 1)
    read = [0.0] * (len(instance.layers) + 1)
    rows = []
    now = host = initialisation
    for number, layer in enumerate(instance.layers, 1):
        host = max(host, read[number]) + run.rates.host_launch_ms
        start = max(now, ready[number], host)
        for piece in by_layer[number]:
            host += run.rates.host_transfer_ms
            ready[piece.first_use] = max(ready[piece.first_use], run.load(piece.nbytes, start))
            read[piece.first_use] = max(read[piece.first_use], run.read)
        end = run.work(start, layer.latency_ms, run.rates.slowing(layer, instance.chunk_bytes))
        rows.append((start, end, layer.latency_ms, start - now, max(0.0, end - start - layer.latency_ms)))
        now = end
    return LayerRuns(*np.array(rows, np.float64).T)


def _memory(
    instance: Instance,
    initialisation: float,
    layers: LayerRuns,
    loads: LoadRuns,
    activation_bytes: Sequence[int] | None,
) -> MemoryCurve:
    """Return the memory curve, from the times at which bytes come and go."""
    weights, first = np.unique(loads.weights, return_index=True)
    last_use = np.array([w.last_use for w in instance.weights], np.int64)[weights]
    nbytes = np.array([w.nbytes for w in instance.weights], np.int64)[weights]
    streamed = loads.layers[first] > 0
    changes = [
        (0, loads.read_starts_ms, loads.nbytes),
        (0, loads.ends_ms, -loads.nbytes),
        (1, loads.starts_ms[first], nbytes),
        (1, layers.ends_ms[last_use[streamed] - 1], -nbytes[streamed]),
    ]
    if activation_bytes is not None:
        alive = np.array(activation_bytes, np.int64)
        changes.append((2, np.concatenate([[initialisation], layers.ends_ms[:-1]]), alive))
        changes.append((2, layers.ends_ms, -alive))
    return memory_curve(changes, float(layers.ends_ms[-1]))
