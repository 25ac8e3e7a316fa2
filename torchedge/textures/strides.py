"""Features of access patterns: cross-block strides, reuse distances, lines that a warp touches.

TMModel, 3.1 step III and 3.2.1. All functions take the places that work-items access, as arrays over
candidates, and return one row a candidate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.textures.work import BLOCK_SHAPES

Places = npt.NDArray[np.int64]


RECENT = 16
"""A stride back into a block of one of so many accesses before stays within what every cache holds."""

_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 62, 1 << 12)
"""Of the places of a sequence in its hash."""


def cross_block_strides(x: npt.ArrayLike, y: npt.ArrayLike) -> FloatArray:
    """Return the histograms of cross-block strides of sequences of accesses.

    x, y: (..., R) texels that a work-item accesses, in its order. Returns (..., F), `STRIDE_FEATURES`: the
    share of the accesses that enter another block, for each block shape. The first access enters one along
    x. An access counts along y if the row of blocks changes, otherwise along x, so that both add up to the
    accesses that enter a block. The paper counts every stride to another block; here one back into a block
    of the last `RECENT` accesses does not count: a walk down four rows and back up reads four lines, each
    again and again, and the cost when work-items contend is the matter of the reuse distance (eq. 2).
    """
    x, y = np.broadcast_arrays(np.asarray(x, np.int64), np.asarray(y, np.int64))
    shape, (first, place) = x.shape[:-1], _alike(x, y)
    x, y = (axis.reshape(-1, axis.shape[-1])[first] for axis in (x, y))
    width, height = (np.reshape(sides, (-1, *[1] * x.ndim)) for sides in zip(*BLOCK_SHAPES, strict=True))
    row = y // height  # (block shapes, ..., R)
    block = (row << 32) + x // width
    new = np.ones(block.shape, bool)
    for back in range(1, min(RECENT, x.shape[-1] - 1) + 1):
        new[..., back:] &= block[..., back:] != block[..., :-back]
    down = np.zeros(block.shape, bool)
    down[..., 1:] = row[..., 1:] != row[..., :-1]
    along = np.concatenate([(new & ~down).mean(-1), (new & down).mean(-1)])
    return np.asarray(along.T[place].reshape(*shape, -1))


def lines_of(x: npt.ArrayLike, y: npt.ArrayLike, line_texels: int) -> Places:
    """Return a number for the cache line of each texel: `line_texels` neighbours in x share one (Fig. 3)."""
    x, y = np.broadcast_arrays(np.asarray(x, np.int64), np.asarray(y, np.int64))
    return np.asarray((y << 32) + x // line_texels)


def reuse_distances(lines: Places) -> FloatArray:
    """Return the mean intra-thread reuse distance s of sequences of accesses (TMModel, 3.2.1).

    lines: (..., R) cache lines that a work-item accesses, in its order. An access that finds its line again
    counts the distinct lines since, its own included: row 1, block-2 2, block-4 4. Returns (...); 0 where no
    line is used twice (column: other work-items use the rest of the line at once).
    """
    lines = np.asarray(lines)
    shape, (first, place) = lines.shape[:-1], _alike(lines)
    lines = lines.reshape(-1, lines.shape[-1])[first]
    steps = np.arange(lines.shape[-1])
    earlier = (lines[..., :, None] == lines[..., None, :]) & (steps[None, :] < steps[:, None])
    last = np.where(earlier, steps, -1).max(-1)  # (..., R): the previous access to the same line
    between = (steps > last[..., :, None]) & (steps < steps[:, None])
    first_since = last[..., None, :] <= last[..., :, None]
    distance = 1.0 + (between & first_since).sum(-1)
    again = last >= 0
    mean = np.where(again, distance, 0.0).sum(-1) / np.maximum(again.sum(-1), 1)
    return np.asarray(mean[place].reshape(shape))


def _alike(*columns: Places) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the first of each kind of sequences, (..., R) in each column, and the kind of each sequence."""
    rows = np.concatenate([column.reshape(-1, column.shape[-1]) for column in columns], axis=1)
    # A hash; collisions of 64 bits do not matter for a cost.
    keys = (rows * np.resize(_WEIGHTS, rows.shape[1])).sum(axis=1)
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return first, place.reshape(-1)


def quad_columns(x: Places) -> FloatArray:
    """Return from how many columns four neighbouring work-items read, on average; x: (..., lanes)."""
    lanes = x.shape[-1] // 4 * 4
    if not lanes:
        return distinct_lines(x)
    return np.asarray(distinct_lines(x[..., :lanes].reshape(*x.shape[:-1], -1, 4)).mean(axis=-1))


def distinct_lines(lines: Places) -> FloatArray:
    """Return the number of different values along the last axis: lines that one access of a warp touches."""
    ordered = np.sort(np.asarray(lines), axis=-1)
    return np.asarray(1.0 + (np.diff(ordered, axis=-1) != 0).sum(-1), np.float64)
