"""From the document of a `device.toml` to a Device: each key known, typed and in its unit, or refused."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar, cast

from torchedge.devices.device import Device, DeviceKind, Fact, Figure, MemoryKind, RuntimeValue
from torchedge.devices.provenance import Provenance
from torchedge.devices.vocabulary import KNOWN_FACTS, KNOWN_FIGURES, RUNTIME_KEYS, FigureRule
from torchedge.errors import ProfileError
from torchedge.storage import Document, resolve_inside, write_toml
from torchedge.storage.documents import parse_toml, read_bytes

__all__ = ["DEVICE_FILE", "MAX_DEVICE_BYTES", "parse_device", "read_device", "write_device"]

DEVICE_FILE = "device.toml"
MAX_DEVICE_BYTES = 256 * 1024
MAX_TEXT = 4096
MAX_ENTRIES = 64

NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?")
"""A device's name, which is also its folder's."""

_TABLES = ("figures", "facts", "software", "runtime", "profile")
_TOP = ("name", "title", "kind", "vendor", "memory", "aliases", "notes", *_TABLES)

_Item = TypeVar("_Item")


def read_device(folder: str | Path) -> Device:
    """Read and validate the `device.toml` of a profile folder.

    Raises:
        ProfileError: the file is missing, leads out of the folder, or anything in it is not as documented.
    """
    path = resolve_inside(Path(folder), DEVICE_FILE)
    data = read_bytes(path, max_bytes=MAX_DEVICE_BYTES)
    fingerprint = hashlib.sha256(data).hexdigest()
    return parse_device(parse_toml(path, data), folder=path.parent, fingerprint=fingerprint)


def write_device(document: Mapping[str, object], folder: str | Path) -> Device:
    """Validate a device's document and write it as `device.toml` into an existing folder, atomically.

    Returns:
        the device as read back.

    Raises:
        ProfileError: the document is not as documented, or the folder cannot be written.
    """
    parse_device(dict(document), folder=Path(folder))
    write_toml(Path(folder) / DEVICE_FILE, document)
    return read_device(folder)


def parse_device(document: Document, *, folder: Path, fingerprint: str = "") -> Device:
    """Return the Device that a parsed document describes; `folder` is named in errors and kept.

    Raises:
        ProfileError: naming the file, the key, what was given, what was expected and what to do.
    """
    reader = _Reader(folder / DEVICE_FILE)
    reader.known("", document, _TOP)
    name = reader.text(document, "name")
    if not NAME.fullmatch(name):
        reader.fail("name", name, "lower case letters, digits, '-' and '.', up to 64")
    return Device(
        name=name,
        title=reader.text(document, "title"),
        kind=cast(DeviceKind, reader.word(document, "kind", ("gpu", "cpu"))),
        vendor=reader.text(document, "vendor"),
        memory=cast(MemoryKind, reader.word(document, "memory", ("unified", "dedicated"))),
        aliases=_aliases(reader, document.get("aliases", [])),
        notes=reader.text(document, "notes") if "notes" in document else "",
        figures=reader.entries(document, "figures", KNOWN_FIGURES, _figure),
        facts=reader.entries(document, "facts", KNOWN_FACTS, _fact),
        software=reader.entries(document, "software", None, _software),
        runtime=reader.entries(document, "runtime", RUNTIME_KEYS, _runtime),
        profile=reader.table(document, "profile"),
        folder=folder,
        fingerprint=fingerprint,
    )


class _Reader:
    """Takes typed values out of a document; every failure is one line about one key of one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def fail(self, key: str, given: object, expected: str, step: str = "correct the file") -> None:
        """Raise the one-line error."""
        key = "".join(character if character.isprintable() else "?" for character in key[:80])
        shown = " ".join(repr(given).split())
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ProfileError(f"{self.file}: {key}: got {shown}, expected {expected}; {step}")

    def known(self, where: str, table: Collection[str], names: Collection[str]) -> None:
        """Refuse a key that is not among `names`, suggesting the nearest."""
        for key in table:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                expected = f"{near[0]!r}, the nearest known key" if near else f"one of: {', '.join(names)}"
                self.fail(f"{where or 'top level'}", key, expected, "correct or remove it")

    def text(self, table: Mapping[str, object], key: str, where: str = "") -> str:
        """Return a text that is neither empty nor over-long."""
        value = table.get(key)
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_TEXT:
            self.fail(where + key, value, f"a text of 1 to {MAX_TEXT} characters")
        return cast(str, value)

    def word(self, table: Mapping[str, object], key: str, words: tuple[str, ...], where: str = "") -> str:
        """Return one of some words."""
        value = table.get(key)
        if not isinstance(value, str) or value not in words:
            self.fail(where + key, value, f"one of: {', '.join(words)}")
        return cast(str, value)

    def table(self, document: Mapping[str, object], key: str) -> Mapping[str, object]:
        """Return an optional table."""
        value = document.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, value, f"a table [{key}]")
        return cast(Mapping[str, object], value)

    def entries(
        self,
        document: Mapping[str, object],
        key: str,
        names: Collection[str] | None,
        parse: Callable[[_Reader, str, str, object], _Item],
    ) -> dict[str, _Item]:
        """Return a table with each entry parsed."""
        table = self.table(document, key)
        if names is not None:
            self.known(f"[{key}]", table, names)
        if len(table) > MAX_ENTRIES:
            self.fail(key, len(table), f"at most {MAX_ENTRIES} entries")
        return {name: parse(self, f"{key}.{name}", name, value) for name, value in table.items()}


