"""From fitted models to a device's profile folder, written with where every part comes from."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from torchedge import __version__
from torchedge.devices import Device, find_device, write_device
from torchedge.devices.device import DEVICE_FILE
from torchedge.errors import InputError, ProfileError
from torchedge.graphs import Mode
from torchedge.prediction.memory.workspaces import FILE as WORKSPACES_FILE
from torchedge.prediction.memory.workspaces import TABLE as WORKSPACES
from torchedge.prediction.memory.workspaces import write_workspaces
from torchedge.prediction.profiles import (
    KINDS_FILE,
    KINDS_TABLE,
    MODE_TABLES,
    FittedModels,
    file_names,
    write_kinds,
    write_models,
)
from torchedge.profiling.accuracy import PROTOCOLS, Score, score, score_simulation, splits
from torchedge.profiling.samples import MOST_FOLDS, QUANTITIES, DataSource, Quantity, Samples
from torchedge.storage import file_sha256, profile_file, read_toml
from torchedge.storage.documents import read_bytes, write_bytes, writing
from torchedge.storage.folders import staged_name
from torchedge.storage.replacing import side_folder, sync_folder
from torchedge.streaming.capacities import FILE as LOADING_FILE
from torchedge.streaming.program_costs import FILE as PROGRAMS_FILE
from torchedge.streaming.program_costs import TABLE as PROGRAMS
from torchedge.streaming.rates import TABLE as LOADING
from torchedge.streaming.rates import write_class_forests
from torchedge.textures.coefficients import COEFFICIENTS_FILE, write_coefficients
from torchedge.textures.coefficients import TABLE as KERNELS

KEYS: Mapping[Quantity, str] = {"memory": "gamma", "latency": "phi"}
"""The quantities by the names that tables, files and JSON use."""

_MOST_BYTES = 8 * 2**20

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
"""Seconds since 1970: the date to write in place of today's, for builds that are the same byte for byte."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Scores by (figure, protocol), and one line for each protocol that the data is too small for."""

    scores: Mapping[tuple[str, str], Score]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModeFit:
    """One mode's models and their table `[profile.training]` or `[profile.inference]`, without the files."""

    models: FittedModels
    described: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PartFit:
    """A model beside those of modes (workspaces, latency under load) and its table in `[profile]`.

    figures: entries of `[figures]`, which replace those of the device.
    """

    model: Any
    described: Mapping[str, Any]
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def check_target(out: Path, *, force: bool) -> None:
    """Raise InputError for an output folder that is not empty (unless forced) or cannot be created."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is no folder, expected a new folder for the profile; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(f"{out}: is not empty, expected a new folder; choose another --out, or add --force")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: its parent folder does not exist; make {out.absolute().parent} first")


SCORES = 10
"""Number of scores of `score_all`: memory and latency in four protocols, two simulated peaks."""


def score_all(
    samples: Samples, step: Callable[[], Any] = lambda: None, quantities: Sequence[Quantity] = QUANTITIES
) -> Accuracy:
    """Score memory and latency in every protocol, and simulated peaks; call `step` after each score.

    Intervals are not scored where levels, or networks in groups, are left out: that would take hours. A
    campaign has its own networks and levels: it is not scored by level, nor in a protocol or on a peak that
    it has no rows for.
    """
    scores: dict[tuple[str, str], Score] = {}
    problems: list[str] = []

    def add(name: str, protocol: str, measure: Callable[[], Score]) -> None:
        try:
            scores[name, protocol] = measure()
        except ProfileError as error:
            problems.append(f"{name}, {protocol}: not scored, as {error}")
        step()

    for quantity in quantities:
        for protocol in PROTOCOLS:
            if samples.steady and (protocol == "levels" or not any(True for _ in splits(samples, protocol))):
                step()
                continue
            few = len(samples.networks) <= MOST_FOLDS  # left out one by one
            intervals = protocol != "levels" and (protocol != "left-out" or few)
            add(KEYS[quantity], protocol, partial(score, samples, quantity, protocol, intervals=intervals))
    for peak in ("allocated", "reserved"):
        if np.isfinite(getattr(samples, peak)).any() or not samples.steady:
            add(peak, "simulated", partial(score_simulation, samples, peak))
        else:
            step()
    return Accuracy(scores, tuple(problems))


_PARTS: Mapping[str, tuple[str, str, Callable[[Path, Any], str]]] = {
    "workspaces": (WORKSPACES, WORKSPACES_FILE, write_workspaces),
    "loading": (LOADING, LOADING_FILE, partial(write_class_forests, LOADING_FILE)),
    "kernels": (KERNELS, COEFFICIENTS_FILE, write_coefficients),
    "kinds": (KINDS_TABLE, KINDS_FILE, write_kinds),
    "programs": (PROGRAMS, PROGRAMS_FILE, partial(write_class_forests, PROGRAMS_FILE)),
}
"""The parts of a profile beside modes: the table in `[profile]`, the file, its writer."""


def write_profile(out: Path, device: Device, fits: Mapping[Mode, ModeFit], **parts: PartFit | None) -> Device:
    """Write a device's profile with the models of some modes; return the device as read back.

    parts: workspaces, loading (latency under load), kernels (their coefficients), kinds (of steps). Modes and
    parts that are not given stay as the device's profile has them. The same data and versions give the same
    bytes except for the date.
    Files are written to a temporary folder and moved under names of their own until `device.toml`, which
    holds their digests, is replaced: a write that is interrupted leaves the old profile or the new one.
    """
    out = Path(os.path.abspath(out))
    source = read_toml(device.folder / DEVICE_FILE)
    before = source.get("profile", {})
    profile: dict[str, Any] = dict(before) if isinstance(before, Mapping) else {}
    with _temporary(out) as temporary:
        for mode, table in MODE_TABLES.items():
            if mode in fits:
                profile[table] = _write_mode(temporary, mode, fits[mode])
            elif isinstance(profile.get(table), Mapping):
                for name, digest in profile[table].get("files", {}).items():
                    _copy(device.folder, str(name), digest, temporary)
        for name, (table, file, write) in _PARTS.items():
            part = parts.get(name)
            if part is not None:
                digest = write(temporary, part.model)
                profile[table] = {**part.described, "sha256": digest}
                source = {**source, "figures": {**source["figures"], **part.figures}}  # type: ignore[dict-item]
            elif isinstance(profile.get(table), Mapping):
                _copy(device.folder, file, profile[table].get("sha256"), temporary)
        write_device({**source, "profile": profile}, temporary)
        names = sorted(path.name for path in temporary.iterdir() if path.name != DEVICE_FILE)
        digests = {name: file_sha256(temporary / name, max_bytes=_MOST_BYTES) for name in names}
        staged = {name: staged_name(name, digest) for name, digest in digests.items()}
        for name, hidden in staged.items():
            os.replace(temporary / name, out / hidden)
        sync_folder(out)
        os.replace(temporary / DEVICE_FILE, out / DEVICE_FILE)
        sync_folder(out)  # from here on the folder holds the new profile
        for name, hidden in staged.items():
            os.replace(out / hidden, out / name)
            for leftover in out.glob(f".{name}.{'?' * 16}"):  # of fits that were killed
                leftover.unlink(missing_ok=True)
        sync_folder(out)
        for mode in fits:
            for name in set(file_names(mode)) - set(names):  # a forest of an earlier fit
                (out / name).unlink(missing_ok=True)
    return find_device(out)


def _copy(folder: Path, name: str, digest: object, target: Path) -> None:
    """Copy a file of a profile that stays as it is."""
    path = profile_file(folder, name, digest, max_bytes=_MOST_BYTES)
    write_bytes(target / name, read_bytes(path, max_bytes=_MOST_BYTES))


def _write_mode(folder: Path, mode: Mode, fit: ModeFit) -> dict[str, Any]:
    described = dict(fit.described)
    metadata = {"dataset": str(described["dataset"]), **described.get("versions", {})}
    if "dataset_sha256" in described:
        metadata["sha256"] = str(described["dataset_sha256"])
    described["files"] = write_models(folder, fit.models, metadata, mode)
    return described


# descriptions -----------------------------------------------------------------------------------------------


def describe(source: DataSource, command: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - TOML values
    """Return the table of a fitted part: where its data comes from, date, command, versions and `more`."""
    return {
        "provenance": str(source.provenance),
        "dataset": source.name,
        "dataset_sha256": source.digest,
        "date": today(),
        "command": command,
        **more,
        "versions": package_versions(),
    }


def describe_fit(out: Path, samples: Samples, models: FittedModels, accuracy: Accuracy | None) -> ModeFit:
    """Return models with the table that the profile has of them: their data and their accuracy."""
    name = samples.source.name
    described = describe(
        samples.source,
        f"torchedge fit {MODE_TABLES[samples.mode]} {name} --device {samples.device.name} "
        f"--out {out.resolve().name}",
        rows=len(samples.batch),
        memory_rows=int(samples.usable("memory").sum()) if models.memory is not None else 0,
        latency_rows=int(samples.usable("latency").sum()) if models.latency is not None else 0,
        networks=samples.networks,
    )
    if accuracy is not None:
        tables: dict[str, dict[str, Any]] = {}
        for (figure, protocol), reached in accuracy.scores.items():
            tables.setdefault(figure, {})[protocol] = score_table(reached)
        described["accuracy"] = tables
    return ModeFit(models, described)


def score_table(reached: Score) -> dict[str, Any]:
    """Return a score in %, rounded so that the last bits of a platform do not show."""
    out: dict[str, Any] = {"mean": round(reached.mean, 2)}
    if reached.coverage:
        out["coverage"] = round(reached.mean_coverage, 1)
    return out | {"networks": {name: round(value, 2) for name, value in reached.error.items()}}


def package_versions() -> dict[str, str]:
    """Return the versions that a fit depends on."""
    packages = {name: metadata.version(name) for name in ("torch", "scikit-learn", "numpy")}
    return {"torchedge": __version__, "python": platform.python_version(), **packages}


def today() -> str:
    """Return the date to write into profiles, YYYY-MM-DD in UTC."""
    epoch = os.environ.get(EPOCH_VARIABLE, "")
    if epoch:
        try:
            return f"{datetime.fromtimestamp(int(epoch), timezone.utc):%Y-%m-%d}"
        except (ValueError, OverflowError, OSError) as error:
            raise InputError(
                f"{EPOCH_VARIABLE} is {epoch[:40]!r}, expected seconds since 1970; correct it"
            ) from error
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


@contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`; `out` exists afterwards unless the block fails."""
    fresh = not out.exists()
    try:
        with writing(out, "choose another --out"), side_folder(out) as temporary:
            out.mkdir(exist_ok=True)
            yield temporary
    finally:
        if fresh and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
