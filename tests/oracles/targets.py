"""Targets of every device class within the limits of the device that runs the tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torchedge.lowering.targets import TARGETS, Target, bounded, limits_of
from torchedge.opencl import choose_device


@cache
def target_here(name: str = "cpu") -> Target:
    """Return the target of a device class, no kernel of which asks for more than the device in use has."""
    limits = replace(limits_of(choose_device()), half_images=None, offset_bytes=None)
    return bounded(TARGETS[name], limits)
