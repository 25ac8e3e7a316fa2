"""Devices: the read-only nouns, each figure with its provenance, and the `device.toml` that holds them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import total_ordering
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from torchedge.devices.vocabulary import KNOWN_FACTS, KNOWN_FIGURES, RUNTIME_KEYS
from torchedge.errors import DeviceError, InputError, ProfileError, did_you_mean
from torchedge.storage import Document, resolve_inside, write_toml
from torchedge.storage.codecs import OUTSIDE, Codec, OneOf, Text, shortened, thaw
from torchedge.storage.documents import parse_toml, read_bytes

DEVICE_FILE = "device.toml"
MAX_DEVICE_BYTES = 256 * 1024
MAX_ENTRIES = 64

NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,62}[a-z0-9])?")
"""A device's name, which is also its folder's."""

DeviceKind = Literal["gpu", "cpu"]
MemoryKind = Literal["unified", "dedicated"]
RuntimeValue = bool | int | float | str
"""One semantic switch of the framework that a profile's measurements refer to."""

Words = Annotated[
    str, Meta(min_length=1, max_length=4096, pattern=r"\S", description="a text of 1 to 4096 characters")
]

_Item = TypeVar("_Item")


@total_ordering
class Provenance(Enum):
    """Where a figure comes from. Ordered: `MEASURED > PUBLIC_DATA > PUBLISHED > TRANSFERRED > ASSUMED`.

    The value is the word used in `device.toml` and in every result.
    """

    MEASURED = "measured"
    """By our probes; the source names date, versions and command."""
    PUBLIC_DATA = "public data"
    """Measured by others and published as data."""
    PUBLISHED = "published"
    """A vendor's or a paper's figure."""
    TRANSFERRED = "transferred"
    """Scaled from a measured device by published figures, with errors found on devices left out."""
    ASSUMED = "assumed"
    """Derived or guessed; the source gives the reasoning."""

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Provenance):
            return NotImplemented
        return _STRENGTH[self] < _STRENGTH[other]

    def __str__(self) -> str:
        return self.value


_STRENGTH = {provenance: -rank for rank, provenance in enumerate(Provenance)}


def weakest(provenances: Iterable[Provenance]) -> Provenance:
    """Return the weakest of some provenances (DESIGN 5.1: a prediction inherits the weakest).

    Raises ValueError: there is none; a result that used no figure has no provenance to inherit.
    """
    return min(provenances)


