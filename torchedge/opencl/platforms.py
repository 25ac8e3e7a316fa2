"""The OpenCL devices of this machine and their properties."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchedge.errors import DeviceError, OpenCLError, needed
from torchedge.opencl.drivers import driver_advice, find_platforms
from torchedge.opencl.foreign_caches import import_pyopencl
from torchedge.opencl.sharing import check_process

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

    @property
    def described(self) -> str:
        """Its name and the version of its driver, for errors."""
        return f"{self.name} (driver {self.driver})"


def load_pyopencl() -> Any:
    """Return the module pyopencl.

    Raises MissingExtraError: it is not installed, or does not load.
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
        platforms = find_platforms(cl)
    except cl.Error as error:
        platforms = []
        reasons.append(driver_message(error))
    for platform in platforms:
        try:
            devices += platform.get_devices()
        except cl.Error as error:  # a driver without its hardware
            reasons.append(f"{_text(platform.name)}: {driver_message(error)}")
    if not devices:
        reason = f" ({'; '.join(reasons)})" if reasons else ""
        raise DeviceError(f"OpenCL finds no device{reason}; install the driver of one, or {driver_advice()}")
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


def place_of(device: ClDevice) -> str:
    """Return a text by which `device_at` finds a device in another process."""
    return json.dumps([device.index, *(getattr(device, name) for name in _NAMES)])


def device_at(place: str) -> int:
    """Return the index in this process of the device that `place_of` describes.

    Indices differ where another process looked for drivers with other variables; of equal devices it is the
    one of the same index.
    Raises OpenCLError: the device is not found here.
    """
    index, *names = json.loads(place)
    same = [
        own
        for own, handle in enumerate(handles())
        if [_text(read(handle)) for read in _NAMES.values()] == names
    ]
    if not same:
        raise OpenCLError(f"a new process finds no OpenCL device {names[0]}; look at its driver's variables")
    return index if index in same else same[0]


_NAMES: dict[str, Callable[[Any], str]] = {
    "name": lambda handle: handle.name,
    "driver": lambda handle: handle.driver_version,
    "platform": lambda handle: handle.platform.name,
    "platform_version": lambda handle: handle.platform.version,
}
"""Properties by which processes tell devices apart."""

_BUILD = re.compile(r"\nBuild on <.*?>:\s*\n(.*?)(?:\n\(options: .*)?\Z", re.DOTALL)
_COMPLAINT = re.compile(r"\b(?:fatal )?error:\s*(\S.*)", re.IGNORECASE)


def driver_message(error: BaseException) -> str:
    """Return an error of pyopencl in one line, each thing once; of a log its first error."""
    text = str(error)
    log = _BUILD.search(text)
    parts = list(dict.fromkeys(part.strip() for part in text[: log.start() if log else None].split(" - ")))
    said = " - ".join(part for part in parts if not any(part != o and o.endswith(part) for o in parts))
    if log is not None:
        lines = [line.strip() for line in log[1].splitlines() if line.strip()]
        complaint = _COMPLAINT.search(log[1])
        said += f": {complaint[1].strip() if complaint else ' '.join(lines)}"
    return " ".join(said.split())


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
