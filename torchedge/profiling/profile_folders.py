"""From a dataset's folder to a device's profile: fit on every row, and write it with where it comes from."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from torchedge import __version__
from torchedge.devices import Device, Provenance, find_device, write_device
from torchedge.devices.parsing import DEVICE_FILE
from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.forests.trees import Forest
from torchedge.prediction.memory.workspace_files import FILE as WORKSPACES_FILE
from torchedge.prediction.memory.workspace_files import TABLE as WORKSPACES
from torchedge.prediction.memory.workspace_files import write_workspaces
from torchedge.prediction.memory.workspaces import WorkspaceModel
from torchedge.prediction.profiles import file_names, write_models
from torchedge.prediction.step_models import MODE_TABLES, FittedModels, Mode
from torchedge.profiling.accuracy import PROTOCOLS, Score, grouped, score, score_allocated, score_reserved
from torchedge.profiling.datasets import Dataset
from torchedge.profiling.samples import Samples
from torchedge.profiling.training_fit import fit_latency, fit_memory, latency_rows, memory_rows
from torchedge.profiling.workspace_fitting import CONVOLUTIONS, fit_workspaces, read_workspaces
from torchedge.storage import read_toml, resolve_inside
from torchedge.streaming.capacities import FILE as LOADING_FILE
from torchedge.streaming.capacities import TABLE as LOADING
from torchedge.streaming.capacities import write_load_model
from torchedge.streaming.instances import LoadClassName

__all__ = [
    "SCORES",
    "TARGETS",
    "Accuracy",
    "LoadingFit",
    "ModeFit",
    "WorkspaceFit",
    "check_target",
    "describe_fit",
    "device_of",
    "fit_device_workspaces",
    "fit_models",
    "one_thread",
    "package_versions",
    "score_all",
    "score_table",
    "today",
    "write_profile",
]

TARGETS = ("gamma", "phi")
"""Γ and Φ by the names that tables, files and JSON use."""

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
"""Seconds since 1970: the date to write in place of today's, for builds that are the same byte for byte."""

Tell = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Scores by (target, protocol), and one line for each protocol that the data is too small for."""

    scores: Mapping[tuple[str, str], Score]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModeFit:
    """One mode's models, and what `[profile.training]` or `[profile.inference]` says of them.

    described: at least provenance, dataset, date, command and rows, without the files; see `describe_fit`.
    """

    models: FittedModels
    described: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkspaceFit:
    """A device's convolution workspaces, and what `[profile.workspaces]` says of them."""

    model: WorkspaceModel
    described: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadingFit:
    """A device's latency under load: a forest a class, what `[profile.loading]` says, figures measured along.

    figures: entries of `[figures]`, which take the place of those that the profile has.
    """

    forests: Mapping[LoadClassName, Forest]
    described: Mapping[str, Any]
    figures: Mapping[str, Mapping[str, Any]]


def fit_device_workspaces(folder: Path) -> WorkspaceFit | None:
    """Fit the convolution workspaces that a dataset folder holds measurements of; None where it has none."""
    for name in (CONVOLUTIONS, CONVOLUTIONS + ".gz"):
        if (folder / name).exists():
            measured = read_workspaces(folder / name)
            described = {
                "provenance": str(Provenance.MEASURED),
                "dataset": folder.resolve().name,
                "date": today(),
                "convolutions": len(measured.geometry),
                "versions": package_versions(),
            }
            return WorkspaceFit(fit_workspaces(measured), described)
    return None


def device_of(dataset_folder: Path, name: str | None) -> Device:
    """Return the device that a dataset was measured on: the one named, else the one its folder is called."""
    if name is not None:
        return find_device(name)
    try:
        return find_device(dataset_folder.resolve().name)
    except (DeviceError, InputError) as error:
        raise InputError(
            f"{dataset_folder}: is not called after a device, expected to be told which; add --device NAME"
        ) from error


def check_target(out: Path, *, force: bool) -> None:
    """Refuse a folder to write into that holds something, or that cannot be made."""
    if out.exists() and not out.is_dir():
        raise InputError(
            f"{out}: is no folder, expected a new one to write a profile into; choose another --out"
        )
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(
            f"{out}: holds files already, expected a new folder; choose another --out, or add --force"
        )
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: the folder around it does not exist; make {out.absolute().parent} first")


def fit_models(samples: Samples, tell: Callable[[str], Any] = lambda _: None) -> FittedModels:
    """Fit memory and latency on all rows; ProfileError where too few. `tell` hears what comes next."""
    every = np.ones(len(samples.batch), dtype=np.bool_)
    tell("memory")
    memory = fit_memory(samples, every)
    tell("latency")
    provenance = Provenance.MEASURED if samples.steady else Provenance.PUBLIC_DATA
    return FittedModels(memory, fit_latency(samples, every), provenance)


SCORES = 8
"""What `score_all` scores: memory and latency in three protocols, two simulated peaks."""


def score_all(samples: Samples, tell: Tell = lambda: None) -> Accuracy:
    """Score memory and latency in every protocol, and simulated peaks; `tell` is called after each.

    Where networks are left out in groups, intervals are not scored: that would take hours.
    """
    found: dict[tuple[str, str], Score] = {}
    problems: list[str] = []
    for target in TARGETS:
        for protocol in PROTOCOLS:
            try:
                errors = protocol != "left-out" or not grouped(samples)
                found[target, protocol] = score(samples, target, protocol, errors=errors)
            except ProfileError as error:
                problems.append(f"{target}, {protocol}: not scored ({error})")
            tell()
    for name, peak in (("allocated", score_allocated), ("reserved", score_reserved)):
        try:
            found[name, "simulated"] = peak(samples)
        except ProfileError as error:
            problems.append(f"{name}, simulated: not scored ({error})")
        tell()
    return Accuracy(found, tuple(problems))


