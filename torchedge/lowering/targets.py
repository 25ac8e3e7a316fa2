"""Device classes that programs are compiled for.

The numbers are defaults, found by experiment: "cpu" on PoCL with AVX-512, "gpu" on an NVIDIA H200; those of
"mobile" are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal, get_args

from torchedge.devices import Device, is_phone_gpu, match_device
from torchedge.errors import InputError, check_choice
from torchedge.opencl.platforms import ClDevice
from torchedge.textures.coefficients import (
    TABLE,
    KernelCoefficients,
    KernelErrors,
    coefficients_of,
    default_coefficients,
    errors_of,
)
from torchedge.textures.layouts import Storage

DeviceClass = Literal["cpu", "gpu", "mobile"]
Precision = Literal["float32", "float16"]
"""How large tensors are stored; arithmetic is in float32."""
Kind = Literal["panel", "local", "register"]
"""Kinds of contractions' kernels."""
Tuner = Literal["fixed", "model", "measured"]
"""What chooses schedules and layouts: constants of the device class, the cost model, or times of its best."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device; an unknown limit is None and is not checked.

    memory_bytes: all memory. allocation_bytes: the largest single allocation. local_bytes: local memory of a
    work-group. work_group: its work-items, work_item_sizes by dimension. Images in texels; rows and begin of
    an image made from a buffer are multiples of pitch_texels and address_bytes, the begin of a sub-buffer of
    offset_bytes. half_images: images of half floats (buffers of half floats always work). sources: where a
    limit comes from, by its name here.
    """

    device: str
    memory_bytes: int | None = None
    allocation_bytes: int | None = None
    local_bytes: int | None = None
    work_group: int | None = None
    work_item_sizes: tuple[int, ...] | None = None
    image_width: int | None = None
    image_height: int | None = None
    image_from_buffer: bool | None = None
    pitch_texels: int | None = None
    address_bytes: int | None = None
    offset_bytes: int | None = None
    half_arithmetic: bool | None = None
    half_images: bool | None = None
    double: bool | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the unknown limits."""
        names = (name for name in self.__dataclass_fields__ if name not in ("device", "sources"))
        return tuple(name for name in names if getattr(self, name) is None)

    @property
    def known(self) -> dict[str, int]:
        """The known limits of one number each, by name; a yes is 1 and a no 0."""
        skipped = ("device", "sources", "work_item_sizes", *self.unknown)
        return {name: int(getattr(self, name)) for name in self.__dataclass_fields__ if name not in skipped}


def limits_of(device: ClDevice) -> Limits:
    """Return the limits that an OpenCL device reports. It does not report its free memory: None."""
    return Limits(
        device.name,
        local_bytes=device.local_bytes,
        work_group=device.work_group,
        work_item_sizes=device.work_item_sizes,
        image_width=device.image_width if device.images else 0,
        image_height=device.image_height if device.images else 0,
        image_from_buffer=device.image_from_buffer,
        pitch_texels=device.pitch_alignment or None,
        offset_bytes=device.base_alignment,
        half_arithmetic=device.half_arithmetic,
        half_images=device.half_images,
        double=device.double,
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A device class.

    vector: widest useful vector of floats. work_items: number that fills the device. group, least_group:
    largest and smallest work-group. row_group: work-items that share long rows (1: none share);
    largest_row_group: the same where more are needed to fill the device; row_items: up to so many in all
    share them, which hide each other's latency. schedule: kind of contractions. storage: preferred storage
    of tensors; pattern: the access pattern of images.
    image_width, image_height: largest image in texels, 0 without images; half_images: images may hold half
    floats. pitch: rows of images made from buffers are a multiple of so many texels. shared_pitch: the same
    of intermediate images made from the arena's buffer; 0: each has memory of its own. alignment: tensors in
    the arena begin at multiples of so many bytes. serial: one work-item does the work of a work-group, in
    loops of its own: PoCL compiles them many times faster than it turns a work-group into loops.
    largest_group: work-items of a work-group at most, group_sizes: the same along each dimension;
    local_bytes: local memory of a work-group. allocation_bytes: the largest single allocation, 0: any.
    double: kernels may compute with float64. half: large intermediates are stored in half precision;
    half_weights: so are matrices of weights that the step does not update. coefficients: by which the tuner
    chooses schedules and layouts; None: fixed defaults. errors: of its predictions, with which the search for
    the fastest begins. checks: kernels report accesses outside their tensors.
    """

    name: DeviceClass
    vector: int
    work_items: int
    group: int
    row_group: int
    largest_row_group: int
    row_items: int
    schedule: Kind = "local"
    least_group: int = 64
    storage: Storage = "buffer"
    pattern: str = "row"
    image_width: int = 16_384
    image_height: int = 16_384
    half_images: bool = True
    pitch: int = 64
    shared_pitch: int = 0
    alignment: int = 512
    serial: bool = False
    largest_group: int = 1024
    group_sizes: tuple[int, int, int] = (1024, 1024, 64)
    local_bytes: int = 32 << 10
    allocation_bytes: int = 0
    double: bool = True
    half: bool = False
    half_weights: bool = False
    coefficients: KernelCoefficients | None = field(default=None, hash=False)
    errors: KernelErrors = field(default=KernelErrors(), hash=False)
    checks: bool = False

    def has_images_of(self, dtype: str) -> bool:
        """Return whether tensors of a dtype may lie in images."""
        return self.image_width > 0 and (dtype == "float32" or (dtype == "float16" and self.half_images))


