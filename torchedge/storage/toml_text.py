"""TOML as text: the standard library reads it and does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MAX_DEPTH = 32


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
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"tables nested over {_MAX_DEPTH} deep")
    below = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (len(below) < len(table) or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    for key, value in table.items():
        if key not in below:
            lines.append(f"{_key(key)} = {_value(value, _MAX_DEPTH)}")
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
        raise ValueError(f"values nested over {_MAX_DEPTH} deep")
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
