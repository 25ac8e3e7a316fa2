"""What the cost model has to know of a device, with where each part comes from and how well it was fitted.

A profile holds them in `kernels.toml`; a device without that file gets the assumed ones of its class, with
the figures of its `device.toml` in their place where it gives any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from torchedge.devices import Device, Provenance, is_phone_gpu, weakest
from torchedge.errors import InputError, ProfileError
from torchedge.storage import file_sha256, profile_file, read_toml, write_toml
from torchedge.storage.codecs import Codec, OneOf, Text
from torchedge.storage.documents import MAX_DOCUMENT_BYTES
from torchedge.textures.work import BLOCK_SHAPES, STRIDE_FEATURES

COEFFICIENTS_FILE = "kernels.toml"
TABLE = "kernels"
"""The table of a device's `[profile]` that describes the file."""
ERRORS_FILE = "kernel-errors.json.gz"
ERRORS_TABLE = "kernel_errors"

ARITHMETIC_WIDTHS = (1, 2, 4, 8, 16)
"""Floats of one instruction, for which arithmetic rates are given."""

PARTS = ("image", "buffer", "occupancy", "arithmetic", "local", "launches", "copies")
"""Parts of the coefficients that have an origin of their own."""

NUMBERS, TERM_COUNT = 19, 10
"""Numbers that describe a schedule with its patterns, and terms of a cost, in `KernelErrors`."""

_Number = Annotated[int, Meta(ge=0, le=2**40)]
_Percent = Annotated[int, Meta(ge=0, le=100)]
_Positive = Annotated[float, Meta(gt=0, le=1e9)]
_Time = Annotated[float, Meta(ge=0, le=1e9)]
_Count = Annotated[int, Meta(ge=1, le=2**40)]
_Lanes = Annotated[int, Meta(ge=1, le=1024)]
"""Work-items of a warp: the cost model walks through them one by one."""
_Features = Annotated[
    tuple[_Time, ...], Meta(min_length=len(STRIDE_FEATURES), max_length=len(STRIDE_FEATURES))
]
_Rates = Annotated[
    tuple[_Positive, ...], Meta(min_length=len(ARITHMETIC_WIDTHS), max_length=len(ARITHMETIC_WIDTHS))
]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part of the coefficients comes from; residual: error of its fit, median, %."""

    provenance: Provenance
    source: Text
    residual: Annotated[float, Meta(ge=0, le=1e6)] | None = None


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """How reads of images, or of buffers, cost.

    hit_ns: latency of an access next to the one before. across: ns that a stride adds which leaves an assumed
    block, for each of `STRIDE_FEATURES` (beta of eq. 1). lines: cache lines C of a compute unit and decay: D
    of eq. 2. line_bytes: bytes of a cache line. overlap: accesses of one work-item in flight at once.
    issue_ns: time of a compute unit for one access of a warp. cache_gb_s, l2_gb_s, main_gb_s: bandwidth of
    all compute units together from the first-level cache, the second-level cache and main memory.
    write_gb_s: bandwidth of writes. line_ns: time of a compute unit for each line that an access of a warp
    touches. column_share: time of an access whose work-items, each four neighbours, read from one column of
    an image, over that of one along a row.
    """

    hit_ns: _Positive
    across: _Features
    lines: _Count
    line_bytes: _Count
    decay: Annotated[float, Meta(ge=1, le=100)]
    overlap: Annotated[float, Meta(ge=1, le=1e4)]
    issue_ns: _Time
    cache_gb_s: _Positive
    l2_gb_s: _Positive
    main_gb_s: _Positive
    write_gb_s: _Positive
    line_ns: _Time = 0.0
    column_share: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @property
    def worst_ns(self) -> float:
        """Latency of an access that enters another block of every shape."""
        shapes = len(BLOCK_SHAPES)
        return self.hit_ns + max(sum(self.across[:shapes]), sum(self.across[shapes:]))


@dataclass(frozen=True, slots=True)
class KernelCoefficients:
    """The constants of the cost model for one device (TMModel, Table 1, and what the extended form needs).

    warp: work-items that run in lock-step. compute_units: SPs. register_bytes and local_bytes: of one
    compute unit. max_waves: warps that it keeps in flight. max_group: most work-items of a group. gflops:
    peak by `ARITHMETIC_WIDTHS`. arithmetic_ns: latency of a multiply-add. l2_bytes: last-level cache.
    local_gb_s, constant_gb_s: bandwidth of local and constant memory. tile_gb_s: of local memory where
    work-items read operands of a product's tiles, which neighbours share (0: local_gb_s). barrier_ns: time of
    a barrier. group_ns: time in which the device starts a work-group.
    launch_us: time of a launch. to_image_gb_s, from_image_gb_s, copy_gb_s: copies from buffers to images,
    back, and between buffers. register_base: bytes of registers that a work-item needs beside its data.
    origins: by part (`PARTS`).
    """

    warp: _Lanes
    compute_units: _Count
    register_bytes: _Count
    max_waves: _Count
    max_group: _Count
    local_bytes: _Count
    l2_bytes: _Count
    gflops: _Rates
    arithmetic_ns: _Positive
    local_gb_s: _Positive
    constant_gb_s: _Positive
    barrier_ns: _Time
    launch_us: _Time
    to_image_gb_s: _Positive
    from_image_gb_s: _Positive
    copy_gb_s: _Positive
    image: MemoryPath
    buffer: MemoryPath
    register_base: Annotated[int, Meta(ge=0, le=4096)] = 0
    tile_gb_s: _Time = 0.0
    group_ns: _Time = 0.0
    origins: Mapping[Annotated[str, OneOf(PARTS)], Origin] = field(default_factory=dict)

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance of a part; "assumed" where a part has no origin."""
        if set(self.origins) != set(PARTS):
            return Provenance.ASSUMED
        return weakest(origin.provenance for origin in self.origins.values())


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """Schedules of a kernel that a device once timed, and the errors of their predictions.

    schedules: the numbers of each (`Scores.fields`). shares: in % of the sum of the terms of its predicted
    cost (`model.TERMS`). errors: of the prediction, as the logarithm of measured over predicted time.
    """

    name: Text
    schedules: tuple[Annotated[tuple[_Number, ...], Meta(min_length=NUMBERS, max_length=NUMBERS)], ...]
    shares: tuple[Annotated[tuple[_Percent, ...], Meta(min_length=TERM_COUNT, max_length=TERM_COUNT)], ...]
    errors: tuple[Annotated[float, Meta(ge=-30, le=30)], ...]


