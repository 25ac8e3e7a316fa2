"""Every schedule that the tuner considers for a kernel, as arrays.

A set of N candidates is one schedule whose fields hold (N,) arrays; a field that all share may be one number.
The first candidate of the first set is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.lowering.schedules import (
    DEPTH,
    DEPTH_OF_A_SLICE,
    ContractionExtents,
    ContractionSchedule,
    Extents,
    RowsExtents,
    RowsSchedule,
    Schedule,
    default_schedule,
    is_legal,
    launch_sizes,
    multiple,
    row_counts,
)
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import LANES

PANEL_TILES = ((8, 2), (8, 3), (10, 2), (16, 1), (4, 4), (6, 4), (12, 2), (4, 2), (8, 1), (4, 1))
"""Register tiles of a processor: rows and vectors."""
PANEL_ROWS, PANEL_COLS = (32, 64, 128, 208), (64, 128, 256, 512)
LOCAL_BLOCKS = (
    # rows, columns, depth, rows and vectors of a work-item's tile, band
    (256, 128, 8, 16, 2, 4),
    (128, 128, 16, 8, 2, 1),
    (128, 128, 8, 16, 2, 1),
    (128, 64, 16, 8, 2, 1),
    (64, 128, 16, 8, 2, 1),
    (64, 64, 16, 8, 2, 1),
    (64, 64, 16, 8, 1, 1),
    (64, 32, 16, 8, 1, 1),
    (32, 64, 16, 4, 2, 1),
    (32, 32, 16, 4, 1, 1),
)
"""Blocks of a GPU whose operands pass through local memory."""
TILES = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2))
"""Rows and vectors of a work-item that multiplies straight from memory."""
GROUPS = ((8, 8), (16, 4), (4, 16), (16, 8), (32, 4), (64, 1), (1, 64), (16, 16), (32, 8))
"""Largest work-groups of it, along columns and along rows."""
SLICES = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("panel", "local", "register", "RowsSchedule")
FIELDS = 16
"""Columns of `Candidates.table`: a contraction's schedule has the most numbers."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """N schedules of one kind of kernel: `schedules` has (N,) arrays in its fields."""

    schedules: Any
    count: int

    def __len__(self) -> int:
        return self.count

    def pick(self, number: int) -> Schedule:
        """Return one schedule, with plain numbers."""
        schedule: Schedule = _taken(self.schedules, number)
        return schedule

    def subset(self, numbers: Array) -> Candidates:
        """Return the candidates with these numbers."""
        return Candidates(_taken(self.schedules, numbers), len(numbers))

    def table(self) -> Array:
        """Return (N, FIELDS) whole numbers: the kind, then the fields; 0 where a kind has fewer."""
        kind = getattr(self.schedules, "kind", type(self.schedules).__name__)
        columns = [np.asarray(KINDS.index(kind)), *_columns(self.schedules)]
        columns += [np.zeros((), int)] * (FIELDS - len(columns))
        return np.stack([np.broadcast_to(column, (self.count,)) for column in columns], axis=1)


def candidates_of(extents: Extents, target: Target) -> list[Candidates]:
    """Return the candidates of a kernel on a device class, a set for each kind; all are legal."""
    default = default_schedule(extents, target)
    sets: list[Any]
    if isinstance(extents, RowsExtents) and not extents.sum_bytes:
        sets = [_elements(extents, target)]
    elif isinstance(extents, RowsExtents):
        assert isinstance(default, RowsSchedule)
        sets = [
            *_rows(extents, default, target, extents.along),
            *_rows(extents, default, target, not extents.along),
        ]
        shared = default.members > 1 and len(sets) > 1
        sets = [sets[shared], *[s for s in sets if s is not sets[shared]]]
    elif default.kind == "panel":  # type: ignore[union-attr]
        sets = [_panels(extents, target)]
    elif default.kind == "local":  # type: ignore[union-attr]
        sets = [_locals(extents), _registers(extents, target)]
    else:
        sets = [_registers(extents, target)]
    first, *others = [_legal(schedules, extents, target) for schedules in sets]
    return [_with_first(default, first), *[more for more in others if len(more)]]