TARGETS = {
    # PoCL: 16 floats fill an AVX-512 register; work-groups are the tasks of a few threads.
    "cpu": Target(
        "cpu",
        vector=16,
        work_items=8,
        group=256,
        row_group=1,
        largest_row_group=1,
        row_items=8,
        schedule="panel",
        least_group=1,
        serial=True,
        local_bytes=2 << 20,
    ),
    # A server or desktop GPU: 128-bit accesses; a hundred processors with over a thousand items each.
    "gpu": Target(
        "gpu",
        vector=4,
        work_items=65_536,
        group=256,
        row_group=128,
        largest_row_group=1024,
        row_items=262_144,
        local_bytes=48 << 10,
    ),
    # A phone's GPU: RGBA texels; few shader cores with sixteen waves each.
    "mobile": Target(
        "mobile",
        vector=4,
        work_items=8_192,
        group=128,
        row_group=64,
        largest_row_group=64,
        row_items=8_192,
        schedule="register",
        storage="image",
    ),
}
"""By device class."""


def target_of(name: str) -> Target:
    """Return a target by its device class; raises InputError for an unknown one."""
    if name not in TARGETS:
        raise InputError(f"device class {name!r} is not known; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]


def device_class(kind: str, *names: str) -> DeviceClass:
    """Return the class of a device: by its type, and by the names of its maker for a phone's GPU."""
    if kind == "cpu":
        return "cpu"
    return "mobile" if is_phone_gpu(*names) else "gpu"


def with_tuner(target: Target, profile: Device | None, tuner: Tuner | None) -> Target:
    """Return a target whose schedules and layouts a tuner chooses; profile: the device's, where it has one.

    tuner: by default "model" where the profile has coefficients of kernels, else "fixed". Processors have
    none: on PoCL `torchedge bench kernels` finds no gain over the defaults.

    Raises:
        InputError: an unknown tuner. ProfileError: the profile's coefficients are damaged.
    """
    if tuner is not None:
        check_choice("tuner", tuner, get_args(Tuner))
    if tuner == "fixed" or (tuner is None and (profile is None or TABLE not in profile.profile)):
        return target
    coefficients = default_coefficients(target.name) if profile is None else coefficients_of(profile)
    errors = errors_of(profile) if profile and tuner == "measured" else KernelErrors()
    return replace(target, coefficients=coefficients, errors=errors)


def bounded(target: Target, limits: Limits) -> Target:
    """Return a target within the limits of a device; of an unknown one that of the device class stays."""
    sizes = limits.work_item_sizes or ()
    pairs = zip([*sizes, *target.group_sizes[len(sizes) :]], target.group_sizes, strict=False)
    first, second, third = [min(pair) for pair in pairs]
    group_sizes, local_bytes = (first, second, third), limits.local_bytes
    largest = min(target.largest_group, limits.work_group or target.largest_group, group_sizes[0])
    width = target.image_width if limits.image_width is None else limits.image_width
    height = target.image_height if limits.image_height is None else limits.image_height
    if not (width and height):
        width = height = 0
    # The groups of a serial target are loops of one work-item.
    most = target.group if target.serial else 1 << (largest.bit_length() - 1)
    return replace(
        target,
        local_bytes=target.local_bytes if local_bytes is None else min(target.local_bytes, local_bytes),
        largest_group=largest,
        group_sizes=group_sizes,
        group=min(target.group, most),
        least_group=min(target.least_group, most),
        row_group=min(target.row_group, 1 << (largest.bit_length() - 1)),
        largest_row_group=min(target.largest_row_group, 1 << (largest.bit_length() - 1)),
        image_width=width,
        image_height=height,
        storage=target.storage if width else "buffer",
        half_images=target.half_images and limits.half_images is not False,
        double=target.double and limits.double is not False,
        alignment=lcm(target.alignment, *filter(None, (limits.offset_bytes, limits.address_bytes))),
    )


def target_for(device: ClDevice, tuner: Tuner | None = None) -> Target:
    """Return the target of an OpenCL device within its limits, with the tuner as in `with_tuner`."""
    target = bounded(
        TARGETS[device_class(device.kind, device.name, device.vendor, device.platform)], limits_of(device)
    )
    target = replace(target, allocation_bytes=device.allocation_bytes)
    return with_tuner(target, match_device(device.name) if device.kind != "cpu" else None, tuner)