@dataclass(frozen=True, slots=True)
class KernelErrors:
    """Errors of the cost model on one device: what the search among timed candidates begins with.

    They correct no prediction of the tuner that does not measure: its coefficients are micro-benchmarks'.
    """

    kernels: tuple[TimedKernel, ...] = ()

    def without(self, names: Collection[str]) -> KernelErrors:
        """Return the errors of kernels of other names."""
        return KernelErrors(tuple([kernel for kernel in self.kernels if kernel.name not in names]))


# assumed coefficients ---------------------------------------------------------------------------------------


def _steps(line: float, block: float) -> tuple[float, ...]:
    """Return beta: `line` ns to enter another line of 2 texels, `block` ns more another block of 8 x 8."""
    per_shape = {(2, 1): line, (8, 8): block}
    return tuple([per_shape.get(shape, 0.0) for shape in BLOCK_SHAPES] * 2)


def _assumed(reason: str) -> Mapping[str, Origin]:
    return MappingProxyType({part: Origin(Provenance.ASSUMED, reason) for part in PARTS})


DEFAULTS: Mapping[str, KernelCoefficients] = MappingProxyType(
    {
        "cpu": KernelCoefficients(
            warp=1, compute_units=4, register_bytes=2**30, max_waves=1, max_group=4096,
            local_bytes=32 * 1024, l2_bytes=4 * 2**20, gflops=(10.0, 20.0, 40.0, 80.0, 160.0),
            arithmetic_ns=1.5, local_gb_s=200.0, constant_gb_s=200.0, barrier_ns=50.0, launch_us=30.0,
            to_image_gb_s=5.0, from_image_gb_s=5.0, copy_gb_s=10.0,
            image=MemoryPath(
                20.0, _steps(0.0, 2.0), 512, 64, 1.05, 4.0, 20.0, 3.0, 3.0, 3.0, 3.0,
            ),
            buffer=MemoryPath(
                1.5, _steps(0.5, 2.0), 512, 64, 1.05, 8.0, 0.5, 200.0, 80.0, 15.0, 10.0,
            ),
            origins=_assumed("class default of a processor: four cores with vectors of 16 floats"),
        ),
        "gpu": KernelCoefficients(
            warp=32, compute_units=64, register_bytes=256 * 1024, max_waves=48, max_group=1024,
            local_bytes=48 * 1024, l2_bytes=8 * 2**20, gflops=(10e3, 10e3, 10e3, 10e3, 10e3),
            arithmetic_ns=2.5, local_gb_s=6000.0, constant_gb_s=6000.0, barrier_ns=20.0, launch_us=4.0,
            to_image_gb_s=200.0, from_image_gb_s=200.0, copy_gb_s=250.0,
            image=MemoryPath(
                150.0, _steps(20.0, 60.0), 1024, 128, 1.1, 4.0, 1.5, 6000.0, 2000.0, 500.0, 300.0,
            ),
            buffer=MemoryPath(
                30.0, _steps(20.0, 60.0), 1024, 128, 1.1, 6.0, 1.0, 8000.0, 2500.0, 500.0, 400.0,
            ),
            origins=_assumed("class default of a desktop GPU"),
        ),
        "mobile": KernelCoefficients(
            warp=64, compute_units=4, register_bytes=192 * 1024, max_waves=16, max_group=1024,
            local_bytes=32 * 1024, l2_bytes=128 * 1024, gflops=(1e3, 1e3, 1e3, 1e3, 1e3),
            arithmetic_ns=8.0, local_gb_s=120.0, constant_gb_s=95.0, barrier_ns=200.0, launch_us=20.0,
            to_image_gb_s=15.0, from_image_gb_s=15.0, copy_gb_s=15.0,
            image=MemoryPath(
                130.0, _steps(30.0, 60.0), 32, 32, 1.5, 2.0, 2.0, 195.0, 100.0, 34.0, 20.0,
            ),
            buffer=MemoryPath(
                113.0, _steps(10.0, 60.0), 512, 64, 1.2, 2.0, 2.0, 96.0, 96.0, 30.0, 20.0,
            ),
            origins=_assumed("class default of a phone's GPU: caches and rates like an Adreno 640's"),
        ),
    }
)  # fmt: skip
"""Assumed coefficients by device class."""


