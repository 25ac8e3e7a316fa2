"""Access patterns: how the texels of a tensor's lines spread over an image (TMModel, section 3.2, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.expressions.texels import LANES

if TYPE_CHECKING:
    from torchedge.textures.layouts import Layout


class Pattern(Protocol):
    """Where step `step` of line `line` lies; a reader walks the steps of its line.

    `place` uses `+ * // %` alone, so that it serves numbers, numpy arrays and index expressions.
    """

    @property
    def name(self) -> str:
        """What a Layout calls it."""

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


_KNOWN: tuple[Pattern, ...] = (Row(), Column(), Block(2), Block(4), Block(8))

PATTERNS: Mapping[str, Pattern] = MappingProxyType({pattern.name: pattern for pattern in _KNOWN})
"""The access patterns by name."""


def packed_image(layout: Layout, moved: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return the image, (height, width, 4) with zeros where no element lies, of a tensor of shape `shape`.

    moved: its elements with the dimensions in the layout's order.
    """
    width, height = layout.extent(shape)
    image = np.zeros((height, width, LANES), moved.dtype)
    if moved.size:
        inner = moved.shape[-1] if moved.ndim else 1
        rows = np.zeros((moved.size // inner, -(-inner // LANES) * LANES), moved.dtype)
        rows[:, :inner] = moved.reshape(-1, inner)
        image[_places(layout, shape)] = rows.reshape(-1, LANES)
    return image


def unpacked_image(layout: Layout, held: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return what `packed_image` was given, from the image that it made."""
    sizes = layout.sizes(shape)
    if prod(sizes) == 0:
        return np.zeros(sizes, held.dtype)
    width, height = layout.extent(shape)
    inner = sizes[-1] if sizes else 1
    texels: npt.NDArray[Any] = held.reshape(height, width, LANES)[_places(layout, shape)]
    return texels.reshape(-1, -(-inner // LANES) * LANES)[:, :inner].reshape(sizes)


def _places(layout: Layout, shape: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return (rows, columns) of all texels, in the order of lines, then of steps."""
    steps, lines = layout.texels(shape)
    x, y = layout.place(np.arange(steps)[None, :], np.arange(lines)[:, None], shape)
    columns, rows = np.broadcast_arrays(x, y)
    return rows.reshape(-1), columns.reshape(-1)
