"""Layouts: where the elements of a tensor lie on a device, as buffer offsets or as texels of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchedge.graphs import ITEM_SIZES

Storage = Literal["buffer", "image", "image_buffer"]

LANES = 4
"""Channels of a texel: RGBA."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory.

    order: its dimensions from the outermost to the innermost one in memory. storage "buffer": dense in that
    order. "image": an RGBA image2d; the innermost dimension is packed four to a texel (padded to a multiple of
    four), the `split` outermost dimensions number the lines, the others the steps within a line.
    "image_buffer": the same image made from a buffer (pitch in `row_texels`).
    pattern: how lines and steps become x and y (see `textures.patterns`): "row", "column", "block-2",
    "block-4" or "block-8".
    fold: a line longer than the device's image is wide continues on that many rows.
    """

    order: tuple[int, ...]
    storage: Storage = "buffer"
    split: int = 0
    pattern: str = "row"
    fold: int = 1
    row_texels: int = 0

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions from the outermost to the innermost one in memory."""
        return tuple([shape[d] for d in self.order])

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the stride of each logical dimension, in elements, as a buffer holds them."""
        found = [0] * len(shape)
        step = 1
        for dim in reversed(self.order):
            found[dim] = step
            step *= shape[dim]
        return tuple(found)

    def texels(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (steps, lines): texels in a line and lines, before pattern and fold."""
        sizes = list(self.sizes(shape)) or [1]
        sizes[-1] = -(-sizes[-1] // LANES)
        return prod(sizes[self.split :]), prod(sizes[: self.split])

    def nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Return the bytes on the device, padding included."""
        if self.storage == "buffer":
            return max(1, prod(shape)) * ITEM_SIZES[dtype]
        width, height = self.extent(shape)
        return max(width, self.row_texels) * height * LANES * ITEM_SIZES[dtype]

    def extent(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (width, height) of the image in texels."""
        from torchedge.textures.patterns import PATTERNS

        steps, lines = self.texels(shape)
        width, height = PATTERNS[self.pattern].extent(steps, lines)
        return -(-width // self.fold), height * self.fold

    def pack(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a C-contiguous array as the device holds it: 1-d, or (height, width, 4) for an image."""
        from torchedge.textures.patterns import packed_image

        moved = np.ascontiguousarray(array.transpose(self.order) if array.ndim else array)
        if self.storage == "buffer":
            return moved.reshape(-1)
        return packed_image(self, moved, array.shape)

    def unpack(self, held: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
        """Return the logical array of what `pack` made."""
        from torchedge.textures.patterns import unpacked_image

        sizes = self.sizes(shape)
        moved = (
            held.reshape(-1)[: prod(sizes)] if self.storage == "buffer" else unpacked_image(self, held, shape)
        )
        back = np.argsort(self.order) if self.order else ()
        return np.ascontiguousarray(moved.reshape(sizes).transpose(back) if len(sizes) else moved.reshape(()))


def row_major(rank: int) -> Layout:
    """Return the dense buffer in the order of the logical dimensions, as PyTorch's contiguous tensors lie."""
    return Layout(tuple(range(rank)))


def channels_last(rank: int) -> Layout:
    """Return the dense buffer with dimension 1 innermost: N, spatial dimensions, C."""
    return Layout((0, *range(2, rank), 1))