def write_profile(
    out: Path,
    device: Device,
    fits: Mapping[Mode, ModeFit],
    workspaces: WorkspaceFit | None = None,
    loading: LoadingFit | None = None,
) -> Device:
    """Write a device's profile with the models of some modes; return the device as read back.

    What the device's profile holds and is not given is kept: modes, workspaces, latency under load. The same
    data and versions give the same bytes but for the date. Files are made aside and moved into place,
    `device.toml`, which names the others' digests, last: an interrupted write is noticed at load.
    """
    out = Path(os.path.abspath(out))
    source = read_toml(device.folder / DEVICE_FILE)
    given = source.get("profile", {})
    profile: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    with _aside(out) as made:
        _copy_other_modes(device, profile, fits, made)
        for mode, fit in fits.items():
            described = dict(fit.described)
            metadata = {"dataset": str(described["dataset"]), **described.get("versions", {})}
            if "dataset_sha256" in described:
                metadata["sha256"] = str(described["dataset_sha256"])
            described["files"] = write_models(made, fit.models, metadata, mode)
            profile[MODE_TABLES[mode]] = described
        if workspaces is not None:
            digest = write_workspaces(made, workspaces.model)
            profile[WORKSPACES] = {**workspaces.described, "sha256": digest}
        if loading is not None:
            digest = write_load_model(made, loading.forests)
            profile[LOADING] = {**loading.described, "sha256": digest}
            source = {**source, "figures": {**source["figures"], **loading.figures}}  # type: ignore[dict-item]
        write_device({**source, "profile": profile}, made)
        names = sorted(path.name for path in made.iterdir() if path.name != DEVICE_FILE)
        for name in (*names, DEVICE_FILE):
            os.replace(made / name, out / name)
        for mode in fits:
            for name in set(file_names(mode)) - set(names):  # a forest of an earlier fit
                (out / name).unlink(missing_ok=True)
    return find_device(out)


def _copy_other_modes(
    device: Device, profile: Mapping[str, Any], fits: Mapping[Mode, ModeFit], made: Path
) -> None:
    """Copy the files of modes that are not written anew, of workspaces and of latency under load."""
    for table, name in ((WORKSPACES, WORKSPACES_FILE), (LOADING, LOADING_FILE)):
        if table in profile:
            shutil.copyfile(resolve_inside(device.folder, name), made / name)
    for mode, table in MODE_TABLES.items():
        if mode not in fits and isinstance(profile.get(table), Mapping):
            for name in profile[table].get("files", {}):
                shutil.copyfile(resolve_inside(device.folder, str(name)), made / name)


def describe_fit(
    out: Path,
    device: Device,
    dataset: Dataset,
    samples: Samples,
    models: FittedModels,
    accuracy: Accuracy | None,
) -> ModeFit:
    """Return models with what the profile says of them: where they come from and what they reached."""
    every = np.ones(len(samples.batch), dtype=np.bool_)
    described: dict[str, Any] = {
        "provenance": str(models.provenance),
        "dataset": dataset.name,
        "dataset_sha256": dataset.digest,
        "date": today(),
        "command": f"torchedge fit {dataset.name} --device {device.name} --out {out.resolve().name}",
        "rows": len(samples.batch),
        "memory_rows": int(memory_rows(samples, every).sum()),
        "latency_rows": int(latency_rows(samples, every).sum()),
        "networks": samples.networks,
        "versions": package_versions(),
    }
    if accuracy is not None:
        tables: dict[str, dict[str, Any]] = {}
        for (target, protocol), found in accuracy.scores.items():
            tables.setdefault(target, {})[protocol] = score_table(found)
        described["accuracy"] = tables
    return ModeFit(models, described)


def score_table(found: Score) -> dict[str, Any]:
    """Return a score in %, rounded so that the last bits of a platform do not show."""
    out: dict[str, Any] = {"mean": round(found.mean, 2)}
    if found.coverage:
        out["coverage"] = round(found.mean_coverage, 1)
    return out | {"networks": {name: round(value, 2) for name, value in found.error.items()}}


def package_versions() -> dict[str, str]:
    """Return the versions that a fit depends on."""
    packages = {name: metadata.version(name) for name in ("torch", "scikit-learn", "numpy")}
    return {"torchedge": __version__, "python": platform.python_version(), **packages}


def today() -> str:
    """Return the date to write into profiles, YYYY-MM-DD in UTC."""
    given = os.environ.get(EPOCH_VARIABLE, "")
    if given:
        try:
            return f"{datetime.fromtimestamp(int(given), timezone.utc):%Y-%m-%d}"
        except (ValueError, OverflowError, OSError) as error:
            raise InputError(
                f"{EPOCH_VARIABLE} is {given[:40]!r}, expected seconds since 1970; correct it"
            ) from error
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: a fit's sums do not depend on the number of cores, nor wait for busy ones."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` to write into, gone afterwards; `out` exists where all went well."""
    made: Path | None = None
    fresh = not out.exists()
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        out.mkdir(exist_ok=True)
        yield made
    except OSError as error:
        raise ProfileError(
            f"{out}: cannot be written ({error.strerror or error}); choose another --out"
        ) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if fresh and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
