"""Device classes that programs are compiled for, and the schedule of a contraction on each.

The numbers are defaults, found by experiment: "cpu" on PoCL with AVX-512, "gpu" on an NVIDIA H200; those of
"mobile" are assumed (`benchmarks/lowering_contractions.py` prints the speed they reach). A tuner that knows
the device replaces them here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchedge.devices import is_phone_gpu
from torchedge.errors import InputError
from torchedge.opencl.platforms import ClDevice
from torchedge.textures.layouts import Storage

DeviceClass = Literal["cpu", "gpu", "mobile"]
Precision = Literal["float32", "float16"]
"""How large tensors are stored; arithmetic is in float32."""
Kind = Literal["panel", "local", "register"]


@dataclass(frozen=True, slots=True)
class Target:
    """A device class.

    vector: widest useful vector of floats. work_items: number that fills the device. group, least_group:
    largest and smallest work-group. row_group: work-items that share a long row (1: none share).
    schedule: kind of `Schedule` of contractions; the blocks of "local" need work-groups of 256.
    storage: preferred storage of tensors; pattern: the access pattern of images. image_width, image_height:
    largest image in texels; pitch: rows of images made from buffers are a multiple of so many texels.
    shared_pitch: the same of intermediate images made from the arena's buffer; 0: each has memory of its own.
    half: large intermediates are stored in half precision; half_weights: so are matrices of weights that the
    step does not update. checks: kernels report accesses outside their
    tensors.
    """

    name: DeviceClass
    vector: int
    work_items: int
    group: int
    row_group: int
    schedule: Kind = "local"
    least_group: int = 64
    storage: Storage = "buffer"
    pattern: str = "row"
    image_width: int = 16_384
    image_height: int = 16_384
    pitch: int = 64
    shared_pitch: int = 0
    half: bool = False
    half_weights: bool = False
    checks: bool = False


TARGETS = {
    # PoCL: 16 floats fill an AVX-512 register; work-groups are the tasks of a few threads.
    "cpu": Target("cpu", vector=16, work_items=8, group=256, row_group=1, schedule="panel", least_group=1),
    # A server or desktop GPU: 128-bit accesses; a hundred processors with over a thousand items each.
    "gpu": Target("gpu", vector=4, work_items=65_536, group=256, row_group=128),
    # A phone's GPU: RGBA texels; few shader cores with sixteen waves each.
    "mobile": Target(
        "mobile", vector=4, work_items=8_192, group=128, row_group=64, schedule="register", storage="image"
    ),
}
"""By device class."""


def target_of(name: str) -> Target:
    """Return a target by its device class; raises InputError for an unknown one."""
    if name not in TARGETS:
        raise InputError(f"device class {name!r} is not known; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]


def device_class(kind: str, *names: str) -> DeviceClass:
    """Return the class of a device: by its type, and by the names of its maker for a phone's GPU."""
    if kind == "cpu":
        return "cpu"
    return "mobile" if is_phone_gpu(*names) else "gpu"


def target_for(device: ClDevice) -> Target:
    """Return the target of an OpenCL device."""
    return TARGETS[device_class(device.kind, device.name, device.vendor, device.platform)]


