"""What a device was measured to load beside its work: a boosted model of latency under load (FlashMem, 4.2).

`hooks/load_probe.py` measures kernels of each operator class, alone and while they copy extra bytes into
textures; `torchedge fit` grows a forest a class from its rows. Here the forests are evaluated, with numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.forests.files import read_forests, write_forests
from torchedge.forests.trees import Forest, evaluate, features_outside
from torchedge.storage import file_sha256, resolve_inside
from torchedge.streaming.instances import MEBIBYTE, LoadClassName
from torchedge.streaming.operations import Operation

__all__ = [
    "FILE",
    "LOADS",
    "LOAD_FEATURES",
    "TABLE",
    "THRESHOLDS",
    "FittedLoads",
    "Work",
    "load_features",
    "load_model_of",
    "write_load_model",
]

THRESHOLDS: Mapping[LoadClassName, float] = MappingProxyType(
    {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}
)
"""Share of its own latency that a layer may spend on loading, by operator class (FlashMem, section 4.2)."""

TABLE, FILE = "loading", "loading.safetensors"
"""`[profile.loading]` of device.toml, and the file beside it."""

LOADS = ("extra_ratio", "extra_gb_s", "extra_mib")
"""Features that grow with the load: over the kernel's input, over its latency, and as they are."""

LOAD_FEATURES = (
    *("log2_flops", "log2_bytes", "log2_flops_per_byte", "log2_work_items", "log2_group_items"),
    *("log2_latency_us", *LOADS),
)
"""What a forest looks at, in order. The latency under load never falls with one of `LOADS`."""

GROUP_ITEMS = "group_items"
"""Key of a forest's metadata: the work-group that was fastest without load, which an operation counts as."""

_ITEM_BYTES = 8
_MOST_BYTES = 8 * 2**20
_MOST_ITEMS = 65536
_POINTS = 65
_HIGHEST = 2.0**32
"""No feature of a kernel on any device is above; a forest that says so is damaged."""

