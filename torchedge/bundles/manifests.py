"""The manifest of a bundle: what it was made of and for, what it takes, and the hash of every file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from torchedge.errors import InputError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.arenas import total_bytes
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import TARGETS
from torchedge.storage import Document, read_json
from torchedge.storage.fields import Fields

__all__ = [
    "ACCUMULATING",
    "MANIFEST",
    "ONNX",
    "PLAN",
    "PROGRAM",
    "SCHEMA",
    "WEIGHTS",
    "BundleFile",
    "Manifest",
    "Memory",
    "Port",
    "Target",
    "kernel_file",
    "manifest_document",
    "memory_of",
    "parse_manifest",
    "ports_of",
    "read_manifest",
]

SCHEMA = "torchedge-bundle-1"
MANIFEST, PROGRAM, ACCUMULATING = "manifest.json", "program.json", "accumulating.json"
WEIGHTS = "weights.safetensors"
ONNX, PLAN = "model.onnx", "streaming_plan.json"

MAX_MANIFEST_BYTES = 2**25
MAX_FILES = 2**17
MAX_BYTES = 2**50
SHARED = frozenset({"parameter", "buffer", "state"})
"""Roles of tensors that programs of one bundle share by name."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

StepMode = Literal["train", "infer"]


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that a caller feeds or gets: name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a bundle was made for: profile's name, title and SHA-256, and its device class.

    checked: the limits that the program was held against, with their values; unknown: those that the profile
    does not give.
    """

    name: str
    title: str
    fingerprint: str
    device_class: str
    checked: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device: tensors that stay, the arena of what does not, the lower bound of the arena.

    largest_bytes: the largest single allocation.
    """

    resident_bytes: int
    arena_bytes: int
    live_bytes: int
    largest_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that a step takes from the device."""
        return self.resident_bytes + self.arena_bytes


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle: SHA-256 (hex) and bytes."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle says of itself.

    accumulate: batches to an update; above one, all but the last of them run accumulating.json, which adds
    up gradients. versions: of torchedge and torch that made it. hyperparameters: their values at the
    beginning. onnx: what was found when model.onnx was run, or why there is none. files: by path within the
    bundle.
    """

    model: str
    mode: StepMode
    accumulate: int
    versions: Mapping[str, str]
    target: Target
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    hyperparameters: Mapping[str, float]
    memory: Memory
    onnx: Mapping[str, object]
    notes: tuple[str, ...]
    files: Mapping[str, BundleFile]


def kernel_file(name: str) -> str:
    """Return the path of a kernel's text within a bundle."""
    return f"kernels/{name}.cl"


def memory_of(programs: Sequence[Program]) -> Memory:
    """Return what programs that share their parameters, buffers and states take from a device."""
    resident: dict[str, int] = {}
    arena = live = largest = 0
    for number, program in enumerate(programs):
        for tensor in program.tensors:
            if tensor.role != "intermediate":
                own = "" if tensor.role in SHARED else f"{number} "
                resident[own + tensor.name] = tensor.nbytes
        slots = [width * height * 4 * ITEM_SIZES[dtype] for width, height, dtype in program.arena.slots]
        arena += total_bytes(program.arena)
        live += program.arena.live_bytes
        largest = max([largest, program.arena.nbytes, *slots])
    return Memory(sum(resident.values()), arena, live, max([largest, *resident.values()]))


def ports_of(program: Program, places: Sequence[int], names: Sequence[str]) -> tuple[Port, ...]:
    """Return tensors of a program as ports, under these names."""
    tensors = [program.tensors[place] for place in places]
    return tuple([Port(name, t.shape, t.dtype) for name, t in zip(names, tensors, strict=True)])


# as a document ----------------------------------------------------------------------------------------------


def manifest_document(manifest: Manifest) -> Document:
    """Return the JSON document of a manifest."""
    target, memory = manifest.target, manifest.memory
    return {
        "schema": SCHEMA,
        "model": manifest.model,
        "mode": manifest.mode,
        "accumulate": manifest.accumulate,
        "versions": dict(manifest.versions),
        "device": {
            "name": target.name,
            "title": target.title,
            "fingerprint": target.fingerprint,
            "class": target.device_class,
            "limits": dict(target.checked),
            "unknown_limits": list(target.unknown),
        },
        "inputs": [_port_document(port) for port in manifest.inputs],
        "outputs": [_port_document(port) for port in manifest.outputs],
        "hyperparameters": dict(manifest.hyperparameters),
        "memory": {
            "resident_bytes": memory.resident_bytes,
            "arena_bytes": memory.arena_bytes,
            "live_bytes": memory.live_bytes,
            "largest_bytes": memory.largest_bytes,
            "total_bytes": memory.total_bytes,
        },
        "onnx": dict(manifest.onnx),
        "notes": list(manifest.notes),
        "files": {
            name: {"sha256": file.sha256, "bytes": file.nbytes} for name, file in manifest.files.items()
        },
    }


