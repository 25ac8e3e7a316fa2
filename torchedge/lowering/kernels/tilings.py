"""Contractions by a schedule, as data: how operands are staged, what a work-item sums, what a launch holds.

`tiling_of` is the function from a product and a schedule to that data. The writer of kernels
(`lowering.kernels.contractions`) reads it with plain numbers; the cost of candidates (`lowering.kernel_work`)
is counted from the same data, with (N,) arrays in the place of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchedge.expressions.indices import Axis
from torchedge.expressions.scalars import Scalar
from torchedge.lowering.kernels.products import Loops, Product, last_of, size
from torchedge.lowering.schedules import LEAST_DEPTH, PAD, ContractionSchedule, ceil_div, multiple
from torchedge.lowering.targets import Kind
from torchedge.lowering.walks import Digit
from torchedge.textures.layouts import LANES

ENDLESS = 1 << 30
"""Rounds of the outermost loop of a work-item."""


@dataclass(frozen=True, slots=True)
class Operand:
    """How one operand of a contraction gets from memory to registers, or to local memory.

    value: what is read, converted and computed on the way. role, loops: "rows" or "cols". `width` neighbours
    along the loop `lane` are read at once; along_inner: that is the innermost of the inner loops. time: the
    loops of a work-item around a read; lanes: how the reads of a work-group lie beside each other; both
    innermost first. reads: of a work-item in all.
    """

    value: Scalar
    role: str
    loops: Loops
    lane: Axis
    along_inner: bool
    width: Any
    time: tuple[Digit, ...] = ()
    lanes: tuple[Digit, ...] = ()
    reads: Any = 0

    @property
    def across(self) -> Any:  # noqa: ANN401
        """Rows (or columns) of a read."""
        return 1 if self.along_inner else self.width

    @property
    def depth(self) -> Any:  # noqa: ANN401
        """Inner points of a read."""
        return self.width if self.along_inner else 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """A product by a schedule. Numbers are (N,) arrays where those of the schedule are.

    schedule: its slices are those that have work. a, b: the operands. cut: how the inner loops are cut into
    chunks, by name. tile: rows and columns that a work-item sums, the padding of whole tiles included; block:
    those of a work-group. points: inner points of a work-item. stored: results of a work-item; time, lanes:
    the loops around them, width: how many are written at once. global_size, group: of the launch. local:
    elements of each local array. columns: other columns of `textures.work.KernelWork`.
    """

    product: Product
    schedule: ContractionSchedule
    a: Operand
    b: Operand
    cut: Mapping[str, Any]
    tile: tuple[Any, Any]
    block: tuple[Any, Any]
    points: Any
    stored: Any
    width: Any
    time: tuple[Digit, ...]
    lanes: tuple[Digit, ...]
    global_size: tuple[Any, Any, Any]
    group: tuple[Any, ...]
    local: Mapping[str, Any]
    columns: Mapping[str, Any]


def tiling_of(product: Product, schedule: ContractionSchedule) -> Tiling:
    """Return a product by a schedule, of plain numbers or of arrays."""
    return _TILINGS[schedule.kind](product, schedule)


def power_above(number: Any) -> Any:  # noqa: ANN401
    """Return the smallest powers of two that are not below numbers."""
    return 2 ** np.ceil(np.log2(np.maximum(number, 1))).astype(int)


def widest(axis: Axis, *limits: Any) -> Any:  # noqa: ANN401
    """Return the widest power of two that divides a loop and all limits."""
    common: Any = axis.extent
    for limit in limits:
        common = np.gcd(common, limit)
    return common & -common


def result_width(product: Product, schedule: ContractionSchedule) -> Any:  # noqa: ANN401
    """Return how many results of neighbouring columns are written at once."""
    return widest(last_of(product.cols), schedule.vector if schedule.kind == "panel" else LANES)


def _settled(schedule: ContractionSchedule, chunks: Any) -> tuple[ContractionSchedule, dict[str, Any]]:  # noqa: ANN401
    """Return a schedule of which no slice is empty, and the chunks of a slice."""
    each = ceil_div(chunks, schedule.slices)
    return replace(schedule, slices=ceil_div(chunks, each)), {"chunks": chunks, "chunks_a_slice": each}


# "panel" ------------------------------------------------------------------------------------------------


def _panel(product: Product, schedule: ContractionSchedule) -> Tiling:
    """A work-item makes a block: operands are copied into local memory in the order of the registers."""
    batch, rows, cols, inner = product.sizes
    cut = _panel_cut(product.inner, schedule)
    s, chunks = _settled(schedule, cut["chunks"])
    tile_rows, tile_cols, vector = np.asarray(s.tile_rows), np.asarray(s.tile_cols), np.asarray(s.vector)
    height, breadth = np.minimum(s.block_rows, rows), np.minimum(s.block_cols, cols)
    points = inner / s.slices
    operands = []
    for is_rows, extent in ((True, height), (False, breadth)):
        value, role, loops, contiguous = _side(product, is_rows)
        deepest, last = last_of(product.inner), last_of(loops)
        # Rows are copied along the inner loop unless only they are neighbours; columns the other way round.
        along = (
            last not in contiguous or deepest in contiguous
            if is_rows
            else (deepest in contiguous | product.b_shared and last not in contiguous)
        )
        lane = deepest if along else last
        tiled = tile_rows if is_rows else tile_cols
        width = widest(lane, vector) if along == is_rows else widest(lane, vector, tiled)
        copied = Operand(value, role, loops, lane, along, width)
        deep = Digit("inner", ceil_div(np.minimum(s.depth, inner), copied.depth), copied.depth)
        wide = Digit(role, ceil_div(extent, copied.across), copied.across)
        time = (deep, wide) if along or is_rows else (wide, deep)
        operands.append(replace(copied, time=time, reads=extent * points / width))
    down, across = ceil_div(rows, s.block_rows), ceil_div(cols, s.block_cols)
    # Whole tiles are computed; the last block of a row or column of blocks has fewer.
    tile = ceil_div(rows, tile_rows) * tile_rows / down, ceil_div(cols, tile_cols) * tile_cols / across
    deep = power_above(np.maximum(LEAST_DEPTH, cut["outers"] * cut["piece"]))
    width = result_width(product, s)
    first, second = (down, across) if np.all(s.rows_first) else (across, down)
    lane_bytes = 4.0 * vector
    rounds = np.maximum(1.0, points / np.minimum(s.depth, points))
    vectors = np.asarray(s.vectors)
    # Each round of a tile loads its columns, and one value of each row into all lanes.
    moved = points * (tile_rows + vectors) + 2 * rounds * tile_rows * vectors
    return Tiling(
        product=product,
        schedule=s,
        a=operands[0],
        b=operands[1],
        cut={**cut, **chunks, "depth": deep},
        tile=tile,
        block=(height, breadth),
        points=points,
        stored=height * breadth,
        width=width,
        time=(Digit("cols", ceil_div(breadth, width), width),),
        lanes=(),
        global_size=(first, second, batch * s.slices),
        group=(1, 1, 1),
        local={"a": s.block_rows * deep, "b": s.block_cols * deep, "sums": s.block_rows * s.block_cols},
        columns={
            "registers": lane_bytes * (tile_rows * vectors + vectors + 1),
            "local_bytes": 4.0 * (np.asarray(s.depth) * (s.block_rows + np.asarray(s.block_cols))),
            "local_traffic": tile[0] / tile_rows * (tile[1] / tile_cols) * moved * lane_bytes
            + (height + breadth) * points * 8.0,
        },
    )


def _panel_cut(inner: Loops, schedule: ContractionSchedule) -> dict[str, Any]:
    """Cut the inner loops into chunks of about `depth` points: whole innermost loops, or pieces of one."""
    inner_size, outer_size, depth = last_of(inner).extent, size(inner[:-1]), schedule.depth
    whole = inner_size <= np.asarray(depth)
    outers = np.where(whole, np.minimum(depth // inner_size, outer_size), 1)
    piece = np.where(
        whole, inner_size, multiple(ceil_div(inner_size, ceil_div(inner_size, depth)), LEAST_DEPTH)
    )
    pieces = ceil_div(inner_size, piece)
    return {
        "inner_size": inner_size,
        "outer_size": outer_size,
        "outers": outers,
        "pieces": pieces,
        "piece": piece,
        "chunks": ceil_div(outer_size, outers) * pieces,
    }


# "local" ------------------------------------------------------------------------------------------------


def _local(product: Product, schedule: ContractionSchedule) -> Tiling:
    """A work-group makes a block: the operands' blocks pass through local memory, two at a time."""
    batch, rows, cols, _ = product.sizes
    depth, threads, tile_rows = np.asarray(schedule.depth), schedule.threads, np.asarray(schedule.tile_rows)
    cut = _local_cut(product, depth)
    s, chunks = _settled(schedule, cut["blocks"])
    each, tile_cols = chunks["chunks_a_slice"], np.asarray(s.tile_cols)
    fetched: Any = 0
    operands: list[Operand] = []
    local: dict[str, Any] = {}
    for is_rows, extent in ((True, s.block_rows), (False, s.block_cols)):
        value, role, loops, contiguous = _side(product, is_rows)
        deepest, last = last_of(product.inner), last_of(loops)
        along = last not in contiguous
        lane = deepest if along else last
        share = extent * depth // threads
        width = widest(lane, LANES, share) if lane in contiguous else share // share
        short = (depth if along else np.asarray(extent)) // width
        beside = Digit("inner" if along else role, short, width)
        below = Digit(role if along else "inner", ceil_div(threads, short), 1)
        rounds = share // width
        time = (Digit(below.role, rounds, ceil_div(threads, short)), Digit("inner", ENDLESS, depth))
        operands.append(Operand(value, role, loops, lane, along, width, time, (beside, below), rounds * each))
        fetched = fetched + share
        local["a_block" if is_rows else "b_block"] = 2 * depth * (extent + PAD * along)
    if np.any(cut["table"]):
        local["points"] = 2 * depth * len(product.inner) * cut["table"]
    across = np.asarray(s.block_cols) // tile_cols
    down, over = ceil_div(rows, s.block_rows), ceil_div(cols, s.block_cols)
    points = each * depth
    return Tiling(
        product=product,
        schedule=s,
        a=operands[0],
        b=operands[1],
        cut={**cut, **chunks, "row_blocks": down, "col_blocks": over},
        tile=(tile_rows, tile_cols),
        block=(s.block_rows, s.block_cols),
        points=points,
        stored=tile_rows * tile_cols,
        width=result_width(product, s),
        time=(Digit("cols", s.vectors, across * LANES), Digit("rows", tile_rows, 1)),
        lanes=(Digit("cols", across, LANES), Digit("rows", threads // across, LANES)),
        global_size=(batch * down * over * threads, s.slices, 1),
        group=(threads, 1, 1),
        local=local,
        columns={
            "registers": 4 * (tile_rows * tile_cols + tile_rows + tile_cols + fetched),
            "local_bytes": 1.0 * sum(local.values()) * product.itemsize,
            "local_traffic": 4.0 * each * fetched,
            "tile_reads": points * (tile_rows + tile_cols) / LANES,
            "barriers": each + 1,
        },
    )


def _local_cut(product: Product, step: Any) -> dict[str, Any]:  # noqa: ANN401
    """Cut along the innermost loop where that wastes nothing, else along all of them as one.

    Where work is skipped for whole rounds of the outer loops, or where there is one loop alone, blocks stay
    within a round if that wastes little. nested: a block stays within one round of the outer ones. table: the
    places of a block's points are found once for a work-group. tail: the end of points where blocks cross it.
    """
    inner = product.inner
    innermost, whole = last_of(inner).extent, size(inner)
    padded = multiple(innermost, step)
    crosses = len(inner) > 1 and not product.skips
    nested = (padded == innermost) | ((padded <= 1.15 * innermost) & (not crosses))
    rounds = ceil_div(whole, step)
    return {
        "nested": nested,
        "table": ~nested & (len(inner) > 1),
        "blocks_inner": np.where(nested, padded // step, 1),
        "blocks": np.where(nested, padded // step * size(inner[:-1]), rounds),
        "tail": np.where(nested, innermost * (padded != innermost), whole * (rounds * step != whole)),
    }


# "register" ---------------------------------------------------------------------------------------------


def _register(product: Product, schedule: ContractionSchedule) -> Tiling:
    """A work-item makes a tile, straight from memory."""
    batch, rows, cols, inner = product.sizes
    cut = _register_cut(product.inner, schedule)
    s, chunks = _settled(schedule, cut["chunks"])
    tile_rows, tile_cols = np.asarray(s.tile_rows), np.asarray(s.tile_cols)
    across, down = ceil_div(cols, tile_cols), ceil_div(rows, tile_rows)
    group = [np.minimum(most, power_above(n)) for most, n in zip(s.group, (across, down), strict=True)]
    points = inner / s.slices
    operands = []
    for is_rows, extent in ((True, tile_rows), (False, tile_cols)):
        value, role, loops, contiguous = _side(product, is_rows)
        along = last_of(loops) not in contiguous
        lane = last_of(product.inner) if along else last_of(loops)
        fits = lane in contiguous and lane.extent % LANES == 0
        width = np.where(fits & (along | (extent % LANES == 0)), LANES, 1)
        operands.append(Operand(value, role, loops, lane, along, width))
    step = np.maximum(operands[0].depth, operands[1].depth) * s.unroll
    for number, (read, extent) in enumerate(zip(operands, (tile_rows, tile_cols), strict=True)):
        deep = Digit("inner", step // read.depth, read.depth)
        wide = Digit(read.role, extent // read.across, read.across)
        near = (deep, wide) if read.role == "rows" else (wide, deep)  # columns are read point by point
        times = extent / read.across * points / read.depth
        operands[number] = replace(read, time=(*near, Digit("inner", ENDLESS, step)), reads=times)
    lanes = (Digit("cols", group[0], tile_cols), Digit("rows", group[1], tile_rows))
    operands = [replace(read, lanes=lanes) for read in operands]
    return Tiling(
        product=product,
        schedule=s,
        a=operands[0],
        b=operands[1],
        cut={**cut, **chunks, "step": step},
        tile=(tile_rows, tile_cols),
        block=(group[1] * tile_rows, group[0] * tile_cols),
        points=points,
        stored=tile_rows * tile_cols,
        width=result_width(product, s),
        time=(Digit("cols", tile_cols // LANES, LANES), Digit("rows", tile_rows, 1)),
        lanes=lanes,
        global_size=(multiple(across, group[0]), multiple(down, group[1]), batch * s.slices),
        group=(*group, 1),
        local={},
        columns={"registers": 4 * (tile_rows * tile_cols + step * (tile_rows + tile_cols))},
    )


def _register_cut(inner: Loops, schedule: ContractionSchedule) -> dict[str, Any]:
    """Cut the inner loops into rounds of the outer ones; for more slices, the innermost loop into pieces."""
    inner_size, outer_size = last_of(inner).extent, size(inner[:-1])
    pieces = np.maximum(1, ceil_div(schedule.slices, outer_size))
    piece = multiple(ceil_div(inner_size, pieces), LANES * schedule.unroll)
    pieces = ceil_div(inner_size, piece)
    return {"inner_size": inner_size, "piece": piece, "pieces": pieces, "chunks": outer_size * pieces}


def _side(product: Product, rows: bool) -> tuple[Scalar, str, Loops, frozenset[Axis]]:
    if rows:
        return product.a, "rows", product.rows, product.a_contiguous
    return product.b, "cols", product.cols, product.b_contiguous


_TILINGS: Mapping[Kind, Callable[[Product, ContractionSchedule], Tiling]] = {
    "panel": _panel,
    "local": _local,
    "register": _register,
}
