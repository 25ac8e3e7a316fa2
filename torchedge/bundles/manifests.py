"""The manifest of a bundle: its sources, its device, its ports, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchedge.errors import InputError
from torchedge.graphs.graph import Mode
from torchedge.lowering.arenas import allocations, common_arena
from torchedge.lowering.program_files import MAX_FILE_BYTES
from torchedge.lowering.programs import MAX_ITEMS, DType, Program, Shape, residents
from torchedge.lowering.targets import DeviceClass
from torchedge.storage import resolve_inside
from torchedge.storage.codecs import DERIVED, REQUIRED, Codec, Key, OptionalText, Sha256, Text
from torchedge.storage.documents import read_json, write_json

if TYPE_CHECKING:
    from torchedge.streaming.schedules import StreamingSchedule

MANIFEST, SOURCE = "manifest.json", "source.json"
PROGRAM, ACCUMULATING = "program.json", "accumulating.json"
WEIGHTS = "weights.safetensors"
ONNX, PLAN, CHECK = "model.onnx", "streaming_plan.json", "check.json"
TOKENIZER = "tokenizer.json"
MAX_ENDS = 100
TRAIN = "train"
"""The method that trains, by convention."""

MAX_MANIFEST_BYTES = 2**25
MAX_PLAN_BYTES = 2**27
MAX_FILES = 2**17
MAX_BYTES = 2**50
MAX_METHODS = 16
METHOD_NAME = re.compile(r"^[a-z][a-z0-9_]{0,31}(?![\s\S])")

Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Plain = bool | int | float | OptionalText
Notes = Annotated[tuple[OptionalText, ...], REQUIRED, Meta(max_length=1000)]


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that a caller feeds or gets: name, shape, dtype."""

    name: Text
    shape: Shape
    dtype: DType

    def drawn(self, draw: np.random.Generator) -> npt.NDArray[Any]:
        """Return random numbers for it, zeros for integers."""
        if np.dtype(self.dtype).kind != "f":
            return np.zeros(self.shape, self.dtype)
        return draw.standard_normal(self.shape).astype(self.dtype)


