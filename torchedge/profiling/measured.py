"""Folders of measurements of any kind (a campaign's, the public ones), with the device they were made on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchedge.devices import Device, Provenance, find_device
from torchedge.devices.parsing import DEVICE_FILE
from torchedge.errors import DeviceError, InputError
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.step_models import Mode
from torchedge.profiling.campaigns.recording import describe_device
from torchedge.profiling.datasets import MEASUREMENTS, read_dataset
from torchedge.profiling.profile_folders import device_of
from torchedge.profiling.public_data import find_public_table, read_public_samples
from torchedge.profiling.samples import PROTOCOL, Samples, prepare
from torchedge.storage import read_json

__all__ = [
    "ENVIRONMENT",
    "Measured",
    "Source",
    "holds_measurements",
    "measured_device",
    "provenance_of",
    "read_measured",
]

ENVIRONMENT = "environment.json"
"""What a campaign's probe saw of the machine; its presence tells our own measurements from public data."""

_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """Where measurements come from: name and sha256 of the dataset, provenance, a label of each row (R,)."""

    name: str
    digest: str
    provenance: Provenance
    labels: Sequence[str]


Measured = dict[Mode, tuple[Samples, Source]]
"""What was measured in each mode."""


def holds_measurements(folder: Path) -> bool:
    """Whether a folder is a dataset or a public table."""
    tables = (folder / MEASUREMENTS, folder / f"{MEASUREMENTS}.gz")
    return folder.is_dir() and (any(t.is_file() for t in tables) or find_public_table(folder) is not None)


def read_measured(
    folder: Path,
    device: Device,
    settings: StepSettings = PROTOCOL,
    tell: Callable[[], object] = lambda: None,
) -> Measured:
    """Read and simulate every row of a dataset's folder or of a public table; `tell` is called a network.

    settings: of a dataset's steps; public tables have their own. Raises ProfileError for a folder that is
    neither, or a damaged one.
    """
    if find_public_table(folder) is not None:
        public = read_public_samples(folder, device)
        labels = [f"{n}@{int(b)}" for n, b in zip(public.labels, public.samples.batch, strict=True)]
        return {
            public.mode: (public.samples, Source(public.name, public.digest, Provenance.PUBLIC_DATA, labels))
        }
    dataset = read_dataset(folder)
    if not dataset.modes:
        prepare(dataset, device)  # says what it expects
    found: Measured = {}
    for mode in dataset.modes:
        samples = prepare(dataset, device, settings, mode, tell)
        names = [graph.name for graph in samples.graphs]
        labels = [f"{names[w]}@{int(b)}" for w, b in zip(samples.which, samples.batch, strict=True)]
        found[mode] = (samples, Source(dataset.name, dataset.digest, provenance_of(folder), labels))
    return found


def measured_device(folder: Path, name: str | None, aside: Path) -> Device:
    """Return the device that a dataset was measured on: a known one, or one that its campaign describes.

    name: as given; by default the dataset's own `device.toml`, else the device its folder is called. For an
    unknown name a `device.toml` is written into the folder `aside` from what the campaign's probe saw.
    """
    own = folder / DEVICE_FILE
    if name is None:
        return find_device(folder) if own.is_file() else device_of(folder, None)
    try:
        return find_device(name)
    except (DeviceError, InputError):
        if own.is_file() and find_device(folder).name == name:
            return find_device(folder)
        if not (folder / ENVIRONMENT).is_file():
            raise
    environment = read_json(folder / ENVIRONMENT, max_bytes=_MOST_BYTES)
    describe_device(aside, name, environment)
    return find_device(aside)


def provenance_of(folder: Path) -> Provenance:
    """Return where a dataset's figures come from: our probes leave what they saw of the machine."""
    return Provenance.MEASURED if (folder / ENVIRONMENT).is_file() else Provenance.PUBLIC_DATA
