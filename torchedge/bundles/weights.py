"""Weights of a bundle: a safetensors file that stores every tensor in the layout of the device.

Loading is a copy. Tensors are stored in the order in which a run loads them (FlashMem, section 3): those that
a streaming plan preloads, then those that it streams, without a plan in the order of their first use. So a
run reads the file from front to back. A tensor of at least one page begins on a page (16 KiB, the page of
phones), a smaller one on a cache line; thus all chunks of a weight but its last are whole pages. The format
allows no gaps: uint8 tensors called `~padding.N` fill them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.errors import InputError, ProfileError
from torchedge.graphs import RESIDENT_ROLES
from torchedge.lowering.packing import check_indices, check_weight, pack_weight
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.storage.documents import open_file, writing
from torchedge.storage.tensors import MAX_HEADER_BYTES, NAMES, Header, parse_header

PAGE, LINE = 16384, 64
SCHEMA = "torchedge-weights-1"

_FILLER = "~padding."


def write_weights(
    path: Path, programs: Sequence[Program], data: Mapping[str, Array], order: Sequence[str] = ()
) -> str:
    """Write the resident tensors of programs from `data` (logical arrays); return the file's SHA-256.

    order: names of the first tensors; the others follow in the order of their first use. Data in single
    precision is converted where its tensor is in half. A state without data is omitted: it begins at its
    fill. Peak memory: one tensor.

    Raises:
        InputError: a parameter, buffer or constant has no data, or data of another shape or dtype.
        ProfileError: the file cannot be written, or there are too many tensors for one file.
    """
    resident = {
        tensor.name: tensor
        for tensor in _resident_tensors(programs)
        if tensor.name in data or tensor.role != "state"
    }
    tensors = [resident[name] for name in dict.fromkeys([*order, *resident])]
    header: dict[str, object] = {"__metadata__": {"page": str(PAGE), "schema": SCHEMA}}
    end = 0
    layout: list[tuple[int, StoredTensor | None]] = []
    for tensor in tensors:
        check_weight(tensor, data)
        padding = -end % (PAGE if _stored_bytes(tensor) >= PAGE else LINE)
        if padding:
            header[f"{_FILLER}{end}"] = _entry("U8", (padding,), end, padding)
            layout.append((padding, None))
            end += padding
        nbytes = _stored_bytes(tensor)
        header[tensor.name] = _entry(NAMES[np.dtype(tensor.dtype)], _stored_shape(tensor), end, nbytes)
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
    with writing(path, f"free room for {end} bytes"), path.open("xb") as file:
        for piece in _pieces(text, layout, data):
            file.write(piece)
            state.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return state.hexdigest()


def _pieces(
    text: bytes, layout: list[tuple[int, StoredTensor | None]], data: Mapping[str, Array]
) -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little")
    yield text
    for nbytes, tensor in layout:
        if tensor is None:
            yield bytes(nbytes)
        else:
            packed = pack_weight(tensor, data[tensor.name])
            yield packed.reshape(-1).view(np.uint8).data


def _entry(code: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, object]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _resident_tensors(programs: Sequence[Program]) -> list[StoredTensor]:
    """Return the tensors that stay on the device, each name once, in the order of their first use."""
    tensors: dict[str, StoredTensor] = {}
    for program in programs:
        used = dict.fromkeys(index for launch in program.launches for index in launch.tensors)
        order = [*used, *[n for n in range(len(program.tensors)) if n not in used]]
        for tensor in [program.tensors[n] for n in order]:
            if tensor.role in RESIDENT_ROLES:
                tensors.setdefault(tensor.name, tensor)
    return list(tensors.values())


def _stored_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape in memory: sizes from outermost to innermost, or (height, width, 4) of an image."""
    if tensor.layout.storage == "buffer":
        return tensor.layout.sizes(tensor.shape)
    width, height = tensor.layout.extent(tensor.shape)
    return (height, width, 4)


def _stored_bytes(tensor: StoredTensor) -> int:
    return int(np.prod(_stored_shape(tensor), dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


# reading ----------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Read the header of a weights file; raises ProfileError for a damaged file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return parse_header(path, file.read(8 + MAX_HEADER_BYTES), size)


def check_weights(path: Path, header: Header, programs: Sequence[Program]) -> None:
    """Raise InputError where a tensor of a weights file is missing, unknown or of another shape or dtype."""
    if header.metadata.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema is {header.metadata.get('schema')!r:.60}; expected {SCHEMA!r}")
    resident = {tensor.name: tensor for tensor in _resident_tensors(programs)}
    for name in header.entries:
        if name not in resident and not name.startswith(_FILLER):
            raise InputError(f"{path}: holds {name!r}, which the program does not keep; export it again")
    for name, tensor in resident.items():
        entry = header.entries.get(name)
        if entry is None:
            if tensor.role != "state":
                raise InputError(f"{path}: holds no {tensor.role} {name}; export it again")
            continue
        if (entry.dtype, entry.shape) != (_dtype(tensor), _stored_shape(tensor)):
            raise InputError(
                f"{path}: {name} is {entry.dtype}{list(entry.shape)}, the program keeps it as "
                f"{tensor.dtype}{list(_stored_shape(tensor))}; export it again"
            )


def _dtype(tensor: StoredTensor) -> np.dtype[Any] | None:
    try:
        return np.dtype(tensor.dtype)
    except TypeError:  # numpy has no bfloat16
        return None


def packed_weights(
    path: Path, header: Header, programs: Sequence[Program], sha256: str, names: Collection[str] | None = None
) -> Iterator[tuple[StoredTensor, Array]]:
    """Yield tensors of the file with their data in the device's layout, in the file's order.

    The whole file is read and hashed on the way: what is used is what was checked. names: of the tensors to
    yield; None: all.

    Raises:
        ProfileError: the file ends early, cannot be read, or (after the last tensor) is not that of `sha256`.
        IndexRangeError: a tensor of indices holds one out of range.
    """
    resident = {tensor.name: tensor for tensor in _resident_tensors(programs)}
    indices = [t for program in programs for t in program.tensors if t.indices and t.role in RESIDENT_ROLES]
    entries = sorted(header.entries.items(), key=lambda item: item[1].start)
    state = hashlib.sha256()
    with open_file(path) as file:
        begin = min([entry.start for _, entry in entries], default=os.fstat(file.fileno()).st_size)
        state.update(file.read(begin))
        for name, entry in entries:
            content = np.empty(entry.stop - entry.start, np.uint8)
            if file.readinto(content.data) != content.size:  # type: ignore[attr-defined]
                raise ProfileError(f"{path}: ends before byte {entry.stop}, expected more; copy it again")
            state.update(content.data)
            if name in resident and content.size and (names is None or name in names):
                if entry.dtype.kind == "b" and bool((content > 1).any()):
                    raise ProfileError(
                        f"{path}: holds a byte that is no boolean; expected 0 or 1: copy it again"
                    )
                tensor, packed = resident[name], content.view(entry.dtype).reshape(entry.shape)
                for ranged in [t for t in indices if t.name == name]:
                    check_indices(ranged, ranged.layout.unpack(packed, ranged.shape))
                yield tensor, packed
        state.update(file.read(1))
    if state.hexdigest() != sha256:
        raise ProfileError(
            f"{path}: was changed after it was checked, or is read wrongly; copy or export the bundle again"
        )
