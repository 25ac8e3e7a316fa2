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

    def started(index: int) -> int:
        return lifetimes[index][0]

    def lived(index: int) -> int:
        return lifetimes[index][1] - lifetimes[index][0]

    orders = (
        sorted(images, key=lambda i: (-image_bytes(images[i]), i)),
        sorted(images, key=lambda i: (-images[i][0], -images[i][1], i)),
        sorted(images, key=lambda i: (-images[i][1], -images[i][0], i)),
        sorted(images, key=lambda i: (-lived(i), -image_bytes(images[i]), i)),
        sorted(images, key=lambda i: (started(i), -image_bytes(images[i]), i)),
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
    held: list[list[Lifetime]] = []
    slot: dict[int, int] = {}
    for index in order:
        width, height, dtype = images[index]
        start, end = lifetimes[index]
        best, cost = len(slots), (image_bytes(images[index]), 0)
        for number, old in enumerate(slots):
            if old[2] != dtype or any(a < end and start < b for a, b in held[number]):
                continue
            new = (max(old[0], width), max(old[1], height), dtype)
            grown = (image_bytes(new) - image_bytes(old), image_bytes(old))
            if grown < cost:
                best, cost = number, grown
        if best == len(slots):
            slots.append(images[index])
            held.append([])
        slots[best] = (max(slots[best][0], width), max(slots[best][1], height), dtype)
        held[best].append((start, end))
        slot[index] = best
    return tuple(slots), slot