_REBUILD = "measure with hooks/load_probe.py and rebuild it with `torchedge fit`"

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel as the model sees it: FLOPs, bytes read and written, launch shape, latency alone (ms)."""

    flops: float
    input_bytes: float
    output_bytes: float
    work_items: float
    group_items: float
    latency_ms: float


def load_features(work: Work, extra_bytes: npt.ArrayLike) -> FloatArray:
    """Return the features of a kernel under each of some loads in bytes: (loads, features)."""
    extra = np.atleast_1d(np.asarray(extra_bytes, np.float64))
    moved, latency = max(work.input_bytes + work.output_bytes, 1.0), max(work.latency_ms, 1e-6)
    flops = max(work.flops, 1.0)
    own = np.log2([flops, moved, flops / moved, work.work_items, work.group_items, latency * 1e3])
    loads = [extra / max(work.input_bytes, 1.0), extra / (latency * 1e6), extra / MEBIBYTE]
    return np.column_stack([np.tile(own, (len(extra), 1)), *loads])


@dataclass(frozen=True)
class FittedLoads:
    """A device's model of latency under load: a forest of log(latency under load / latency alone) a class."""

    forests: Mapping[LoadClassName, Forest]
    source: str
    _found: dict[tuple[LoadClassName, Work], int] = field(default_factory=dict, repr=False, compare=False)
    """Capacities found: layers repeat."""

    def work_of(self, operation: Operation, latency_ms: float) -> Work:
        """Return an operation as the probe's kernels are launched: four results of two bytes a work-item."""
        return Work(
            operation.flops,
            max(operation.bytes_moved - operation.output_bytes, 1),
            operation.output_bytes,
            max(operation.output_bytes // _ITEM_BYTES, 1),
            float(self.forests[operation.load_class].metadata[GROUP_ITEMS]),
            latency_ms,
        )

    def increase(self, load_class: LoadClassName, work: Work, extra_bytes: npt.ArrayLike) -> FloatArray:
        """Return by how much of its own latency a kernel slows under each of some loads (0.2: a fifth)."""
        with np.errstate(over="ignore"):
            return np.expm1(evaluate(self.forests[load_class], load_features(work, extra_bytes)))

    def most_bytes(self, load_class: LoadClassName, work: Work) -> int:
        """Return the largest load that the measurements speak of: of any kernel, of this input and latency.

        What is larger or slower than all that was measured counts as the largest and slowest.
        """
        forest = self.forests[load_class]
        high = dict(zip(forest.feature_names, forest.high.tolist(), strict=True))
        share = min(1.0, 2.0 ** high["log2_bytes"] / max(work.input_bytes + work.output_bytes, 1.0))
        latency_ms = min(work.latency_ms, 2.0 ** high["log2_latency_us"] / 1e3)
        by_input, by_latency = work.input_bytes * share, latency_ms * 1e6
        limits = (
            high["extra_ratio"] * by_input,
            high["extra_gb_s"] * by_latency,
            high["extra_mib"] * MEBIBYTE,
        )
        return int(min(limits))

    def capacity_bytes(self, operation: Operation, latency_ms: float) -> int:
        """Return the most bytes whose predicted increase stays within the threshold of the operation's class.

        Never more than was measured (`most_bytes`), and 0 where the threshold is: no measurement tells an
        increase of 0 from noise.
        """
        threshold = THRESHOLDS[operation.load_class]
        if threshold <= 0:
            return 0
        key = operation.load_class, self.work_of(operation, latency_ms)
        if key not in self._found:
            self._found[key] = self.most_within(*key, threshold)
        return self._found[key]

    def most_within(self, load_class: LoadClassName, work: Work, threshold: float) -> int:
        """Return the most bytes whose predicted increase stays within a threshold, up to `most_bytes`."""
        low, high = -1, self.most_bytes(load_class, work)  # low is within, or no load at all is
        while low < high:
            points = np.unique(np.linspace(low + 1, high, _POINTS).astype(np.int64))
            over = np.flatnonzero(self.increase(load_class, work, points) > threshold)
            if len(over):
                high = int(points[over[0]]) - 1
                points = points[: over[0]]
            low = int(points[-1]) if len(points) else low
        return max(low, 0)

    def outside(self, operation: Operation, latency_ms: float) -> tuple[str, ...]:
        """Return the features of an operation alone that lie outside what was measured of its class."""
        work = self.work_of(operation, latency_ms)
        return features_outside(self.forests[operation.load_class], load_features(work, 0))


def load_model_of(device: Device) -> FittedLoads | None:
    """Return the model of latency under load of a device, None where nobody measured it.

    Raises:
        ProfileError: its file is missing, damaged or made for another version.
    """
    described = device.profile.get(TABLE)
    if described is None:
        return None
    if not isinstance(described, Mapping):
        raise ProfileError(f"{device.folder}: [profile.{TABLE}] is no table; {_REBUILD}")
    told: dict[str, Any] = {key: described.get(key, "?") for key in ("measured", "rows", "dataset")}
    source = "latency under load, {rows} rows of {dataset}, measured {measured}".format(**told)
    return _loaded(device.folder, str(described.get("sha256")), source)


@lru_cache(maxsize=16)
def _loaded(folder: Path, digest: str, source: str) -> FittedLoads:
    path = resolve_inside(folder, FILE)
    if file_sha256(path, max_bytes=_MOST_BYTES) != digest:
        raise ProfileError(
            f"{path} is not the file that device.toml describes (its sha256 differs); "
            f"restore it, or {_REBUILD}"
        )
    read = read_forests(path, expected=dict.fromkeys(THRESHOLDS, LOAD_FEATURES), max_bytes=_MOST_BYTES)
    forests: dict[LoadClassName, Forest] = {name: read[name] for name in THRESHOLDS}
    for name, forest in forests.items():
        _check_range(path, name, forest)
        items = forest.metadata.get(GROUP_ITEMS, "")
        if not items.isdecimal() or not items.isascii() or not 1 <= int(items[:9]) <= _MOST_ITEMS:
            raise ProfileError(
                f"{path}: forest {name} has {GROUP_ITEMS} {items[:20]!r}, expected a whole number "
                f"from 1 to {_MOST_ITEMS}; {_REBUILD}"
            )
    return FittedLoads(forests, source)


def _check_range(path: Path, name: str, forest: Forest) -> None:
    """Refuse a measured range that none can have: capacities are bounded by it."""
    of_loads = [forest.feature_names.index(feature) for feature in LOADS]
    highest = np.where(np.isin(np.arange(forest.n_features), of_loads), _HIGHEST, 128.0)
    if (np.abs(forest.low) > highest).any() or (np.abs(forest.high) > highest).any():
        raise ProfileError(f"{path}: forest {name} claims a measured range beyond any device; {_REBUILD}")


def write_load_model(folder: Path, forests: Mapping[LoadClassName, Forest]) -> str:
    """Write the forests of each class into a profile's folder; return the file's sha256."""
    write_forests(folder / FILE, {str(name): forest for name, forest in forests.items()})
    return file_sha256(folder / FILE, max_bytes=_MOST_BYTES)
