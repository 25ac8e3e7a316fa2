"""Measured rows of one device and mode, with everything that fits read of them simulated and counted once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance, find_device
from torchedge.devices.device import DEVICE_FILE, NAME
from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.graphs import ForwardGraph, Mode
from torchedge.prediction.analysis import analyse
from torchedge.prediction.feature_sets import INFERENCE, feature_rows
from torchedge.prediction.latency.workload import Workload
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.peaks import Peaks, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.predictor import device_settings
from torchedge.profiling.campaigns.plans import FEWEST_ROWS
from torchedge.profiling.campaigns.recording import describe_device
from torchedge.profiling.datasets import ENVIRONMENT, KINDS, Dataset, read_dataset
from torchedge.storage import read_json

Mask = npt.NDArray[np.bool_]

Quantity = Literal["memory", "latency"]
QUANTITIES: tuple[Quantity, ...] = ("memory", "latency")

PROTOCOL = StepSettings(optimizer="sgd-momentum", weight_decay=5e-4)
"""The training step of the perf4sight measurements: SGD with momentum 0.9 and weight decay 5e-4."""

OWN, NO_FOREST = "own", "none"
"""Names beside those of feature sets: the model's own features, and no forest at all."""

MOST_FOLDS = 10
"""More networks than this are held out in this number of groups, each network in one."""

FEW_FOLDS = 6
"""The same with few rows."""

FEW_ROWS = 60
"""With fewer rows than this the priors of a fit weigh more, and a forest has to prove itself."""

HOST_BOUND = 1.6
"""A point that takes less than this times the shortest step of its network waits for the host."""

