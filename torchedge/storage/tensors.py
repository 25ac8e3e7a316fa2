"""Numpy arrays in safetensors files, checked against every rule of the format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchedge.errors import ProfileError
from torchedge.storage.documents import parse_json, read_bytes, write_bytes

MAX_TENSOR_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 2**22
MAX_TENSORS = 2**15
MAX_RANK = 16
MAX_NAME = 256

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
    }
)  # fmt: skip
"""numpy's code of each dtype by the format's name; the format's bfloat16 has none."""

NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
"""The format's name by numpy's dtype."""

_METADATA = "__metadata__"
_NEXT = "fetch or rebuild the file"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: dtype, shape, and its first byte and the byte after its last one."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's metadata (text by key) and its tensors by name."""

    metadata: dict[str, str]
    entries: dict[str, Entry]

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Offset in the file and bytes of each tensor, by name."""
        return {name: (entry.start, entry.stop - entry.start) for name, entry in self.entries.items()}


def read_tensors(
    path: str | Path, *, max_bytes: int = MAX_TENSOR_BYTES, finite: bool = True
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read every tensor of a safetensors file as a read-only array, and its metadata.

    Args:
        path: the file.
        max_bytes: the largest file to accept.
        finite: raise for floating-point tensors with an infinity or a NaN.

    Returns:
        the arrays by name, and the metadata (text by key).
    Raises ProfileError: the file is missing, too large, or breaks a rule of the format.
    """
    data = read_bytes(path, max_bytes=max_bytes)
    header = parse_header(path, data[: 8 + MAX_HEADER_BYTES], len(data))
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.entries.items():
        count = math.prod(entry.shape)
        try:
            array = np.frombuffer(data, entry.dtype, count, entry.start if count else 0).reshape(entry.shape)
        except (ValueError, OverflowError) as error:  # an empty tensor of sides beyond numpy's
            raise ProfileError(f"{path}: tensor {name!r} has no such shape ({error}); {_NEXT}") from error
        if finite and array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise ProfileError(
                f"{path}: tensor {name!r} holds an infinity or a NaN, expected finite numbers; {_NEXT}"
            )
        if array.dtype.kind == "b" and bool((array.view(np.uint8) > 1).any()):
            raise ProfileError(
                f"{path}: tensor {name!r} holds a byte that is no boolean, expected 0 or 1; {_NEXT}"
            )
        tensors[name] = array
    return tensors, header.metadata


def write_tensors(
    path: str | Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to a safetensors file, atomically; the same content always gives the same bytes.

    The format's own writer changes the order of metadata from call to call. Here wide dtypes come first,
    which keeps every tensor aligned; tensors of one width are sorted by name.

    Args:
        path: the file, replaced whole.
        tensors: the arrays by name; any layout in memory, stored in C order and little endian.
        metadata: text by key.
    Raises ProfileError: an array of a dtype that the format lacks, a bad name, too many tensors, a header
    that `read_tensors` would refuse, or a folder that cannot be written.
    """
    if len(tensors) > MAX_TENSORS:
        raise ProfileError(
            f"{path}: got {len(tensors)} tensors, expected at most {MAX_TENSORS}; split the file"
        )
    header: dict[str, object] = {}
    if metadata:
        _check_metadata(path, dict(metadata))
        header[_METADATA] = {key: metadata[key] for key in sorted(metadata)}
    parts: list[bytes] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        array = tensors[name]
        code = NAMES.get(array.dtype.newbyteorder("<"))
        if code is None or array.ndim > MAX_RANK:
            raise ProfileError(
                f"{path}: tensor {name!r} has dtype {array.dtype} and rank {array.ndim}, expected one of "
                f"{', '.join(str(np.dtype(item)) for item in DTYPES.values())} rank to {MAX_RANK}; convert it"
            )
        _check_name(path, name)
        parts.append(np.ascontiguousarray(array, dtype=DTYPES[code]).tobytes())
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [end, end + len(parts[-1])],
        }
        end += len(parts[-1])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ProfileError(
            f"{path}: a header of {len(text)} bytes, expected at most {MAX_HEADER_BYTES}; split the file"
        )
    write_bytes(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def parse_header(path: str | Path, start: bytes, size: int) -> Header:
    """Check a file's header against its size; `path` is named in errors.

    start: the first 8 + MAX_HEADER_BYTES bytes of the file, or all of a shorter one. size: bytes of the file.
    Raises ProfileError: a rule of the format is broken: too large, a gap, an overlap, a bad name or dtype.
    """
    length = int.from_bytes(start[:8], "little")
    if size < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ProfileError(
            f"{path}: announces a header of {length} bytes in {size}, expected a safetensors file whose "
            f"header has up to {MAX_HEADER_BYTES}; {_NEXT}"
        )
    header = parse_json(f"{path} (header)", start[8 : 8 + length])
    stored = header.pop(_METADATA, {})
    if not isinstance(stored, dict):
        raise ProfileError(
            f"{path}: has metadata of type {type(stored).__name__}, expected a table of texts; {_NEXT}"
        )
    metadata = _check_metadata(path, stored)
    if len(header) > MAX_TENSORS:
        raise ProfileError(f"{path}: holds {len(header)} tensors, expected at most {MAX_TENSORS}; {_NEXT}")
    entries = {}
    for name, entry in header.items():
        _check_name(path, name)
        entries[name] = _check_entry(path, name, entry, 8 + length)
    end = 8 + length
    for span in sorted((entry.start, entry.stop) for entry in entries.values()):
        if span[0] != end:
            raise ProfileError(
                f"{path}: tensors overlap or leave a gap at byte {span[0]}, expected byte {end}; {_NEXT}"
            )
        end = span[1]
    if end != size:
        raise ProfileError(f"{path}: tensors take {end} bytes of {size}, expected all; {_NEXT}")
    return Header(metadata, entries)


def _check_entry(path: str | Path, name: str, entry: object, begin: int) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ProfileError(f"{where}: expected exactly dtype, shape and data_offsets; {_NEXT}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ProfileError(
            f"{where}: has dtype {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}; {_NEXT}"
        )
    if not _sizes(shape) or len(shape) > MAX_RANK:
        raise ProfileError(f"{where}: expected a shape of up to {MAX_RANK} sizes, none negative; {_NEXT}")
    if not _sizes(offsets) or len(offsets) != 2:
        raise ProfileError(f"{where}: expected two data_offsets, none negative; {_NEXT}")
    start, stop = offsets
    expected = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if stop - start != expected:
        raise ProfileError(f"{where}: takes {stop - start} bytes, expected {expected} by its shape; {_NEXT}")
    return Entry(np.dtype(DTYPES[dtype]), tuple(shape), begin + start, begin + stop)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_metadata(path: str | Path, metadata: Mapping[Any, Any]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ProfileError(
                f"{path}: metadata {str(key)[:40]!r} is not text by key, expected only texts; {_NEXT}"
            )
    return dict(metadata)


def _check_name(path: str | Path, name: str) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable() or name == _METADATA:
        raise ProfileError(
            f"{path}: has the tensor name {name[:40]!r}, expected up to {MAX_NAME} printable characters, not "
            f"{_METADATA}; rename the tensor"
        )