Ports = Annotated[tuple[Port, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class BundleTarget:
    """The device that a bundle was made for: profile's name, title and SHA-256, and its device class.

    checked: the limits that the programs respect, with their values; unknown: limits that the profile does
    not give.
    """

    name: Text
    title: Text
    fingerprint: Sha256
    device_class: Annotated[DeviceClass, Key("class")]
    checked: Annotated[Mapping[Text, Bytes], REQUIRED, Key("limits")] = field(default_factory=dict)
    unknown: Annotated[Notes, Key("unknown_limits")] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device: tensors that stay, the arena of what does not, the lower bound of the arena.

    largest_bytes: the largest single allocation. staging_bytes: memory through which weights are streamed; 0
    where all of them stay.
    """

    resident_bytes: Bytes
    arena_bytes: Bytes
    live_bytes: Bytes
    largest_bytes: Bytes
    staging_bytes: Bytes = 0

    @property
    def total_bytes(self) -> Annotated[int, DERIVED]:
        """All that a step takes from the device."""
        return self.resident_bytes + self.arena_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle: SHA-256 (hex) and bytes."""

    sha256: Sha256
    nbytes: Annotated[Bytes, Key("bytes")]


@dataclass(frozen=True, slots=True)
class Method:
    """One of several programs of a bundle: its name and file, what it takes and returns, its own memory."""

    name: Annotated[
        str,
        Meta(
            pattern=METHOD_NAME.pattern,
            description="a method's name: a small letter, then up to 31 small letters, digits and _",
        ),
    ]
    program: Text
    inputs: Ports
    outputs: Ports
    memory: Memory


@dataclass(frozen=True, slots=True)
class Manifest:
    """A bundle's sources, device, ports and the hash of every file: manifest.json.

    accumulation: batches to an update; above one, all but the last of them run accumulating.json, which adds
    up gradients. versions: of torchedge and torch that made it. hyperparameters: their values at the
    beginning. onnx: what was found when model.onnx was run, or why there is none. files: by path within the
    bundle. sha256: of all other entries (`digest_of`). methods: of a bundle with several programs over the
    same weights and states; `inputs` and `outputs` are then the first one's, `memory` that of all together.
    ends: of a language model, tokens that end its texts.
    """

    model: Text
    mode: Mode
    accumulation: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    versions: Mapping[Text, Text]
    target: Annotated[BundleTarget, Key("device")]
    inputs: Ports
    outputs: Ports
    hyperparameters: Mapping[Text, float]
    memory: Memory
    onnx: Mapping[Text, Plain]
    notes: Notes
    files: Annotated[Mapping[Text, BundleFile], Meta(max_length=MAX_FILES)]
    sha256: Sha256
    methods: Annotated[tuple[Method, ...], Meta(max_length=MAX_METHODS)] = ()
    ends: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(max_length=MAX_ENDS)] = ()

    @property
    def programs(self) -> dict[str, str]:
        """The file of each program, the one that runs by default first; without methods, `mode` names it."""
        if self.methods:
            return {method.name: method.program for method in self.methods}
        return {self.mode: PROGRAM} | ({"accumulating": ACCUMULATING} if self.accumulation > 1 else {})

    @property
    def plans(self) -> dict[str, str]:
        """The file of each program's streaming plan; none where all weights stay on the device."""
        files = {name: plan_path(file) for name, file in self.programs.items()}
        return {name: file for name, file in files.items() if file in self.files}


def plan_path(program: str) -> str:
    """Return the file of a program's streaming plan, by the program's file."""
    return f"{PLAN.removesuffix('.json')}.{program}".replace(".program.", ".")


def kernel_file(name: str) -> str:
    """Return the path of a kernel's text within a bundle."""
    return f"kernels/{name}.cl"


def program_file(name: str, place: int) -> str:
    """Return the file of a method's program, by its place among the methods."""
    return f"program.{name}.json" if place else PROGRAM


def memory_of(programs: Sequence[Program], staging_bytes: int = 0) -> Memory:
    """Return the memory of programs that run one at a time: they share one arena, and by name what stays.

    Streamed weights are those with a place in the arena.
    """
    resident = [tensor.nbytes for tensor in residents(programs)]
    arena = common_arena([program.arena for program in programs])
    parts = allocations(arena)
    largest = max([staging_bytes, *parts, *resident], default=0)
    return Memory(sum(resident), sum(parts), arena.live_bytes, largest, staging_bytes)


def memory_of_schedules(schedules: Sequence[StreamingSchedule]) -> Memory:
    """Return the memory of streaming programs that run one at a time."""
    staging = max(schedule.staging_bytes for schedule in schedules)
    return memory_of([schedule.program for schedule in schedules], staging)


def ports_of(program: Program, places: Sequence[int], names: Sequence[str]) -> tuple[Port, ...]:
    """Return tensors of a program as ports, under these names."""
    tensors = [program.tensors[place] for place in places]
    return tuple([Port(name, t.shape, t.dtype) for name, t in zip(names, tensors, strict=True)])


# as a document ----------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle's folder.

    Raises:
        InputError: an entry is missing, unknown or out of range.
        ProfileError: the file cannot be read, leads out of the folder, is too large or is no JSON.
    """
    path = resolve_inside(folder, MANIFEST)
    document = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    manifest = MANIFESTS.parse(path, document)
    if manifest.sha256 != digest_of(document):
        raise InputError(
            f"{path}: has another SHA-256 than it says: it was changed, or damaged on its way; copy or "
            "export the bundle again"
        )
    return manifest


def digest_of(document: Mapping[str, object]) -> str:
    """Return the SHA-256 (hex) of a manifest's entries without `sha256`: JSON, keys sorted, no spaces."""
    entries = {key: entry for key, entry in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with its own hash; raises ProfileError if the folder cannot be written."""
    document = MANIFESTS.document(manifest)
    write_json(folder / MANIFEST, {**document, "sha256": digest_of(document)})


def _check_manifest(manifest: Manifest) -> None:
    if manifest.methods and (manifest.mode != "infer" or manifest.accumulation > 1):
        raise InputError("methods are given with a training step; expected those of inferences")
    names = [method.name for method in manifest.methods]
    files = [program_file(name, place) for place, name in enumerate(names)]
    if len(set(names)) != len(names) or [method.program for method in manifest.methods] != files:
        raise InputError(f"methods has the files {[m.program for m in manifest.methods]}; expected {files}")
    for name in (SOURCE, WEIGHTS, *manifest.programs.values()):
        if name not in manifest.files:
            raise InputError(f"files has no {name!r}; expected it")
    texts = sum(file.nbytes for name, file in manifest.files.items() if name.startswith("kernels/"))
    if texts > MAX_FILE_BYTES:
        raise InputError(f"the kernels' texts have {texts} bytes; expected at most {MAX_FILE_BYTES} together")


MANIFESTS = Codec(
    Manifest,
    "Bundle manifest",
    schema="torchedge-bundle-2",
    verify=_check_manifest,
    remedy="export the model again",
    max_bytes=MAX_MANIFEST_BYTES,
)
