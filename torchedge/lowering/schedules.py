"""Schedules: how a kernel spreads its work over work-items, registers, local memory and launches.

One class for contractions, one for all else: element-wise work is rows of one element. `default_schedule`
returns constants that were found by experiment for each device class ("cpu" on PoCL with AVX-512, "gpu" on an
NVIDIA H200; those of "mobile" are assumed); the tuner (`lowering.tuning`) chooses among
`lowering.candidates`. `is_legal` holds for schedules whose kernels are correct and fit the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from torchedge.lowering.row_shares import Sizes, fitting_shares, fitting_slices, shares_of, slices_of
from torchedge.lowering.targets import Kind, Target
from torchedge.textures.layouts import LANES

MICRO_TILES = {(8, 2): 1.0, (8, 3): 1.0, (10, 2): 0.95, (16, 1): 0.82}
"""Relative speed of register tiles by rows and vectors; 32 vector registers hold each with its operands."""
DEPTH = 256
"""Inner points of a block on a CPU: a tile's columns stay in the first-level cache."""
LEAST_DEPTH = 16
"""Inner points of a block at least: chunks of the innermost loop are multiples of it."""
WIDEST_BLOCK = 512
"""Columns of a block at most: long runs of an operand's and a result's lines move together."""
MOST_ROWS = 208
"""Rows of a block at most: for each, the columns' operand is copied once."""
FEW = 64
"""With so few rows, or half as many inner points, memory is the limit: whole lines are copied."""
DEPTH_OF_A_SLICE = 384
"""Smallest number of inner points with which a slice on a GPU is worth its cost."""
WORTH_SLICES = 2048
"""Fewest inner points of a CPU's product with few rows whose slices cost less than narrower columns."""
PAD = 4
"""Elements between the lines of a block that is written across: lanes then use different banks."""
SHORT = 16
"""Largest number of rounds of a loop that is unrolled."""


@dataclass(frozen=True, slots=True)
class ContractionExtents:
    """The sizes of a contraction: numbers of batches, rows, columns and inner points, bytes of a sum.

    run: number of neighbouring columns that skip the same inner points (0: none are skipped). innermost:
    extent of the innermost loop. loops: number of inner loops.
    """

    batch: int
    rows: int
    cols: int
    inner: int
    itemsize: int = 4
    run: int = 0
    innermost: int = 1
    loops: int = 1


@dataclass(frozen=True, slots=True)
class ContractionSchedule:
    """How a contraction is computed.

    kind "panel": one work-item a block of `block_rows` x `block_cols`, operands copied into local memory
    `depth` deep, register tiles of `tile_rows` x `vectors` vectors of `vector`. kind "local": a work-group a
    block, a work-item `tile_rows` x `tile_cols` of it, `depth` inner points in local memory at a time. kind
    "register": a work-item a tile, straight from memory; block and depth mean nothing. slices: number of
    split-K slices of the inner loops, each a block of its own, summed afterwards in order. rows_first:
    neighbouring work-groups of a "panel" share columns rather than rows. band: number of rows of blocks that
    neighbouring work-groups of a "local" walk together. group: largest work-group of a "register", along
    columns and along rows. unroll: rounds of the inner loop of a "register" that are written out.
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
    group: tuple[int, int] = (16, 8)
    unroll: int = 1

    @property
    def threads(self) -> int:
        """Work-items that share a block."""
        return (self.block_rows // self.tile_rows) * (self.block_cols // self.tile_cols)

    @property
    def tile_cols(self) -> int:
        """Columns of a register tile."""
        return self.vectors * self.vector


LARGE = ContractionSchedule("local", 256, 128, 8, 16, 2, 4, band=4)
MIDDLE = ContractionSchedule("local", 128, 64, 16, 8, 2, 4)
SMALL = ContractionSchedule("local", 64, 64, 16, 8, 2, 4)
"""Blocks of a server GPU: the large one needs a product that fills the device with them."""


SMALLER = (
    ContractionSchedule("local", 64, 32, 16, 8, 1, 4),
    ContractionSchedule("local", 32, 32, 16, 4, 1, 4),
    ContractionSchedule("local", 32, 32, 8, 8, 1, 4),
)
"""Blocks of a GPU with little local memory or small work-groups."""

TILE = ContractionSchedule("register", 4, 8, 4, 4, 2, 4)
NARROW = ContractionSchedule("register", 4, 4, 4, 4, 1, 4)
"""Tiles of a phone's GPU: 8 or 4 vectors of sums leave registers for the waves that hide memory."""


