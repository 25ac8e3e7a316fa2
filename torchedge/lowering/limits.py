"""The limits in a device's profile, and the check of a program against limits before it allocates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from torchedge.devices import Device
from torchedge.errors import DeviceError
from torchedge.expressions.dialect import STORED
from torchedge.lowering.addressing import beyond_offsets
from torchedge.lowering.arenas import allocations, total_bytes
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import Limits, device_class

_HALF_EXTENSION = "cl_khr_fp16"


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


_STEPS = ("pitch_texels", "address_bytes", "offset_bytes")
"""Limits of which a program has to use multiples."""
_ELSEWHERE, _SMALLER = "lower or export the program for this device", "use a smaller batch, or half storage"
_STREAM = f"{_SMALLER}, or stream the weights of an inference within a memory_limit"
_LOWER = "plan it within a lower memory_limit"

_Demand = tuple[str, str, Any, str, str]
"""What asks for an amount, its limit, the amount, the same in words, and what to do beyond the limit."""


def check_limits(program: Program, limits: Limits, staging_bytes: int = 0) -> None:
    """Raise DeviceError for the first tensor, launch or sum of bytes beyond a limit.

    program: as it runs; that of a streaming schedule has its streamed weights in the arena. staging_bytes: of
    the pool of a streaming run.
    """
    if message := beyond_offsets(program):
        raise DeviceError(message)
    for tensor in program.tensors:
        if tensor.dtype not in STORED:
            raise DeviceError(
                f"{tensor.role} {tensor.name} is {tensor.dtype}, which {limits.device} does not compute "
                "with; cast the model to float32"
            )
    for what, limit, amount, asked, advice in _demands(program, staging_bytes):
        most = getattr(limits, limit)
        if _is_beyond(amount, limit, most):
            takes = "none" if most is False else f"{'multiples of' if limit in _STEPS else 'at most'} {most}"
            source = f" ({limits.sources[limit]})" if limit in limits.sources else ""
            raise DeviceError(f"{what} {asked}, {limits.device} takes {takes}{source}; {advice}")
    for position, launch in enumerate(program.launches):
        local = launch.local_size or (1,) * len(launch.global_size)
        if any(whole % part for whole, part in zip(launch.global_size, local, strict=True)):
            name = f"launch {position}, kernel {program.kernels[launch.kernel].name}"
            raise DeviceError(
                f"{name}: {list(launch.global_size)} in groups of {list(local)}, expected multiples; "
                f"{_ELSEWHERE}"
            )


def _is_beyond(amount: Any, limit: str, most: Any) -> bool:  # noqa: ANN401 - a number, a size or a need
    if most is None or isinstance(most, bool):
        return most is False and bool(amount)
    if isinstance(most, tuple):
        return any(size > largest for size, largest in zip(amount, most, strict=False))
    return bool(most and amount % most) if limit in _STEPS else amount > most


def _demands(program: Program, staging_bytes: int) -> Iterator[_Demand]:
    """Yield what a program asks of a device."""
    arena = program.arena
    for index, tensor in enumerate(program.tensors):
        name, image = f"{tensor.role} {tensor.name}", tensor.layout.storage != "buffer"
        kind = f"is {'an image of ' if image else ''}{tensor.dtype}"
        begin = arena.place(index)[1] if index in arena.offset else 0
        yield name, "half_images", image and tensor.dtype == "float16", kind, "use float32"
        yield name, "double", tensor.dtype == "float64", kind, "use float32"
        if image:
            width, height = tensor.layout.extent(tensor.shape)
            texels = f"is an image of {width} x {height} texels"
            yield name, "image_width", width, texels, _ELSEWHERE
            yield name, "image_height", height, texels, _ELSEWHERE
        if tensor.layout.storage == "image_buffer":
            pitch, where = max(width, tensor.layout.row_texels), f"begins at byte {begin} of the arena"
            yield name, "image_from_buffer", True, "is an image made from a buffer", "store it otherwise"
            yield name, "pitch_texels", pitch, f"has rows of {pitch} texels", _ELSEWHERE
            yield name, "address_bytes", begin, f"is an image that {where}", _ELSEWHERE
        if tensor.role != "intermediate" or arena.holds(index):
            yield name, "allocation_bytes", tensor.nbytes, f"takes {tensor.nbytes} bytes at once", _SMALLER
    most = max(allocations(arena), default=0)
    for what, nbytes in ((f"arena of {program.name}", most), ("staging pool", staging_bytes)):
        yield what, "allocation_bytes", nbytes, f"takes {nbytes} bytes at once", _SMALLER
    total = sum(tensor.nbytes for tensor in program.residents) + total_bytes(arena) + staging_bytes
    advice = _LOWER if staging_bytes else _STREAM
    yield f"program {program.name}", "memory_bytes", total, f"takes {total} bytes", advice
    for index in arena.offset:
        offset = arena.place(index)[1]
        name = f"{program.tensors[index].role} {program.tensors[index].name}"
        yield name, "offset_bytes", offset, f"begins at byte {offset} of the arena", _ELSEWHERE
    for kernel in program.kernels:
        name, local = f"kernel {kernel.name}", f"takes {kernel.local_bytes} bytes of local memory"
        yield name, "local_bytes", kernel.local_bytes, local, _ELSEWHERE
        halves, doubles = _HALF_EXTENSION in kernel.source, re.search(r"\bdouble", kernel.source) is not None
        yield name, "half_arithmetic", halves, "computes with half", "use float32"
        yield name, "double", doubles, "computes with double", "use float32"
    for position, launch in enumerate(program.launches):
        name = f"launch {position}, kernel {program.kernels[launch.kernel].name}"
        group = launch.local_size or ()
        asked = f"has work-groups of {list(group)}"
        yield name, "work_group", prod(group), asked, _ELSEWHERE
        yield name, "work_item_sizes", group, asked, _ELSEWHERE
