"""Contractions on a GPU: blocks of both operands pass through local memory into tiles in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
from torchedge.lowering.schedules import Schedule

PAD = 4
"""Elements between the lines of a block that is written across: keeps lanes out of one another's banks."""


@dataclass(frozen=True, slots=True)
class _Depth:
    """How the inner loops fall into blocks. nested: a block stays within one round of the outer ones."""

    nested: bool
    blocks_inner: int
    blocks: int
    tail: int


def local_launch(product: Product, schedule: Schedule) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (global size, local size): a work-group a block, all in the one dimension that has no limit."""
    batch, rows, cols, _ = product.sizes
    blocks = -(-rows // schedule.block_rows) * -(-cols // schedule.block_cols)
    return (batch * blocks * schedule.threads, schedule.parts, 1), (schedule.threads, 1, 1)


def local_chunks(product: Product, schedule: Schedule) -> int:
    """Return into how many chunks the inner loops are cut."""
    return _depth(product.inner, schedule.depth).blocks


def local_values(product: Product, schedule: Schedule, texts: Texts) -> dict[str, Any]:
    """Return what `contraction_local.cl.jinja` needs."""
    _, rows, cols, _ = product.sizes
    depth = _depth(product.inner, schedule.depth)
    a = _read(product, schedule, texts, depth, rows=True)
    b = _read(product, schedule, texts, depth, rows=False)
    across = schedule.block_cols // schedule.tile_cols
    lanes = min(8, across)
    last = last_of(product.cols)
    width = widest(last, 4)
    epilogue = replace(
        texts.write(product.stores, last, width), place=tuple(places(product.cols, "col", last, width))
    )
    return {
        "type": texts.type,
        "threads": schedule.threads,
        "tm": schedule.tile_rows,
        "nv": schedule.vectors,
        "bm": schedule.block_rows,
        "bn": schedule.block_cols,
        "bk": schedule.depth,
        "band": schedule.band,
        "rows": rows,
        "cols": cols,
        "row_blocks": -(-rows // schedule.block_rows),
        "col_blocks": -(-cols // schedule.block_cols),
        "chunks": depth.blocks,
        "chunks_a_part": -(-depth.blocks // schedule.parts),
        "nested": depth.nested,
        "blocks_inner": depth.blocks_inner,
        "tail": depth.tail,
        "lanes_x": lanes,
        "warps_x": across // lanes,
        "meets": texts.meets(product, schedule.block_cols) if depth.nested else None,
        "a": a,
        "b": b,
        "a_stride": schedule.block_rows + (PAD if a.along_inner else 0),
        "b_stride": schedule.block_cols + (PAD if b.along_inner else 0),
        "a_count": schedule.block_rows * schedule.depth // a.width // schedule.threads,
        "b_count": schedule.block_cols * schedule.depth // b.width // schedule.threads,
        "batch_place": places(product.batch, "batch"),
        "row_place": places(product.rows, "row"),
        "outer_place": {
            block: places(product.inner[:-1], f"{block} / {depth.blocks_inner}")
            for block in ("chunk", "next")
        },
        "epilogue": epilogue,
    }


def _depth(inner: Loops, step: int) -> _Depth:
    """Cut along the innermost loop where that wastes little, else along all of them as one."""
    innermost, whole = (inner[-1].extent if inner else 1), size(inner)
    padded = -(-innermost // step) * step
    if padded <= 1.15 * innermost:
        blocks = padded // step
        return _Depth(True, blocks, blocks * size(inner[:-1]), 0 if padded == innermost else innermost)
    blocks = -(-whole // step)
    return _Depth(False, 1, blocks, 0 if blocks * step == whole else whole)


def _read(product: Product, schedule: Schedule, texts: Texts, depth: _Depth, rows: bool) -> OperandText:
    """Read along whichever loop has neighbours in memory, the inner one where neither has."""
    operand, loops = (product.a, product.rows) if rows else (product.b, product.cols)
    contiguous = product.a_contiguous if rows else product.b_contiguous
    extent = schedule.block_rows if rows else schedule.block_cols
    deepest, last = last_of(product.inner), last_of(loops)
    along_inner = last not in contiguous
    lane = deepest if along_inner else last
    share = extent * schedule.depth // schedule.threads
    width = widest(lane, 4, share) if lane in contiguous else 1
    read = texts.read(operand, lane, width, along_inner)
    start = f"min({'row0' if rows else 'col0'} + x, {size(loops) - (1 if along_inner else width)})"
    at = product.inner[-1:] if depth.nested else product.inner
    return replace(
        read,
        axes=tuple(axis.name for axis in loops),
        place=tuple(places(loops, start, None if along_inner else last, width)),
        inner_place=tuple(places(at, "q", deepest if along_inner else None, width)),
    )
