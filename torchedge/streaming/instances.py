"""The overlap problem as data: layers with load capacities, weights with first and last uses, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

from msgspec import Meta

from torchedge.errors import InputError
from torchedge.lowering.programs import LoadClassName
from torchedge.storage.codecs import REQUIRED, Codec, Key, Text
from torchedge.storage.documents import first_repeated
from torchedge.storage.locks import cached_property

MEBIBYTE = 2**20

Residency = Literal["chunks", "weights"]
Distance = Literal["layers", "chunks"]

MAX_FILE_BYTES = 2**25
MAX_LAYERS = 100_000
MAX_WEIGHTS = 100_000
MAX_CHUNKS = 2**31
MAX_BYTES = 2**53
MAX_DENOMINATOR = 10**6

Chunks = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


@dataclass(frozen=True, slots=True)
class Layer:
    """One kernel: the chunks it can load beside its own work, its latency alone (ms), its operator class."""

    name: Text
    capacity_chunks: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    latency_ms: Annotated[float, Meta(ge=0, le=1e9)]
    load_class: Annotated[LoadClassName, Key("class")]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: bytes, chunks T(w), and the first (i_w) and last layer that use it, from 1."""

    name: Text
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BYTES), Key("bytes")]
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    first_use: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    last_use: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]


@dataclass(frozen=True)
class Instance:
    """An overlap plan generation problem (FlashMem, section 3.1); layers are numbered from 1.

    Minimise lam * (chunks preloaded) + (1 - lam) * sum over streamed weights of (first_use - first layer
    that loads it), each distance times the weight's chunks where `distance` is "chunks". A streamed weight
    is loaded whole in layers before its first use (C0, C1), a layer loads at most its capacity (C3), and what
    is in flight stays within `m_peak_chunks` at every layer (C2): the chunks loaded and not yet past their
    last use, or (residency "weights") whole weights from the first layer that loads them to their last use.
    `memory_chunks` limits the preloaded chunks and those in flight together; None: no limit. `lam` counts as
    the nearest fraction with a denominator of at most a million. Raises InputError where an entry is out of
    range, a weight's chunks are not those of its bytes, or a name stands twice.
    """

    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    weights: Annotated[tuple[Weight, ...], Meta(max_length=MAX_WEIGHTS)]
    m_peak_chunks: Annotated[Chunks | None, REQUIRED] = None
    lam: Annotated[float, Meta(ge=0, le=1), REQUIRED, Key("lambda")] = 0.9
    memory_chunks: Chunks | None = None
    residency: Residency = "chunks"
    distance: Distance = "layers"
    name: Text = field(default="instance", compare=False)

    def __post_init__(self) -> None:
        """Raise InputError naming the first invalid entry."""
        INSTANCES.check(self)
        for place, weight in enumerate(self.weights):
            _check_weight(f"weights[{place}], {weight.name!r}", weight, self)
        repeated = first_repeated(weight.name for weight in self.weights)
        if repeated:
            raise InputError(f"two weights are called {repeated!r}; expected each name once")

    @cached_property
    def prices(self) -> tuple[int, int, int]:
        """`(p, d, unit)`: the objective times `unit` is p * preloaded chunks + d * distances, all whole."""
        lam = Fraction(str(self.lam)).limit_denominator(MAX_DENOMINATOR)
        return lam.numerator, lam.denominator - lam.numerator, lam.denominator

    @cached_property
    def total_chunks(self) -> int:
        """Chunks of all weights."""
        return sum(w.chunks for w in self.weights)


def _check_weight(where: str, weight: Weight, instance: Instance) -> None:
    if not (weight.chunks - 1) * instance.chunk_bytes < weight.nbytes <= weight.chunks * instance.chunk_bytes:
        needed = -(-weight.nbytes // instance.chunk_bytes)
        raise InputError(
            f"{where}: {weight.chunks} chunks of {instance.chunk_bytes} bytes for {weight.nbytes} bytes; "
            f"expected {needed} chunks"
        )
    last = len(instance.layers)
    for key, layer in (("first_use", weight.first_use), ("last_use", weight.last_use)):
        if layer > last:
            raise InputError(f"{where}: {key} is {layer}; expected a layer from 1 to {last}")
    if weight.last_use < weight.first_use:
        raise InputError(
            f"{where}: last_use {weight.last_use} comes before first_use {weight.first_use}; expected layers "
            "in execution order"
        )


INSTANCES = Codec(
    Instance, "Overlap instance", remedy="see docs/streaming-files.md", max_bytes=MAX_FILE_BYTES
)

read_instance, write_instance = INSTANCES.read, INSTANCES.write
"""Instance files are .json or .json.gz."""