def _port_document(port: Port) -> Document:
    return {"name": port.name, "shape": list(port.shape), "dtype": port.dtype}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle's folder.

    Raises:
        InputError: an entry is missing, unknown or out of range.
        ProfileError: the file cannot be read, is too large or is no JSON.
    """
    path = folder / MANIFEST
    return parse_manifest(path, read_json(path, max_bytes=MAX_MANIFEST_BYTES))


def parse_manifest(source: str | Path, document: Mapping[str, object]) -> Manifest:
    """Build a manifest from its JSON document; `source` is named in errors, which are InputErrors."""
    entry = Fields(str(source), document)
    entry.word("schema", (SCHEMA,))
    manifest = Manifest(
        model=entry.text("model"),
        mode=entry.word("mode", get_args(StepMode)),  # type: ignore[arg-type]
        accumulate=entry.whole("accumulate", 1, 2**31 - 1),
        versions=_versions(entry.below("versions")),
        target=_target(entry.below("device")),
        inputs=_ports(entry, "inputs"),
        outputs=_ports(entry, "outputs"),
        hyperparameters=_hyperparameters(entry.below("hyperparameters")),
        memory=_memory(entry.below("memory")),
        onnx=_onnx(entry.below("onnx")),
        notes=_texts(entry, "notes"),
        files=_files(entry.below("files")),
    )
    entry.done()
    for name in (PROGRAM, WEIGHTS, *([ACCUMULATING] if manifest.accumulate > 1 else [])):
        if name not in manifest.files:
            raise InputError(f"{source}: files lists no {name}; expected it: export the model again")
    return manifest


def _versions(entry: Fields) -> dict[str, str]:
    return {key: entry.text(key) for key in entry}


def _target(entry: Fields) -> Target:
    name, title = entry.text("name"), entry.text("title")
    fingerprint = _sha256(entry, "fingerprint")
    device_class = entry.word("class", tuple(TARGETS))
    limits = entry.below("limits")
    checked = {key: limits.whole(key, 0, MAX_BYTES) for key in limits}
    target = Target(name, title, fingerprint, device_class, checked, _texts(entry, "unknown_limits"))
    entry.done()
    return target


def _sha256(entry: Fields, key: str) -> str:
    text = entry.text(key)
    if not _SHA256.fullmatch(text):
        raise InputError(
            f"{entry.where}: {key} is {text[:70]!r}; expected 64 hexadecimal digits in lower case"
        )
    return text


def _ports(entry: Fields, key: str) -> tuple[Port, ...]:
    found = []
    for place, item in enumerate(entry.entries(key, most=2**16)):
        port = Fields(f"{entry.where}: {key}[{place}]", item)
        shape = port.numbers("shape", 0, 2**40, most=16)
        found.append(Port(port.text("name"), shape, port.word("dtype", tuple(ITEM_SIZES))))
        port.done()
    return tuple(found)


def _hyperparameters(entry: Fields) -> dict[str, float]:
    return {key: entry.real(key) for key in entry}


def _memory(entry: Fields) -> Memory:
    names = ("resident_bytes", "arena_bytes", "live_bytes", "largest_bytes")
    memory = Memory(*[entry.whole(name, 0, MAX_BYTES) for name in names])
    total = entry.whole("total_bytes", 0, 2 * MAX_BYTES)
    entry.done()
    if total != memory.total_bytes:
        raise InputError(f"{entry.where}: total_bytes is {total}; expected {memory.total_bytes}, the sum")
    return memory


def _onnx(entry: Fields) -> dict[str, object]:
    """Return what is told of model.onnx: free content of plain values."""
    found = {key: entry.raw(key) for key in entry}
    for key, value in found.items():
        if not isinstance(value, (str, int, float, bool)):
            raise InputError(f"{entry.where}: {key} is a {type(value).__name__}; expected a plain value")
    return found


def _texts(entry: Fields, key: str) -> tuple[str, ...]:
    items = entry.entries(key, most=1000)
    if not all(isinstance(item, str) and item.isprintable() for item in items):
        raise InputError(f"{entry.where}: {key} holds something that is no printable text; expected texts")
    return tuple([str(item) for item in items])


def _files(entry: Fields) -> dict[str, BundleFile]:
    found: dict[str, BundleFile] = {}
    for name in entry:
        if len(found) == MAX_FILES:
            raise InputError(f"{entry.where}: holds over {MAX_FILES} files; expected fewer")
        file = entry.below(name)
        found[name] = BundleFile(_sha256(file, "sha256"), file.whole("bytes", 0, MAX_BYTES))
        file.done()
    return found
