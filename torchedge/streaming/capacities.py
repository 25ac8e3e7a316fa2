"""What each layer can load beside its own work (C_l, FlashMem section 4.2), and the problem that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance
from torchedge.errors import InputError, ProfileError
from torchedge.forests.trees import Forest, evaluate, features_outside
from torchedge.lowering.kernels.loading import LoadingWay
from torchedge.lowering.programs import LoadClassName, Program
from torchedge.streaming.instances import MEBIBYTE, Distance, Instance, Layer
from torchedge.streaming.rates import TABLE, THRESHOLDS, class_forests, copy_rate, kernel_rates
from torchedge.streaming.schedules import LaunchWork, weights_of, works_of

FILE = "loading.safetensors"
"""The forests, beside device.toml; `TABLE` there describes them."""

LOADING_WAYS: tuple[LoadingWay, ...] = get_args(LoadingWay)
WAY = "way"
"""Key of the fastest way in `TABLE`."""

LOADS = ("extra_ratio", "extra_gb_s", "extra_mib")
"""Features that grow with the load: over the kernel's input, over its latency, and as they are."""

LOAD_FEATURES = (
    *("log2_flops", "log2_bytes", "log2_flops_per_byte", "log2_work_items", "log2_group_items"),
    *("log2_latency_us", *LOADS),
)
"""The features of a forest, in order. The latency under load never falls with one of `LOADS`."""

GROUP_ITEMS = "group_items"
"""Key of a forest's metadata: the work-group of a launch whose work-group the driver chooses."""

_MOST_ITEMS = 65536
_POINTS = 65
_HIGHEST = 2.0**32
"""No feature of a real kernel is above this: a forest with such a range is damaged."""

_REBUILD = "measure with `torchedge profile --streaming` and rebuild it with `torchedge fit loads`"


def load_features(work: LaunchWork, latency_ms: float, extra_bytes: npt.ArrayLike) -> FloatArray:
    """Return the features of a launch under each of some loads in bytes: (loads, features).

    latency_ms: of the launch alone; its work-group has a size.
    """
    extra = np.atleast_1d(np.asarray(extra_bytes, np.float64))
    moved, latency = max(work.bytes_moved, 1.0), max(latency_ms, 1e-6)
    flops, group = max(work.flops, 1.0), float(work.group_items or 1)
    own = np.log2([flops, moved, flops / moved, work.work_items, group, latency * 1e3])
    loads = [extra / max(work.input_bytes, 1.0), extra / (latency * 1e6), extra / MEBIBYTE]
    return np.column_stack([np.tile(own, (len(extra), 1)), *loads])


