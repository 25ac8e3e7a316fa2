"""Contractions straight from memory or textures into registers, for GPUs with little or slow local memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.expressions.indices import Axis
from torchedge.expressions.scalars import Scalar
from torchedge.expressions.texels import LANES
from torchedge.lowering.kernels.products import (
    Loops,
    OperandText,
    Product,
    Texts,
    last_of,
    multiple,
    places,
    size,
    widest,
)
from torchedge.lowering.schedules import Schedule

GROUP = (16, 8)
"""Work-group: along columns, along rows."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """An operand's share of a tile: one read covers `across` rows (or columns) and `depth` inner points.

    texts: the values of a row (or the vectors of four columns), by inner point.
    """

    read: OperandText
    across: int
    depth: int
    texts: Sequence[Sequence[str]] = ()


def register_launch(
    product: Product, schedule: Schedule
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (global size, local size): a work-item a tile."""
    batch, rows, cols, _ = product.sizes
    across, down = -(-cols // schedule.tile_cols), -(-rows // schedule.tile_rows)
    group = min(GROUP[0], 1 << (across - 1).bit_length()), min(GROUP[1], 1 << (down - 1).bit_length())
    sizes = (multiple(across, group[0]), multiple(down, group[1]), batch * schedule.parts)
    return sizes, (*group, 1)


def register_chunks(product: Product, schedule: Schedule) -> int:
    """Return into how many chunks the inner loops are cut."""
    return _chunks(product.inner, schedule)["chunks"]


def register_values(product: Product, schedule: Schedule, texts: Texts) -> dict[str, Any]:
    """Return what `contraction_register.cl.jinja` needs."""
    _, rows, cols, _ = product.sizes
    deepest, last = last_of(product.inner), last_of(product.cols)
    a = _tile(product.a, product.rows, deepest, product.a_contiguous, schedule.tile_rows, texts)
    b = _tile(product.b, product.cols, deepest, product.b_contiguous, schedule.tile_cols, texts)
    step = max(a.depth, b.depth)
    a_texts = [[_element(a, "a", i, k) for k in range(step)] for i in range(schedule.tile_rows)]
    b_texts = [[_four(b, "b", j, k, texts.type) for k in range(step)] for j in range(schedule.vectors)]
    width = widest(last, LANES)
    epilogue = replace(
        texts.write(product.stores, last, width), place=tuple(places(product.cols, "col", last, width))
    )
    return {
        "type": texts.type,
        "tm": schedule.tile_rows,
        "tn": schedule.tile_cols,
        "nv": schedule.vectors,
        "step": step,
        "deepest": deepest.name,
        "rows": rows,
        "cols": cols,
        "parts": schedule.parts,
        "batch_place": places(product.batch, "batch"),
        "row_place": places(product.rows, "row"),
        "outer_place": places(product.inner[:-1], "outer"),
        "a": replace(a, texts=a_texts),
        "b": replace(b, texts=b_texts),
        "epilogue": epilogue,
        **_chunks(product.inner, schedule),
    }


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


def _chunks(inner: Loops, schedule: Schedule) -> dict[str, int]:
    """Cut the inner loops into rounds of the outer ones; for more parts, the innermost loop into pieces."""
    inner_size, outer_size = (inner[-1].extent if inner else 1), size(inner[:-1])
    pieces = max(1, -(-schedule.parts // outer_size))
    piece = multiple(-(-inner_size // pieces), LANES)
    pieces = -(-inner_size // piece)
    chunks = outer_size * pieces
    return {
        "inner_size": inner_size,
        "piece": piece,
        "pieces": pieces,
        "chunks": chunks,
        "chunks_a_part": -(-chunks // schedule.parts),
    }
