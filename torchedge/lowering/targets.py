"""Device classes that programs are compiled for.

The numbers are defaults, found by experiment: "cpu" on PoCL with AVX-512, "gpu" on an NVIDIA H200; those of
"mobile" are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
"""Templates of contractions."""
Tuner = Literal["fixed", "model", "measured"]
"""What chooses schedules and layouts: constants of the device class, the cost model, or times of its best."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device class.

    vector: widest useful vector of floats. work_items: number that fills the device. group, least_group:
    largest and smallest work-group. row_group: work-items that share a long row (1: none share). schedule:
    template of contractions. storage: preferred storage of tensors; pattern: the access pattern of images.
    image_width, image_height: largest image in texels; pitch: rows of images made from buffers are a multiple
    of so many texels. shared_pitch: the same of intermediate images made from the arena's buffer; 0: each has
    memory of its own. serial: one work-item does the work of a work-group, in loops of its own: PoCL compiles
    them many times faster than it turns a work-group into loops. largest_group: work-items of a work-group at
    most; local_bytes: local memory of a work-group. allocation_bytes: the largest single allocation, 0: any.
    half: large intermediates are stored in half precision; half_weights: so are matrices of weights that the
    step does not update. coefficients: by which the tuner chooses schedules and layouts; None: fixed
    defaults. errors: of its predictions, with which the search for the fastest begins. checks: kernels report
    accesses outside their tensors.
    """

    name: DeviceClass
    vector: int
    work_items: int
    group: int
    row_group: int
    schedule: Kind = "local"
    least_group: int = 64
    storage: Storage = "buffer"
    pattern: str = "row"
    image_width: int = 16_384
    image_height: int = 16_384
    pitch: int = 64
    shared_pitch: int = 0
    serial: bool = False
    largest_group: int = 1024
    local_bytes: int = 32 << 10
    allocation_bytes: int = 0
    half: bool = False
    half_weights: bool = False
    coefficients: KernelCoefficients | None = field(default=None, hash=False)
    errors: KernelErrors = field(default=KernelErrors(), hash=False)
    checks: bool = False


TARGETS = {
    # PoCL: 16 floats fill an AVX-512 register; work-groups are the tasks of a few threads.
    "cpu": Target(
        "cpu",
        vector=16,
        work_items=8,
        group=256,
        row_group=1,
        schedule="panel",
        least_group=1,
        serial=True,
        local_bytes=1 << 20,
    ),
    # A server or desktop GPU: 128-bit accesses; a hundred processors with over a thousand items each.
    "gpu": Target("gpu", vector=4, work_items=65_536, group=256, row_group=128, local_bytes=48 << 10),
    # A phone's GPU: RGBA texels; few shader cores with sixteen waves each.
    "mobile": Target(
        "mobile", vector=4, work_items=8_192, group=128, row_group=64, schedule="register", storage="image"
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


def target_for(device: ClDevice, tuner: Tuner | None = None) -> Target:
    """Return the target of an OpenCL device, with the tuner as in `with_tuner`."""
    target = TARGETS[device_class(device.kind, device.name, device.vendor, device.platform)]
    target = replace(target, allocation_bytes=device.allocation_bytes)
    if device.images:
        target = replace(target, image_width=device.image_width, image_height=device.image_height)
    return with_tuner(target, match_device(device.name) if device.kind != "cpu" else None, tuner)
