"""The overlap problem as data: layers with load capacities, weights with first and last uses, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from torchedge.errors import InputError
from torchedge.storage import Document, write_json
from torchedge.storage.documents import parse_json, read_unpacked

__all__ = [
    "MEBIBYTE",
    "Distance",
    "Instance",
    "Layer",
    "LoadClassName",
    "Residency",
    "Weight",
    "instance_document",
    "parse_instance",
    "read_instance",
    "write_instance",
]

MEBIBYTE = 2**20

LoadClassName = Literal["elemental", "reusable", "hierarchical"]
Residency = Literal["chunks", "weights"]
Distance = Literal["layers", "chunks"]

MAX_FILE_BYTES = 2**25
MAX_LAYERS = 100_000
MAX_WEIGHTS = 100_000
MAX_CHUNKS = 2**31
MAX_BYTES = 2**53
MAX_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True)
class Layer:
    """One kernel: the chunks it can load beside its own work, its latency alone (ms), its operator class."""

    name: str
    capacity_chunks: int
    latency_ms: float
    load_class: LoadClassName


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: bytes, chunks T(w), and the first (i_w) and last layer that use it, from 1."""

    name: str
    nbytes: int
    chunks: int
    first_use: int
    last_use: int


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

    chunk_bytes: int
    layers: tuple[Layer, ...]
    weights: tuple[Weight, ...]
    m_peak_chunks: int | None = None
    lam: float = 0.9
    memory_chunks: int | None = None
    residency: Residency = "chunks"
    distance: Distance = "layers"
    name: str = field(default="instance", compare=False)

    def __post_init__(self) -> None:
        check_instance(self)

    @cached_property
    def prices(self) -> tuple[int, int, int]:
        """`(p, d, unit)`: the objective times `unit` is p * preloaded chunks + d * distances, all whole."""
        lam = Fraction(str(self.lam)).limit_denominator(MAX_DENOMINATOR)
        return lam.numerator, lam.denominator - lam.numerator, lam.denominator

    @cached_property
    def total_chunks(self) -> int:
        """Chunks of all weights."""
        return sum(w.chunks for w in self.weights)


def check_instance(instance: Instance) -> None:
    """Raise InputError naming the first thing that makes an instance meaningless."""
    _number("chunk_bytes", instance.chunk_bytes, 1, MAX_BYTES, whole=True)
    _number("lambda", instance.lam, 0, 1)
    for name in ("m_peak_chunks", "memory_chunks"):
        value = getattr(instance, name)
        if value is not None:
            _number(name, value, 0, MAX_BYTES, whole=True)
    _word("residency", instance.residency, get_args(Residency))
    _word("distance", instance.distance, get_args(Distance))
    if not 1 <= len(instance.layers) <= MAX_LAYERS:
        raise InputError(f"layers holds {len(instance.layers)} entries; expected 1 to {MAX_LAYERS}")
    if len(instance.weights) > MAX_WEIGHTS:
        raise InputError(f"weights holds {len(instance.weights)} entries; expected at most {MAX_WEIGHTS}")
    for place, layer in enumerate(instance.layers, 1):
        _text(f"layer {place}: name", layer.name)
        _number(f"layer {place}: capacity_chunks", layer.capacity_chunks, 0, MAX_CHUNKS, whole=True)
        _number(f"layer {place}: latency_ms", layer.latency_ms, 0, 10**9)
        _word(f"layer {place}: class", layer.load_class, get_args(LoadClassName))
    seen: set[str] = set()
    for place, weight in enumerate(instance.weights):
        _check_weight(f"weights[{place}]", weight, instance)
        if weight.name in seen:
            raise InputError(f"two weights are called {weight.name!r}; expected each name once")
        seen.add(weight.name)


