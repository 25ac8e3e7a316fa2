"""Contractions as kernels: matrix products, convolutions, their gradients, and what follows them.

A schedule has one of three kinds, each with a template in `export/kernels`. "panel", for a processor with
caches: blocks are copied in the order of the registers, then multiplied. "local", for a GPU: blocks of both
operands pass through local memory into tiles in registers. "register", for a GPU with little or slow local
memory: from memory or textures straight into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.expressions.indices import Axis, Index, flatten, of
from torchedge.expressions.scalars import Local, Read, Scalar, reads_of
from torchedge.expressions.sizes import argument, digits, quotient
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.fusion import ACCUMULATED, Computed, FusionGroup
from torchedge.lowering.kernels.loops import work_of
from torchedge.lowering.kernels.products import (
    Loops,
    OperandText,
    Product,
    Texts,
    last_of,
    places,
    size,
    widest,
)
from torchedge.lowering.kernels.rows import rows_nest, write_rows
from torchedge.lowering.kernels.sources import KernelSource, arguments_of, declared, fill
from torchedge.lowering.nodes import Contraction, Node, Rows, Stage, Stored
from torchedge.lowering.schedules import (
    PAD,
    ContractionSchedule,
    RowsSchedule,
    default_schedule,
    multiple,
)
from torchedge.lowering.targets import Kind, Target
from torchedge.textures.layouts import LANES, Layout, row_major

SLICE = Axis("part", 1 << 16)
"""The loop over the slices of a split-K contraction."""

LOCAL_WORDS = 1 << 14
"""Smallest local memory of a "panel", in elements; larger ones have four times as many, and so on.

A device with less has panels of all its local memory."""
MOST_LOCAL_WORDS = 1 << 18
"""Largest local memory of a "panel" that is rounded up."""
SHORT_INNER = 8
"""Extent of the innermost loop below which a "panel" has a loop for each of the outer ones: to divide a flat
position would take longer than to copy so few elements."""

_Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Filling:
    """The values of a template, the sizes of the launch, and the local arrays of the kernel in elements."""

    values: dict[str, Any]
    global_size: _Sizes
    local_size: _Sizes
    local_arrays: Mapping[str, int]


def write_contraction(
    group: FusionGroup,
    product: Product,
    layouts: Mapping[Node, Layout],
    schedule: ContractionSchedule,
    target: Target,
) -> tuple[KernelSource, ...]:
    """Return the kernels of a group whose host is a contraction: one, or two where it is split (split-K).

    The slices of a split contraction lie in a tensor of their own: a bare Node, row-major, that the first
    kernel writes and the second one reads.
    """
    host = group.host
    chunks = _CHUNKS[schedule.kind](product, schedule)
    chunks_a_slice = -(-chunks // schedule.slices)
    schedule = replace(schedule, slices=-(-chunks // chunks_a_slice))  # no slice is empty
    if schedule.slices == 1:
        return (_main(group, product, schedule, group.stored, layouts, target),)
    sizes = (schedule.slices, *product.sizes[:3])
    scratch = Node(sizes, "float32" if host.dtype == "float16" else host.dtype)
    outer = (product.batch, product.rows, product.cols)
    element = (of(SLICE), *[flatten(list(map(of, loops)), [x.extent for x in loops]) for loops in outer])
    partial = replace(product, stores=((scratch, Computed(Local(ACCUMULATED, scratch.dtype), element)),))
    layouts = {**layouts, scratch: row_major(4)}
    return (
        _main(group, partial, schedule, {scratch: None}, layouts, target),
        *_sum(group, product, scratch, element, layouts, target),
    )


def _main(
    group: FusionGroup,
    product: Product,
    schedule: ContractionSchedule,
    written: Mapping[Node, Stored | None],
    layouts: Mapping[Node, Layout],
    target: Target,
) -> KernelSource:
    """Return the kernel that multiplies."""
    host = group.host
    assert isinstance(host, Contraction)
    values = [c.value for _, c in product.stores]
    read = dict.fromkeys(read.tensor for read in reads_of(product.a, product.b, *values))
    arguments = arguments_of(written, list(read), layouts, target.checks)
    texts = Texts(arguments, host.dtype)
    filling = _FILLINGS[schedule.kind](product, schedule, texts, target)
    batch, rows, cols, inner = product.sizes
    source = fill(
        f"contraction_{schedule.kind}",
        preamble="".join(texts.helpers),
        arguments=arguments.text,
        type=texts.type,
        rows=argument(rows, "rows"),
        cols=argument(cols, "cols"),
        slices=argument(schedule.slices, "slices"),
        tm=schedule.tile_rows,
        tn=schedule.tile_cols,
        nv=schedule.vectors,
        bm=schedule.block_rows,
        bn=schedule.block_cols,
        batch_place=places(product.batch, "batch"),
        local_arrays=filling.local_arrays,
        **filling.values,
    )
    return arguments.launch(
        source,
        host.name,
        (filling.global_size, filling.local_size),
        host.flops + work_of(values) * host.numel,
        f"{host.name} as {batch} x [{rows}, {inner}] @ [{inner}, {cols}]",
        group.scope,
        max(4, ITEM_SIZES[host.dtype]) * sum(filling.local_arrays.values()),
        "reusable",
    )


def _sum(
    group: FusionGroup,
    product: Product,
    scratch: Node,
    element: Sequence[Index],
    layouts: Mapping[Node, Layout],
    target: Target,
) -> tuple[KernelSource, ...]:
    """Return the kernels that add the slices of a split contraction and compute what follows it.

    element: of the scratch tensor, at the loop `SLICE` and those of the product.
    """
    part = Axis("part", scratch.shape[0])
    body = Read(scratch, tuple([i.substitute({SLICE: of(part)}) for i in element]), scratch.dtype)
    loops = (*product.batch, *product.rows, *product.cols)
    host = Rows(
        tuple([axis.extent for axis in loops]),
        scratch.dtype,
        loops,
        (part,),
        (Stage(ACCUMULATED, "sum", body, scratch.dtype),),
        (),
        "sum of slices",
        scope=group.scope,
    )
    reads = dict.fromkeys(r.tensor for r in reads_of(body, *[c.value for _, c in product.stores]))
    sums = FusionGroup(host, dict(product.stores), group.place, (body,), reads, group.stored)
    nest = rows_nest(sums, arguments_of(group.stored, list(reads), layouts))
    schedule = default_schedule(nest.extents, target)
    assert isinstance(schedule, RowsSchedule)
    return write_rows(sums, nest, layouts, replace(schedule, unroll=1), target)


def _epilogue(product: Product, texts: Texts, column: str, vector: int) -> OperandText:
    """Return the statements that store the results; `column` is the C text of a column's number."""
    last = last_of(product.cols)
    width = widest(last, vector)
    return replace(
        texts.write(product.stores, last, width), place=tuple(places(product.cols, column, last, width))
    )


