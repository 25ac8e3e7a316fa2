"""Layouts: where the elements of a tensor lie on a device, as buffer offsets or as texels of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchedge.errors import DeviceError
from torchedge.expressions.texels import LANES
from torchedge.graphs import ITEM_SIZES
from torchedge.storage.codecs import OneOf
from torchedge.textures.patterns import PATTERNS, packed_image, unpacked_image

Storage = Literal["buffer", "image", "image_buffer"]

MAX_RANK = 16
MAX_EXTENT = 2**20
"""Most texels of an image each way."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory.

    order: its dimensions from the outermost to the innermost one in memory. storage "buffer": dense in that
    order. "image": an RGBA image2d; the innermost dimension is packed four to a texel (padded to a multiple
    of four), the `split` outermost dimensions number the lines, the others the steps within a line.
    "image_buffer": the same image made from a buffer (pitch in `row_texels`).
    pattern: how lines and steps become x and y (see `textures.patterns`): "row", "column", "block-2",
    "block-4" or "block-8".
    fold: a line longer than the device's image is wide continues on that many rows.
    """

    order: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_RANK - 1)], ...], Meta(max_length=MAX_RANK)]
    storage: Storage = "buffer"
    split: Annotated[int, Meta(ge=0, le=MAX_RANK)] = 0
    pattern: Annotated[str, OneOf(tuple(PATTERNS))] = "row"
    fold: Annotated[int, Meta(ge=1, le=MAX_EXTENT)] = 1
    row_texels: Annotated[int, Meta(ge=0, le=MAX_EXTENT)] = 0

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
        """Return (width, height) of the image in texels, at least one each."""
        steps, lines = self.texels(shape)
        width, height = PATTERNS[self.pattern].extent(max(steps, 1), max(lines, 1))
        return -(-width // self.fold), height * self.fold

    def place(self, step: Any, line: Any, shape: Sequence[int]) -> tuple[Any, Any]:  # noqa: ANN401
        """Return (x, y) of a texel, fold included; step and line: numbers, arrays or index expressions."""
        x, y = PATTERNS[self.pattern].place(step, line)
        if self.fold == 1:
            return x, y
        width, _ = self.extent(shape)
        return x % width, y * self.fold + x // width

    def pack(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a C-contiguous array as the device holds it: 1-d, or (height, width, 4) for an image."""
        moved = np.ascontiguousarray(array.transpose(self.order) if array.ndim else array)
        if self.storage == "buffer":
            return moved.reshape(-1)
        return packed_image(self, moved, array.shape)

    def unpack(self, held: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
        """Return the logical array of what `pack` made."""
        sizes = self.sizes(shape)
        moved = (
            held.reshape(-1)[: prod(sizes)] if self.storage == "buffer" else unpacked_image(self, held, shape)
        )
        back = sorted(range(len(sizes)), key=self.order.__getitem__)
        return np.ascontiguousarray(moved.reshape(sizes).transpose(back)).reshape(shape)


def row_major(rank: int) -> Layout:
    """Return the dense buffer in the order of the logical dimensions, as PyTorch's contiguous tensors lie."""
    return Layout(tuple(range(rank)))


def channels_last(rank: int) -> Layout:
    """Return the dense buffer with dimension 1 innermost: N, spatial dimensions, C."""
    return Layout((0, *range(2, rank), 1))


def fitted(layout: Layout, shape: Sequence[int], max_width: int, max_height: int) -> Layout:
    """Return the layout with the least fold whose image is at most `max_width` by `max_height` texels.

    Raises:
        DeviceError: no fold fits; another pattern, another split or a buffer has to hold the tensor.
    """
    if layout.storage == "buffer":
        return layout
    width, height = replace(layout, fold=1).extent(shape)
    fold = -(-width // max_width)
    if height * fold > max_height:
        raise DeviceError(
            f"shape {list(shape)} as {layout.pattern} image takes {width} x {height} texels; the device has "
            f"{max_width} x {max_height} and no fold fits; choose another pattern or split, or a buffer"
        )
    return replace(layout, fold=fold, row_texels=0 if fold != layout.fold else layout.row_texels)
