"""The places that a kernel's work-items read and write, found by evaluating its index expressions over numpy.

A walk says which loops a work-item runs through, in its order, and how neighbouring work-items lie beside
each other, for N candidates at once. No kernel text is needed. (TMModel, 3.1 step III and section 4: the
access pattern's histogram H, reuse distance s and the lines that a warp touches.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.expressions.dialect import aligned
from torchedge.expressions.indices import Axis, Fetched, Floor, Index, Remainder, as_index, axes_of, of
from torchedge.expressions.scalars import Read, reads_of
from torchedge.graphs import ITEM_SIZES
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import LANES, Layout
from torchedge.textures.strides import (
    cross_block_strides,
    distinct_lines,
    lines_of,
    quad_columns,
    reuse_distances,
)
from torchedge.textures.work import ReadWork

SEQUENCE = 32
"""Accesses of a work-item whose places are evaluated."""
MOMENTS = 2
"""Points in time at which the places of a whole warp are evaluated."""
UNIT_BYTES = 16
"""Bytes of a texel of four floats: the unit of places in buffers."""


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop of a walk: in each of `count` rounds the position of `role` grows by `weight`; (N,) each."""

    role: str
    count: Any
    weight: Any


@dataclass(frozen=True, slots=True)
class Walk:
    """How the work-items of N candidates run through the loops of a nest.

    roles: by name the loops that one flat position stands for, from the outermost to the innermost one. time:
    the loops of a work-item around one access; lanes: the work-items of a work-group; both innermost first.
    group: how many positions of each role a work-group covers, (N,).
    """

    roles: Mapping[str, tuple[Axis, ...]]
    time: tuple[Digit, ...]
    lanes: tuple[Digit, ...]
    group: Mapping[str, Any]

    def extent(self, role: str) -> int:
        """Return the number of positions of a role."""
        return prod([axis.extent for axis in self.roles[role]])


@dataclass(frozen=True, slots=True)
class Access:
    """One operand's access: its element in terms of the loops, and its lanes.

    lane: the loop along which `width` (N,) neighbours are accessed at once. count: (N,) vectors that a
    work-item accesses.
    """

    tensor: Any
    indices: tuple[Index, ...]
    dtype: str
    lane: Axis | None
    width: Any
    count: Any


