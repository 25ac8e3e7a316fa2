"""Slots of images that share memory over their lifetimes: an image serves one tensor after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.lifetimes import Lifetime

ImageSize = tuple[int, int, str]
"""Width and height in texels, and dtype, of an RGBA image."""


def image_bytes(size: ImageSize) -> int:
    """Return the bytes of an image, without what a driver may add."""
    return size[0] * size[1] * 4 * ITEM_SIZES[size[2]]


def find_slots(
    images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime]
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Return slots, and the slot of each image; a slot may be larger than an image that it holds.

    Kernels address texels by number, so that a larger image serves as well.
    """
    end = max((lifetimes[i][1] for i in images), default=0)
    alive = [0] * end
    for index, size in images.items():
        for launch in range(*lifetimes[index]):
            alive[launch] += image_bytes(size)
    tight = {i: max(alive[slice(*lifetimes[i])]) for i in images}
    area = {i: image_bytes(size) for i, size in images.items()}
    orders = (
        sorted(images, key=lambda i: (-tight[i], -area[i], i)),
        sorted(images, key=lambda i: (-area[i], -tight[i], i)),
        sorted(images, key=lambda i: (-area[i], -lifetimes[i][1], i)),
        sorted(images, key=lambda i: (-images[i][0], -images[i][1], i)),
        sorted(images, key=lambda i: (-images[i][1], -images[i][0], i)),
    )
    return min(
        [_filled(order, images, lifetimes) for order in orders],
        key=lambda found: sum(map(image_bytes, found[0])),
    )


def _filled(
    order: Sequence[int], images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime]
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Put each image where the slots grow least, or into a new slot where that costs less."""
    slots: list[ImageSize] = []
    busy: list[int] = []  # a bit for each launch
    slot: dict[int, int] = {}
    for index in order:
        width, height, dtype = images[index]
        life = (1 << lifetimes[index][1]) - (1 << lifetimes[index][0])
        best, cost = len(slots), (width * height, 0)
        for number, (wide, high, kind) in enumerate(slots):
            if busy[number] & life or kind != dtype:
                continue
            grown = max(wide, width) * max(high, height) - wide * high
            if (grown, wide * high) < cost:
                best, cost = number, (grown, wide * high)
        if best == len(slots):
            slots.append(images[index])
            busy.append(0)
        slots[best] = (max(slots[best][0], width), max(slots[best][1], height), dtype)
        busy[best] |= life
        slot[index] = best
    return tuple(slots), slot
