"""Latencies of launches alone, rates at which weights move, and the slowdown of launches by copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from torchedge.devices import Device, Figure, Provenance, weakest
from torchedge.errors import DeviceError, ProfileError
from torchedge.forests.trees import Forest, read_forests, write_forests
from torchedge.lowering.programs import LoadClassName
from torchedge.storage import file_sha256, profile_file
from torchedge.storage.codecs import thaw
from torchedge.streaming.instances import MEBIBYTE, Layer
from torchedge.streaming.schedules import LaunchWork

RATIO = "inference_time_ratio"
"""The figure for measured inference time over the roofline."""

STAGING_BYTES = 16 * MEBIBYTE
"""Unified memory that reading ahead may take."""

REQUEST_BYTES = 4 * MEBIBYTE
"""Bytes that one read asks the disk for; storage reaches its sequential rate with such."""

THRESHOLDS: Mapping[LoadClassName, float] = MappingProxyType(
    {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}
)
"""Share of its own latency that a layer may spend on loading, by operator class (FlashMem, section 4.2)."""


TABLE, KERNELS = "loading", "kernels"
"""`[profile.loading.kernels]` of device.toml: a table of `KernelRates` by operator class."""

TRANSFER_US = 20.0
"""What a transfer costs the host where nothing was measured."""


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Measured rates of the kernels of one operator class: us + max(FLOPs / gflops, bytes / gb_s)."""

    gflops: Annotated[float, Meta(gt=0, lt=1e9)]
    gb_s: Annotated[float, Meta(gt=0, lt=1e9)]
    us: Annotated[float, Meta(ge=0, lt=1e9)]

    def latency_ms(self, work: LaunchWork) -> float:
        """Return the latency of a launch alone."""
        return self.us / 1e3 + max(work.flops / self.gflops, work.bytes_moved / self.gb_s) / 1e6


def class_rates(content: object) -> dict[LoadClassName, KernelRates]:
    """Return rates of every operator class from a profile's table.

    Raises KeyError for a class that it lacks, and ValidationError of msgspec for anything else.
    """
    read: dict[LoadClassName, KernelRates] = msgspec.convert(thaw(content), dict[LoadClassName, KernelRates])
    return {name: read[name] for name in THRESHOLDS}


def kernel_rates(device: Device) -> tuple[dict[LoadClassName, KernelRates], tuple[str, ...]]:
    """Return the rates of each operator class, and notes that name missing figures and their substitutes.

    They are those that were measured of the lowering's own kernels, else a roofline of the device's figures
    in single precision, in which all kernels compute, times its `inference_time_ratio`.

    Raises:
        DeviceError: the profile has neither such rates nor a peak rate and a bandwidth.
        ProfileError: its measured rates are damaged.
    """
    table = device.profile.get(TABLE)
    if isinstance(table, Mapping) and table.get(KERNELS) is not None:
        try:
            return class_rates(table[KERNELS]), ()
        except (KeyError, msgspec.ValidationError) as error:
            raise ProfileError(
                f"{device.folder}: [profile.{TABLE}.{KERNELS}] does not give gflops, gb_s, us above 0 for "
                f"{', '.join(THRESHOLDS)}; write it anew with `torchedge fit loads`"
            ) from error
    ratio, launch = device.figures.get(RATIO), device.figures.get("launch_overhead_us")
    notes = []
    if ratio is None:
        notes.append(f"{device.name} gives no {RATIO}; latencies are the bare roofline")
    if launch is None:
        notes.append(f"{device.name} gives no launch_overhead_us; launches are taken to cost nothing")
    times = ratio.value if ratio else 1.0
    rates = KernelRates(
        device.value("peak_fp32_gflops") / times,
        _bandwidth(device).value / times,
        launch.value * times if launch else 0.0,
    )
    return dict.fromkeys(THRESHOLDS, rates), tuple(notes)


def _bandwidth(device: Device) -> Figure:
    measured = device.figures.get("measured_bandwidth_gb_s")
    return measured if measured is not None else device.figure("bandwidth_gb_s")


def copy_rate(device: Device) -> Figure:
    """Return the rate (GB/s) at which weights move from unified to texture memory beside a running kernel.

    Where the profile gives no `unified_to_texture_gb_s`, half of its bandwidth stands in, "assumed".
    Raises DeviceError: its profile gives no bandwidth either.
    """
    figure = device.figures.get("unified_to_texture_gb_s")
    if figure is not None:
        return figure
    source = "Half of the bandwidth: a copy reads and writes main memory once"
    return Figure(_bandwidth(device).value / 2, "GB/s", Provenance.ASSUMED, source)


