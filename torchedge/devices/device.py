"""The nouns: a Device and its Figures, read-only and hashable by content."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from torchedge.devices.provenance import Provenance
from torchedge.errors import DeviceError

__all__ = ["Device", "DeviceKind", "Fact", "Figure", "MemoryKind", "RuntimeValue"]

DeviceKind = Literal["gpu", "cpu"]
MemoryKind = Literal["unified", "dedicated"]
RuntimeValue = bool | int | float | str
"""One semantic switch of the framework that a profile's measurements refer to."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number about a device: value, unit, where it comes from, and the source (or the reasoning)."""

    value: float
    unit: str
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One property of a device that is no number (a yes or no, or a word), with its provenance and source."""

    value: bool | str
    provenance: Provenance
    source: str


def freeze(value: object) -> object:
    """Return nested dicts and lists as read-only mappings and tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: object) -> object:
    """Return nested read-only mappings as dicts and tuples as lists, which can be written and pickled."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of one device: the content of its `device.toml`.

    `figures` and `facts` carry their provenance; `software` names the versions that the measurements refer
    to; `runtime` holds the semantic switches of that software for the simulation of training memory;
    `profile` describes the fitted files beside `device.toml` (open content, read-only). `folder` is where it
    was read from, `fingerprint` the SHA-256 of the file's bytes.
    """

    name: str
    title: str
    kind: DeviceKind
    vendor: str
    memory: MemoryKind
    figures: Mapping[str, Figure]
    folder: Path = field(compare=False)
    fingerprint: str
    aliases: tuple[str, ...] = ()
    notes: str = ""
    facts: Mapping[str, Fact] = field(default_factory=lambda: MappingProxyType({}))
    software: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    runtime: Mapping[str, RuntimeValue] = field(default_factory=lambda: MappingProxyType({}))
    profile: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in ("figures", "facts", "software", "runtime", "profile"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((self.name, self.fingerprint))

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; worker processes get plain ones, frozen again on arrival.
        return _restore, tuple(thaw(getattr(self, item.name)) for item in fields(self))

    def figure(self, name: str) -> Figure:
        """Return a figure by its name.

        Raises:
            DeviceError: this device's profile does not give it.
        """
        return self._known(self.figures, name, "figures")

    def fact(self, name: str) -> Fact:
        """Return a fact by its name.

        Raises:
            DeviceError: this device's profile does not give it.
        """
        return self._known(self.facts, name, "facts")

    def value(self, name: str) -> float:
        """Return the value of a figure, in the unit that `KNOWN_FIGURES` fixes for its name.

        Raises:
            DeviceError: this device's profile does not give it.
        """
        return self.figure(name).value

    def _known(self, table: Mapping[str, _Item], name: str, what: str) -> _Item:
        if name in table:
            return table[name]
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it gives: {', '.join(sorted(table)) or 'none'}"
        raise DeviceError(
            f"{self.name}: its profile gives no {name!r} among its {what}, expected one; {hint} "
            f"Else add it to {self.folder / 'device.toml'}"
        )


def _restore(*values: object) -> Device:
    names = [item.name for item in fields(Device)]
    given = dict(zip(names, values, strict=True))
    aliases = given["aliases"]
    given["aliases"] = tuple(aliases) if isinstance(aliases, list) else ()
    return Device(**given)  # type: ignore[arg-type]
