"""TOML and JSON documents and raw bytes: bounded reading, finite numbers only, atomic writing, no pickle."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from torchedge.errors import ProfileError, TorchedgeError, clipped, described
from torchedge.storage.replacing import new_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Document = dict[str, object]
"""A parsed document: nested dicts, lists, str, bool, int, finite float (and None, in JSON)."""

MAX_DOCUMENT_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 2**22
"""Most values and keys of a JSON document: Python takes about 100 bytes for each."""
MAX_INTEGER = 2**63 - 1

_PIECE = 2**22

# More parts than this in one dotted key cost the TOML parser time that grows with their square.
_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_WORD}(?:[ \t]*\.[ \t]*{_WORD}){{{MAX_DEPTH},}}")


@contextlib.contextmanager
def open_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; errors of reading are raised like errors of opening.

    Raises ProfileError: it is missing, unreadable or no regular file (a pipe or device could block).
    """
    try:
        # Non-blocking: opening a pipe that nobody writes would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"{path}: cannot be read ({reason}), expected a file; check the path") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProfileError(f"{path}: is not a regular file, expected one; check the path")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); check the file") from error
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    Raises ProfileError: it is missing, unreadable, too large or no regular file (a pipe or device could
    block).
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(max_bytes, max(size, _PIECE)) + 1)  # as much memory as the file takes
    if len(data) > max_bytes:
        raise ProfileError(
            f"{path}: holds {max(size, len(data))} bytes, expected at most {max_bytes}; "
            "check that it is the right file"
        )
    return data


def read_unpacked(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a file of at most `max_bytes` bytes, unpacked where its name ends in .gz.

    Raises ProfileError: as `read_bytes`, or the packed data is damaged or unpacks to more.
    """
    data = read_bytes(path, max_bytes=max_bytes)
    if Path(path).suffix != ".gz":
        return data
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, max_bytes)
    except zlib.error as error:
        raise ProfileError(f"{path}: is not in gzip format ({error}); check the file") from error
    if unpacker.unconsumed_tail:
        raise ProfileError(f"{path}: unpacks to more than {max_bytes} bytes; check that it is the right file")
    if not unpacker.eof:
        raise ProfileError(f"{path}: is cut off, expected a whole gzip file; fetch it again")
    return unpacked


def present(file: Path) -> Path:
    """Return the file, or its compressed form where only that exists."""
    packed = file.with_name(file.name + ".gz")
    return packed if packed.exists() and not file.exists() else file


def read_text(path: str | Path, kind: str) -> str:
    """Read a UTF-8 text; `kind` is named in errors.

    Raises ProfileError: as `read_bytes`, or it is not UTF-8.
    """
    return _decode(path, read_bytes(path), kind)


def read_toml(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Document:
    """Read a TOML document; dates and times come back as ISO 8601 text.

    Raises ProfileError: as `read_bytes`, or it is not UTF-8 TOML, is nested too deep or holds a number that
    is not finite or does not fit 64 bits.
    """
    return parse_toml(path, read_bytes(path, max_bytes=max_bytes))


def parse_toml(source: str | Path, data: bytes) -> Document:
    """Parse and validate the bytes of a TOML document, as `read_toml`; `source` is named in errors."""
    text = _decode(source, data, "TOML")
    if _LONG_KEY.search(text):
        raise ProfileError(
            f"{source}: holds a dotted key of over {MAX_DEPTH} parts, expected fewer; shorten the key"
        )
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{source}: is not valid TOML ({_reason(error)}); correct the file") from error
    return {key: _checked(value, source, key, MAX_DEPTH) for key, value in document.items()}


def read_json(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Document:
    """Read a JSON document whose top level is an object, unpacked where the file's name ends in .gz.

    Raises ProfileError: as `read_toml` and `read_unpacked`, or a key stands twice in one object.
    """
    return parse_json(path, read_unpacked(path, max_bytes=max_bytes))


def parse_json(source: str | Path, data: bytes) -> Document:
    """Parse and validate the bytes of a JSON object, as `read_json`; `source` is named in errors."""
    check_values(source, data)
    text = _decode(source, data, "JSON")
    try:
        document: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{source}: is not valid JSON ({_reason(error)}); correct the file") from error
    if not isinstance(document, dict):
        raise ProfileError(
            f"{source}: holds {'null' if document is None else described(document)}, expected a JSON object; "
            "correct the file"
        )
    if _is_sound(document):
        return document
    return {key: _checked(value, source, key, MAX_DEPTH) for key, value in document.items()}


def check_values(source: str | Path, data: bytes) -> None:
    """Raise ProfileError for JSON text of over MAX_VALUES values and keys, before it is parsed.

    It counts the marks that begin or follow a value; those within texts count too.
    """
    count = sum(map(data.count, (b"[", b"{", b",", b":")))
    if count > MAX_VALUES:
        raise ProfileError(
            f"{source}: holds up to {count} values, expected at most {MAX_VALUES}; "
            "check that it is the right file"
        )


def plain(value: Any) -> Any:  # noqa: ANN401 - any nested result
    """Return a nested result as JSON has it: dicts, lists, texts, finite numbers and None.

    Dataclasses become dicts of the fields that their repr shows, arrays lists, members of an Enum their
    value, and numbers that are not finite None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in fields(value) if item.repr}
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def reading(place: str, what: str, expected: str) -> Iterator[None]:
    """Raise ProfileError if a part of a file, converted inside, does not have the form expected.

    place: of the part, with the file. what: the kind of part expected.
    """
    try:
        yield
    except TorchedgeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else _reason(error)
        raise ProfileError(f"{place}: not {what} ({reason}); expected {expected}") from error


