"""The work of kernels as arrays over candidates: the cost model's input (TMModel, section 4, Table 1)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray

BLOCK_SHAPES = (
    (1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (4, 8), (8, 8), (16, 16), (64, 64),
)  # fmt: skip
"""Assumed shapes of a block, (width, height) in texels (TMModel, 3.1, step III)."""

STRIDE_FEATURES = tuple(f"{axis} {width}x{height}" for axis in "xy" for width, height in BLOCK_SHAPES)
"""Columns of a histogram of cross-block strides: along x over all block shapes, then along y."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadWork:
    """How N candidates of a kernel read, or write, one operand. A single number stands for all candidates.

    image: (N,) bool, an image rather than a buffer. count: (N,) accesses of a work-item. nbytes: (N,) bytes
    of an access. distinct_bytes: (N,) bytes of the operand that the launch touches, each counted once.
    strides: (N, F) cross-block strides per access of a work-item, in its order (`STRIDE_FEATURES`; of a
    buffer, x counts units of 16 bytes and y is 0). reuse: (N,) intra-thread reuse distance s in cache lines
    (eq. 2). warp_lines: (N,) cache lines that one access of a warp of neighbouring work-items touches.
    warp_share: (N,) work-items of a warp that access a place of their own (w_i of eq. 3).
    group_bytes: (N,) bytes that a work-group touches, each counted once; 0: unknown. quad_columns: (N,)
    columns of an image from which four neighbouring work-items read, 1 to 4. again: the same work-items have
    read the same elements before, all of them.
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
    quad_columns: FloatArray = field(default_factory=lambda: np.full((), 4.0))
    again: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((), bool))

    def rows(self, places: npt.NDArray[np.intp]) -> ReadWork:
        """Return the work of some candidates; every column has a row for each."""
        return ReadWork(**{item.name: getattr(self, item.name)[places] for item in fields(self)})

    def spread_over(self, candidates: int) -> ReadWork:
        """Return the same work with a row for each of N candidates."""
        strides = np.broadcast_to(self.strides, (candidates, len(STRIDE_FEATURES)))
        names = [item.name for item in fields(self) if item.name != "strides"]
        columns = {name: np.broadcast_to(getattr(self, name), (candidates,)) for name in names}
        return ReadWork(strides=strides, **columns)


@dataclass(frozen=True, slots=True, eq=False)
class KernelWork:
    """N candidates of one kernel, a row each. A single number stands for all candidates.

    items: (N,) work-items of a launch, padding to whole work-groups included. group: (N, 3) work-group sizes.
    flops: (N,) arithmetic of a work-item, a multiply-add counted as two. registers: (N,) bytes of registers
    of a work-item. local_bytes: (N,) local memory of a work-group. tile_reads: (N,) vectors of four that a
    work-item reads of a product's tiles in local memory. local_traffic: (N,) other bytes that it reads from
    and writes to local memory. barriers: (N,) that a work-item passes. vector: (N,) floats of one arithmetic
    instruction of a work-item. chains: (N,) independent multiply-adds of a work-item, which hide each other's
    latency. reads, writes: one entry an operand.
    """

    items: FloatArray
    group: FloatArray
    flops: FloatArray
    registers: FloatArray
    reads: tuple[ReadWork, ...]
    writes: tuple[ReadWork, ...] = ()
    local_bytes: FloatArray = field(default_factory=lambda: np.zeros(()))
    local_traffic: FloatArray = field(default_factory=lambda: np.zeros(()))
    tile_reads: FloatArray = field(default_factory=lambda: np.zeros(()))
    barriers: FloatArray = field(default_factory=lambda: np.zeros(()))
    vector: FloatArray = field(default_factory=lambda: np.ones(()))
    chains: FloatArray = field(default_factory=lambda: np.ones(()))

    def __post_init__(self) -> None:
        count = len(np.atleast_1d(self.items))
        for item in fields(self):
            if item.name not in ("reads", "writes"):
                shape = (count, 3) if item.name == "group" else (count,)
                object.__setattr__(self, item.name, np.broadcast_to(getattr(self, item.name), shape))
        for name in ("reads", "writes"):
            operands = tuple([operand.spread_over(count) for operand in getattr(self, name)])
            object.__setattr__(self, name, operands)

    def __len__(self) -> int:
        return len(self.items)
