"""The OpenCL devices of this machine and their properties."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchedge.errors import DeviceError, needed
from torchedge.opencl.foreign_caches import import_pyopencl
from torchedge.opencl.sharing import check_process

DEVICE_VARIABLE = "TORCHEDGE_OPENCL_DEVICE"
"""Environment variable of the default device: a number, a type or a part of a name."""

KINDS = ("gpu", "accelerator", "cpu", "other")
"""Device types, the preferred one first."""

EXTENSIONS_OF_INTEREST = (
    "cl_khr_fp16",
    "cl_khr_fp64",
    "cl_khr_image2d_from_buffer",
    "cl_khr_subgroups",
    "cl_khr_int64_base_atomics",
    "cl_khr_command_buffer",
    "cl_khr_integer_dot_product",
    "cl_khr_il_program",
    "cl_intel_subgroups",
    "cl_qcom_perf_hint",
    "cl_qcom_reqd_sub_group_size",
    "cl_qcom_recordable_queues",
    "cl_qcom_ml_ops",
    "cl_arm_integer_dot_product_int8",
    "cl_arm_import_memory",
    "cl_nv_device_attribute_query",
)

_PITCH_ALIGNMENT, _BASE_ADDRESS_ALIGNMENT = 0x104A, 0x104B  # of images made from buffers, in texels


@dataclass(frozen=True, slots=True)
class ClDevice:
    """One OpenCL device.

    index: its place among all devices of all platforms, in the loader's order. kind: "gpu", "cpu",
    "accelerator" or "other". Sizes are in bytes, images in texels. pitch_alignment and address_alignment, in
    texels, are those of images made from buffers (0: unknown). half_arithmetic: cl_khr_fp16; half_images:
    RGBA images of half floats. base_alignment: of offsets of sub-buffers.
    """

    index: int
    name: str
    platform: str
    platform_version: str
    vendor: str
    version: str
    driver: str
    kind: str
    compute_units: int
    clock_mhz: int
    global_bytes: int
    local_bytes: int
    allocation_bytes: int
    work_group: int
    work_item_sizes: tuple[int, ...]
    images: bool
    image_width: int
    image_height: int
    image_buffer_texels: int
    image_from_buffer: bool
    pitch_alignment: int
    address_alignment: int
    half_arithmetic: bool
    half_images: bool
    double: bool
    base_alignment: int
    extensions: tuple[str, ...]


def load_pyopencl() -> Any:
    """Return the module pyopencl.

    Raises:
        MissingExtraError: it is not installed, or does not load.
    """
    with needed("pyopencl", extra="opencl", purpose="running OpenCL kernels"):
        return import_pyopencl()


def handles() -> list[Any]:
    """Return pyopencl's devices of all platforms, in the order of `ClDevice.index`.

    Raises:
        DeviceError: the loader finds no platform or no device.
        MissingExtraError: pyopencl is not installed.
        OpenCLError: this process was forked from one that used OpenCL.
    """
    cl = load_pyopencl()
    check_process()
    devices: list[Any] = []
    reasons = []
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        platforms = []
        reasons.append(" ".join(str(error).split()))
    for platform in platforms:
        try:
            devices += platform.get_devices()
        except cl.Error as error:  # a driver without its hardware
            reasons.append(f"{platform.name.strip()}: {' '.join(str(error).split())}")
    if not devices:
        reason = f" ({'; '.join(reasons)})" if reasons else ""
        raise DeviceError(
            f"OpenCL finds no device{reason}; install the driver of one, or for this machine's processor "
            "run: pip install 'torchedge[opencl]'"
        )
    return devices


def list_opencl_devices() -> list[ClDevice]:
    """Return the OpenCL devices of this machine; raises what `handles` raises."""
    return [describe(handle, index) for index, handle in enumerate(handles())]


def describe(handle: Any, index: int) -> ClDevice:
    """Return the properties of a device of pyopencl."""
    cl = load_pyopencl()
    extensions = set(handle.extensions.split())
    version = re.search(r"(\d+)\.(\d+)", handle.version)
    number = (int(version[1]), int(version[2])) if version else (1, 2)
    images = bool(handle.image_support)
    known = [name for name in KINDS if hasattr(cl.device_type, name.upper())]
    kind = next((name for name in known if handle.type & getattr(cl.device_type, name.upper())), "other")
    return ClDevice(
        index=index,
        name=_text(handle.name),
        platform=_text(handle.platform.name),
        platform_version=_text(handle.platform.version),
        vendor=_text(handle.vendor),
        version=_text(handle.version),
        driver=_text(handle.driver_version),
        kind=kind,
        compute_units=handle.max_compute_units,
        clock_mhz=handle.max_clock_frequency,
        global_bytes=handle.global_mem_size,
        local_bytes=handle.local_mem_size,
        allocation_bytes=handle.max_mem_alloc_size,
        work_group=handle.max_work_group_size,
        work_item_sizes=tuple(handle.max_work_item_sizes),
        images=images,
        image_width=handle.image2d_max_width if images else 0,
        image_height=handle.image2d_max_height if images else 0,
        image_buffer_texels=_property(handle, cl.device_info.IMAGE_MAX_BUFFER_SIZE) if images else 0,
        image_from_buffer=images
        and ("cl_khr_image2d_from_buffer" in extensions or (2, 0) <= number < (3, 0)),
        pitch_alignment=_property(handle, _PITCH_ALIGNMENT),
        address_alignment=_property(handle, _BASE_ADDRESS_ALIGNMENT),
        half_arithmetic="cl_khr_fp16" in extensions,
        half_images=images and _reads_half_images(cl, handle),
        double="cl_khr_fp64" in extensions,
        base_alignment=max(1, handle.mem_base_addr_align // 8),
        extensions=tuple(name for name in EXTENSIONS_OF_INTEREST if name in extensions),
    )


def choose_device(query: str | int | None = None, devices: Sequence[ClDevice] | None = None) -> ClDevice:
    """Return one OpenCL device.

    query: an index, a type ("gpu", "cpu", ...) or a part of a device's, platform's or vendor's name;
    None: `$TORCHEDGE_OPENCL_DEVICE`, else the first GPU, else the first accelerator, else the first device.

    Raises:
        DeviceError: there is no such device, or a name fits several.
        MissingExtraError: pyopencl is not installed.
    """
    known = list_opencl_devices() if devices is None else list(devices)
    asked = os.environ.get(DEVICE_VARIABLE) or None if query is None else query
    if asked is None:
        return min(known, key=lambda device: (KINDS.index(device.kind), device.index))
    wanted = str(asked).strip().casefold()
    if re.fullmatch(r"-?\d+", wanted):
        matches = [device for device in known if device.index == int(wanted)]
    elif wanted in KINDS:
        matches = [device for device in known if device.kind == wanted][:1]
    else:
        matches = [d for d in known if wanted in f"{d.name}\n{d.platform}\n{d.vendor}".casefold()]
    if len(matches) == 1:
        return matches[0]
    names = "; ".join(f"{device.index}: {device.name} ({device.kind})" for device in known)
    what = f"fits {len(matches)} devices" if matches else "fits no device"
    raise DeviceError(f"OpenCL device {asked!r} {what}; expected one of {names}; name one by its number")


def _text(words: str) -> str:
    return " ".join(words.replace("\0", " ").split())


def _property(handle: Any, info: int) -> int:
    """Return a property that not every driver and not every pyopencl has; 0 without it."""
    try:
        return int(handle.get_info(info))
    except Exception:
        return 0


def _reads_half_images(cl: Any, handle: Any) -> bool:
    wanted = (cl.channel_order.RGBA, cl.channel_type.HALF_FLOAT)
    try:
        context = cl.Context([handle])
        return all(
            any(
                (item.channel_order, item.channel_data_type) == wanted
                for item in cl.get_supported_image_formats(context, flags, cl.mem_object_type.IMAGE2D)
            )
            for flags in (cl.mem_flags.READ_ONLY, cl.mem_flags.WRITE_ONLY)
        )
    except cl.Error:
        return False
