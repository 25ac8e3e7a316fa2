"""What a program asks of a device, held against what the device has, before anything is allocated."""

from __future__ import annotations

from torchedge.errors import DeviceError
from torchedge.expressions.dialect import STORED
from torchedge.lowering.limits import Limits
from torchedge.lowering.limits import check_limits as check_program
from torchedge.lowering.programs import Program
from torchedge.opencl import ClDevice


def limits_of(device: ClDevice) -> Limits:
    """Return the limits that a device reports; how much memory it gives, allocating tells."""
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


def check_limits(program: Program, device: ClDevice) -> None:
    """Raise DeviceError for the first dtype, image, launch or arena offset that the device does not take."""
    for tensor in program.tensors:
        if tensor.dtype not in STORED:
            raise DeviceError(
                f"{tensor.role} {tensor.name} is {tensor.dtype}, which {device.name} does not compute with; "
                "cast the model to float32"
            )
    check_program(program, limits_of(device))