@dataclass(frozen=True, slots=True)
class RowsExtents:
    """The loops of a kernel over rows, from the outermost to the innermost one.

    rows, inner: extents of the loops over rows and within a row; those of extent 1 are gone. along:
    neighbours in memory belong to one row. searches: a reduction looks for a position (argmax). memory: the
    numbers of all loops, those over rows first, from the fastest in memory to the slowest; () where `along`
    tells it. slices: a row may be cut into slices. sum_bytes: of all reductions of one row; 0: element-wise
    work. fetches: neighbouring elements are read at places of their own, which tensors hold.
    """

    rows: Sizes
    inner: Sizes
    along: bool
    searches: bool = False
    memory: Sizes = ()
    slices: bool = False
    sum_bytes: int = 4
    fetches: bool = False

    @property
    def order(self) -> Sizes:
        """The numbers of all loops, the fastest in memory first."""
        rows, inner = len(self.rows), len(self.inner)
        within, over = range(rows + inner - 1, rows - 1, -1), range(rows - 1, -1, -1)
        return self.memory or ((*within, *over) if self.along else (*over, *within))

    def items(self, vector: int, along: bool) -> Sizes:
        """Return the rounds of each loop, those over rows first; a vector counts once."""
        counts = [*self.rows, *self.inner]
        lane = (len(counts) if along else len(self.rows)) - 1
        return tuple([n // vector if k == lane else n for k, n in enumerate(counts)])


@dataclass(frozen=True, slots=True)
class RowsSchedule:
    """How reductions over rows, and element-wise work, are computed.

    along: the `vector` lanes are neighbours in one row, else neighbouring rows. members: work-items that
    share a row through local memory, a power of two. group: the work-group, innermost loop first; where rows
    are shared, a multiple of the members in one number (`lowering.row_shares`). unroll: loops of at most so
    many rounds are unrolled. slices: about so many of each row are reduced by themselves; a second kernel
    joins them. further: vectors of a work-item beside its first one, element by element; the first ones of
    all work-items come first.
    """

    vector: int
    along: bool
    members: int
    group: Sizes
    unroll: int = SHORT
    slices: int = 1
    further: int = 0

    def shares(self, extents: RowsExtents) -> Sizes:
        """Return the work-items of a group along each loop; all are 1 where no row is shared."""
        items, rows = extents.items(self.vector, self.along), len(extents.rows)
        if self.members == 1:
            return (1,) * len(items)
        return shares_of(items, rows, extents.order, self.members, prod(self.group) // self.members)

    def cuts(self, extents: RowsExtents) -> Sizes:
        """Return the slices of each loop."""
        items = extents.items(self.vector, self.along)
        return slices_of(items, len(extents.rows), self.shares(extents), self.slices)


Extents = ContractionExtents | RowsExtents
Schedule = ContractionSchedule | RowsSchedule


def default_schedule(extents: Extents, target: Target) -> Schedule:
    """Return the default schedule of a kernel on a device class; it is legal there."""
    if isinstance(extents, RowsExtents):
        return _rows(extents, target)
    schedules = {"panel": _panels, "local": _locals, "register": _registers}
    return schedules[target.schedule](extents, target)


def is_legal(schedule: Any, extents: Extents, target: Target) -> Any:  # noqa: ANN401 - numbers or arrays of them
    """Return whether a schedule's kernel is correct and fits a device class.

    schedule: one schedule, or one whose fields are arrays (of the same kind of kernel): the result is an
    array, too.
    """
    if isinstance(extents, RowsExtents):
        return _legal_rows(schedule, extents, target)
    return _legal_contraction(schedule, extents, target)


def launch_sizes(counts: Sequence[int]) -> list[int]:
    """Return the work-items in each dimension of a launch: the two innermost loops, then the others as one.

    counts: work-items of each loop, from the outermost to the innermost one.
    """
    order = list(reversed(counts))
    return [*order[:2], *([prod(order[2:])] if order[2:] else [])] or [1]


def group_size(items: int, target: Target) -> int:
    """Return the size of a work-group: the target's, or less where some processors would be idle."""
    return min(target.group, max(target.least_group, items // target.work_items))


def default_group(counts: Sequence[int], target: Target) -> Sizes:
    """Return the default work-group of loops: as wide as possible along the innermost one."""
    wanted = launch_sizes(counts)
    group: list[int] = []
    left = group_size(prod(wanted), target)
    for size in wanted:
        part = min(size if size <= 64 else power_of_two(size), left)
        if not target.serial:
            part = min(part, target.group_sizes[len(group)])
        group.append(part)
        left //= part
    return tuple(group)


def row_counts(extents: RowsExtents, along: Any, vector: Any) -> list[Any]:  # noqa: ANN401
    """Return the work-items of each loop over rows (numbers or arrays), the outermost one first."""
    *others, last = extents.rows or (1,)
    return [*others, last // (along + (1 - along) * vector)]


def power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


def width_of(extent: int, widest: int) -> int:
    """Return the widest vector (a power of two) that divides an extent."""
    width = widest
    while extent % width:
        width //= 2
    return width


def _rows(extents: RowsExtents, target: Target) -> RowsSchedule:
    """Return the default of rows: lanes along the memory, as wide as is read whole; a group shares a row."""
    if extents.along:
        vector = 1 if extents.searches else min(target.vector, power_of_two(extents.inner[-1]))
    else:
        vector = width_of(extents.rows[-1], target.vector) if extents.rows and not extents.fetches else 1
    items, rows = extents.items(vector, extents.along), len(extents.rows)
    fill, more = target.work_items, 2 * target.work_items
    schedule = _shared_rows(extents, target, vector, target.row_group, fill, target.row_items)
    filled = prod(items[:rows]) * schedule.members >= target.work_items
    if schedule.members == 1 or (filled and schedule.slices == 1):
        return schedule
    larger = _shared_rows(extents, target, vector, target.largest_row_group, more, more)
    return schedule if larger.slices > 1 else larger


def _shared_rows(
    extents: RowsExtents, target: Target, vector: int, most: int, fill: int, sharing: int
) -> RowsSchedule:
    """Return the schedule in which groups of up to so many work-items share rows, until `sharing` do in all.

    Slices let `fill` work.
    """
    items, rows = extents.items(vector, extents.along), len(extents.rows)
    room = 1
    lanes = extents.sum_bytes * (1 if extents.along else vector)
    while 2 * room <= most and 2 * room * lanes <= target.local_bytes // 2:
        room *= 2
    room = 1 if extents.searches else room
    least = target.least_group
    while True:
        share = fitting_shares(items, rows, extents.order, room, sharing, least)
        slices = fitting_slices(items, rows, share, fill) if extents.slices else 1
        members = prod(share[rows:])
        group = (prod(share),) if members > 1 else default_group(items[:rows], target)
        schedule = RowsSchedule(vector, extents.along, members, group, slices=slices)
        while members > 1 and schedule.group != (size := (prod(schedule.shares(extents)),)):
            schedule = replace(schedule, group=size)  # fewer rows where numbers are odd
        if room == 1 or is_legal(schedule, extents, target):
            return schedule
        room //= 2
        least = min(least, room)


def _legal_group(group: Sequence[Any], target: Target) -> Any:  # noqa: ANN401
    """Return whether a device runs work-groups of these sizes; those of a serial target are loops."""
    if target.serial:
        return True
    legal = prod(group) <= target.largest_group
    for size, most in zip(group, target.group_sizes, strict=False):
        legal = legal & (size <= most)
    return legal


def _legal_rows(schedule: Any, extents: RowsExtents, target: Target) -> Any:  # noqa: ANN401
    """Members share rows in local memory; slices are of rows that can be cut; vectors are whole.

    The variable of a loop over further vectors stays within 31 bits.
    """
    *_, last = extents.rows or (1,)
    *_, innermost = extents.inner or (1,)
    along, vector = np.asarray(schedule.along), schedule.vector
    step = vector * (1 + schedule.further)
    fits = (along & (vector <= innermost)) | (~along & (last % step == 0))
    single = not extents.sum_bytes and last // vector + last // step < 1 << 31
    room = prod(schedule.group) * extents.sum_bytes * np.where(along, 1, vector) <= target.local_bytes
    whole = _legal_group(schedule.group, replace(target, serial=False))
    shares = (schedule.members == 1) | (room & whole & (not extents.searches))
    slices = (schedule.slices == 1) | extents.slices
    lanes = (vector == 1) | ~along | (not extents.searches)
    loops = (along & bool(extents.inner)) | (~along & bool(extents.rows)) | (vector == 1)
    further = (schedule.further == 0) | single
    return fits & shares & slices & lanes & loops & further & _legal_group(schedule.group, target)


def _legal_contraction(schedule: Any, extents: ContractionExtents, target: Target) -> Any:  # noqa: ANN401
    """Blocks hold whole tiles, tiles fit the registers and blocks the local memory; no slice is empty."""
    rows, cols = schedule.block_rows, schedule.block_cols
    tiles = (rows % schedule.tile_rows == 0) & (cols % schedule.tile_cols == 0)
    legal = tiles & (schedule.slices <= extents.inner)
    if schedule.kind == "register":
        whole = (schedule.unroll == 1) | (extents.innermost % (LANES * schedule.unroll) == 0)
        groups = _legal_group((*schedule.group, 1), replace(target, serial=False))
        return legal & whole & (schedule.vector == LANES) & groups
    if schedule.kind == "panel":
        elements = schedule.depth * (rows + cols) + rows * cols
        return legal & (elements * extents.itemsize <= target.local_bytes)
    # A warp of 32 work-items covers `lanes` columns of tiles, and as many rows of them as are left.
    across, down = cols // schedule.tile_cols, rows // schedule.tile_rows
    threads = schedule.threads
    lanes = np.clip(across, 1, 8)
    legal &= (across % lanes == 0) & (32 % lanes == 0) & (down % (32 // lanes) == 0)
    legal &= (threads % 32 == 0) & (threads <= target.largest_group)
    legal &= (schedule.tile_rows % 4 == 0) & (schedule.vector == LANES) & (schedule.depth % 4 == 0)
    legal &= (rows * schedule.depth % threads == 0) & (cols * schedule.depth % threads == 0)
    table = extents.loops if extents.loops > 1 else 0
    nbytes = 2 * schedule.depth * (rows + cols + 2 * PAD + table) * extents.itemsize
    return legal & (nbytes <= target.local_bytes)


def _panels(extents: ContractionExtents, target: Target) -> ContractionSchedule:
    """Return the schedule of a CPU: register tiles with little waste, blocks in the second-level cache."""
    vector = max(1, target.vector * 4 // extents.itemsize)
    while vector > 4 and extents.cols <= vector // 2:
        vector //= 2
    tile_rows, vectors = min(MICRO_TILES, key=lambda tile: _slowness(extents, tile, vector))
    tile_cols = vectors * vector
    few = extents.rows <= FEW or extents.inner <= FEW // 2
    block_cols = multiple(min(WIDEST_BLOCK if few else WIDEST_BLOCK // 2, extents.cols), tile_cols)
    if extents.run and extents.run % tile_cols == 0:
        block_cols = min(block_cols, extents.run)
    most_rows = FEW if few else MOST_ROWS
    block_rows = multiple(-(-extents.rows // -(-extents.rows // most_rows)), tile_rows)
    slices = 1
    while slices * _tasks(extents, block_rows, block_cols) < 3 * target.work_items // 4:
        deep = extents.inner // (slices + 1) >= DEPTH
        if deep and few and extents.inner >= WORTH_SLICES:
            slices += 1
        elif block_rows > 64 and 2 * block_rows >= block_cols:
            block_rows = multiple(block_rows // 2, tile_rows)
        elif block_cols > 64 and block_cols >= 4 * tile_cols:
            block_cols = multiple(block_cols // 2, tile_cols)
        elif deep:
            slices += 1
        elif block_rows >= 4 * tile_rows:
            block_rows = multiple(block_rows // 2, tile_rows)
        else:
            break
    schedule = ContractionSchedule("panel", block_rows, block_cols, DEPTH, tile_rows, vectors, vector, slices)
    # The larger operand is read repeatedly: keep it in the cache.
    schedule = replace(schedule, rows_first=extents.rows >= extents.cols)
    while not is_legal(schedule, extents, target):
        smaller = _smaller_panel(schedule)
        if smaller == schedule:
            return _registers(extents, target)
        schedule = smaller
    return schedule


def _smaller_panel(schedule: ContractionSchedule) -> ContractionSchedule:
    """Return a panel with the largest of its three sizes halved; the same where all are smallest."""
    rows = multiple(schedule.block_rows // 2, schedule.tile_rows)
    cols = multiple(schedule.block_cols // 2, schedule.tile_cols)
    sizes = {"depth": schedule.depth, "block_rows": schedule.block_rows, "block_cols": schedule.block_cols}
    halves = {"depth": max(LEAST_DEPTH, schedule.depth // 2), "block_rows": rows, "block_cols": cols}
    shrinking = [name for name in sizes if halves[name] < sizes[name]]
    if not shrinking:
        return schedule
    largest = max(shrinking, key=lambda name: sizes[name])
    return replace(schedule, **{largest: halves[largest]})


def _locals(extents: ContractionExtents, target: Target) -> ContractionSchedule:
    """Return the schedule of a GPU: the largest block that still fills it, then a split of inner loops."""
    groups = max(1, target.work_items // target.group)  # that should run at once
    chosen = next((block for block in (SMALL, *SMALLER) if is_legal(block, extents, target)), None)
    if chosen is None:
        return _registers(extents, target)
    for block in (LARGE, MIDDLE) if extents.itemsize <= 4 else ():
        if (
            extents.cols > block.block_cols // 2
            and extents.rows > block.block_rows // 2
            and _tasks(extents, block.block_rows, block.block_cols) >= groups
            and is_legal(block, extents, target)
        ):
            chosen = block
            break
    tasks = _tasks(extents, chosen.block_rows, chosen.block_cols)
    if tasks >= groups:
        return chosen
    slices = min(-(-2 * groups // tasks), extents.inner // DEPTH_OF_A_SLICE)
    return replace(chosen, slices=max(1, slices))


def _registers(extents: ContractionExtents, target: Target) -> ContractionSchedule:
    """Return the schedule of a phone's GPU: the largest tile that fills it, then a split of inner loops."""
    chosen = TILE if _tasks(extents, 4, 8) >= target.work_items and extents.cols > 4 else NARROW
    tasks = _tasks(extents, chosen.block_rows, chosen.block_cols)
    slices = min(target.work_items // tasks, extents.inner // DEPTH_OF_A_SLICE)
    width = min(chosen.group[0], target.group_sizes[0], power_of_two(target.largest_group))
    height = min(chosen.group[1], target.group_sizes[1], power_of_two(target.largest_group) // width)
    return replace(chosen, slices=max(1, slices), group=(power_of_two(width), power_of_two(height)))


def _slowness(extents: ContractionExtents, tile: tuple[int, int], vector: int) -> float:
    """Return the growth of the work by padding to whole tiles, over the tile's speed."""
    padded = multiple(extents.rows, tile[0]) * multiple(extents.cols, tile[1] * vector)
    return float(padded / (extents.rows * extents.cols) / MICRO_TILES[tile])


def _tasks(extents: ContractionExtents, block_rows: int, block_cols: int) -> int:
    return extents.batch * -(-extents.rows // block_rows) * -(-extents.cols // block_cols)


def ceil_div(number: Any, divisor: Any) -> Any:  # noqa: ANN401 - numbers or arrays
    """Return a quotient rounded up."""
    return -(-number // divisor)


def multiple(number: Any, step: Any) -> Any:  # noqa: ANN401 - numbers or arrays
    """Return the smallest multiple of a step that is not below a number."""
    return ceil_div(number, step) * step