def freeze(value: object) -> object:
    """Return nested dicts and lists as read-only mappings and tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Figure:
    """One number about a device: value, unit, where it comes from, and the source (or the reasoning)."""

    value: float
    unit: str
    provenance: Provenance
    source: Words


def measured_figure(name: str, value: float, source: str) -> dict[str, Any]:
    """Return a measured figure of the vocabulary as `device.toml` has it."""
    unit, provenance = KNOWN_FIGURES[name].unit, str(Provenance.MEASURED)
    return {"value": value, "unit": unit, "provenance": provenance, "source": source}


@dataclass(frozen=True, slots=True)
class Fact:
    """One property of a device that is no number (a yes or no, or a word), with its provenance and source."""

    value: bool | str
    provenance: Provenance
    source: Words


@dataclass(frozen=True, slots=True)
class Device:
    """One device: the content of its `device.toml`.

    `figures` and `facts` carry their provenance; `software` names the versions that the measurements refer
    to; `runtime` holds the semantic switches of that software for the simulation of training memory;
    `profile` describes the fitted files beside `device.toml` (open content, read-only). `folder` is where it
    was read from, `fingerprint` the SHA-256 of the file's bytes.
    """

    name: Annotated[
        str,
        Meta(
            pattern=rf"^{NAME.pattern}(?![\s\S])",
            description="lower case letters, digits, '-' and '.', up to 64",
        ),
    ]
    title: Words
    kind: DeviceKind
    vendor: Words
    memory: MemoryKind
    folder: Annotated[Path, OUTSIDE] = field(compare=False)
    fingerprint: Annotated[str, OUTSIDE]
    figures: Annotated[
        Mapping[Annotated[str, OneOf(tuple(KNOWN_FIGURES))], Figure], Meta(max_length=MAX_ENTRIES)
    ] = field(default_factory=dict)
    aliases: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\S")], ...],
        Meta(max_length=MAX_ENTRIES),
    ] = ()
    notes: Words = ""
    facts: Mapping[Annotated[str, OneOf(tuple(KNOWN_FACTS))], Fact] = field(default_factory=dict)
    software: Annotated[Mapping[Text, Words], Meta(max_length=MAX_ENTRIES)] = field(default_factory=dict)
    runtime: Mapping[Annotated[str, OneOf(tuple(RUNTIME_KEYS))], RuntimeValue] = field(default_factory=dict)
    profile: Mapping[str, object] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.fingerprint))

    def __reduce__(self) -> tuple[object, ...]:
        # Read-only mappings do not pickle; worker processes get plain ones, frozen again on arrival.
        return _restore, tuple(thaw(getattr(self, item.name)) for item in fields(self))

    def figure(self, name: str) -> Figure:
        """Return a figure by its name.

        Raises DeviceError: this device's profile does not give it.
        """
        return self._known(self.figures, name, "figures")

    def fact(self, name: str) -> Fact:
        """Return a fact by its name.

        Raises DeviceError: this device's profile does not give it.
        """
        return self._known(self.facts, name, "facts")

    @property
    def native_dtypes(self) -> frozenset[str]:
        """The dtypes that the device computes in, as its figures and facts say; others are emulated."""
        half = "half_arithmetic" in self.facts and self.facts["half_arithmetic"].value is True
        half = half or not {"peak_fp16_gflops", "peak_fp16_matrix_gflops"}.isdisjoint(self.figures)
        brain = "peak_bf16_matrix_gflops" in self.figures
        return frozenset(["float32", *["float16"] * half, *["bfloat16"] * brain])

    def value(self, name: str) -> float:
        """Return the value of a figure, in the unit that `KNOWN_FIGURES` fixes for its name.

        Raises DeviceError: this device's profile does not give it.
        """
        return self.figure(name).value

    def on_host(self, operator_us: float) -> Device:
        """Return the device in a host that takes another time for each launch of eager PyTorch.

        operator_us: microseconds of the host's thread for one tiny operator, as
        `torchedge.measure_operator_us` returns it on that host. Where the host sets the pace of a step,
        predictions of latency follow it.
        Raises InputError: the time is no positive number, or the profile does not say how fast the host of
        its measurements was.
        """
        rule = KNOWN_FIGURES["eager_operator_us"]
        if isinstance(operator_us, bool) or not isinstance(operator_us, (int, float)):
            raise InputError(f"operator_us is {operator_us!r}; expected microseconds, a number")
        if not rule.low <= operator_us <= rule.high:
            raise InputError(
                f"operator_us is {operator_us!r}; expected {rule.low:g} to {rule.high:g} microseconds"
            )
        tables = [self.profile.get(table) for table in ("training", "inference")]
        measured = any(isinstance(table, Mapping) and table.get("latency_rows") for table in tables)
        if measured and self.measured_operator_us is None:
            raise InputError(
                f"{self.name}: its profile does not say how fast the host of its measurements was, so that "
                "no other host can be predicted; expected a device whose profile gives kinds.operator_us"
            )
        figure = Figure(float(operator_us), rule.unit, Provenance.MEASURED, "given for the host in use")
        mark = hashlib.sha256(f"{self.fingerprint} {operator_us!r}".encode()).hexdigest()
        figures = MappingProxyType({**self.figures, "eager_operator_us": figure})
        return replace(self, figures=figures, fingerprint=mark)

    @property
    def measured_operator_us(self) -> float | None:
        """The `eager_operator_us` of the host that the measured latencies are of; None: unknown."""
        kinds = self.profile.get("kinds")
        known = kinds.get("operator_us") if isinstance(kinds, Mapping) else None
        return float(known) if isinstance(known, (int, float)) and known > 0 else None

    def _known(self, table: Mapping[str, _Item], name: str, what: str) -> _Item:
        if name in table:
            return table[name]
        hint = did_you_mean(name, table, f"it gives: {', '.join(sorted(table)) or 'none'}")
        raise DeviceError(
            f"{self.name}: its profile gives no {name!r} among its {what}, expected one; {hint} "
            f"Else add it to {self.folder / 'device.toml'}"
        )


def _read_only(device: Device) -> Device:
    """Return a device whose tables cannot be written to."""
    tables = ("figures", "facts", "software", "runtime", "profile")
    return replace(device, **{name: freeze(getattr(device, name)) for name in tables})  # type: ignore[arg-type]


def _restore(*values: Any) -> Device:  # noqa: ANN401 - one of each field
    entries = dict(zip([item.name for item in fields(Device)], values, strict=True))
    return _read_only(Device(**{**entries, "aliases": tuple(entries["aliases"])}))


# device.toml ------------------------------------------------------------------------------------------------


def read_device(folder: str | Path) -> Device:
    """Read and validate the `device.toml` of a profile folder.

    Raises ProfileError: the file is missing, leads out of the folder, or breaks a rule of the format.
    """
    path = resolve_inside(Path(folder), DEVICE_FILE)
    data = read_bytes(path, max_bytes=MAX_DEVICE_BYTES)
    fingerprint = hashlib.sha256(data).hexdigest()
    return parse_device(parse_toml(path, data), folder=path.parent, fingerprint=fingerprint)


def write_device(document: Mapping[str, object], folder: str | Path) -> Device:
    """Validate a device's document and write it as `device.toml` into an existing folder, atomically.

    Returns:
        the device as read back.
    Raises ProfileError: the document breaks a rule of the format, or the folder cannot be written.
    """
    parse_device(dict(document), folder=Path(folder))
    write_toml(Path(folder) / DEVICE_FILE, document)
    return read_device(folder)


def parse_device(document: Document, *, folder: Path, fingerprint: str = "") -> Device:
    """Return the Device that a parsed document describes; `folder` is named in errors.

    Raises ProfileError: naming the file, the key, its value, what was expected and what to do.
    """
    path = folder / DEVICE_FILE
    return _read_only(DEVICES.parse(path, document, folder=folder, fingerprint=fingerprint))


_KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _check_device(device: Device) -> None:
    """Check figures, facts and switches against the vocabulary."""
    for name, figure in device.figures.items():
        rule = KNOWN_FIGURES[name]
        if figure.unit != rule.unit:
            raise InputError(
                f"figures.{name}.unit is {figure.unit[:40]!r}; expected {rule.unit!r}: convert the value"
            )
        if not rule.low <= figure.value <= rule.high or (rule.whole and figure.value != int(figure.value)):
            expected = (
                f"a {'whole ' if rule.whole else ''}number from {rule.low:g} to {rule.high:g} {rule.unit}"
            )
            raise InputError(f"figures.{name}.value is {figure.value}; expected {expected}")
    for name, fact in device.facts.items():
        words = KNOWN_FACTS[name].words
        if fact.value not in words if words else not isinstance(fact.value, bool):
            expected = f"one of {', '.join(words)}" if words else "true or false"
            raise InputError(f"facts.{name}.value is {shortened(fact.value)}; expected {expected}")
    for name, value in device.runtime.items():
        switch = RUNTIME_KEYS[name]
        if type(value) is not switch.type or (switch.words and value not in switch.words) or value == "":
            expected = f"one of {', '.join(switch.words)}" if switch.words else _KINDS[switch.type]
            raise InputError(f"runtime.{name} is {shortened(value)}; expected {expected}")


DEVICES = Codec(Device, "Device profile", verify=_check_device, error=ProfileError)
