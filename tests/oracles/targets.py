"""Targets of every device class within the limits of the device that runs the tests."""

from __future__ import annotations

from functools import cache

from torchedge.lowering.targets import TARGETS, Target, bounded
from torchedge.opencl import choose_device


@cache
def target_here(name: str = "cpu") -> Target:
    """Return the target of a device class, no kernel of which asks for more than the device in use has."""
    device = choose_device()
    return bounded(
        TARGETS[name],
        local_bytes=device.local_bytes,
        work_group=device.work_group,
        work_item_sizes=device.work_item_sizes,
        image_width=device.image_width if device.images else 0,
        image_height=device.image_height if device.images else 0,
        double=device.double,
    )