def _panels(extents: ContractionExtents, target: Target) -> ContractionSchedule:
    default = default_schedule(extents, target)
    assert isinstance(default, ContractionSchedule)
    tiles = np.array(PANEL_TILES)
    rows = np.array(sorted({min(n, extents.rows) for n in (*PANEL_ROWS, default.block_rows)}))
    cols = np.array(sorted({min(n, extents.cols) for n in (*PANEL_COLS, default.block_cols)}))
    deep = max(1, extents.inner // DEPTH)
    slices = [n for n in {*SLICES[:4], default.slices} if n <= min(deep, target.work_items)] or [1]
    tile, row, col, part = _grid(np.arange(len(tiles)), rows, cols, np.array(sorted(slices)))
    height, vectors = tiles[tile, 0], tiles[tile, 1]
    # A tile no higher than the product, and no wider than its columns need.
    useful = ((height <= 4) | (height <= multiple(extents.rows, 2))) & (
        (vectors == 1) | ((vectors - 1) * default.vector < extents.cols)
    )
    height, vectors, row, col, part = (a[useful] for a in (height, vectors, row, col, part))
    return ContractionSchedule(
        "panel",
        multiple(row, height),
        multiple(col, vectors * default.vector),
        DEPTH,
        height,
        vectors,
        default.vector,
        part,
        default.rows_first,
    )


def _locals(extents: ContractionExtents) -> ContractionSchedule:
    blocks = np.array(LOCAL_BLOCKS)
    slices: Any = np.array([n for n in SLICES if n == 1 or extents.inner // n >= DEPTH_OF_A_SLICE // 2])
    number, part = _grid(np.arange(len(blocks)), slices)
    rows, cols, depth, tile_rows, vectors, band = blocks[number].T
    return ContractionSchedule("local", rows, cols, depth, tile_rows, vectors, LANES, part, True, band)


def _registers(extents: ContractionExtents, target: Target) -> ContractionSchedule:
    tiles = np.array([tile for tile in TILES if tile[1] == 1 or extents.cols > LANES])
    groups = np.array([group for group in GROUPS if prod(group) <= target.group])
    slices: Any = np.array([n for n in SLICES[::2] if n == 1 or extents.inner // n >= DEPTH_OF_A_SLICE // 4])
    tile, group, unroll, part = _grid(np.arange(len(tiles)), np.arange(len(groups)), np.array([1, 2]), slices)
    tile_rows, vectors = tiles[tile].T
    return ContractionSchedule(
        "register", tile_rows, vectors * LANES, LANES, tile_rows, vectors, LANES, part,
        group=tuple(groups[group].T), unroll=unroll,
    )  # fmt: skip


def _rows(extents: RowsExtents, default: RowsSchedule, target: Target, along: bool) -> list[RowsSchedule]:
    """Rows of a work-item's own, and rows that a work-group shares; lanes along the row or across rows."""
    lane = (extents.inner or (1,))[-1] if along else (extents.rows or (1,))[-1]
    vectors = [n for n in (1, 2, 4, 8, 16) if n <= min(target.vector, max(lane, 1))]
    if extents.searches and along:
        vectors = [1]
    cuts = sorted({1, default.slices, *([4, 16, 64] if extents.slices else [])})
    cuts = [n for n in cuts if n == 1 or n * 8 <= prod(extents.inner)]
    sizes = [n for n in (1, 4, 16, 32, 64, 128, 256) if target.least_group <= n or n == 1]
    vector, size, cut = _grid(np.array(vectors), np.array(sizes), np.array(cuts))
    counts = row_counts(extents, np.full(len(vector), int(along)), vector) if extents.rows else []
    group = _filled(counts, size) if extents.rows else (np.ones_like(size),)
    own = RowsSchedule(vector, along, 1, group, slices=cut)
    if target.row_group == 1:
        return [own]
    members = np.array([n for n in (8, 16, 32, 64, 128, 256) if n <= prod(extents.inner) // 2])
    vector, member, across, cut = _grid(
        np.array(vectors), members, np.array([1, 2, 4, 8, 32]), np.array(cuts)
    )
    whole = member * across <= min(256, target.largest_group)
    vector, member, across, cut = (a[whole] for a in (vector, member, across, cut))
    return [own, RowsSchedule(vector, along, member, (member * across,), slices=cut)]


def _elements(extents: RowsExtents, target: Target) -> RowsSchedule:
    """Element-wise work: vectors, those of a work-item, and work-groups."""
    vectors = np.array([n for n in (1, 2, 4, 8, 16) if n <= target.vector])
    sizes = np.array([n for n in (1, 4, 16, 32, 64, 128, 256, 512) if n >= target.least_group])
    vector, items, size = _grid(vectors, np.array([1, 2, 4, 8]), sizes)
    *others, last = extents.rows or (1,)
    counts: list[Any] = [*others, np.maximum(1, last // (vector * items))]
    return RowsSchedule(vector, False, 1, _filled(counts, size), further=items - 1)


def _filled(counts: Sequence[Any], sizes: Array) -> tuple[Any, ...]:
    """Return work-groups of these sizes, as wide as possible along the innermost loop."""
    group, left = [], sizes
    for wanted in map(np.asarray, launch_sizes(counts)):
        powers = 2 ** np.floor(np.log2(np.maximum(wanted, 1))).astype(int)
        part = np.minimum(np.where(wanted <= 64, wanted, powers), left)
        group.append(part)
        left = left // part
    return tuple(group)


def _grid(*axes: Array) -> list[Any]:
    """Return the columns of all combinations."""
    return [axis.reshape(-1) for axis in np.meshgrid(*axes, indexing="ij")]


def _legal(schedules: Any, extents: Extents, target: Target) -> Candidates:  # noqa: ANN401
    """Return those candidates that are legal, each once."""
    legal = np.atleast_1d(is_legal(schedules, extents, target))
    if not legal.any():
        return Candidates(schedules, 0)
    columns = np.stack([np.broadcast_to(column, legal.shape) for column in _columns(schedules)], axis=1)
    _, first = np.unique(columns, axis=0, return_index=True)
    chosen = np.sort(first[legal[first]])
    return Candidates(_taken(schedules, chosen), len(chosen))


def _columns(schedules: Any) -> list[Array]:  # noqa: ANN401
    """Return the numeric fields of a schedule, those of tuples one by one."""
    columns = []
    for item in fields(schedules):
        value = getattr(schedules, item.name)
        if not isinstance(value, str):
            columns += [np.asarray(v, int) for v in (value if isinstance(value, tuple) else (value,))]
    return columns


def _with_first(default: Any, candidates: Candidates) -> Candidates:  # noqa: ANN401
    """Return the candidates with the default before them, and only there."""
    if not len(candidates):
        return Candidates(_mapped(lambda number: np.array([number]), default), 1)
    columns = [np.broadcast_to(c, (len(candidates),)) for c in _columns(candidates.schedules)]
    same = np.all([c == d for c, d in zip(columns, _columns(default), strict=True)], axis=0)
    count = int((~same).sum())
    merged = _mapped(
        lambda first, column: np.concatenate([[first], np.broadcast_to(column, (count,))]),
        default,
        _taken(candidates.schedules, np.flatnonzero(~same)),
    )
    return Candidates(merged, count + 1)


def _taken(schedules: Any, number: Any) -> Any:  # noqa: ANN401
    """Return one candidate as a schedule of plain numbers, or several as one of arrays."""

    def take(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, np.ndarray):
            return value
        return value[number].item() if np.ndim(number) == 0 else value[number]

    return _mapped(take, schedules)


def _mapped(function: Callable[..., Any], *schedules: Any) -> Any:  # noqa: ANN401
    """Return the first schedule with a function of the numbers of all in place of each of its numbers."""

    def mapped(*values: Any) -> Any:  # noqa: ANN401
        if isinstance(values[0], (str, bool)):
            return values[0]
        if isinstance(values[0], tuple):
            return tuple([mapped(*parts) for parts in zip(*values, strict=True)])
        return function(*values)

    names = [item.name for item in fields(schedules[0])]
    return replace(schedules[0], **{name: mapped(*[getattr(s, name) for s in schedules]) for name in names})