MICRO_TILES = {(8, 2): 1.0, (8, 3): 1.0, (10, 2): 0.95, (16, 1): 0.82}
"""Relative speed of register tiles by rows and vectors; 32 vector registers hold each with its operands."""
DEPTH = 256
"""Inner points of a block on a CPU: a tile's columns stay in the first-level cache."""
WIDEST_BLOCK = 512
"""Columns of a block at most: long runs of an operand's and a result's lines move together."""
MOST_ROWS = 208
"""Rows of a block at most: for each, the columns' operand is copied once."""
FEW = 64
"""With so few rows, or half as many inner points, memory is the limit: whole lines are copied."""
DEPTH_OF_A_SLICE = 384
"""Smallest number of inner points with which a slice on a GPU is worth its cost."""


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of a contraction: numbers of batches, rows, columns and inner points, bytes of a sum.

    run: number of neighbouring columns that skip the same inner points (0: none are skipped).
    """

    batch: int
    rows: int
    cols: int
    inner: int
    itemsize: int = 4
    run: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a contraction is computed.

    kind "panel": one work-item a block of `block_rows` x `block_cols`, operands copied into local memory
    `depth` deep, register tiles of `tile_rows` x `vectors` vectors of `vector`. kind "local": a work-group
    a block, a work-item `tile_rows` x `tile_cols` of it, `depth` inner points in local memory at a time.
    kind "register": a work-item a tile, straight from memory; block and depth mean nothing.
    slices: number of split-K slices of the inner loops, each a block of its own, summed afterwards in order.
    rows_first: neighbouring work-groups of a "panel" share columns rather than rows. band: number of rows of
    blocks that neighbouring work-groups of a "local" walk together.
    """

    kind: Kind
    block_rows: int
    block_cols: int
    depth: int
    tile_rows: int
    vectors: int
    vector: int
    slices: int = 1
    rows_first: bool = True
    band: int = 1

    @property
    def threads(self) -> int:
        """Work-items that share a block."""
        return (self.block_rows // self.tile_rows) * (self.block_cols // self.tile_cols)

    @property
    def tile_cols(self) -> int:
        """Columns of a register tile."""
        return self.vectors * self.vector


LARGE = Schedule("local", 256, 128, 8, 16, 2, 4, band=4)
MIDDLE = Schedule("local", 128, 64, 16, 8, 2, 4)
SMALL = Schedule("local", 64, 64, 16, 8, 2, 4)
"""Blocks of a server GPU: the large one needs a product that fills the device with them."""


TILE = Schedule("register", 4, 8, 4, 4, 2, 4)
NARROW = Schedule("register", 4, 4, 4, 4, 1, 4)
"""Tiles of a phone's GPU: 8 or 4 vectors of sums leave registers for the waves that hide memory."""


def default_schedule(extents: Extents, target: Target) -> Schedule:
    """Return the default schedule of a contraction on a device class."""
    schedules = {"panel": _panels, "local": _locals, "register": _registers}
    return schedules[target.schedule](extents, target)


def _panels(extents: Extents, target: Target) -> Schedule:
    """Return the schedule of a CPU: register tiles with little waste, blocks in the second-level cache."""
    vector = max(1, target.vector * 4 // extents.itemsize)
    while vector > 4 and extents.cols <= vector // 2:
        vector //= 2
    tile_rows, vectors = min(MICRO_TILES, key=lambda tile: _slowness(extents, tile, vector))
    tile_cols = vectors * vector
    few = extents.rows <= FEW or extents.inner <= FEW // 2
    block_cols = _multiple(min(WIDEST_BLOCK if few else WIDEST_BLOCK // 2, extents.cols), tile_cols)
    if extents.run and extents.run % tile_cols == 0:
        block_cols = min(block_cols, extents.run)
    most_rows = FEW if few else MOST_ROWS
    block_rows = _multiple(-(-extents.rows // -(-extents.rows // most_rows)), tile_rows)
    slices = 1
    while slices * _tasks(extents, block_rows, block_cols) < 3 * target.work_items // 4:
        deep = extents.inner // (slices + 1) >= DEPTH
        if deep and few:
            slices += 1
        elif block_rows > 64 and 2 * block_rows >= block_cols:
            block_rows = _multiple(block_rows // 2, tile_rows)
        elif block_cols > 64 and block_cols >= 4 * tile_cols:
            block_cols = _multiple(block_cols // 2, tile_cols)
        elif deep:
            slices += 1
        elif block_rows >= 4 * tile_rows:
            block_rows = _multiple(block_rows // 2, tile_rows)
        else:
            break
    schedule = Schedule("panel", block_rows, block_cols, DEPTH, tile_rows, vectors, vector, slices)
    # The larger operand is read repeatedly: keep it in the cache.
    return replace(schedule, rows_first=extents.rows >= extents.cols)


def _locals(extents: Extents, target: Target) -> Schedule:
    """Return the schedule of a GPU: the largest block that still fills it, then a split of inner loops."""
    groups = max(1, target.work_items // target.group)  # that should run at once
    chosen = SMALL
    for block in (LARGE, MIDDLE) if extents.itemsize <= 4 else ():
        if (
            extents.cols > block.block_cols // 2
            and extents.rows > block.block_rows // 2
            and _tasks(extents, block.block_rows, block.block_cols) >= groups
        ):
            chosen = block
            break
    tasks = _tasks(extents, chosen.block_rows, chosen.block_cols)
    if tasks >= groups:
        return chosen
    slices = min(-(-2 * groups // tasks), extents.inner // DEPTH_OF_A_SLICE)
    return replace(chosen, slices=max(1, slices))


def _registers(extents: Extents, target: Target) -> Schedule:
    """Return the schedule of a phone's GPU: the largest tile that fills it, then a split of inner loops."""
    chosen = TILE if _tasks(extents, 4, 8) >= target.work_items and extents.cols > 4 else NARROW
    tasks = _tasks(extents, chosen.block_rows, chosen.block_cols)
    slices = min(target.work_items // tasks, extents.inner // DEPTH_OF_A_SLICE)
    return replace(chosen, slices=max(1, slices))


def _slowness(extents: Extents, tile: tuple[int, int], vector: int) -> float:
    """Return the growth of the work by padding to whole tiles, over the tile's speed."""
    padded = _multiple(extents.rows, tile[0]) * _multiple(extents.cols, tile[1] * vector)
    return padded / (extents.rows * extents.cols) / MICRO_TILES[tile]


def _tasks(extents: Extents, block_rows: int, block_cols: int) -> int:
    return extents.batch * -(-extents.rows // block_rows) * -(-extents.cols // block_cols)


def _multiple(number: int, step: int) -> int:
    """Return the smallest multiple of a step that is not below a number."""
    return -(-number // step) * step