def default_coefficients(device_class: Literal["cpu", "gpu", "mobile"]) -> KernelCoefficients:
    """Return the assumed coefficients of a device class; raises InputError for an unknown one."""
    if device_class not in DEFAULTS:
        raise InputError(f"device class {device_class!r} is not known; expected one of {', '.join(DEFAULTS)}")
    return DEFAULTS[device_class]


# profiles ---------------------------------------------------------------------------------------------------

CODEC = Codec(KernelCoefficients, "Kernel coefficients", schema="torchedge.kernels/1", error=ProfileError)


def _check_errors(errors: KernelErrors) -> None:
    for kernel in errors.kernels:
        if len({len(kernel.schedules), len(kernel.shares), len(kernel.errors)}) > 1:
            raise InputError(f"{kernel.name}: expected schedules, shares and errors of one length")


ERRORS = Codec(
    KernelErrors, "Errors of kernels", schema="torchedge.errors/1", verify=_check_errors, error=ProfileError
)


def coefficients_of(device: Device) -> KernelCoefficients:
    """Return a device's coefficients: those of its profile, else its class's with the device's figures.

    Raises:
        ProfileError: the profile's file breaks a rule of the format.
    """
    described = device.profile.get(TABLE)
    if isinstance(described, Mapping):
        digest = described.get("sha256")
        path = profile_file(device.folder, COEFFICIENTS_FILE, digest, max_bytes=MAX_DOCUMENT_BYTES)
        return CODEC.parse(path, read_toml(path))
    phone = is_phone_gpu(device.vendor, device.title, *device.aliases)
    base = DEFAULTS["cpu" if device.kind == "cpu" else "mobile" if phone else "gpu"]
    figures = {name: figure.value for name, figure in device.figures.items()}
    peak = figures.get("peak_fp32_gflops")
    main = figures.get("measured_bandwidth_gb_s") or figures.get("bandwidth_gb_s")
    units = int(figures.get("compute_units", base.compute_units))
    changed = replace(
        base,
        warp=int(figures.get("warp_size", base.warp)),
        compute_units=units,
        register_bytes=int(figures.get("register_bytes", base.register_bytes)),
        max_waves=int(figures.get("max_waves", base.max_waves)),
        max_group=int(figures.get("max_work_group_size", base.max_group)),
        local_bytes=int(1024 * figures.get("local_memory_kib", base.local_bytes / 1024)),
        l2_bytes=int(1024 * figures.get("l2_cache_kib", base.l2_bytes / 1024)),
        launch_us=figures.get("launch_overhead_us", base.launch_us),
        gflops=base.gflops if peak is None else tuple([peak * g / base.gflops[-1] for g in base.gflops]),
        to_image_gb_s=figures.get("unified_to_texture_gb_s", base.to_image_gb_s),
        image=_scaled(base.image, units / base.compute_units, main, figures.get("texture_cache_bytes")),
        buffer=_scaled(base.buffer, units / base.compute_units, main, None),
        local_gb_s=base.local_gb_s * units / base.compute_units,
        constant_gb_s=base.constant_gb_s * units / base.compute_units,
    )
    known = {
        "occupancy": ("warp_size", "compute_units", "register_bytes", "max_waves"),
        "launches": ("launch_overhead_us",),
    }
    origins = dict(base.origins)
    for part, names in known.items():
        if set(names) <= set(device.figures):
            worst = min((device.figures[name] for name in names), key=lambda figure: figure.provenance)
            origins[part] = Origin(worst.provenance, f"figures of {device.name}: {', '.join(names)}")
    return replace(changed, origins=MappingProxyType(origins))


