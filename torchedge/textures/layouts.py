"""How tensors lie on a device: in buffers, or in images by an access pattern (TMModel, 3.2, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchedge.errors import DeviceError
from torchedge.graphs import ITEM_SIZES
from torchedge.storage.codecs import OneOf

Storage = Literal["buffer", "image", "image_buffer"]

LANES = 4
"""Channels of a texel: RGBA."""

MAX_RANK = 16
MAX_EXTENT = 2**20
"""Most texels of an image each way."""

PAGE_BYTES = 4096
"""Bytes of a page, the unit in which buffers are loaded."""


class Pattern(Protocol):
    """Where step `step` of line `line` lies; a reader walks the steps of its line.

    `place` uses `+ * // %` alone, so that it serves numbers, numpy arrays and index expressions.
    """

    @property
    def name(self) -> str:
        """Its name in a Layout."""

    def extent(self, steps: int, lines: int) -> tuple[int, int]:
        """Return (width, height) in texels of the image that holds `lines` lines of `steps` steps."""

    def place(self, step: Any, line: Any) -> tuple[Any, Any]:  # noqa: ANN401 - any kind of number
        """Return (x, y)."""


class Row:
    """A line is a row of the image: cache lines are read from start to end."""

    name = "row"

    def extent(self, steps: int, lines: int) -> tuple[int, int]:
        """Return (width, height) in texels."""
        return steps, lines

    def place(self, step: Any, line: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return (x, y)."""
        return step, line