def _aliases(reader: _Reader, value: object) -> tuple[str, ...]:
    good = isinstance(value, list) and len(value) <= MAX_ENTRIES
    if not good or not all(
        isinstance(item, str) and 0 < len(item.strip()) <= 128 for item in cast(list[object], value)
    ):
        reader.fail("aliases", value, f"a list of up to {MAX_ENTRIES} names")
    return tuple(cast(list[str], value))


def _figure(reader: _Reader, key: str, name: str, entry: object) -> Figure:
    table = _sourced(reader, key, entry, ("value", "unit", "provenance", "source"))
    rule = KNOWN_FIGURES[name]
    if table.get("unit") != rule.unit:
        reader.fail(f"{key}.unit", table.get("unit"), f"{rule.unit!r}", "convert the value to that unit")
    value = table.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _within(float(value), rule):
        kind = "a whole number" if rule.whole else "a number"
        reader.fail(f"{key}.value", value, f"{kind} from {rule.low:g} to {rule.high:g} {rule.unit}")
    number = float(cast(float, value))
    return Figure(number, rule.unit, _provenance(reader, key, table), reader.text(table, "source", f"{key}."))


def _within(value: float, rule: FigureRule) -> bool:
    return rule.low <= value <= rule.high and (not rule.whole or value == int(value))


def _fact(reader: _Reader, key: str, name: str, entry: object) -> Fact:
    table = _sourced(reader, key, entry, ("value", "provenance", "source"))
    words = KNOWN_FACTS[name].words
    value = table.get("value")
    if words:
        reader.word(table, "value", words, f"{key}.")
    elif not isinstance(value, bool):
        reader.fail(f"{key}.value", value, "true or false")
    source = reader.text(table, "source", f"{key}.")
    return Fact(cast("bool | str", value), _provenance(reader, key, table), source)


def _sourced(reader: _Reader, key: str, entry: object, names: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(entry, dict):
        reader.fail(key, entry, f"a table of {', '.join(names)}")
    table = cast(Mapping[str, object], entry)
    reader.known(key, table, names)
    return table


def _provenance(reader: _Reader, key: str, table: Mapping[str, object]) -> Provenance:
    return Provenance(reader.word(table, "provenance", tuple(item.value for item in Provenance), f"{key}."))


def _software(reader: _Reader, key: str, name: str, value: object) -> str:
    return reader.text({name: value}, name, key.removesuffix(name))


def _runtime(reader: _Reader, key: str, name: str, value: object) -> RuntimeValue:
    rule = RUNTIME_KEYS[name]
    where = key.removesuffix(name)
    if rule.words:
        return reader.word({name: value}, name, rule.words, where)
    if rule.type is str:
        return reader.text({name: value}, name, where)
    numeric = rule.type is float and type(value) is int
    if type(value) is not rule.type and not numeric:
        reader.fail(key, value, f"a value of type {rule.type.__name__}")
    return cast(RuntimeValue, value)