# "panel" ------------------------------------------------------------------------------------------------


def _panel(product: Product, schedule: ContractionSchedule, texts: Texts, target: Target) -> _Filling:
    """Fill `contraction_panel.cl.jinja`: a work-item a block."""
    batch, rows, cols, _ = product.sizes
    epilogue = _epilogue(product, texts, "col0 + c", schedule.vector)
    cut = _panel_cut(product.inner, schedule)
    depth = _power_above(max(16, cut["outers"] * cut["piece"]))
    block = depth * (schedule.block_rows + schedule.block_cols) + schedule.block_rows * schedule.block_cols
    # With few sizes of local memory, contractions of many shapes share a kernel.
    words = LOCAL_WORDS * 4 ** max(0, -(-((block - 1) // LOCAL_WORDS).bit_length() // 2))
    words = block if words > MOST_LOCAL_WORDS else min(words, target.local_bytes // product.itemsize)
    values = {
        "vector": f"{texts.type}{schedule.vector}",
        "v": schedule.vector,
        "rows_first": argument(int(schedule.rows_first), "rows first"),
        "block_rows": argument(schedule.block_rows, "block rows"),
        "block_cols": argument(schedule.block_cols, "block cols"),
        "a_words": argument(schedule.block_rows * depth, "a block"),
        "b_words": argument(schedule.block_cols * depth, "b block"),
        "row_place": places(product.rows, "row0 + r"),
        "outer_place": places(product.inner[:-1], "o"),
        "nest": [(axis.name, argument(axis.extent, axis.name)) for axis in product.inner[:-1]]
        if cut["chunks"] == 1 and cut["inner_size"] < SHORT_INNER
        else (),
        "meets": texts.meets(product, schedule.block_cols),
        "a": _panel_a(product, schedule, texts),
        "b": _panel_b(product, schedule, texts),
        "epilogue": epilogue,
        "ks": depth,
        **{name: argument(number, name) for name, number in cut.items()},
    }
    counts = [-(-rows // schedule.block_rows), -(-cols // schedule.block_cols)]
    first, second = counts if schedule.rows_first else counts[::-1]
    return _Filling(values, (first, second, batch * schedule.slices), (1, 1, 1), {"words": words})


def _power_above(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def _panel_cut(inner: Loops, schedule: ContractionSchedule) -> dict[str, int]:
    """Cut the inner loops into chunks of about `depth` points: whole innermost loops, or pieces of one."""
    inner_size, outer_size = (inner[-1].extent if inner else 1), size(inner[:-1])
    if inner_size <= schedule.depth:
        outers = min(schedule.depth // inner_size, outer_size)
        pieces, piece = 1, inner_size
    else:
        outers, pieces = 1, -(-inner_size // schedule.depth)
        piece = multiple(-(-inner_size // pieces), 16)
        pieces = -(-inner_size // piece)
    chunks = -(-outer_size // outers) * pieces
    return {
        "inner_size": inner_size,
        "outer_size": outer_size,
        "outers": outers,
        "pieces": pieces,
        "piece": piece,
        "chunks": chunks,
        "chunks_a_slice": -(-chunks // schedule.slices),
    }


def _panel_a(product: Product, schedule: ContractionSchedule, texts: Texts) -> OperandText:
    """Read along the inner loop, or along rows where only those are neighbours in memory."""
    deepest, last = last_of(product.inner), last_of(product.rows)
    along_inner = deepest in product.a_contiguous or last not in product.a_contiguous
    lane = deepest if along_inner else last
    width = (
        widest(lane, schedule.vector) if along_inner else widest(lane, schedule.vector, schedule.tile_rows)
    )
    return replace(
        texts.read(product.a, lane, width, along_inner),
        place=tuple(places(product.rows, "row0 + r", None if along_inner else last, width)),
        inner_place=tuple(_at_depth(product.inner, width if along_inner else 1)),
    )


def _panel_b(product: Product, schedule: ContractionSchedule, texts: Texts) -> OperandText:
    """Read along columns, or along the inner loop where only its points are neighbours in memory."""
    deepest, last = last_of(product.inner), last_of(product.cols)
    if deepest in product.b_contiguous and last not in product.b_contiguous:
        width = widest(deepest, schedule.vector, schedule.tile_cols)
        column = f"min(col0 + c + x, {argument(size(product.cols) - 1, 'last column')})"
        return replace(
            texts.read(product.b, deepest, width, along_inner=True),
            place=tuple(places(product.cols, column)),
            inner_place=tuple(_at_depth(product.inner, width)),
        )
    width = widest(last, schedule.vector)
    return replace(
        texts.read(product.b, last, width),
        place=tuple(places(product.cols, "col0 + c", last, width)),
        inner_place=tuple(_at_depth(product.inner, 1)),
    )


def _at_depth(inner: Loops, width: int) -> list[str]:
    return places(inner[-1:], "q", inner[-1] if inner else None, width)


# "local" ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Depth:
    """How the inner loops are cut into blocks.

    nested: a block stays within one round of the outer ones. table: the places of a block's points are found
    once for a work-group.
    """

    nested: bool
    table: bool
    blocks_inner: int
    blocks: int
    tail: int


def _local(product: Product, schedule: ContractionSchedule, texts: Texts, target: Target) -> _Filling:
    """Fill `contraction_local.cl.jinja`: a work-group a block, all in the dimension without a limit."""
    batch, rows, cols, _ = product.sizes
    depth = depth_of(product, schedule.depth)
    a = _local_read(product, schedule, texts, depth, rows=True)
    b = _local_read(product, schedule, texts, depth, rows=False)
    across = schedule.block_cols // schedule.tile_cols
    lanes = min(8, across)
    epilogue = _epilogue(product, texts, "col", 4)
    row_blocks, col_blocks = -(-rows // schedule.block_rows), -(-cols // schedule.block_cols)
    over = {block: quotient(block, depth.blocks_inner, "inner blocks") for block in ("chunk", "next")}
    a_stride = schedule.block_rows + (PAD if a.along_inner else 0)
    b_stride = schedule.block_cols + (PAD if b.along_inner else 0)
    values = {
        "threads": schedule.threads,
        "bk": schedule.depth,
        "band": schedule.band,
        "row_blocks": row_blocks,
        "argument": argument,
        "group_place": [
            *declared(
                digits("(int)get_group_id(0)", [("number", row_blocks * col_blocks), ("batch", batch)])
            ),
            *declared(digits("number", [("within", schedule.band * col_blocks), ("band", row_blocks)])),
        ],
        "chunks": argument(depth.blocks, "chunks"),
        "chunks_a_slice": argument(-(-depth.blocks // schedule.slices), "chunks a slice"),
        "nested": depth.nested,
        "table": [axis.name for axis in product.inner] if depth.table else [],
        "table_place": places(product.inner, "within"),
        "whole": size(product.inner),
        "inner_block": {
            block: f"({block} - {argument(depth.blocks_inner, 'inner blocks')} * ({over[block]}))"
            if len(product.inner) > 1
            else block
            for block in over
        },
        "tail": depth.tail,
        "lanes_x": lanes,
        "warps_x": across // lanes,
        "meets": texts.meets(product, schedule.block_cols) if depth.nested else None,
        "a": a,
        "b": b,
        "a_stride": a_stride,
        "b_stride": b_stride,
        "a_count": schedule.block_rows * schedule.depth // a.width // schedule.threads,
        "b_count": schedule.block_cols * schedule.depth // b.width // schedule.threads,
        "row_place": places(product.rows, "row"),
        "outer_place": {block: places(product.inner[:-1], over[block]) for block in over},
        "epilogue": epilogue,
    }
    groups = batch * row_blocks * col_blocks
    arrays = {"a_block": 2 * schedule.depth * a_stride, "b_block": 2 * schedule.depth * b_stride}
    if depth.table:
        arrays["points"] = 2 * schedule.depth * len(product.inner)
    return _Filling(values, (groups * schedule.threads, schedule.slices, 1), (schedule.threads, 1, 1), arrays)


def depth_of(product: Product, step: int) -> _Depth:
    """Cut along the innermost loop where that wastes nothing, else along all of them as one.

    Where work is skipped for whole rounds of the outer loops, or where there is one loop alone, blocks stay
    within a round if that wastes little.
    """
    inner = product.inner
    innermost, whole = (inner[-1].extent if inner else 1), size(inner)
    padded = multiple(innermost, step)
    crosses = len(inner) > 1 and not product.skips
    if padded == innermost or (padded <= 1.15 * innermost and not crosses):
        blocks = padded // step
        return _Depth(True, False, blocks, blocks * size(inner[:-1]), 0 if padded == innermost else innermost)
    blocks = -(-whole // step)
    return _Depth(False, len(inner) > 1, 1, blocks, 0 if blocks * step == whole else whole)


def _local_read(
    product: Product, schedule: ContractionSchedule, texts: Texts, depth: _Depth, rows: bool
) -> OperandText:
    """Read along the loop whose points are neighbours in memory, along the inner one where none are."""
    operand, loops = (product.a, product.rows) if rows else (product.b, product.cols)
    contiguous = product.a_contiguous if rows else product.b_contiguous
    extent = schedule.block_rows if rows else schedule.block_cols
    deepest, last = last_of(product.inner), last_of(loops)
    along_inner = last not in contiguous
    lane = deepest if along_inner else last
    share = extent * schedule.depth // schedule.threads
    width = widest(lane, 4, share) if lane in contiguous else 1
    start = f"min({'row0' if rows else 'col0'} + x, {size(loops) - (1 if along_inner else width)})"
    at = product.inner[-1:] if depth.nested else product.inner
    return replace(
        texts.read(operand, lane, width, along_inner),
        axes=tuple(axis.name for axis in loops),
        place=tuple(places(loops, start, None if along_inner else last, width)),
        inner_place=tuple(places(at, "within", deepest if along_inner else None, width)),
    )


# "register" ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tile:
    """An operand's share of a tile: one read covers `across` rows (or columns) and `depth` inner points.

    texts: the values of a row (or the vectors of four columns), by inner point.
    """

    read: OperandText
    across: int
    depth: int
    texts: Sequence[Sequence[str]] = ()


def _register(product: Product, schedule: ContractionSchedule, texts: Texts, target: Target) -> _Filling:
    """Fill `contraction_register.cl.jinja`: a work-item a tile."""
    batch, rows, cols, _ = product.sizes
    deepest = last_of(product.inner)
    a = _tile(product.a, product.rows, deepest, product.a_contiguous, schedule.tile_rows, texts)
    b = _tile(product.b, product.cols, deepest, product.b_contiguous, schedule.tile_cols, texts)
    step = max(a.depth, b.depth) * schedule.unroll
    a_texts = [[_element(a, "a", i, k) for k in range(step)] for i in range(schedule.tile_rows)]
    b_texts = [[_four(b, "b", j, k, texts.type) for k in range(step)] for j in range(schedule.vectors)]
    values = {
        "step": step,
        "deepest": deepest.name,
        "row_place": places(product.rows, "row"),
        "outer_place": places(product.inner[:-1], "outer"),
        "a": replace(a, texts=a_texts),
        "b": replace(b, texts=b_texts),
        "epilogue": _epilogue(product, texts, "col", LANES),
        **_register_cut(product.inner, schedule),
    }
    across, down = -(-cols // schedule.tile_cols), -(-rows // schedule.tile_rows)
    group = [min(m, _power_above(n)) for m, n in zip(schedule.group, (across, down), strict=True)]
    sizes = (multiple(across, group[0]), multiple(down, group[1]), batch * schedule.slices)
    return _Filling(values, sizes, (group[0], group[1], 1), {})


def _tile(
    operand: Scalar, loops: Loops, deepest: Axis, contiguous: frozenset[Axis], extent: int, texts: Texts
) -> _Tile:
    """Read four inner points at once, or four rows (or columns), whichever are neighbours in memory."""
    last = last_of(loops)
    along_inner = last not in contiguous
    lane = deepest if along_inner else last
    width = LANES if lane in contiguous and lane.extent % LANES == 0 and extent % LANES == 0 else 1
    across, depth = (1, width) if along_inner else (width, 1)
    read = replace(
        texts.read(operand, lane, width, along_inner),
        axes=tuple(axis.name for axis in loops),
        place=tuple(places(loops, f"min(x, {size(loops) - across})", None if along_inner else last, width)),
    )
    return _Tile(read, across, depth)


def _element(tile: _Tile, letter: str, place: int, k: int) -> str:
    """Return the value at a row (or column) and an inner point."""
    name = f"{letter}{place - place % tile.across}_{k - k % tile.depth}"
    return f"{name}.s{place % tile.across or k % tile.depth}" if tile.read.width > 1 else name


def _four(tile: _Tile, letter: str, vector: int, k: int, kind: str) -> str:
    """Return the values at four neighbouring columns and an inner point."""
    if tile.across == LANES:
        return f"{letter}{vector * LANES}_{k}"
    values = [_element(tile, letter, vector * LANES + x, k) for x in range(LANES)]
    return f"({kind}{LANES})({', '.join(values)})"


def _register_cut(inner: Loops, schedule: ContractionSchedule) -> dict[str, int]:
    """Cut the inner loops into rounds of the outer ones; for more slices, the innermost loop into pieces."""
    inner_size, outer_size = (inner[-1].extent if inner else 1), size(inner[:-1])
    pieces = max(1, -(-schedule.slices // outer_size))
    piece = multiple(-(-inner_size // pieces), LANES * schedule.unroll)
    pieces = -(-inner_size // piece)
    chunks = outer_size * pieces
    return {
        "inner_size": inner_size,
        "piece": piece,
        "pieces": pieces,
        "chunks": chunks,
        "chunks_a_slice": -(-chunks // schedule.slices),
    }


_FILLINGS: Mapping[Kind, Callable[[Product, ContractionSchedule, Texts, Target], _Filling]] = {
    "panel": _panel,
    "local": _local,
    "register": _register,
}
_CHUNKS: Mapping[Kind, Callable[[Product, ContractionSchedule], int]] = {
    "panel": lambda product, schedule: _panel_cut(product.inner, schedule)["chunks"],
    "local": lambda product, schedule: depth_of(product, schedule.depth).blocks,
    "register": lambda product, schedule: _register_cut(product.inner, schedule)["chunks"],
}
"""Number of chunks of the inner loops: the largest number of slices."""
