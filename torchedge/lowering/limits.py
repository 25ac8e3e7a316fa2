"""Limits of a device, and the check of a program against them before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torchedge.devices import Device
from torchedge.errors import DeviceError
from torchedge.expressions.dialect import STORED
from torchedge.lowering.arenas import total_bytes
from torchedge.lowering.programs import Kernel, Program, StoredTensor
from torchedge.lowering.targets import device_class
from torchedge.opencl.platforms import ClDevice

_HALF_EXTENSION = "cl_khr_fp16"


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
        image_width=device.image_width if device.images else None,
        image_height=device.image_height if device.images else None,
        image_from_buffer=device.image_from_buffer,
        pitch_texels=device.pitch_alignment or None,
        offset_bytes=device.base_alignment,
        half_arithmetic=device.half_arithmetic,
        half_images=device.half_images,
        double=device.double,
    )


_FIGURES = {
    "memory_bytes": ("memory_mib", 2**20),
    "allocation_bytes": ("max_allocation_mib", 2**20),
    "local_bytes": ("local_memory_kib", 2**10),
    "work_group": ("max_work_group_size", 1),
    "image_width": ("max_image_width", 1),
    "image_height": ("max_image_height", 1),
    "pitch_texels": ("image_pitch_alignment_px", 1),
    "address_bytes": ("image_base_alignment_bytes", 1),
}
_FACTS = {
    "image_from_buffer": "image_from_buffer",
    "half_arithmetic": "half_arithmetic",
    "half_images": "half_arithmetic",
}


def profile_limits(device: Device) -> Limits:
    """Return the limits in a device's profile, each with its figure and that figure's provenance."""
    values: dict[str, int | bool] = {}
    sources: dict[str, str] = {}
    for limit, (name, unit) in _FIGURES.items():
        if name in device.figures:
            figure = device.figures[name]
            values[limit], sources[limit] = int(figure.value * unit), f"{name}, {figure.provenance}"
    for limit, name in _FACTS.items():
        if name in device.facts:
            fact = device.facts[name]
            values[limit], sources[limit] = bool(fact.value), f"{name}, {fact.provenance}"
    if device_class(device.kind, device.vendor) == "mobile":
        values["double"], sources["double"] = False, "phone GPUs have no float64"
    return Limits(device.name, sources=sources, **values)  # type: ignore[arg-type]


def check_limits(program: Program, limits: Limits) -> None:
    """Raise DeviceError for the first tensor, launch or sum of bytes beyond a limit."""
    for index, tensor in enumerate(program.tensors):
        _check_dtype(tensor, limits)
        if tensor.layout.storage != "buffer":
            _check_image(program, index, limits)
        if tensor.role != "intermediate" and not program.arena.holds(index):
            _check_bytes(f"{tensor.role} {tensor.name}", tensor.nbytes, limits, "allocation_bytes")
    total = resident_bytes(program) + total_bytes(program.arena)
    _check_bytes(f"arena of {program.name}", program.arena.nbytes, limits, "allocation_bytes")
    _check_bytes(f"program {program.name}", total, limits, "memory_bytes")
    _check_offsets(program, limits)
    for kernel in program.kernels:
        _check_kernel(kernel, limits)
    for position in range(len(program.launches)):
        _check_launch(program, position, limits)


def resident_bytes(program: Program) -> int:
    """Return the bytes of all tensors outside the arena."""
    return sum(
        tensor.nbytes
        for index, tensor in enumerate(program.tensors)
        if tensor.role != "intermediate" and not program.arena.holds(index)
    )


def _beyond(what: str, asked: str, limits: Limits, limit: str, advice: str) -> DeviceError:
    source = f" ({limits.sources[limit]})" if limit in limits.sources else ""
    return DeviceError(f"{what} {asked}, {limits.device} takes {_shown(limits, limit)}{source}; {advice}")


def _shown(limits: Limits, limit: str) -> str:
    value = getattr(limits, limit)
    if isinstance(value, bool):
        return "them" if value else "none"
    return (
        f"multiples of {value}"
        if limit in ("pitch_texels", "address_bytes", "offset_bytes")
        else f"at most {value}"
    )


def _check_dtype(tensor: StoredTensor, limits: Limits) -> None:
    if tensor.dtype not in STORED:
        raise DeviceError(
            f"{tensor.role} {tensor.name} is {tensor.dtype}, which {limits.device} does not compute with; "
            "cast the model to float32"
        )
    image = tensor.layout.storage != "buffer"
    for dtype, limit, counts in (("float16", "half_images", image), ("float64", "double", True)):
        if counts and tensor.dtype == dtype and getattr(limits, limit) is False:
            asked = f"is {'an image of ' if image else ''}{dtype}"
            raise _beyond(f"{tensor.role} {tensor.name}", asked, limits, limit, "use float32")


def _check_image(program: Program, index: int, limits: Limits) -> None:
    tensor = program.tensors[index]
    name, (width, height) = f"{tensor.role} {tensor.name}", tensor.layout.extent(tensor.shape)
    for limit, size in (("image_width", width), ("image_height", height)):
        most = getattr(limits, limit)
        if most is not None and size > most:
            asked = f"is an image of {width} x {height} texels"
            raise _beyond(name, asked, limits, limit, "lower the program for this device")
    if tensor.layout.storage != "image_buffer":
        return
    if limits.image_from_buffer is False:
        raise _beyond(
            name, "is an image made from a buffer", limits, "image_from_buffer", "store it otherwise"
        )
    pitch, address = max(width, tensor.layout.row_texels), program.arena.offset.get(index, 0)
    for limit, amount, what in (
        ("pitch_texels", pitch, f"has rows of {pitch} texels"),
        ("address_bytes", address, f"is an image that begins at byte {address} of the arena"),
    ):
        step = getattr(limits, limit)
        if step and amount % step:
            raise _beyond(name, what, limits, limit, "lower the program for this device")


def _check_bytes(what: str, nbytes: int, limits: Limits, limit: str) -> None:
    most = getattr(limits, limit)
    if most is not None and nbytes > most:
        asked = f"takes {nbytes} bytes" + (" at once" if limit == "allocation_bytes" else "")
        raise _beyond(what, asked, limits, limit, "use a smaller batch, or half storage")


def _check_offsets(program: Program, limits: Limits) -> None:
    step = limits.offset_bytes
    for index, offset in program.arena.offset.items():
        if step and offset % step:
            tensor = program.tensors[index]
            name = f"{tensor.role} {tensor.name}"
            asked = f"begins at byte {offset} of the arena"
            raise _beyond(name, asked, limits, "offset_bytes", "lower the program for this device")


def _check_kernel(kernel: Kernel, limits: Limits) -> None:
    if limits.local_bytes is not None and kernel.local_bytes > limits.local_bytes:
        asked = f"takes {kernel.local_bytes} bytes of local memory"
        raise _beyond(f"kernel {kernel.name}", asked, limits, "local_bytes", "lower it with smaller tiles")
    if limits.half_arithmetic is False and _HALF_EXTENSION in kernel.source:
        raise _beyond(f"kernel {kernel.name}", "computes with half", limits, "half_arithmetic", "use float32")


def _check_launch(program: Program, position: int, limits: Limits) -> None:
    launch = program.launches[position]
    local = launch.local_size
    if local is None:
        return
    name = f"launch {position}, kernel {program.kernels[launch.kernel].name}"
    asked, advice = f"has work-groups of {list(local)}", "lower the program for this device"
    if limits.work_group is not None and prod(local) > limits.work_group:
        raise _beyond(name, asked, limits, "work_group", advice)
    if limits.work_item_sizes is not None and any(
        size > most for size, most in zip(local, limits.work_item_sizes, strict=False)
    ):
        raise _beyond(name, asked, limits, "work_item_sizes", advice)
    if any(whole % part for whole, part in zip(launch.global_size, local, strict=True)):
        raise DeviceError(
            f"{name}: {list(launch.global_size)} in groups of {list(local)}, expected multiples; {advice}"
        )
