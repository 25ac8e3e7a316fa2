"""What a program asks of a device, held against what the device has, before anything is allocated."""

from __future__ import annotations

from math import prod

import numpy as np

from torchedge.errors import DeviceError
from torchedge.lowering.programs import Program
from torchedge.opencl import ClDevice


def check_limits(program: Program, device: ClDevice) -> None:
    """Raise DeviceError for the first dtype, launch or arena offset that the device does not take."""
    for tensor in program.tensors:
        if not _has_dtype(tensor.dtype, device):
            raise DeviceError(
                f"{tensor.role} {tensor.name} is {tensor.dtype}, which {device.name} does not compute with; "
                "cast the model to float32"
            )
    for position, launch in enumerate(program.launches):
        name = f"launch {position}, kernel {program.kernels[launch.kernel].name}"
        local = launch.local_size or ()
        if prod(local) > device.work_group or any(
            size > most for size, most in zip(local, device.work_item_sizes, strict=False)
        ):
            raise DeviceError(
                f"{name}: work-groups of {list(local)}, {device.name} takes {device.work_group} work-items, "
                f"at most {list(device.work_item_sizes)}; lower the program for this device"
            )
        if local and any(whole % part for whole, part in zip(launch.global_size, local, strict=True)):
            raise DeviceError(
                f"{name}: {list(launch.global_size)} in groups of {list(local)}, expected multiples; "
                "lower the program again"
            )
    for index, offset in program.arena.offset.items():
        if offset % device.base_alignment:
            raise DeviceError(
                f"intermediate {program.tensors[index].name} begins at byte {offset} of the arena; "
                f"{device.name} takes multiples of {device.base_alignment}; lower the program for this device"
            )


def _has_dtype(name: str, device: ClDevice) -> bool:
    try:
        return np.dtype(name).kind != "c" and (name != "float64" or device.double)
    except TypeError:  # bfloat16 and the like
        return False
