"""What a profile tells of a device's limits, and the device class that a program is lowered for."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.bundles.manifests import memory_of
from torchedge.devices import Device, is_phone_gpu
from torchedge.errors import DeviceError
from torchedge.lowering.limits import Limits, check_limits
from torchedge.lowering.programs import Program
from torchedge.lowering.targets import DeviceClass

__all__ = ["check_memory", "checked_limits", "device_class", "limits_of"]

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


def device_class(device: Device) -> DeviceClass:
    """Return what a device's programs are lowered for: "cpu", "gpu" (desktop, server, Jetson) or "mobile"."""
    if device.kind == "cpu":
        return "cpu"
    return "mobile" if is_phone_gpu(device.vendor) else "gpu"


def limits_of(device: Device) -> Limits:
    """Return the limits that a device's profile gives, each with its figure and where that comes from."""
    values: dict[str, int | bool] = {}
    sources: dict[str, str] = {}
    for limit, (figure, unit) in _FIGURES.items():
        if figure in device.figures:
            known = device.figures[figure]
            values[limit], sources[limit] = int(known.value * unit), f"{figure}, {known.provenance}"
    for limit, name in _FACTS.items():
        if name in device.facts:
            fact = device.facts[name]
            values[limit], sources[limit] = bool(fact.value), f"{name}, {fact.provenance}"
    if device_class(device) == "mobile":
        values["double"], sources["double"] = False, "phone GPUs have no float64"
    return Limits(device.name, sources=sources, **values)  # type: ignore[arg-type]


def check_memory(programs: Sequence[Program], limits: Limits) -> None:
    """Raise DeviceError for what programs that share their weights ask beyond a device's limits."""
    for program in programs:
        check_limits(program, limits)
    total = memory_of(programs).total_bytes
    if limits.memory_bytes is not None and total > limits.memory_bytes:
        raise DeviceError(
            f"{programs[0].name} takes {total} bytes in all, {limits.device} has {limits.memory_bytes} "
            f"({limits.sources['memory_bytes']}); use a smaller batch"
        )


def checked_limits(limits: Limits) -> dict[str, int]:
    """Return the limits that are known, by name; a yes is 1 and a no 0."""
    names = [n for n in limits.__dataclass_fields__ if n not in ("device", "sources", "work_item_sizes")]
    return {name: int(getattr(limits, name)) for name in names if getattr(limits, name) is not None}