@dataclass(frozen=True)
class FittedLoads:
    """A device's model of latency under load: a forest of log(latency under load / latency alone) a class."""

    forests: Mapping[LoadClassName, Forest]
    source: str
    _known: dict[tuple[LaunchWork, float], int] = field(default_factory=dict, repr=False, compare=False)
    """Capacities by work and latency: layers repeat."""

    def usual(self, work: LaunchWork) -> LaunchWork:
        """Return a nameless launch, with the work-group measured as the fastest where the driver chooses."""
        group = work.group_items or int(self.forests[work.load_class].metadata[GROUP_ITEMS])
        return replace(work, name="", input_bytes=max(work.input_bytes, 1), group_items=group)

    def increase(self, work: LaunchWork, latency_ms: float, extra_bytes: npt.ArrayLike) -> FloatArray:
        """Return a launch's slowdown under each of some loads, as a share of its latency (0.2: a fifth)."""
        with np.errstate(over="ignore"):
            features = load_features(self.usual(work), latency_ms, extra_bytes)
            return np.expm1(evaluate(self.forests[work.load_class], features))

    def most_bytes(self, work: LaunchWork, latency_ms: float) -> int:
        """Return the largest load that was measured, for a launch of this input and latency.

        A launch beyond the measured range counts as the largest and slowest one measured.
        """
        forest = self.forests[work.load_class]
        high = dict(zip(forest.feature_names, forest.high.tolist(), strict=True))
        share = min(1.0, 2.0 ** high["log2_bytes"] / max(work.bytes_moved, 1.0))
        latency_ms = min(latency_ms, 2.0 ** high["log2_latency_us"] / 1e3)
        limits = (
            high["extra_ratio"] * max(work.input_bytes, 1) * share,
            high["extra_gb_s"] * latency_ms * 1e6,
            high["extra_mib"] * MEBIBYTE,
        )
        return int(min(limits))

    def capacity_bytes(self, work: LaunchWork, latency_ms: float) -> int:
        """Return the most bytes whose predicted increase stays within the threshold of the launch's class.

        Never more than was measured (`most_bytes`), and 0 if the threshold is 0: no measurement separates an
        increase of 0 from noise.
        """
        threshold = THRESHOLDS[work.load_class]
        if threshold <= 0:
            return 0
        key = self.usual(work), latency_ms
        if key not in self._known:
            self._known[key] = self.most_within(*key, threshold)
        return self._known[key]

    def most_within(self, work: LaunchWork, latency_ms: float, threshold: float) -> int:
        """Return the most bytes whose predicted increase stays within a threshold, up to `most_bytes`."""
        low, high = -1, self.most_bytes(work, latency_ms)  # low is within, or no load at all is
        while low < high:
            points = np.unique(np.linspace(low + 1, high, _POINTS).astype(np.int64))
            over = np.flatnonzero(self.increase(work, latency_ms, points) > threshold)
            if len(over):
                high = int(points[over[0]]) - 1
                points = points[: over[0]]
            low = int(points[-1]) if len(points) else low
        return max(low, 0)

    def outside(self, work: LaunchWork, latency_ms: float) -> tuple[str, ...]:
        """Return the features of a launch alone that lie outside what was measured of its class."""
        features = load_features(self.usual(work), latency_ms, 0)
        return features_outside(self.forests[work.load_class], features)


def load_model_of(device: Device) -> FittedLoads | None:
    """Return a device's model of latency under load; None if it was not measured.

    Raises ProfileError: its file is missing, damaged or made for another version.
    """
    described = device.profile.get(TABLE)
    if described is None:
        return None
    if not isinstance(described, Mapping):
        raise ProfileError(f"{device.folder}: [profile.{TABLE}] is no table; {_REBUILD}")
    shown: dict[str, Any] = {key: described.get(key, "?") for key in ("measured", "rows", "dataset")}
    source = "latency under load, {rows} rows of {dataset}, measured {measured}".format(**shown)
    forests = class_forests(device.folder, FILE, str(described.get("sha256")), LOAD_FEATURES)
    for name, forest in forests.items():
        # The measured range bounds capacities.
        path = device.folder / FILE
        of_loads = [forest.feature_names.index(feature) for feature in LOADS]
        highest = np.where(np.isin(np.arange(forest.n_features), of_loads), _HIGHEST, 128.0)
        if (np.abs(forest.low) > highest).any() or (np.abs(forest.high) > highest).any():
            raise ProfileError(f"{path}: forest {name} claims a measured range beyond any device; {_REBUILD}")
        items = forest.metadata.get(GROUP_ITEMS, "")
        if not items.isdecimal() or not items.isascii() or not 1 <= int(items[:9]) <= _MOST_ITEMS:
            raise ProfileError(
                f"{device.folder / FILE}: forest {name} has {GROUP_ITEMS} {items[:20]!r}, expected a whole "
                f"number from 1 to {_MOST_ITEMS}; {_REBUILD}"
            )
    return FittedLoads(forests, source)


def loading_way(device: Device) -> LoadingWay:
    """Return the fastest way to load beside kernels that was measured on a device; copies if none was.

    Raises ProfileError: the profile names another way.
    """
    table = device.profile.get(TABLE)
    way = table.get(WAY, "copy") if isinstance(table, Mapping) else "copy"
    if way not in LOADING_WAYS:
        raise ProfileError(
            f"{device.folder}: [profile.{TABLE}] has {WAY} {str(way)[:20]!r}, expected one of "
            f"{', '.join(LOADING_WAYS)}; {_REBUILD}"
        )
    return way


_THRESHOLD_SOURCE = (
    "thresholds of the operator classes (FlashMem, section 4.2) on the roofline of each layer's latency"
)