@contextlib.contextmanager
def writing(path: str | Path, remedy: str, error: type[TorchedgeError] = ProfileError) -> Iterator[None]:
    """Raise an error that names the path and the remedy if a file or folder cannot be written inside."""
    try:
        yield
    except OSError as failure:
        raise error(f"{path}: cannot be written ({failure.strerror or failure}); {remedy}") from failure


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file whole or not at all, by `new_file`; raises what that raises."""
    with new_file(path) as file:
        file.write(data)


def write_json(path: str | Path, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically, keys sorted: the same document gives the same bytes.

    It is packed where the file's name ends in .gz.
    Raises ProfileError: it cannot be written, or holds something that JSON has not (a NaN, an object).
    """
    try:
        # The encoder of the standard library is written in C only without indentation.
        text = json.dumps(document, sort_keys=True, allow_nan=False, ensure_ascii=False)
        data = msgspec.json.format(text.encode(), indent=1) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path}: {_reason(error)}, expected what JSON can hold; convert the values"
        ) from error
    write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def write_toml(path: str | Path, document: Mapping[str, object]) -> None:
    """Write a TOML document atomically, keys in the order given.

    Raises ProfileError: it cannot be written, or holds something other than text, bool, integer, finite
    float, list and table.
    """
    try:
        data = format_toml(document).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path}: {_reason(error)}, expected what TOML can hold; convert the values"
        ) from error
    write_bytes(path, data)


def file_sha256(path: str | Path, *, max_bytes: int) -> str:
    """Return the hexadecimal SHA-256 of a file of at most `max_bytes` bytes, read piece by piece.

    Raises ProfileError: as `read_bytes`.
    """
    state, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            if size > max_bytes:
                raise ProfileError(
                    f"{path}: holds more than {max_bytes} bytes, expected no more; "
                    "check that it is the right file"
                )
            state.update(piece)
    return state.hexdigest()


def _decode(source: str | Path, data: bytes, kind: str) -> str:
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{source}: is not UTF-8 text (byte {error.start}), expected {kind}; check the file"
        ) from error


def _reason(error: Exception) -> str:
    """One short line of a parser's message."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    return clipped(str(error))


def _unique(pairs: list[tuple[str, object]]) -> Document:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"the key {first_repeated(key for key, _ in pairs)[:80]!r} stands twice")
    return table


def first_repeated(names: Iterable[str]) -> str:
    """Return the first of some names that stands there again, "" if all differ."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _is_sound(document: Document) -> bool:
    """Return whether a JSON document keeps the rules of `_checked`, level by level and without paths."""
    level: list[Any] = list(document.values())
    for _ in range(MAX_DEPTH):
        for item in level:
            kind = type(item)
            if (kind is float and not math.isfinite(item)) or (kind is int and abs(item) > MAX_INTEGER):
                return False
        items: list[Iterable[Any]] = [item for item in level if type(item) is list]
        items += [item.values() for item in level if type(item) is dict]
        level = list(chain.from_iterable(items))
    return not level


def _checked(value: object, source: str | Path, where: str, depth: int) -> object:
    """Return a value with every number in it checked and every date as text."""
    if depth == 0:
        raise ProfileError(
            f"{source}: {_shown(where)}: nested over {MAX_DEPTH} deep, expected less; flatten it"
        )
    if isinstance(value, dict):
        where = where[:80]
        return {key: _checked(item, source, f"{where}.{key}", depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, source, where, depth - 1) for item in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    finite = not isinstance(value, float) or math.isfinite(value)
    if not finite or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        raise ProfileError(
            f"{source}: {_shown(where)}: expected a finite number of at most 64 bits; correct the value"
        )
    return value


def _shown(where: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in where[:80])


# TOML as text: the standard library reads it and does not write it ------------------------------------------

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def format_toml(document: Mapping[str, object]) -> str:
    """Return a document as TOML text that parses back to an equal one, keys in the order given.

    Values: str, bool, int, finite float, sequences of values, and mappings, which become tables.

    Raises:
        TypeError: another type of value or key.
        ValueError: a float that is not finite, or nesting over 32 deep.
    """
    lines: list[str] = []
    _table(document, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(table: Mapping[str, object], path: tuple[str, ...], lines: list[str]) -> None:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"tables nested over {MAX_DEPTH} deep")
    below = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (len(below) < len(table) or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    for key, value in table.items():
        if key not in below:
            lines.append(f"{_key(key)} = {_value(value, MAX_DEPTH)}")
    for key, value in below.items():
        _table(value, (*path, key), lines)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key of type {type(key).__name__}")
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL (and lone surrogates, which neither may hold).
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object, depth: int) -> str:
    if depth == 0:
        raise ValueError(f"values nested over {MAX_DEPTH} deep")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"the number {value}")
        return repr(float(value))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = (f"{_key(key)} = {_value(item, depth - 1)}" for key, item in value.items())
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return "[" + ", ".join(_value(item, depth - 1) for item in value) + "]"
    raise TypeError(f"a value of type {type(value).__name__}")
