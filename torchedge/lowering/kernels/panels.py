"""Contractions on a processor with caches: blocks copied into the order of the registers, then multiplied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def panel_chunks(product: Product, schedule: Schedule) -> int:
    """Return into how many chunks the inner loops are cut."""
    return _chunks(product.inner, schedule)["chunks"]


def panel_launch(product: Product, schedule: Schedule) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (global size, local size): a work-item a block."""
    batch, rows, cols, _ = product.sizes
    counts = [-(-rows // schedule.block_rows), -(-cols // schedule.block_cols)]
    first, second = counts if schedule.rows_first else counts[::-1]
    return (first, second, batch * schedule.parts), (1, 1, 1)


def panel_values(product: Product, schedule: Schedule, texts: Texts) -> dict[str, Any]:
    """Return what `contraction_panel.cl.jinja` needs."""
    _, rows, cols, _ = product.sizes
    epilogue = _epilogue(product, schedule, texts)
    chunks = _chunks(product.inner, schedule)
    return {
        "type": texts.type,
        "vector": f"{texts.type}{schedule.vector}",
        "v": schedule.vector,
        "nv": schedule.vectors,
        "tm": schedule.tile_rows,
        "tn": schedule.tile_cols,
        "bm": schedule.block_rows,
        "bn": schedule.block_cols,
        "rows": rows,
        "cols": cols,
        "parts": schedule.parts,
        "row_dim": 0 if schedule.rows_first else 1,
        "batch_place": places(product.batch, "batch"),
        "row_place": places(product.rows, "row0 + r"),
        "outer_place": places(product.inner[:-1], "o"),
        "nest": product.inner[:-1] if chunks["chunks"] == 1 else (),
        "meets": texts.meets(product, schedule.block_cols),
        "a": _read_a(product, schedule, texts),
        "b": _read_b(product, schedule, texts),
        "epilogue": epilogue,
        **chunks,
    }


def _chunks(inner: Loops, schedule: Schedule) -> dict[str, int]:
    """Cut the inner loops into chunks of about `depth` points: whole innermost loops, or pieces of one."""
    inner_size, outer_size = (inner[-1].extent if inner else 1), size(inner[:-1])
    if inner_size <= schedule.depth:
        outers = min(schedule.depth // inner_size, outer_size)
        pieces, piece, deep = 1, inner_size, outers * inner_size
    else:
        outers, pieces = 1, -(-inner_size // schedule.depth)
        piece = deep = multiple(-(-inner_size // pieces), 16)
        pieces = -(-inner_size // piece)
    chunks = -(-outer_size // outers) * pieces
    return {
        "inner_size": inner_size,
        "outer_size": outer_size,
        "outers": outers,
        "pieces": pieces,
        "piece": piece,
        "chunks": chunks,
        "chunks_a_part": -(-chunks // schedule.parts),
        "ks": multiple(deep, 16),
    }


def _read_a(product: Product, schedule: Schedule, texts: Texts) -> OperandText:
    """Read along the inner loop, or along rows where those alone are neighbours in memory."""
    deepest, last = last_of(product.inner), last_of(product.rows)
    if last in product.a_contiguous and deepest not in product.a_contiguous:
        width = widest(last, schedule.vector, schedule.tile_rows)
        read = texts.read(product.a, last, width)
        return replace(
            read,
            place=tuple(places(product.rows, "row0 + r", last, width)),
            inner_place=tuple(_at_depth(product.inner, 1)),
        )
    width = widest(deepest, schedule.vector)
    read = texts.read(product.a, deepest, width, along_inner=True)
    return replace(
        read,
        place=tuple(places(product.rows, "row0 + r")),
        inner_place=tuple(_at_depth(product.inner, width)),
    )


def _read_b(product: Product, schedule: Schedule, texts: Texts) -> OperandText:
    """Read along columns, or along the inner loop where that alone has neighbours in memory."""
    deepest, last = last_of(product.inner), last_of(product.cols)
    if deepest in product.b_contiguous and last not in product.b_contiguous:
        width = widest(deepest, schedule.vector, schedule.tile_cols)
        read = texts.read(product.b, deepest, width, along_inner=True)
        column = f"min(col0 + c + x, {size(product.cols) - 1})"
        return replace(
            read,
            place=tuple(places(product.cols, column)),
            inner_place=tuple(_at_depth(product.inner, width)),
        )
    width = widest(last, schedule.vector)
    read = texts.read(product.b, last, width)
    return replace(
        read,
        place=tuple(places(product.cols, "col0 + c", last, width)),
        inner_place=tuple(_at_depth(product.inner, 1)),
    )


def _epilogue(product: Product, schedule: Schedule, texts: Texts) -> OperandText:
    last = last_of(product.cols)
    width = widest(last, schedule.vector)
    return replace(
        texts.write(product.stores, last, width),
        place=tuple(places(product.cols, "col0 + c", last, width)),
    )


def _at_depth(inner: Loops, width: int) -> list[str]:
    return places(inner[-1:], "q", inner[-1] if inner else None, width)
