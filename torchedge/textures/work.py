"""The work of kernels as arrays over candidates: the cost model's input (TMModel, section 4, Table 1)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError

FloatArray = npt.NDArray[np.float64]

BLOCK_SHAPES = (
    (1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (4, 8), (8, 8), (16, 16), (64, 64),
)  # fmt: skip
"""Assumed shapes of a block, (width, height) in texels (TMModel, 3.1, step III)."""

STRIDE_FEATURES = tuple(f"{axis} {width}x{height}" for axis in "xy" for width, height in BLOCK_SHAPES)
"""Columns of a histogram of cross-block strides: along x over all block shapes, then along y."""


def _column(value: Any, count: int, what: str) -> npt.NDArray[Any]:  # noqa: ANN401 - numbers or arrays
    """Return (N,) numbers, read-only: one number stands for every candidate."""
    array = np.asarray(value)
    array = array if array.dtype == bool else array.astype(np.float64)
    if array.shape not in ((), (count,)):
        raise InputError(f"{what} has shape {array.shape}; expected ({count},), one number a candidate")
    if array.dtype != bool and not (np.isfinite(array) & (array >= 0)).all():
        raise InputError(f"{what} holds a number that is negative or not finite; expected numbers from 0")
    return array if array.shape else np.broadcast_to(array, (count,))


@dataclass(frozen=True, slots=True, eq=False)
class ReadWork:
    """How N candidates of a kernel read, or write, one operand. A single number stands for all candidates.

    image: (N,) bool, an image rather than a buffer. count: (N,) accesses of a work-item. nbytes: (N,) bytes
    of an access. distinct_bytes: (N,) bytes of the operand that the launch touches, each counted once.
    strides: (N, F) cross-block strides per access of a work-item, in its order (`STRIDE_FEATURES`; of a
    buffer, x counts units of 16 bytes and y is 0). reuse: (N,) intra-thread reuse distance s in cache lines
    (eq. 2). warp_lines: (N,) cache lines that one access of a warp of neighbouring work-items touches.
    warp_share: (N,) work-items of a warp that access a place of their own (w_i of eq. 3).
    group_bytes: (N,) bytes that a work-group touches, each counted once; 0: unknown.
    """

    image: npt.NDArray[np.bool_]
    count: FloatArray
    nbytes: FloatArray
    distinct_bytes: FloatArray
    strides: FloatArray
    reuse: FloatArray
    warp_lines: FloatArray
    warp_share: FloatArray
    group_bytes: FloatArray = field(default_factory=lambda: np.zeros(()))

    def rows(self, places: npt.NDArray[np.intp]) -> ReadWork:
        """Return the work of some candidates; every column has a row for each."""
        return ReadWork(**{item.name: getattr(self, item.name)[places] for item in fields(self)})

    def spread_over(self, candidates: int) -> ReadWork:
        """Return the same work with a row for each of N candidates.

        Raises:
            InputError: a column has another length, a negative number or one that is not finite.
        """
        strides = np.asarray(self.strides, np.float64)
        if strides.shape not in ((len(STRIDE_FEATURES),), (candidates, len(STRIDE_FEATURES))):
            raise InputError(
                f"strides has shape {strides.shape}; expected ({candidates}, {len(STRIDE_FEATURES)}), "
                "one column for each of STRIDE_FEATURES"
            )
        if not ((strides >= 0) & (strides <= 1)).all():
            raise InputError("strides holds a number outside of 0 to 1; expected crossings per access")
        columns = {
            item.name: _column(getattr(self, item.name), candidates, item.name)
            for item in fields(self)
            if item.name != "strides"
        }
        columns["image"] = columns["image"].astype(bool)
        return ReadWork(strides=np.broadcast_to(strides, (candidates, len(STRIDE_FEATURES))), **columns)


@dataclass(frozen=True, slots=True, eq=False)
class KernelWork:
    """N candidates of one kernel, a row each. A single number stands for all candidates.

    items: (N,) work-items of a launch, padding to whole work-groups included. group: (N, 3) work-group sizes.
    flops: (N,) arithmetic of a work-item, a multiply-add counted as two. registers: (N,) bytes of registers
    of a work-item. local_bytes: (N,) local memory of a work-group. local_traffic: (N,) bytes that a work-item
    reads from and writes to local memory. barriers: (N,) barriers that a work-item passes. launches: (N,)
    launches, split-K sums and layout conversions included. vector: (N,) floats of one arithmetic instruction
    of a work-item. chains: (N,) independent multiply-adds of a work-item, which hide each other's latency.
    reads, writes: one entry an operand.

    Raises:
        InputError: the columns differ in length, or hold a number that makes no sense.
    """

    items: FloatArray
    group: FloatArray
    flops: FloatArray
    registers: FloatArray
    reads: tuple[ReadWork, ...]
    writes: tuple[ReadWork, ...] = ()
    local_bytes: FloatArray = field(default_factory=lambda: np.zeros(()))
    local_traffic: FloatArray = field(default_factory=lambda: np.zeros(()))
    barriers: FloatArray = field(default_factory=lambda: np.zeros(()))
    launches: FloatArray = field(default_factory=lambda: np.ones(()))
    vector: FloatArray = field(default_factory=lambda: np.ones(()))
    chains: FloatArray = field(default_factory=lambda: np.ones(()))

    def __post_init__(self) -> None:
        count = len(np.atleast_1d(self.items))
        group = np.asarray(self.group, np.float64)
        if group.shape not in ((3,), (count, 3)) or not (group >= 1).all():
            raise InputError(
                f"group has shape {group.shape}; expected ({count}, 3) work-group sizes, each from 1"
            )
        object.__setattr__(self, "group", np.broadcast_to(group, (count, 3)))
        for item in fields(self):
            if item.name not in ("group", "reads", "writes"):
                object.__setattr__(self, item.name, _column(getattr(self, item.name), count, item.name))
        for name in ("reads", "writes"):
            operands = tuple([operand.spread_over(count) for operand in getattr(self, name)])
            object.__setattr__(self, name, operands)

    def __len__(self) -> int:
        return len(self.items)