@dataclass(frozen=True)
class Rates:
    """How fast a device moves weights, in GB/s (10^9 bytes) and us, each figure with its provenance.

    `disk_read`: from storage to staging buffers; `copy`: from these to the device's memory, on a queue beside
    the launches; each copy costs `copy_overhead` besides. `host_launch`, `host_transfer`: the time of the
    thread that launches for each launch and each transfer; None: not counted. `staging_bytes` is the size of
    the staging pool, `request_bytes` the most that one read brings.
    """

    disk_read: Figure
    copy: Figure
    copy_overhead: Figure
    staging_bytes: int = STAGING_BYTES
    request_bytes: int = REQUEST_BYTES
    host_launch: Figure | None = None
    host_transfer: Figure | None = None

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance of all figures."""
        known = (self.disk_read, self.copy, self.copy_overhead, self.host_launch, self.host_transfer)
        return weakest([figure.provenance for figure in known if figure is not None])

    @property
    def host_launch_ms(self) -> float:
        """Time of the thread that launches for a launch."""
        return self.host_launch.value / 1e3 if self.host_launch else 0.0

    @property
    def host_transfer_ms(self) -> float:
        """Time of the thread that launches for a transfer."""
        return self.host_transfer.value / 1e3 if self.host_transfer else 0.0

    def read_ms(self, nbytes: int) -> float:
        """Return the time to read some bytes from the disk."""
        return nbytes / (self.disk_read.value * 1e6)

    def copy_ms(self, nbytes: int) -> float:
        """Return the time of one copy."""
        return self.copy_overhead.value / 1e3 + nbytes / (self.copy.value * 1e6)

    def slowing(self, layer: Layer, chunk_bytes: int) -> float:
        """Return the share (0 to 1) of the time of a copy beside a layer by which the layer takes longer.

        A layer that loads as much as its capacity takes longer by its class's threshold h of its latency t:
        that is the definition of a capacity (FlashMem, section 4.2). Copying B bytes at rate r takes B / r,
        so the share is h t r / B. It is 1, nothing is hidden, where the capacity follows from the threshold
        and the rate of a copy, and for hierarchical layers; a larger capacity, as a fitted model may give,
        hides part.
        """
        most = THRESHOLDS[layer.load_class] * layer.latency_ms * self.copy.value * 1e6
        capacity = layer.capacity_chunks * chunk_bytes
        return most / capacity if 0 < most < capacity else 1.0


def derive_rates(device: Device) -> Rates:
    """Return the rates of a device from the figures of its profile.

    The host's times are its `host_launch_us` and `host_transfer_us`, which `torchedge profile --streaming`
    measures; without them a launch takes its `launch_overhead_us`, and a transfer `TRANSFER_US`.
    Raises DeviceError: the profile gives no `disk_read_gb_s`, or no rate at all between memories.
    """
    if "disk_read_gb_s" not in device.figures:
        raise DeviceError(
            f"{device.name} gives no disk_read_gb_s, the rate at which weights are read from storage; add "
            f"[figures.disk_read_gb_s] with value, unit, provenance and source to "
            f"{device.folder / 'device.toml'}, or plan for another device, such as adreno-750"
        )
    source = f"{device.name} gives no launch_overhead_us; copies are taken to start at once"
    launch = device.figures.get("launch_overhead_us") or Figure(0.0, "us", Provenance.ASSUMED, source)
    assumed = Figure(TRANSFER_US, "us", Provenance.ASSUMED, f"{device.name} gives no host_transfer_us")
    return Rates(
        device.figure("disk_read_gb_s"),
        copy_rate(device),
        launch,
        host_launch=device.figures.get("host_launch_us", launch),
        host_transfer=device.figures.get("host_transfer_us", assumed),
    )


# forests of operator classes in a profile -------------------------------------------------------------------

_MOST_BYTES = 8 * 2**20


@lru_cache(maxsize=32)
def class_forests(
    folder: Path, file: str, digest: str, features: tuple[str, ...]
) -> Mapping[LoadClassName, Forest]:
    """Return the forests of each operator class, over some features, from a file of a profile.

    Raises ProfileError: the file is missing, damaged, another one or made for another version.
    """
    path = profile_file(folder, file, digest, max_bytes=_MOST_BYTES)
    read = read_forests(path, expected=dict.fromkeys(THRESHOLDS, features), max_bytes=_MOST_BYTES)
    return {name: read[name] for name in THRESHOLDS}


def write_class_forests(file: str, folder: Path, forests: Mapping[LoadClassName, Forest]) -> str:
    """Write the forests of each class into a file of a profile's folder; return its sha256."""
    write_forests(folder / file, {str(name): forest for name, forest in forests.items()})
    return file_sha256(folder / file, max_bytes=_MOST_BYTES)