_LEAST_LAYER_MS = 0.05
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where measurements come from: name and sha256 of the dataset, and their provenance."""

    name: str
    digest: str
    provenance: Provenance


@dataclass(frozen=True)
class Samples:
    """R measured rows of one mode on one device: labels, measured figures (NaN: none), simulated peaks, work.

    network: rows that are held out together. label: the measured network. which: place of a row's network in
    `graphs` and `work`. layers: (R, 6) ms by `KINDS`, NaN where unknown or paced by the host. steady: the
    measured peaks are those of a steady step, not perf4sight's means of records.
    """

    mode: Mode
    source: DataSource
    network: npt.NDArray[np.str_]
    level: npt.NDArray[np.int64]
    strategy: npt.NDArray[np.str_]
    label: npt.NDArray[np.str_]
    batch: FloatArray
    gamma: FloatArray
    allocated: FloatArray
    reserved: FloatArray
    phi: FloatArray
    fits: FloatArray
    which: npt.NDArray[np.intp]
    work: Sequence[Workload]
    peaks: Peaks
    device: Device
    graphs: Sequence[ForwardGraph]
    settings: StepSettings
    layers: FloatArray | None = None
    steady: bool = True

    @property
    def networks(self) -> list[str]:
        """The networks, in alphabetical order."""
        return sorted(set(self.network.tolist()))

    @property
    def every(self) -> Mask:
        """(R,) all rows."""
        return np.ones(len(self.batch), dtype=np.bool_)

    def measured(self, quantity: Quantity) -> FloatArray:
        """Return (R,) measured memory in MiB or latency in ms."""
        return self.gamma if quantity == "memory" else self.phi

    def usable(self, quantity: Quantity, rows: Mask | None = None) -> Mask:
        """Return (R,) which of some rows (default: all) measured a quantity; failed runs have no memory."""
        usable: Mask = np.isfinite(self.measured(quantity))
        if quantity == "memory":
            usable &= self.fits == 1
        return usable if rows is None else usable & rows

    def points(self, rows: Mask) -> list[str]:
        """Return names of some rows, such as "resnet18-30@16"."""
        pairs = zip(self.label[rows].tolist(), self.batch[rows].tolist(), strict=True)
        return [f"{label}@{int(batch)}" for label, batch in pairs]


def prepare(
    dataset: Dataset, device: Device, settings: StepSettings = PROTOCOL, mode: Mode = "train"
) -> Samples:
    """Simulate and count every row of one mode whose network has a graph, without those under autocast."""
    lowered = [name for name, network in dataset.networks.items() if network.settings.amp is not None]
    rows = dataset.has_graph & (dataset.mode == mode) & ~np.isin(dataset.id, lowered)
    if not rows.any():
        raise ProfileError(
            f"{dataset.name}: no row measured in mode {mode} has a known topology; "
            "expected rows and topologies of the same names"
        )
    names = sorted(set(dataset.id[rows].tolist()), key=list(dataset.networks).index)
    settings = device_settings(device, settings)
    analyses = []
    for name in names:
        analyses.append(analyse(dataset.graph_of(name, mode)))
        analyses[-1].tape(settings)
    position = {name: i for i, name in enumerate(names)}
    which = np.array([position[name] for name in dataset.id[rows].tolist()], dtype=np.intp)
    networks = [dataset.networks[name] for name in names]
    batch = dataset.batch[rows].astype(np.float64)
    tapes, traits = [a.tape(settings) for a in analyses], [a.traits for a in analyses]
    return Samples(
        mode=mode,
        source=DataSource(dataset.name, dataset.digest, dataset.provenance),
        network=np.array([n.architecture for n in networks])[which],
        level=np.array([n.level for n in networks], dtype=np.int64)[which],
        strategy=np.array([n.strategy for n in networks])[which],
        label=dataset.id[rows],
        batch=batch,
        gamma=dataset["memory"][rows],
        allocated=dataset["allocated"][rows],
        reserved=dataset["reserved"][rows],
        phi=dataset["latency"][rows],
        fits=dataset["fits"][rows],
        which=which,
        work=[a.work_under(settings) for a in analyses],
        peaks=simulate_peaks(tapes, traits, which, batch),
        device=device,
        graphs=[dataset.graph_of(name, mode) for name in names],
        settings=settings,
        layers=_layers(dataset, rows, mode),
        steady=dataset.probed,
    )


def _layers(dataset: Dataset, rows: Mask, mode: Mode) -> FloatArray | None:
    """Return the times of layers by kind (R, 6), NaN where the host and not the device sets the pace."""
    if not dataset.layers:
        return None
    latency = dataset["latency"][rows]
    names, batches = dataset.id[rows].tolist(), dataset.batch[rows].tolist()
    shortest: dict[str, float] = {}
    for name, ms in zip(names, latency.tolist(), strict=True):
        shortest[name] = min(shortest.get(name, np.inf), ms)
    layers = np.full((len(names), len(KINDS)), np.nan)
    for row, (name, batch, ms) in enumerate(zip(names, batches, latency.tolist(), strict=True)):
        sums = dataset.layers.get((name, mode, batch))
        if sums is not None and ms >= HOST_BOUND * shortest[name]:
            layers[row] = sums
    layers[~(layers >= _LEAST_LAYER_MS)] = np.nan
    return layers


def read_samples(folder: Path, device: Device) -> dict[Mode, Samples]:
    """Read a dataset folder and prepare every mode measured there; ProfileError for a damaged folder."""
    dataset = read_dataset(folder)
    return {mode: prepare(dataset, device, mode=mode) for mode in dataset.modes or ("train",)}


def device_of(folder: Path, name: str | None) -> Device:
    """Return the device that a dataset was measured on: the one named, else the one its folder is called."""
    if name is not None:
        return find_device(name)
    try:
        return find_device(folder.resolve().name)
    except (DeviceError, InputError) as error:
        raise InputError(f"{folder}: the folder's name is not that of a device; add --device NAME") from error


def measured_device(folder: Path, name: str | None, scratch: Path) -> Device:
    """Return the device that a dataset was measured on: a known one, or one that its campaign describes.

    name: default: the dataset's own `device.toml`, else the device its folder is called. For an unknown name
    a `device.toml` is written into the folder `scratch` from the report of the campaign's probe.
    """
    own = folder / DEVICE_FILE
    if name is None:
        return find_device(folder) if own.is_file() else device_of(folder, None)
    try:
        return find_device(name)
    except (DeviceError, InputError):
        if own.is_file():
            described = find_device(folder)
            if described.name != name:
                raise
            return described
        if not (folder / ENVIRONMENT).is_file() or NAME.fullmatch(name) is None:
            raise
    describe_device(scratch, name, read_json(folder / ENVIRONMENT, max_bytes=_MOST_BYTES))
    return find_device(scratch)


def network_weights(samples: Samples, rows: Mask | npt.NDArray[np.intp]) -> FloatArray:
    """Return weights for some rows (a mask, or places) under which every network counts the same."""
    names, inverse, counts = np.unique(samples.network[rows], return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[inverse] * len(names)))


def simulate_records(samples: Samples, rows: Mask) -> FloatArray:
    """Return (R,) MiB: the allocated figure of rows as the measurements' protocol records it.

    A record resets the peaks, empties the cache and runs a step; a figure is the mean of five records: the
    warm-up step (no gradients, no momentum yet) twice, then three steps. Steady rows stay unchanged.
    """
    if samples.steady:
        return samples.peaks.allocated[rows]
    allocated = np.empty(int(rows.sum()))
    pairs = [
        (write_tape(g, samples.settings, first=True), write_tape(g, samples.settings)) for g in samples.graphs
    ]
    for place, (which, batch) in enumerate(zip(samples.which[rows], samples.batch[rows], strict=True)):
        first, steady = pairs[which]
        start, later = replay(steady, int(batch), first=first, steps=1, empty_cache=True)
        allocated[place] = (2 * start.allocated_mib + 3 * later.allocated_mib) / 5
    return allocated


# cross-validation -------------------------------------------------------------------------------------------


def folds(samples: Samples, rows: Mask, *, levels: bool, networks: bool) -> Iterator[Mask]:
    """Yield the rows to hold out in turn: each inner pruning level, each network; never all rows.

    Many networks are held out in `MOST_FOLDS` groups.
    """
    if levels:
        inner = sorted(set(samples.level[rows].tolist()))[1:-1]
        for level in inner:
            yield rows & (samples.level == level)
    names = sorted(set(samples.network[rows].tolist()))
    if networks and len(names) > 1:
        for group in network_groups(names, MOST_FOLDS if rows.sum() >= FEW_ROWS else FEW_FOLDS):
            yield rows & np.isin(samples.network, group)


def network_groups(names: Sequence[str], most: int = MOST_FOLDS) -> list[list[str]]:
    """Return networks in at most `most` groups of nearly equal size, whatever their order.

    Where groups hold several networks, names that are alike fall into different ones.
    """

    def scattered(name: str) -> bytes:
        return hashlib.sha256(name.encode()).digest()

    order = sorted(names) if len(names) <= most else sorted(names, key=scattered)
    return [order[start::most] for start in range(min(most, len(order)))]


def candidate_sets(samples: Samples, used: Mask) -> tuple[str, ...]:
    """Return the candidates for forests: none, our own features, for inference the paper's 15 features.

    The first is taken unless another is clearly better. Many rows of a few networks are asked about prunings
    of these, which a forest knows best, so that it goes first.
    """
    own = (OWN,) if samples.mode == "train" or used.sum() < FEW_ROWS else (OWN, INFERENCE.name)
    few_networks = len(set(samples.network[used].tolist())) <= MOST_FOLDS
    return (*own, NO_FOREST) if few_networks and used.sum() >= FEW_ROWS else (NO_FOREST, *own)


def enough_rows(samples: Samples, quantity: Quantity, rows: Mask) -> Mask:
    """Return (R,) which of some rows measured a quantity; raises ProfileError where a fit needs more."""
    used = samples.usable(quantity, rows)
    if used.sum() < FEWEST_ROWS:
        raise ProfileError(
            f"{int(used.sum())} rows measured {quantity} in mode {samples.mode}; expected at least "
            f"{FEWEST_ROWS}, of two networks or three pruning levels"
        )
    return used


def columns_of(samples: Samples, rows: Mask, feature_set: str | None) -> FloatArray | None:
    """Return the features (R, F) of a feature set for some rows, None for our own."""
    if feature_set in (None, OWN):
        return None
    return feature_rows(samples.graphs, samples.which[rows], samples.batch[rows], str(feature_set))


@dataclass(frozen=True)
class HeldOut:
    """Errors of E rows predicted by models fitted without them: log(measured / predicted), difficulty.

    best: place of the candidate that was chosen, whose errors these are. weight: every fold counts
    the same. network: (E,) of each row.
    """

    best: int
    errors: FloatArray
    difficulty: FloatArray
    weight: FloatArray
    network: npt.NDArray[np.str_]

    @property
    def percent(self) -> float:
        """Mean absolute error in %."""
        return float(np.average(self._size, weights=self.weight))

    @property
    def worst(self) -> str:
        """The network with the largest mean error; "" for one network."""
        names = sorted(set(self.network.tolist()))
        means = [float(self._size[self.network == name].mean()) for name in names]
        return names[int(np.argmax(means))] if len(names) > 1 else ""

    @property
    def _size(self) -> FloatArray:
        return np.asarray(100 * np.abs(np.exp(-self.errors) - 1))


def cross_validate(
    samples: Samples,
    quantity: Quantity,
    used: Mask,
    predict: Callable[[Mask, Mask], tuple[Sequence[FloatArray], FloatArray]],
    *,
    levels: bool,
    networks: bool,
) -> HeldOut:
    """Return the best candidate on held-out rows, with its errors.

    Memory: the first within a standard error of the best, as what a process takes beside its tensors is a
    constant unless a forest shows otherwise. Of time nothing says so.

    predict(training rows, held-out rows) returns each candidate's predictions of the held-out rows, and the
    difficulty of these. levels, networks: as in `folds`. Raises ProfileError where there is nothing to hold
    out.
    """
    measured = samples.measured(quantity)
    errors, difficulties, weights, labels = [], [], [], []
    for left_out in folds(samples, used, levels=levels, networks=networks):
        predictions, difficulty = predict(used & ~left_out, left_out)
        errors.append([np.log(measured[left_out] / predicted) for predicted in predictions])
        difficulties.append(difficulty)
        weights.append(np.full(int(left_out.sum()), 1.0 / left_out.sum()))
        labels.append(samples.network[left_out])
    if not weights:
        raise ProfileError(
            f"the rows that measured {quantity} in mode {samples.mode} are of one network at fewer than "
            "three pruning levels; expected two networks: measure another"
        )
    weight = np.concatenate(weights)
    by_candidate = [np.concatenate(parts) for parts in zip(*errors, strict=True)]
    # (candidates, folds)
    means = np.array([[float(np.abs(e).mean()) for e in parts] for parts in zip(*errors, strict=True)])
    behind = means - means[means.mean(axis=1).argmin()]
    spread = np.zeros(len(means))
    if quantity == "memory" and len(weights) > 1:
        spread = behind.std(axis=1, ddof=1) / sqrt(len(weights))
    best = int(np.argmax(behind.mean(axis=1) <= spread))
    return HeldOut(best, by_candidate[best], np.concatenate(difficulties), weight, np.concatenate(labels))