CHUNK_BYTES = 256 * 1024
M_PEAK_BYTES = 500 * 2**20
LAMBDA = 0.9
"""M_peak and lambda where memory comes first (FlashMem, section 3.2); it never states its chunk size."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Chunks each layer can load beside its work, its latency alone (ms), and the source of both.

    `notes` name the figures that the device's profile lacks and their substitutes.
    """

    chunks: tuple[int, ...]
    latencies_ms: tuple[float, ...]
    provenance: Provenance
    source: str
    notes: tuple[str, ...] = ()


def rate_capacities(
    program: Program,
    device: Device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    launch_ms: Sequence[float] | None = None,
) -> Capacities:
    """Return C_l of every launch: from the profile's model of latency under load, else from the thresholds.

    Without a model, a layer loads for a share of its own latency (the threshold) at the device's
    unified-to-texture rate. Such capacities are "assumed", those of a fitted model "measured".
    launch_ms: measured latency of each launch alone, instead of the roofline.

    Raises:
        DeviceError: the profile lacks a figure that this takes.
        InputError: `chunk_bytes` is no whole number above 0, or `launch_ms` has not one entry a launch.
        ProfileError: the profile's model is damaged.
    """
    if type(chunk_bytes) is not int or chunk_bytes < 1:
        raise InputError(f"chunk_bytes is {chunk_bytes!r}; expected a whole number of at least 1")
    works = works_of(program)
    if launch_ms is not None and len(launch_ms) != len(works):
        raise InputError(f"launch_ms has {len(launch_ms)} entries; expected {len(works)}, one a launch")
    notes: tuple[str, ...] = ()
    if launch_ms is None:
        rates, notes = kernel_rates(device)
        latencies = tuple([rates[work.load_class].latency_ms(work) for work in works])
    else:
        latencies = tuple(map(float, launch_ms))
    layers = list(zip(works, latencies, strict=True))
    model = load_model_of(device)
    if model is not None:
        chunks = tuple(max(0, model.capacity_bytes(work, ms)) // chunk_bytes for work, ms in layers)
        notes += _outside(model, layers)
        return Capacities(chunks, latencies, Provenance.MEASURED, model.source, notes)
    per_ms = copy_rate(device).value * 1e6
    chunks = tuple(int(THRESHOLDS[work.load_class] * ms * per_ms / chunk_bytes) for work, ms in layers)
    return Capacities(chunks, latencies, Provenance.ASSUMED, _THRESHOLD_SOURCE, notes)


def _outside(model: FittedLoads, layers: list[tuple[LaunchWork, float]]) -> tuple[str, ...]:
    """Count the loading layers outside the measured range."""
    loading = [(work, ms) for work, ms in layers if THRESHOLDS[work.load_class] > 0]
    outside = [names for work, ms in loading if (names := model.outside(work, ms))]
    if not outside:
        return ()
    features = ", ".join(dict.fromkeys(name for names in outside for name in names))
    return (
        f"{len(outside)} of {len(loading)} layers that may load lie outside the measured range ({features}); "
        "they count as the nearest measured",
    )


def make_instance(
    program: Program,
    device: Device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    m_peak_bytes: int | None = M_PEAK_BYTES,
    lam: float = LAMBDA,
    distance: Distance = "layers",
    capacities: Capacities | None = None,
) -> Instance:
    """Return the overlap problem of a program on a device: a layer a launch, a weight a resident tensor.

    M_peak is in bytes and rounded down to chunks. Weights count whole from the first chunk to the last use,
    as a run allocates them (residency "weights"). `capacities`, of the same program and chunk size, default
    to `rate_capacities`.

    Raises:
        DeviceError: the profile lacks a figure that this takes.
        InputError: an option is out of range, or the program has no launch.
    """
    if capacities is None:
        capacities = rate_capacities(program, device, chunk_bytes=chunk_bytes)
    layers = tuple(
        Layer(work.name, chunks, round(ms, 6), work.load_class)
        for work, chunks, ms in zip(
            works_of(program), capacities.chunks, capacities.latencies_ms, strict=True
        )
    )
    return Instance(
        chunk_bytes,
        layers,
        weights_of(program, chunk_bytes),
        m_peak_chunks=None if m_peak_bytes is None else m_peak_bytes // chunk_bytes,
        lam=lam,
        residency="weights",
        distance=distance,
        name=program.name,
    )