def _check_weight(where: str, weight: Weight, instance: Instance) -> None:
    _text(f"{where}: name", weight.name)
    where = f"weight {weight.name!r}"
    _number(f"{where}: bytes", weight.nbytes, 1, MAX_BYTES, whole=True)
    _number(f"{where}: chunks", weight.chunks, 1, MAX_CHUNKS, whole=True)
    if not (weight.chunks - 1) * instance.chunk_bytes < weight.nbytes <= weight.chunks * instance.chunk_bytes:
        needed = -(-weight.nbytes // instance.chunk_bytes)
        raise InputError(
            f"{where} is {weight.chunks} chunks of {instance.chunk_bytes} bytes for {weight.nbytes} bytes; "
            f"expected {needed} chunks"
        )
    last = len(instance.layers)
    _number(f"{where}: first_use", weight.first_use, 1, last, whole=True)
    _number(f"{where}: last_use", weight.last_use, 1, last, whole=True)
    if weight.last_use < weight.first_use:
        raise InputError(
            f"{where}: last_use {weight.last_use} comes before first_use {weight.first_use}; expected layers "
            "in execution order"
        )


def _number(what: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    kind = "whole number" if whole else "number"
    good = isinstance(value, int) if whole else isinstance(value, (int, float))
    if not good or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise InputError(f"{what} is {_short(value)}; expected a {kind} from {low:,} to {high:,}")


def _word(what: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise InputError(f"{what} is {_short(value)}; expected one of {', '.join(words)}")


def _text(what: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 1000 or not value.isprintable():
        raise InputError(f"{what} is {_short(value)}; expected a text of 1 to 1000 printable characters")


def _short(value: object) -> str:
    # Python refuses to write integers of thousands of digits in decimal.
    text = hex(value) if isinstance(value, int) and abs(value) > MAX_BYTES else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def instance_document(instance: Instance) -> Document:
    """Return the JSON document of an instance; optional keys are left out at their defaults."""
    document: Document = {
        "chunk_bytes": instance.chunk_bytes,
        "layers": [
            {
                "name": layer.name,
                "capacity_chunks": layer.capacity_chunks,
                "latency_ms": layer.latency_ms,
                "class": layer.load_class,
            }
            for layer in instance.layers
        ],
        "weights": [
            {
                "name": w.name,
                "bytes": w.nbytes,
                "chunks": w.chunks,
                "first_use": w.first_use,
                "last_use": w.last_use,
            }
            for w in instance.weights
        ],
        "m_peak_chunks": instance.m_peak_chunks,
        "lambda": instance.lam,
    }
    optional = {
        "memory_chunks": (instance.memory_chunks, None),
        "residency": (instance.residency, "chunks"),
        "distance": (instance.distance, "layers"),
        "name": (instance.name, "instance"),
    }
    document |= {key: value for key, (value, default) in optional.items() if value != default}
    return document


def parse_instance(source: str | Path, document: Mapping[str, object]) -> Instance:
    """Build an instance from its JSON document; raises InputError that names `source` and the bad entry."""
    try:
        _keys(
            "the instance",
            document,
            "chunk_bytes layers weights m_peak_chunks lambda",
            "memory_chunks residency distance name",
        )
        layers = []
        for place, entry in enumerate(_entries("layers", document["layers"]), 1):
            _keys(f"layer {place}", entry, "name capacity_chunks latency_ms class")
            layers.append(
                Layer(entry["name"], entry["capacity_chunks"], entry["latency_ms"], entry["class"])  # type: ignore[arg-type]
            )
        weights = []
        for place, entry in enumerate(_entries("weights", document["weights"])):
            _keys(f"weights[{place}]", entry, "name bytes chunks first_use last_use")
            values = [entry[key] for key in ("name", "bytes", "chunks", "first_use", "last_use")]
            weights.append(Weight(*values))  # type: ignore[arg-type]
        options = {
            key: document[key] for key in ("memory_chunks", "residency", "distance") if key in document
        }
        name = document.get("name", "instance")
        _text("name", name)
        return Instance(
            document["chunk_bytes"],  # type: ignore[arg-type]
            tuple(layers),
            tuple(weights),
            document["m_peak_chunks"],  # type: ignore[arg-type]
            document["lambda"],  # type: ignore[arg-type]
            name=name,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
    except InputError as error:
        raise InputError(f"{source}: {error}; see docs/streaming.md for the schema") from error


def _entries(what: str, value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise InputError(f"{what} is {_short(value)}; expected a list of objects")
    return value


def _keys(what: str, entry: Mapping[str, object], needed: str, optional: str = "") -> None:
    missing = [key for key in needed.split() if key not in entry]
    if missing:
        raise InputError(f"{what} has no {missing[0]!r}; expected the keys {', '.join(needed.split())}")
    unknown = [key for key in entry if key not in needed.split() + optional.split()]
    if unknown:
        known = ", ".join(needed.split() + optional.split())
        raise InputError(f"{what} has the unknown key {_short(unknown[0])}; expected only {known}")


def read_instance(path: str | Path) -> Instance:
    """Read an instance file (.json, or .json.gz).

    Raises:
        InputError: an entry is missing, unknown or out of range.
        ProfileError: the file cannot be read, is too large or is no JSON.
    """
    data = read_unpacked(path, max_bytes=MAX_FILE_BYTES)
    return parse_instance(path, parse_json(path, data))


def write_instance(path: str | Path, instance: Instance) -> None:
    """Write an instance file atomically; raises ProfileError where it cannot be written."""
    write_json(path, instance_document(instance))