def errors_of(device: Device) -> KernelErrors:
    """Return the errors of predictions that a device's profile holds; none where it has no such file.

    Raises:
        ProfileError: the profile's file breaks a rule of the format.
    """
    described = device.profile.get(ERRORS_TABLE)
    if not isinstance(described, Mapping):
        return KernelErrors()
    path = profile_file(device.folder, ERRORS_FILE, described.get("sha256"), max_bytes=MAX_DOCUMENT_BYTES)
    return ERRORS.read(path)


def write_coefficients(folder: Path, coefficients: KernelCoefficients) -> str:
    """Write the coefficients into a profile folder, atomically; return the file's sha256.

    Raises:
        ProfileError: a coefficient breaks a rule of the format, or the folder cannot be written.
    """
    CODEC.check(coefficients)
    path = folder / COEFFICIENTS_FILE
    write_toml(path, CODEC.document(coefficients))
    return file_sha256(path, max_bytes=MAX_DOCUMENT_BYTES)


def _scaled(
    path: MemoryPath, units: float, main_gb_s: float | None, texture_bytes: float | None
) -> MemoryPath:
    main = main_gb_s or path.main_gb_s
    return replace(
        path,
        lines=path.lines if texture_bytes is None else max(1, int(texture_bytes / path.line_bytes)),
        cache_gb_s=path.cache_gb_s * units,
        l2_gb_s=path.l2_gb_s * units,
        main_gb_s=main,
        write_gb_s=min(path.write_gb_s * units, main),
    )
