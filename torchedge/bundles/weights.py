"""Weights of a bundle: a safetensors file in which every tensor lies as the device will hold it.

Loading is a copy. Tensors follow one another in the order in which the launches first touch them, so that a
run that streams its weights (FlashMem, section 3) reads the file from front to back; one of at least a page
begins on a page (16 KiB: what phones map), a smaller one on a cache line, so that all chunks of a weight but
its last are whole pages. Fillers, uint8 tensors called `~padding.N`, take the bytes between, since the format
allows no gaps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError, ProfileError
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.storage.documents import open_file
from torchedge.storage.tensors import MAX_HEADER_BYTES, NAMES, Entry, Header, parse_header

__all__ = ["KEPT", "LINE", "PAGE", "check_weights", "packed_weights", "read_header", "write_weights"]

PAGE, LINE = 16384, 64
SCHEMA = "torchedge-weights-1"

_FILLER = "~padding."
KEPT = frozenset({"parameter", "buffer", "state", "constant"})
"""Roles of tensors that stay on the device from step to step."""

Array = npt.NDArray[Any]


def write_weights(path: Path, programs: Sequence[Program], data: Mapping[str, Array]) -> str:
    """Write the tensors that programs keep and `data` holds (logical arrays); return the file's SHA-256.

    States that `data` does not hold begin at their fill. Memory: one tensor at a time.

    Raises:
        InputError: a parameter, buffer or constant has no data, or data of another shape or dtype.
        ProfileError: the file cannot be written, or there are too many tensors for one file.
    """
    tensors = [tensor for tensor in _kept(programs) if tensor.name in data or tensor.role != "state"]
    header: dict[str, object] = {"__metadata__": {"page": str(PAGE), "schema": SCHEMA}}
    end = 0
    layout: list[tuple[int, StoredTensor | None]] = []
    for tensor in tensors:
        _check_data(tensor, data)
        padding = -end % (PAGE if _stored_bytes(tensor) >= PAGE else LINE)
        if padding:
            header[f"{_FILLER}{end}"] = _entry("U8", (padding,), end, padding)
            layout.append((padding, None))
            end += padding
        nbytes = _stored_bytes(tensor)
        header[tensor.name] = _entry(NAMES[np.dtype(tensor.dtype)], _held_shape(tensor), end, nbytes)
        layout.append((nbytes, tensor))
        end += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > MAX_HEADER_BYTES:
        raise ProfileError(
            f"{path}: a header of {len(text)} bytes for {len(tensors)} tensors, expected at most "
            f"{MAX_HEADER_BYTES}; the model has too many tensors for one bundle"
        )
    state = hashlib.sha256()
    try:
        with path.open("xb") as file:
            for part in _parts(text, layout, data):
                file.write(part)
                state.update(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ProfileError(
            f"{path}: cannot be written ({error.strerror}), expected room for {end} bytes; free some"
        ) from error
    return state.hexdigest()


def _parts(
    text: bytes, layout: list[tuple[int, StoredTensor | None]], data: Mapping[str, Array]
) -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little")
    yield text
    for nbytes, tensor in layout:
        if tensor is None:
            yield bytes(nbytes)
        else:
            packed = np.ascontiguousarray(tensor.layout.pack(np.asarray(data[tensor.name])))
            yield packed.reshape(-1).view(np.uint8).data


def _entry(code: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, object]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _kept(programs: Sequence[Program]) -> list[StoredTensor]:
    """Return the tensors that stay on the device, those first that a launch touches first; each name once."""
    found: dict[str, StoredTensor] = {}
    for program in programs:
        touched = dict.fromkeys(index for launch in program.launches for index in launch.tensors)
        order = [*touched, *[n for n in range(len(program.tensors)) if n not in touched]]
        for tensor in [program.tensors[n] for n in order]:
            if tensor.role in KEPT:
                found.setdefault(tensor.name, tensor)
    return list(found.values())


def _held_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape of a tensor as it lies: dimensions from outermost to innermost, or an image's."""
    if tensor.layout.storage == "buffer":
        return tensor.layout.sizes(tensor.shape)
    width, height = tensor.layout.extent(tensor.shape)
    return (height, width, 4)


def _stored_bytes(tensor: StoredTensor) -> int:
    return int(np.prod(_held_shape(tensor), dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


def _check_data(tensor: StoredTensor, data: Mapping[str, Array]) -> None:
    what = f"{tensor.role} {tensor.name}"
    if tensor.name not in data:
        raise InputError(f"{what}: the captured step holds no data of it; report this with the model")
    found = data[tensor.name]
    if (found.shape, str(found.dtype)) != (tensor.shape, tensor.dtype):
        raise InputError(
            f"{what} is {found.dtype}{list(found.shape)}, the program keeps {tensor.dtype}"
            f"{list(tensor.shape)}; report this with the model"
        )


# reading ----------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Read where the tensors of a weights file lie; raises ProfileError for a damaged file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return parse_header(path, file.read(8 + MAX_HEADER_BYTES), size)


def check_weights(path: Path, header: Header, programs: Sequence[Program]) -> None:
    """Hold a weights file against the programs; raises InputError for what is missing, unknown or else."""
    if header.metadata.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema is {header.metadata.get('schema')!r:.60}; expected {SCHEMA!r}")
    kept = {tensor.name: tensor for tensor in _kept(programs)}
    for name in header.entries:
        if name not in kept and not name.startswith(_FILLER):
            raise InputError(f"{path}: holds {name!r}, which the program does not keep; export it again")
    for name, tensor in kept.items():
        entry = header.entries.get(name)
        if entry is None:
            if tensor.role != "state":
                raise InputError(f"{path}: holds no {tensor.role} {name}; export it again")
            continue
        if (entry.dtype, entry.shape) != (_dtype(tensor), _held_shape(tensor)):
            raise InputError(
                f"{path}: {name} is {entry.dtype}{list(entry.shape)}, the program keeps it as "
                f"{tensor.dtype}{list(_held_shape(tensor))}; export it again"
            )


def _dtype(tensor: StoredTensor) -> np.dtype[Any] | None:
    try:
        return np.dtype(tensor.dtype)
    except TypeError:  # bfloat16 and the like, which numpy has not
        return None


def packed_weights(
    path: Path, header: Header, programs: Sequence[Program]
) -> Iterator[tuple[StoredTensor, Array]]:
    """Yield each tensor that the file holds with its data as the device holds it, in the file's order.

    Raises:
        ProfileError: the file ends early, or cannot be read.
    """
    kept = {tensor.name: tensor for tensor in _kept(programs)}
    with open_file(path) as file:
        for name, entry in sorted(header.entries.items(), key=lambda item: item[1].start):
            if name in kept and entry.stop > entry.start:
                yield kept[name], _read(path, file, entry)


def _read(path: Path, file: Any, entry: Entry) -> Array:  # noqa: ANN401 - a binary file
    held = np.empty(entry.stop - entry.start, np.uint8)
    file.seek(entry.start)
    if file.readinto(held.data) != held.size:
        raise ProfileError(f"{path}: ends before byte {entry.stop}, expected more; export or copy it again")
    if entry.dtype.kind == "b" and bool((held > 1).any()):
        raise ProfileError(f"{path}: holds a byte that is no boolean, expected 0 or 1; copy it again")
    return held.view(entry.dtype).reshape(entry.shape)