def access_works(
    access: Access,
    walk: Walk,
    layouts: Sequence[Layout],
    candidates: int,
    coefficients: KernelCoefficients,
    writes: bool = False,
) -> list[ReadWork]:
    """Return how N candidates access one operand, for each layout in which it may lie.

    GPUs access vectors that are not aligned element by element; caches join such writes.
    """
    first, group = _distinct(access, walk, candidates)
    few, width = _taken(walk, first, candidates), _rows(access.width, first, candidates)
    lane = next((r for r, loops in walk.roles.items() if access.lane in loops), None)
    neighbours = None if lane is None else _elements(access, few, {lane: np.arange(LANES)[None, :]}, {})
    lanes = _steps(few.lanes, coefficients.warp)
    warps = [_elements(access, few, lanes, _steps(few.time, 1, moment * 7)) for moment in range(MOMENTS)]
    scalars = coefficients.warp > 1 and not writes
    vectors = [_vectors(access, neighbours, layout, width, scalars) for layout in layouts]
    sequences: dict[bytes, list[Array]] = {}
    places, lines, warp_lines, warp_share, columns = [], [], [], [], []
    for layout, (split, _) in zip(layouts, vectors, strict=True):
        image = layout.storage != "buffer"
        path = coefficients.image if image else coefficients.buffer
        line_units = max(1, path.line_bytes // UNIT_BYTES)
        if split.tobytes() not in sequences:
            time = few.time
            if lane is not None and (split > 1).any():
                time = (Digit(lane, split, 1), *time)
            sequences[split.tobytes()] = _elements(access, few, _steps(time, SEQUENCE), {})
        x, y, _ = _places(sequences[split.tobytes()], access, layout, len(first))
        places.append((x, y))
        lines.append(lines_of(x, y, line_units))
        moments = [_places(element, access, layout, len(first)) for element in warps]
        warp_lines.append([lines_of(x, y, line_units) for x, y, _ in moments])
        columns.append(np.mean([quad_columns(x) for x, _, _ in moments], axis=0))
        warp_share.append([(y << 36) + x * LANES + (0 if image else z) for x, y, z in moments])
    strides = cross_block_strides(*[_stacked(axis) for axis in zip(*places, strict=True)])
    reuse = reuse_distances(_stacked(lines))
    touched, share = (
        distinct_lines(_stacked([_stacked(moments) for moments in its])).mean(axis=1)
        for its in (warp_lines, warp_share)
    )
    itemsize = ITEM_SIZES[access.dtype]
    distinct = min(prod(access.tensor.shape), _used(access, walk)) * itemsize
    share_of_group = np.ones(candidates)
    in_use = set[Axis]().union(*map(axes_of, access.indices))
    for role, loops in walk.roles.items():
        if in_use & set(loops):
            share_of_group = share_of_group * np.minimum(1.0, walk.group.get(role, 1) / walk.extent(role))
    group_bytes = np.maximum(share_of_group * distinct, itemsize)

    def whole(values: Any) -> Array:  # noqa: ANN401
        return np.broadcast_to(np.asarray(values), (len(first),))[group]

    works = []
    for number, (layout, (split, moved)) in enumerate(zip(layouts, vectors, strict=True)):
        image = layout.storage != "buffer"
        nbytes = (LANES if image else moved) * itemsize
        count = np.broadcast_to(np.asarray(access.count, float), (candidates,)) * whole(split)
        works.append(
            ReadWork(
                image=np.full(candidates, image),
                count=count,
                nbytes=whole(nbytes) * 1.0,
                distinct_bytes=np.full(candidates, float(distinct)),
                strides=strides[number][group],
                reuse=np.where(count > 1, reuse[number][group], 0.0),
                warp_lines=touched[number][group],
                warp_share=share[number][group],
                group_bytes=group_bytes,
                quad_columns=columns[number][group],
                again=np.zeros(candidates, bool),
            )
        )
    return works


def _stacked(arrays: Sequence[Array]) -> Array:
    """Stack positions of equal rows; one that does not change over the steps has a single column."""
    return np.stack(np.broadcast_arrays(*arrays))


def evaluate(index: Index, values: Mapping[Axis, Array], known: dict[Any, Array]) -> Array:
    """Return the numbers that an index is where the loops have these values. known: results for its atoms."""
    total: Array = np.asarray(index.const)
    for atom, coefficient in index.terms:
        if atom not in known:
            if isinstance(atom, Axis):
                known[atom] = values.get(atom, np.asarray(0))
            elif isinstance(atom, Floor):
                known[atom] = evaluate(atom.index, values, known) // atom.divisor
            elif isinstance(atom, Remainder):
                known[atom] = evaluate(atom.index, values, known) % atom.divisor
            else:
                known[atom] = _scattered(atom, values, known)
        total = total + coefficient * known[atom]
    return total


def _scattered(atom: Fetched, values: Mapping[Axis, Array], known: dict[Any, Array]) -> Array:
    """Return numbers in the place of indices that lie in memory: scattered over their range."""
    seed: Array = np.asarray(0)
    for read in reads_of(atom.value):
        for index in read.indices:
            seed = seed * 31 + evaluate(index, values, known)
    return atom.low + (seed * 2654435761 % 2**32) % (atom.high - atom.low + 1)


def _distinct(access: Access, walk: Walk, candidates: int) -> tuple[Array, Array]:
    """Return candidates that walk differently: the first of each kind, and by candidate its kind."""
    columns = [access.width]
    for digit in (*walk.time, *walk.lanes):
        columns += [digit.count, digit.weight]
    table = np.stack([np.broadcast_to(np.asarray(c, np.int64), (candidates,)) for c in columns])
    keys = np.zeros(candidates, np.int64)
    for column in table:  # a hash of all columns; collisions of 64 bits do not matter for a cost
        keys = (keys ^ column) * 0x100000001B3 + 0x9E3779B9
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    return first, group.reshape(-1)


def _rows(column: Any, rows: Array, candidates: int) -> Array:  # noqa: ANN401
    values = np.asarray(column)
    return values[rows] if values.shape == (candidates,) else np.broadcast_to(values, rows.shape)


def _taken(walk: Walk, rows: Array, candidates: int) -> Walk:
    def taken(digits: Sequence[Digit]) -> tuple[Digit, ...]:
        return tuple(
            [
                Digit(d.role, _rows(d.count, rows, candidates), _rows(d.weight, rows, candidates))
                for d in digits
            ]
        )

    return replace(walk, time=taken(walk.time), lanes=taken(walk.lanes))


def _steps(digits: Sequence[Digit], length: int, start: int = 0) -> dict[str, Array]:
    """Return by role by how much positions grow: (N, length). The outermost digit has no end."""
    moved: dict[str, Array] = {}
    left: Array = np.arange(start, start + length)[None, :]
    for number, digit in enumerate(digits):
        count = np.maximum(np.asarray(digit.count), 1).reshape(-1, 1)
        value = left if number == len(digits) - 1 else left % count
        left = left // count
        step = value * np.asarray(digit.weight).reshape(-1, 1)
        moved[digit.role] = moved[digit.role] + step if digit.role in moved else step
    return moved


def _elements(
    access: Access, walk: Walk, first: Mapping[str, Array], second: Mapping[str, Array]
) -> list[Array]:
    """Return the elements, by dimension, of accesses whose positions grow by two sums of steps."""
    values: dict[Axis, Array] = {}
    for role, loops in walk.roles.items():
        position = _middle(walk.extent(role)) + first.get(role, 0) + second.get(role, 0)
        for axis in reversed(loops):
            values[axis] = np.asarray(position % axis.extent)
            position = position // axis.extent
    known: dict[Any, Array] = {}
    element = [evaluate(index, values, known) for index in access.indices]
    sizes = access.tensor.shape
    return [np.minimum(np.maximum(e, 0), max(0, n - 1)) for e, n in zip(element, sizes, strict=True)]


def _places(
    element: Sequence[Array], access: Access, layout: Layout, rows: int
) -> tuple[Array, Array, Array]:
    """Return (x, y, element within a unit) of elements, (rows, R) each."""
    x, y, z = (np.broadcast_to(p, (rows, p.shape[1])) for p in _texels(element, access, layout))
    return x, y, z


def _texels(element: Sequence[Array], access: Access, layout: Layout) -> tuple[Array, Array, Array]:
    shape, itemsize = access.tensor.shape, ITEM_SIZES[access.dtype]
    if layout.storage == "buffer":
        offset = np.atleast_2d(np.asarray(layout.offset(element, shape)) * itemsize)
        return offset // UNIT_BYTES, np.zeros_like(offset), offset % UNIT_BYTES // itemsize
    x, y, channel = np.broadcast_arrays(*[np.atleast_2d(v) for v in layout.texel(element, shape)])
    return x, y, channel


def _middle(size: int) -> int:
    """Return a position in the middle of a loop, not at an edge; aligned to vectors and tiles."""
    half = size // 2
    return half - half % min(64, 1 << max(half, 1).bit_length() - 1)


def _vectors(
    access: Access, neighbours: Sequence[Array] | None, layout: Layout, width: Array, scalars: bool
) -> tuple[Array, Array]:
    """Return (U,) accesses that one vector takes, and how many elements of a buffer each one moves.

    One access where the elements are neighbours, or one element. neighbours: the elements of the first lanes;
    None where no lane moves them. scalars: a vector in a buffer that is not aligned is read in elements.
    """
    one = np.ones_like(width)
    if neighbours is None:
        return one, one
    x, y, z = (p[0] for p in _texels(neighbours, access, layout))
    if layout.storage != "buffer":
        together = (np.diff(x) == 0).all() and (np.diff(y) == 0).all()
        return np.where(width <= LANES, 1, width // LANES) if together else width, one
    steps = np.diff(x * (UNIT_BYTES // ITEM_SIZES[access.dtype]) + z)
    if (steps == 1).all():
        lane = access.lane
        if not scalars or lane is None:
            return one, width
        offset, whole = (
            as_index(layout.offset(access.indices, access.tensor.shape)),
            np.ones(len(width), bool),
        )
        for number in set(width.tolist()):
            begin = of(Axis("vector", max(1, lane.extent // number))) * number
            whole[width == number] = aligned(offset.substitute({lane: begin}), number)
        return np.where(whole, one, width), np.where(whole, width, one)
    return one if (steps == 0).all() else width, one


def _used(access: Access, walk: Walk) -> int:
    """Return how many elements of an operand the loops reach, at most."""
    axes = set[Axis]().union(*map(axes_of, access.indices))
    loops = {axis for group in walk.roles.values() for axis in group}
    fetched = any(isinstance(atom, Fetched) for index in access.indices for atom, _ in index.terms)
    return 1 << 60 if fetched else prod([axis.extent for axis in axes & loops])


def accesses_of(reads: Sequence[Read], lane: Axis | None, width: Any, count: Any) -> list[Access]:  # noqa: ANN401
    """Return the accesses of reads that a work-item executes `count` times, `width` neighbours at once."""
    return [Access(read.tensor, read.indices, read.dtype, lane, width, count) for read in reads]
