"""`torchedge devices --opencl`: the OpenCL devices of this machine, or all that matters of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from torchedge.cli.output import print_json, print_table, print_wrapped, warn
from torchedge.errors import DeviceError

if TYPE_CHECKING:
    from torchedge.opencl import ClDevice

MIB = 2**20


def list_opencl(name: str | None, *, as_json: bool) -> None:
    """Print the OpenCL devices, or the one that `name` (a number, a type, a part of a name) chooses."""
    from torchedge.opencl import choose_device, list_opencl_devices

    devices = list_opencl_devices()
    if name is not None:
        device = choose_device(name, devices)
        if as_json:
            print_json(asdict(device))
        else:
            print_opencl_device(device)
    elif as_json:
        print_json([asdict(device) for device in devices])
    else:
        try:
            chosen = choose_device(None, devices)
        except DeviceError as error:  # of an environment variable: the list is what helps
            warn(str(error))
            chosen = None
        print_opencl_devices(devices, chosen)


def print_opencl_devices(devices: list[ClDevice], chosen: ClDevice | None) -> None:
    """Print a line for each device; `chosen` is marked as the one that is taken where none is named."""
    print_table(
        ["", "OpenCL device", "type", "units", "MiB", "image2d", "half in"],
        [
            [
                f"{device.index}{'*' if device == chosen else ''}",
                _short(device.name, 32),
                device.kind,
                str(device.compute_units),
                f"{device.global_bytes // MIB:,}",
                f"{device.image_width}" if device.images else "no",
                _half(device, short=True),
            ]
            for device in devices
        ],
        left=3,
    )


def print_opencl_device(device: ClDevice) -> None:
    """Print all that matters of one device."""
    print_wrapped(device.name, first=f"{device.index}: ", rest="   ")
    rows = {
        "type": device.kind,
        "vendor": device.vendor,
        "platform": f"{device.platform} ({device.platform_version})",
        "version": device.version,
        "driver": device.driver,
        "compute units": f"{device.compute_units} at {device.clock_mhz} MHz",
        "global memory": f"{device.global_bytes // MIB:,} MiB",
        "allocations": f"at most {device.allocation_bytes // MIB:,} MiB at once",
        "local memory": f"{device.local_bytes // 1024:,} KiB",
        "work-group": f"{device.work_group} work-items within {' x '.join(map(str, device.work_item_sizes))}",
        "image2d": _images(device),
        "image from buffer": _images_from_buffers(device),
        "half floats": _half(device),
        "double": "yes" if device.double else "no",
        "sub-buffers": f"aligned to {device.base_alignment} bytes",
        "extensions": ", ".join(device.extensions) or "none of interest",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print_wrapped(value, first=f"{name:<{width}}  ", rest=" " * (width + 2))


def _images(device: ClDevice) -> str:
    return f"up to {device.image_width} x {device.image_height} texels" if device.images else "no"


def _images_from_buffers(device: ClDevice) -> str:
    if not device.image_from_buffer:
        return "no"
    known = (device.pitch_alignment, device.address_alignment)
    told = "rows in multiples of {} texels, beginning at multiples of {}".format(*known)
    return f"up to {device.image_buffer_texels:,} texels, {told if all(known) else 'alignment not told'}"


def _half(device: ClDevice, *, short: bool = False) -> str:
    """Return where half floats may be used: in buffers always, in images, in arithmetic."""
    parts = ["buffers", *["images"] * device.half_images, *["arithmetic"] * device.half_arithmetic]
    return parts[-1] if short else ", ".join(parts)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip(" (,") + "…"