class Column:
    """A line is a column of the image: readers of neighbouring lines share cache lines."""

    name = "column"

    def extent(self, steps: int, lines: int) -> tuple[int, int]:
        """Return (width, height) in texels."""
        return lines, steps

    def place(self, step: Any, line: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return (x, y)."""
        return line, step


class Block:
    """A line fills a band of `rows` rows, down each column of it first (block-4: TMModel, Listing 1)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.name = f"block-{rows}"

    def extent(self, steps: int, lines: int) -> tuple[int, int]:
        """Return (width, height) in texels."""
        return -(-steps // self.rows), lines * self.rows

    def place(self, step: Any, line: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Return (x, y)."""
        return step // self.rows, line * self.rows + step % self.rows


_PATTERNS: tuple[Pattern, ...] = (Row(), Column(), Block(2), Block(4), Block(8))

PATTERNS: Mapping[str, Pattern] = MappingProxyType({pattern.name: pattern for pattern in _PATTERNS})
"""The access patterns by name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory.

    order: its dimensions from the outermost to the innermost one in memory. storage "buffer": dense in that
    order. "image": an RGBA image2d; the innermost dimension is packed four to a texel (padded to a multiple
    of four), the `split` outermost dimensions number the lines, the others the steps within a line.
    "image_buffer": the same image made from a buffer (pitch in `row_texels`).
    pattern: how lines and steps become x and y (see `PATTERNS`): "row", "column", "block-2",
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
        """Return the stride of each logical dimension in a buffer, in elements."""
        strides = [0] * len(shape)
        step = 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= shape[dim]
        return tuple(strides)

    def offset(self, element: Sequence[Any], shape: Sequence[int]) -> Any:  # noqa: ANN401
        """Return the place of an element in a buffer; element: numbers, arrays or index expressions."""
        return sum(place * stride for place, stride in zip(element, self.strides(shape), strict=True))

    def texel(self, element: Sequence[Any], shape: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return (x, y, channel) of an element in an image; element: as of `offset`."""
        places, sizes = [element[d] for d in self.order], list(self.sizes(shape))
        channel = places[-1] % LANES
        places[-1], sizes[-1] = places[-1] // LANES, -(-sizes[-1] // LANES)
        line = step = 0
        for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
            if number < self.split:
                line = line * size + place
            else:
                step = step * size + place
        return *self.place(step, line, shape), channel

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

    def packed_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Return the bytes of what `pack` returns: without the gaps between the rows of an "image_buffer"."""
        if self.storage == "buffer":
            return prod(shape) * ITEM_SIZES[dtype]
        width, height = self.extent(shape)
        return width * height * LANES * ITEM_SIZES[dtype]

    def unit_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Return the packed bytes of the smallest copy: a row of texels, a page of a buffer."""
        if self.storage == "buffer":
            return PAGE_BYTES
        return self.extent(shape)[0] * LANES * ITEM_SIZES[dtype]

    def chunk_bytes(
        self, shape: Sequence[int], dtype: str, first: int, stop: int, chunks: int
    ) -> tuple[int, int]:
        """Return (start, stop) in packed bytes of the chunks `first` to `stop` (exclusive) of `chunks`.

        Chunk c covers the units from c * H // chunks to (c + 1) * H // chunks of the tensor's H units, so
        that a copy of chunks in a row is linear or rectangular.
        """
        unit, nbytes = self.unit_bytes(shape, dtype), self.packed_bytes(shape, dtype)
        units = -(-nbytes // unit)
        start, end = (min(chunk * units // chunks * unit, nbytes) for chunk in (first, stop))
        return start, end

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

    def borders(self, shape: Sequence[int]) -> frozenset[int]:
        """Return the dimensions of which a number that is out of range leads outside the image.

        There a sampler that clamps to the border (CLK_ADDRESS_CLAMP) reads zero of an RGBA image. It is the
        outermost dimension of a coordinate, the highest digit, while all dimensions but those returned are
        in range. A block's steps, and what is folded, come back into the image.
        """
        if self.storage == "buffer":
            return frozenset()
        along = "xy" if self.pattern == "column" else "yx"  # coordinates of lines and of steps
        clear = {axis for axis in along if axis == "y" or self.fold == 1}
        parts = {along[0]: self.order[: self.split]}
        if self.pattern in ("row", "column"):
            parts[along[1]] = self.order[self.split :]
        wide = [[d for d in part if shape[d] > 1] for axis, part in parts.items() if axis in clear]
        return frozenset([part[0] for part in wide if part and part[0] != self.order[-1]])

    def pack(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array as it lies on the device: 1-d, or (height, width, 4) for an image."""
        ordered = np.ascontiguousarray(array.transpose(self.order) if array.ndim else array)
        if self.storage == "buffer":
            return ordered.reshape(-1)
        width, height = self.extent(array.shape)
        image = np.zeros((height, width, LANES), array.dtype)
        if array.size:
            inner = ordered.shape[-1] if array.ndim else 1
            rows = np.zeros((array.size // inner, -(-inner // LANES) * LANES), array.dtype)
            rows[:, :inner] = ordered.reshape(-1, inner)
            image[self._texels_in_order(array.shape)] = rows.reshape(-1, LANES)
        return image

    def unpack(self, packed: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
        """Return the logical array from which `pack` made an array."""
        sizes = self.sizes(shape)
        if self.storage == "buffer" or not prod(sizes):
            ordered = packed.reshape(-1)[: prod(sizes)]
        else:
            width, height = self.extent(shape)
            inner = sizes[-1] if sizes else 1
            texels: npt.NDArray[Any] = packed.reshape(height, width, LANES)[self._texels_in_order(shape)]
            ordered = texels.reshape(-1, -(-inner // LANES) * LANES)[:, :inner]
        back = sorted(range(len(sizes)), key=self.order.__getitem__)
        return np.ascontiguousarray(ordered.reshape(sizes).transpose(back)).reshape(shape)

    def _texels_in_order(self, shape: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return (rows, columns) of all texels, in the order of lines, then of steps."""
        steps, lines = self.texels(shape)
        x, y = self.place(np.arange(steps)[None, :], np.arange(lines)[:, None], shape)
        columns, rows = np.broadcast_arrays(x, y)
        return rows.reshape(-1), columns.reshape(-1)


def row_major(rank: int) -> Layout:
    """Return the dense buffer in the order of the logical dimensions, as PyTorch's contiguous tensors lie."""
    return Layout(tuple(range(rank)))


def channels_last(rank: int) -> Layout:
    """Return the dense buffer with dimension 1 innermost: N, spatial dimensions, C."""
    return Layout((0, *range(2, rank), 1))


def image_layouts(layout: Layout, shape: Sequence[int], max_width: int, max_height: int) -> list[Layout]:
    """Return the layout with every split that the limits of images allow, those with the least fold first.

    Of these the first one is nearest to lines of two dimensions (tensors of rank 4 and more), or of one. A
    weight of 3 x 3 x 512 x 512 in nine lines would be 65,536 texels wide; in 4,608 lines it is 128 wide.
    """
    sizes, rank = layout.sizes(shape), len(shape)
    usual = rank - 2 if rank > 3 else rank - 1
    images = []
    for split in sorted(range(rank - 1, 0, -1), key=lambda split: abs(split - usual)):
        if split == 1 or sizes[split - 1] > 1:  # else the same image as with one dimension fewer
            with suppress(DeviceError):
                images.append(fitted(replace(layout, split=split), shape, max_width, max_height))
    return sorted(images, key=lambda image: image.fold)


def fitted(layout: Layout, shape: Sequence[int], max_width: int, max_height: int) -> Layout:
    """Return the layout with the least fold whose image is at most `max_width` by `max_height` texels.

    Raises:
        DeviceError: no fold fits.
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
