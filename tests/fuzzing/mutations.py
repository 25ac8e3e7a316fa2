"""Mutations that keep a file's form: values of JSON documents, lines of text, headers of tensors.

Mutated bytes rarely get past a parser. These change a few values and write the file again, so that what
stands behind the parser is reached.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 256, 65535, 65536, 10**5, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1,
    2**63, 2**64, 10**30, -(2**31), -(2**63), 0.0, -0.0, 0.5, -1.5, 1e-300, 1e-30, 1e30, 1e300, 1.8e308,
)  # fmt: skip
WORDS = (
    "", "0", "-1", "1e400", "NaN", "x", "\u202e", "\u00e9", "a b", "../../etc/passwd", "/", "\n", "\x1b[2J",
    "'", "{}",
    "%s%n", "9" * 400, "weight", "input", "output", "float32", "float16", "int64", "bool", "parameter",
    "intermediate", "state", "read", "write", "update", "image", "buffer", "train", "infer",
)  # fmt: skip


def mutate_json(document: Any, rng: random.Random, most: int = 4) -> Any:
    """Return a document with a few of its values changed, removed, repeated or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        places = list(_places(document)) if isinstance(document, (dict, list)) else []
        if not places:
            return _value(rng)
        holder, key = rng.choice(places)
        what = rng.random()
        if what < 0.1 and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 40)))]
        elif what < 0.2:
            del holder[key]
        elif what < 0.35:
            other, place = rng.choice(places)
            if (isinstance(other, dict) and place in other) or (
                isinstance(other, list) and place < len(other)
            ):
                holder[key] = copy.deepcopy(other[place])
        elif what < 0.4 and isinstance(holder, dict):
            holder[rng.choice(WORDS) if rng.random() < 0.5 else f"{key}x"] = holder.pop(key)
        else:
            holder[key] = _near(holder[key], rng) if rng.random() < 0.6 else _value(rng)
    return document


def mutate_text(text: str, rng: random.Random) -> str:
    """Return a text with lines or characters changed, removed or repeated; lines of JSON as documents."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        line, what = lines[place], rng.random()
        if what < 0.5 and line.startswith("{"):
            try:
                lines[place] = json.dumps(mutate_json(json.loads(line), rng, 2))
                continue
            except ValueError:
                pass
        if what < 0.6 and "," in line:
            cells = line.split(",")
            cells[rng.randrange(len(cells))] = str(_value(rng))
            lines[place] = ",".join(cells)
        elif what < 0.7:
            lines[place:place] = [line] * rng.choice((1, 2, 40))
        elif what < 0.8 and len(lines) > 1:
            del lines[place]
        else:
            start = rng.randint(0, len(line))
            end = min(len(line), start + rng.choice((0, 0, 1, 4)))
            lines[place] = line[:start] + rng.choice((*WORDS, *map(str, NUMBERS))) + line[end:]
    return "\n".join(lines)


def mutate_tensors(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a changed header, or with changed numbers."""
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= len(data) - 8:
        return data
    content = bytearray(data[8 + length :])
    header = data[8 : 8 + length]
    if rng.random() < 0.5 and content:
        for _ in range(rng.choice((1, 2, 16))):
            place = 4 * rng.randrange(max(1, len(content) // 4))
            value = rng.choice(
                (b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", rng.randbytes(4), b"\0\0\0\0")
            )
            content[place : place + 4] = value
    else:
        try:
            header = json.dumps(mutate_json(json.loads(header), rng, 2)).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return data
    return len(header).to_bytes(8, "little") + header + bytes(content)


def _places(document: Any) -> Any:
    """Yield the container and the key of every value."""
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in items:
            yield holder, key
            if isinstance(value, (dict, list)):
                waiting.append(value)


def _near(value: Any, rng: random.Random) -> Any:
    """Return a value of the same kind, near another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 2 * value, value << 20, value // 2))
    if isinstance(value, float):
        return rng.choice((-value, value * 2, value * 1e6, value / 1e6, value * 1e200, 0.0))
    if isinstance(value, str):
        if value.lstrip("-").isdigit() and len(value) < 30:  # whole numbers of protobuf are texts
            return str(_near(int(value), rng)) if rng.random() < 0.7 else str(rng.choice(NUMBERS[:22]))
        return mutate_text(value, rng)
    if isinstance(value, list):
        return rng.choice((value * 2, value[:-1], value[::-1], [value]))
    return value


def _value(rng: random.Random) -> Any:
    return rng.choice((
        None, True, False, [], {}, [[]], [0, 0], *rng.choices(NUMBERS, k=3), *rng.choices(WORDS, k=2),
    ))  # fmt: skip
