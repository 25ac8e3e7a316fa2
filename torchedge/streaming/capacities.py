"""What each layer can load beside its own work (C_l, FlashMem section 4.2), and the instance that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torchedge.devices import Device, Provenance
from torchedge.errors import InputError
from torchedge.streaming.instances import Distance, Instance, Layer, Residency, Weight
from torchedge.streaming.latencies import estimate_latencies, inline_rate, roofline_of
from torchedge.streaming.load_models import THRESHOLDS, FittedLoads, load_model_of
from torchedge.streaming.operations import InferenceGraph, Operation

__all__ = [
    "CHUNK_BYTES",
    "LAMBDA",
    "M_PEAK_BYTES",
    "THRESHOLDS",
    "Capacities",
    "LoadModel",
    "make_instance",
    "rate_capacities",
]

_THRESHOLD_SOURCE = (
    "thresholds of the operator classes (FlashMem, section 4.2) on the roofline of each layer's latency"
)

CHUNK_BYTES = 256 * 1024
M_PEAK_BYTES = 500 * 2**20
LAMBDA = 0.9
"""M_peak and lambda where memory comes first (FlashMem, section 3.2); it never states its chunk size."""


class LoadModel(Protocol):
    """A fitted model of latency under load."""

    def capacity_bytes(self, operation: Operation, latency_ms: float) -> int:
        """Return the bytes an operation of this latency loads before it slows by more than its threshold."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Chunks each layer can load beside its work, its latency alone (ms), and where the former come from.

    `notes` say which figures the device's profile lacks and what stood in for them.
    """

    chunks: tuple[int, ...]
    latencies_ms: tuple[float, ...]
    provenance: Provenance
    source: str
    notes: tuple[str, ...] = ()


def rate_capacities(
    graph: InferenceGraph,
    device: Device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    model: LoadModel | None = None,
    model_source: str = "",
) -> Capacities:
    """Return C_l of every layer: from a fitted model of latency under load, else from the thresholds.

    The model is the one given, else the one in the device's profile. Without either a layer loads for a share
    of its own latency at the device's unified-to-texture rate: the thresholds. Such capacities are "assumed",
    those of a fitted model "measured". A fused kernel loads what the least of its parts could (section 4.3).

    Raises:
        DeviceError: the profile lacks a figure that this takes.
        InputError: `chunk_bytes` is no whole number above 0.
        ProfileError: the profile's model is damaged.
    """
    if type(chunk_bytes) is not int or chunk_bytes < 1:
        raise InputError(f"chunk_bytes is {chunk_bytes!r}; expected a whole number of at least 1")
    roofline = roofline_of(device, graph.precision)
    latencies = estimate_latencies(graph.operations, roofline)
    parts = [part for op in graph.operations for part in op.parts or (op,)]
    layers = list(zip(parts, estimate_latencies(parts, roofline), strict=True))
    notes = roofline.notes
    if model is None and (fitted := load_model_of(device)) is not None:
        model, model_source = fitted, fitted.source
        notes += _outside(fitted, layers)
    if model is not None:
        chunks = _weakest([max(0, model.capacity_bytes(op, ms)) // chunk_bytes for op, ms in layers], graph)
        source = model_source or "a fitted model of latency under load"
        return Capacities(chunks, latencies, Provenance.MEASURED, source, notes)
    per_ms = inline_rate(device).value * 1e6
    chunks = _weakest(
        [int(THRESHOLDS[op.load_class] * ms * per_ms / chunk_bytes) for op, ms in layers], graph
    )
    return Capacities(chunks, latencies, Provenance.ASSUMED, _THRESHOLD_SOURCE, notes)


def _weakest(chunks: Sequence[int], graph: InferenceGraph) -> tuple[int, ...]:
    """What each kernel loads: of its parts, which `chunks` goes through in order, the least."""
    rest = iter(chunks)
    return tuple(min(islice(rest, max(1, len(op.parts)))) for op in graph.operations)


def _outside(model: FittedLoads, layers: list[tuple[Operation, float]]) -> tuple[str, ...]:
    """Say how many of the layers that load lie outside what was measured."""
    loading = [(op, ms) for op, ms in layers if THRESHOLDS[op.load_class] > 0]
    found = [names for op, ms in loading if (names := model.outside(op, ms))]
    if not found:
        return ()
    features = ", ".join(dict.fromkeys(name for names in found for name in names))
    return (
        f"{len(found)} of {len(loading)} layers that may load lie outside what was measured ({features}); "
        "they count as the nearest that was",
    )


def make_instance(
    graph: InferenceGraph,
    device: Device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    m_peak_bytes: int | None = M_PEAK_BYTES,
    lam: float = LAMBDA,
    memory_bytes: int | None = None,
    residency: Residency = "chunks",
    distance: Distance = "layers",
    capacities: Capacities | None = None,
) -> Instance:
    """Return the overlap problem of a graph on a device; limits are in bytes and rounded down to chunks.

    `memory_bytes` limits the weights preloaded and in flight together; activations are not part of it.
    `capacities` (of the same graph and chunk size) default to `rate_capacities`.

    Raises:
        DeviceError: the profile lacks a figure that this takes.
        InputError: an option is out of range.
    """
    if capacities is None:
        capacities = rate_capacities(graph, device, chunk_bytes=chunk_bytes)
    layers = tuple(
        Layer(op.name, chunks, round(ms, 6), op.load_class)
        for op, chunks, ms in zip(graph.operations, capacities.chunks, capacities.latencies_ms, strict=True)
    )
    weights = tuple(
        Weight(w.name, w.nbytes, -(-w.nbytes // chunk_bytes), *graph.uses[w.name]) for w in graph.weights
    )
    return Instance(
        chunk_bytes,
        layers,
        weights,
        m_peak_chunks=None if m_peak_bytes is None else m_peak_bytes // chunk_bytes,
        lam=lam,
        memory_chunks=None if memory_bytes is None else memory_bytes // chunk_bytes,
        residency=residency,
        distance=distance,
        name=graph.name,
    )
