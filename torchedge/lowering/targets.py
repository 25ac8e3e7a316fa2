"""Targets: what lowering must know of a device class to choose among variants of a kernel.

The numbers are documented defaults; a tuner that knows the device replaces them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchedge.errors import InputError
from torchedge.textures.layouts import Storage

DeviceClass = Literal["cpu", "gpu", "mobile"]


@dataclass(frozen=True, slots=True)
class Target:
    """A device class.

    vector: widest vector of floats worth computing with. work_items: how many must run at once to fill the
    device. group, least_group: work-items in a work-group, at most and at least. row_group: work-items that
    share a long row (1: each row alone).
    storage: where tensors lie if kernels can write them so; pattern: the access pattern of images.
    image_width, image_height: texels an image has at most; pitch: texels that rows of images made from
    buffers are a multiple of. half: large intermediates lie in half precision. checks: kernels report
    accesses outside their tensors (a debug build).
    """

    name: DeviceClass
    vector: int
    work_items: int
    group: int
    row_group: int
    least_group: int = 64
    storage: Storage = "buffer"
    pattern: str = "row"
    image_width: int = 16_384
    image_height: int = 16_384
    pitch: int = 64
    half: bool = False
    checks: bool = False


TARGETS = {
    # PoCL: 16 floats fill an AVX-512 register; work-groups are the tasks of a few threads.
    "cpu": Target("cpu", vector=16, work_items=8, group=256, row_group=1, least_group=1),
    # A server or desktop GPU: 128-bit accesses; a hundred processors with over a thousand items each.
    "gpu": Target("gpu", vector=4, work_items=65_536, group=256, row_group=128),
    # A phone's GPU: RGBA texels; few shader cores with sixteen waves each.
    "mobile": Target("mobile", vector=4, work_items=8_192, group=128, row_group=64, storage="image"),
}
"""By device class."""


def target_of(name: str) -> Target:
    """Return a target by its device class; raises InputError for an unknown one."""
    if name not in TARGETS:
        raise InputError(f"device class {name!r} is not known; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]
