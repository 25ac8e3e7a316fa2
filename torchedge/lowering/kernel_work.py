"""The work of a kernel's candidates, from its loops alone: what the cost model of `textures.model` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.expressions.indices import Axis
from torchedge.expressions.scalars import reads_of
from torchedge.lowering.candidates import Candidates
from torchedge.lowering.kernels.contractions import depth_of
from torchedge.lowering.kernels.loops import work_of
from torchedge.lowering.kernels.nests import Nest
from torchedge.lowering.kernels.pointwise import PointwiseNest
from torchedge.lowering.kernels.products import Product, last_of, widest
from torchedge.lowering.kernels.rows import RowsNest
from torchedge.lowering.nodes import Node
from torchedge.lowering.schedules import PAD, RowsExtents, launch_sizes
from torchedge.lowering.targets import Target
from torchedge.lowering.walks import Access, Digit, Walk, access_works, accesses_of
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import LANES, Layout
from torchedge.textures.work import KernelWork, ReadWork

Array = npt.NDArray[Any]

OperandWorks = dict[tuple[int, Layout], ReadWork]
"""Work of a launch's operands, by their number and layout."""

ADDRESSES = 80
"""Bytes of registers for addresses and counters of a work-item."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The launch of N candidates without the places of their operands.

    columns: of `KernelWork`. reads, writes: (walk, access) of each operand. slices: (N,) copies of the
    results that are written. scratch: what the launch reads besides tensors.
    """

    candidates: int
    columns: Mapping[str, Any]
    reads: tuple[tuple[Walk, Access], ...]
    writes: tuple[tuple[Walk, Access], ...]
    slices: Any = 1
    scratch: tuple[ReadWork, ...] = ()

    def work(
        self,
        placed: Sequence[Mapping[Node, Layout]],
        coefficients: KernelCoefficients,
        known: OperandWorks | None = None,
    ) -> KernelWork:
        """Return the work of all candidates in several choices of layouts: those of the first choice first.

        known: work of operands; what it lacks is added.
        """
        works = {} if known is None else known
        same: dict[Any, int] = {}

        def work_of_operand(number: int) -> ReadWork:
            walk, access = (*self.reads, *self.writes)[number]
            alike = (id(walk), access.tensor, access.indices, access.dtype, access.lane)
            number = same.setdefault((*alike, id(access.width), id(access.count)), number)
            own = [layouts[access.tensor] for layouts in placed]
            several = list(dict.fromkeys(own))
            missing = [layout for layout in several if (number, layout) not in works]
            if missing:
                writes = number >= len(self.reads)
                added = access_works(access, walk, missing, self.candidates, coefficients, writes)
                works.update({(number, layout): work for layout, work in zip(missing, added, strict=True)})
            return _joined([works[number, layout] for layout in several], [several.index(x) for x in own])

        count = len(placed)
        operands = [work_of_operand(number) for number in range(len(self.reads) + len(self.writes))]
        elements = [(access.tensor, access.indices) for _, access in self.reads]
        for number, element in enumerate(elements):
            if element in elements[:number]:
                operands[number] = replace(operands[number], again=np.ones(count * self.candidates, bool))
        scratch = [_joined([part.spread_over(self.candidates)], [0] * count) for part in self.scratch]
        slices = np.tile(np.broadcast_to(self.slices, (self.candidates,)), count)
        columns = {
            name: np.tile(np.broadcast_to(value, (self.candidates, 3)), (count, 1))
            if name == "group"
            else np.tile(np.broadcast_to(np.asarray(value, float), (self.candidates,)), count)
            for name, value in self.columns.items()
        }
        writes = [
            replace(part, distinct_bytes=part.distinct_bytes * slices) for part in operands[len(self.reads) :]
        ]
        return KernelWork(**columns, reads=(*scratch, *operands[: len(self.reads)]), writes=tuple(writes))


def _joined(works: Sequence[ReadWork], order: Sequence[int]) -> ReadWork:
    """Return an operand's work in several layouts, one after the other. order: which work each has."""
    if len(order) == 1:
        return works[0]
    columns = {}
    for name in ReadWork.__dataclass_fields__:
        column = np.stack([getattr(work, name) for work in works])[list(order)]
        columns[name] = column.reshape(-1, *column.shape[2:])
    return ReadWork(**columns)


def sketches_of(nest: Nest, candidates: Candidates, target: Target) -> list[tuple[Sketch, Any]]:
    """Return the launches of a kernel's candidates: (launch, 1 for candidates that need it, else 0).

    A contraction in slices has a second launch, which adds them.
    """
    if isinstance(nest, Product):
        product = _contraction(nest, candidates)
        slices = candidates.schedules.slices
        if np.max(slices) == 1:
            return [(product, 1.0)]
        return [(product, 1.0), (_sum(nest, candidates, target), np.asarray(slices) > 1)]
    if isinstance(nest, RowsNest):
        shares, cuts = _shares(candidates, nest.extents)
        rows = [(_rows(nest, candidates, shares, cuts), np.ones(len(candidates)))]
        cut = np.asarray(candidates.schedules.slices) > 1
        return [*rows, (_join(nest, candidates, cuts), cut)] if np.any(cut) else rows
    return [(_pointwise(nest, candidates), 1.0)]


def _over(amount: Any, step: Any) -> Any:  # noqa: ANN401 - numbers or arrays
    return -(-amount // step)


# element by element -----------------------------------------------------------------------------------------


def _launch_walk(loops: Sequence[Axis], group: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, ...]:
    """Return (roles, lanes, group) of loops spread over a launch, the innermost loop first."""
    order = list(reversed(loops))
    roles = {"x": tuple(order[:1]), "y": tuple(order[1:2]), "z": tuple(reversed(order[2:]))}
    names = [name for name, axes in roles.items() if axes]
    lanes = tuple([Digit(n, g, w) for n, g, w in zip(names, group, weights, strict=False)])
    covered = {n: np.asarray(g) * w for n, g, w in zip(names, group, weights, strict=False)}
    return roles, lanes, covered


def _padded(counts: Sequence[Any], group: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return the work-items of a launch, padding to whole work-groups included."""
    return prod([_over(np.asarray(n), g) * g for n, g in zip(launch_sizes(counts), group, strict=True)])


def _three(group: Sequence[Any], candidates: int) -> Array:
    """Return (N, 3) work-group sizes."""
    columns = [np.broadcast_to(np.asarray(g, float), (candidates,)) for g in (*group, 1, 1)[:3]]
    return np.stack(columns, axis=1)


def _pointwise(nest: PointwiseNest, candidates: Candidates) -> Sketch:
    schedule = candidates.schedules
    vector, items = schedule.vector, schedule.items
    roles, lanes, group = _launch_walk(nest.loops, schedule.group, (vector, 1, 1))
    last = nest.loops[-1] if nest.loops else None
    step = (last.extent if last else 1) // items
    time = (Digit("x", items, step),) if last else ()
    walked = Walk(roles, time, lanes, {**group, "x": group.get("x", 1) * items})
    values = [item.value for _, item in nest.stores]
    extents = [axis.extent for axis in nest.loops]
    counts = [*extents[:-1], extents[-1] // (vector * items)] if extents else []
    columns = {
        "items": _padded(counts, schedule.group) * np.ones(len(candidates)),
        "group": _three(schedule.group, len(candidates)),
        "flops": (work_of(values) + 1) * vector * items,
        "registers": ADDRESSES + 4 * vector * (1 + len(reads_of(*values))) * np.minimum(items, 4),
        "vector": vector,
        "chains": items,
    }
    reads = [(walked, a) for a in accesses_of(reads_of(*values), last, vector, items)]
    return Sketch(len(candidates), columns, tuple(reads), _writes(nest.stores, walked, last, vector, items))


def _writes(
    stores: Iterable[Any],
    walked: Walk,
    lane: Axis | None,
    width: Any,  # noqa: ANN401
    count: Any,  # noqa: ANN401
) -> tuple[tuple[Walk, Access], ...]:
    written = [(node, item) for node, item in stores]
    return tuple(
        [(walked, Access(node, item.element, node.dtype, lane, width, count)) for node, item in written]
    )


# rows -------------------------------------------------------------------------------------------------------


def _rows(nest: RowsNest, candidates: Candidates, shares: Array, cuts: Array) -> Sketch:
    """Describe reductions: each work-item has rows of its own, or a work-group shares its rows."""
    s, count, extents = candidates.schedules, len(candidates), nest.extents
    vector, lane = np.asarray(s.vector), nest.lane(s.along)
    loops = (*nest.rows, *nest.inner)
    weight = {axis.name: vector if axis is lane else 1 for axis in loops}
    rounds = {axis.name: axis.extent // weight[axis.name] for axis in loops}
    share = {axis.name: shares[:, k] for k, axis in enumerate(loops)}
    cut = {axis.name: cuts[:, k] for k, axis in enumerate(loops)}
    shared = bool(np.max(s.members) > 1)
    if shared:
        roles = {axis.name: (axis,) for axis in loops}
        lanes = tuple([Digit(a.name, share[a.name], weight[a.name]) for a in nest.memory])
        covered = {a.name: share[a.name] * weight[a.name] for a in nest.rows}
        group = _three(s.group, count)
        blocks = prod([_over(rounds[a.name], share[a.name]) for a in nest.rows])
        items = blocks * np.prod(group, axis=1)
    else:
        below = vector if not s.along else 1
        roles, lanes, covered = _launch_walk(nest.rows, s.group, (below, 1, 1))
        roles |= {axis.name: (axis,) for axis in nest.inner}
        group = _three(s.group, count)
        counts = [rounds[axis.name] for axis in nest.rows]
        items = _padded(counts, s.group) * np.ones(count)
    slices = np.prod(cuts, axis=1)
    own = {a.name: _over(rounds[a.name], share[a.name] * cut[a.name]) for a in nest.inner}
    time = tuple([Digit(a.name, own[a.name], share[a.name] * weight[a.name]) for a in reversed(nest.inner)])
    walked = Walk(
        roles, time, lanes, {**covered, **{a.name: _over(a.extent, cut[a.name]) for a in nest.inner}}
    )
    times = prod(own.values()) if own else np.ones(count)
    by_element, by_row = nest.split_stores()
    values, stages = [item.value for _, item in by_element], len(nest.bodies)
    members = np.asarray(s.members)
    steps = np.log2(np.maximum(members, 1))
    columns = {
        "items": items * slices,
        "group": group,
        "flops": (work_of(nest.bodies) + 4 * stages + work_of(values)) * times * vector,
        "registers": ADDRESSES + 4 * vector * (2 + 2 * stages),
        "local_bytes": np.where(members > 1, np.prod(group, axis=1) * extents.sum_bytes, 0),
        "local_traffic": np.where(members > 1, 12 * steps * stages, 0),
        "barriers": np.where(members > 1, (1 + steps) * stages, 0),
        "vector": vector,
        # A sum waits for the one before it; compensated sums are four operations in a row.
        "chains": 0.25,
    }
    reads = [
        (walked, access)
        for part in (*[[body] for body in nest.bodies], values)
        for access in accesses_of(reads_of(*part), lane, vector, times)
    ]
    writes = [(walked, Access(n, c.element, n.dtype, lane, vector, times)) for n, c in by_element]
    over, width = (None, 1) if s.along else (lane, vector)  # lanes that are neighbouring rows
    writes += [(walked, Access(n, c.element, n.dtype, over, width, 1 / members)) for n, c in by_row]
    return Sketch(count, columns, tuple(reads), tuple(writes), slices)


def _shares(candidates: Candidates, extents: RowsExtents) -> tuple[Array, Array]:
    """Return (N, loops) work-items of a group along each loop, and slices of each loop."""
    s, count = candidates.schedules, len(candidates)
    keys = np.stack(
        [np.broadcast_to(c, (count,)) for c in (s.vector, s.members, prod(s.group), s.slices)], axis=1
    )
    _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    schedules = [candidates.pick(int(k)) for k in first]  # of each kind once
    shares = np.array([schedule.shares(extents) for schedule in schedules])  # type: ignore[union-attr]
    cuts = np.array([schedule.cuts(extents) for schedule in schedules])  # type: ignore[union-attr]
    place = place.reshape(-1)
    return shares[place].reshape(count, -1), cuts[place].reshape(count, -1)


def _scratch(slices: Array, nbytes: int, distinct: Array, lines: float, share: int) -> ReadWork:
    """Return the work of reading slices of results, each `nbytes` at a time and in order."""
    none = np.zeros(())
    of_read, touched, share_of_warp = (np.asarray(float(n)) for n in (nbytes, lines, share))
    count = slices.astype(float)
    return ReadWork(none.astype(bool), count, of_read, distinct, none, none, touched, share_of_warp)


def _join(nest: RowsNest, candidates: Candidates, cuts: Array) -> Sketch:
    """Describe the launch that joins the results of slices of rows."""
    count, extents = len(candidates), nest.extents
    rows, slices = max(1, prod(extents.rows)), np.prod(cuts, axis=1)
    distinct = slices * float(rows * extents.sum_bytes)
    read = _scratch(slices, extents.sum_bytes, distinct, lines=1, share=min(32, rows))
    columns = {
        "items": np.full(count, float(rows)),
        "group": np.array([min(64.0, rows), 1.0, 1.0]),
        "flops": 4.0 * slices,
        "registers": ADDRESSES,
        "chains": 0.25,
    }
    return Sketch(count, columns, (), (), scratch=(read,))


# contractions -----------------------------------------------------------------------------------------------


def _widths(axis: Axis, *limits: Any) -> Any:  # noqa: ANN401
    """Return `products.widest` of columns: the widest power of two that divides a loop and all limits."""
    width: Any = 1
    for power in (2, 4, 8, 16):
        fits = np.asarray(axis.extent % power == 0)
        for limit in limits:
            fits = fits & (np.asarray(limit) % power == 0)
        width = np.where(fits & (width == power // 2), power, width)
    return width


def _contraction(product: Product, candidates: Candidates) -> Sketch:
    sketch = {"panel": _panel, "local": _local, "register": _register}[candidates.schedules.kind]
    return sketch(product, candidates)


def _roles(product: Product) -> dict[str, tuple[Axis, ...]]:
    return {"batch": product.batch, "rows": product.rows, "cols": product.cols, "inner": product.inner}


def _operand(product: Product, rows: bool) -> tuple[Any, tuple[Axis, ...], frozenset[Axis], str]:
    if rows:
        return product.a, product.rows, product.a_contiguous, "rows"
    return product.b, product.cols, product.b_contiguous, "cols"


def _results(
    product: Product,
    walked: Walk,
    elements: Any,  # noqa: ANN401
    width: int,
) -> tuple[tuple[tuple[Walk, Access], ...], tuple[tuple[Walk, Access], ...]]:
    """Return reads and writes of the epilogue, which each work-item does for so many elements."""
    last = last_of(product.cols)
    values = [item.value for _, item in product.stores]
    count = elements / width
    reads = [(walked, a) for a in accesses_of(reads_of(*values), last, width, count)]
    return tuple(reads), _writes(product.stores, walked, last, width, count)


def _register(product: Product, candidates: Candidates) -> Sketch:
    s, count = candidates.schedules, len(candidates)
    batch, rows, cols, inner = product.sizes
    tile_rows, tile_cols = np.asarray(s.tile_rows), np.asarray(s.vectors) * s.vector
    across, down = _over(cols, tile_cols), _over(rows, tile_rows)
    group = [np.minimum(g, _power_above(n)) for g, n in zip(s.group, (across, down), strict=True)]
    lanes = (Digit("cols", group[0], tile_cols), Digit("rows", group[1], tile_rows))
    covered = {"cols": group[0] * tile_cols, "rows": group[1] * tile_rows, "inner": _over(inner, s.slices)}
    deepest, tiles = last_of(product.inner), []
    for is_rows in (True, False):
        _, loops, contiguous, _ = _operand(product, is_rows)
        last, extent = last_of(loops), tile_rows if is_rows else tile_cols
        along_inner = last not in contiguous
        lane = deepest if along_inner else last
        fits = lane in contiguous and lane.extent % LANES == 0
        width = np.where(fits & (along_inner | (extent % LANES == 0)), LANES, 1)
        tiles.append((lane, along_inner, width, extent))
    depths = [np.where(along, width, 1) for _, along, width, _ in tiles]
    step = np.maximum(*depths) * s.unroll
    reads: list[tuple[Walk, Access]] = []
    points = inner / s.slices
    for is_rows, (lane, along_inner, width, extent), depth in zip((True, False), tiles, depths, strict=True):
        operand, _, _, role = _operand(product, is_rows)
        wide = np.where(along_inner, 1, width)
        time = (
            Digit("inner", step // depth, depth),
            Digit(role, extent // wide, wide),
            Digit("inner", 1 << 30, step),
        )
        if not is_rows:  # columns are read point by point
            time = (time[1], time[0], time[2])
        walked = Walk(_roles(product), time, lanes, covered)
        each = extent / wide * points / depth
        reads += [(walked, a) for a in accesses_of(reads_of(operand), lane, width, each)]
    whole = Walk(
        _roles(product),
        (Digit("cols", tile_cols // LANES, LANES), Digit("rows", tile_rows, 1)),
        lanes,
        covered,
    )
    more, writes = _results(product, whole, tile_rows * tile_cols, widest(last_of(product.cols), LANES))
    values = tile_rows * tile_cols + step * (tile_rows + tile_cols)
    columns = {
        "items": _over(across, group[0])
        * group[0]
        * _over(down, group[1])
        * group[1]
        * batch
        * s.slices
        * np.ones(count),
        "group": _three(group, count),
        "flops": 2.0 * tile_rows * tile_cols * points,
        "registers": ADDRESSES + 4 * values,
        "vector": s.vector,
        "chains": tile_rows * np.asarray(s.vectors),
    }
    return Sketch(count, columns, (*reads, *more), writes, s.slices)


def _power_above(numbers: Any) -> Any:  # noqa: ANN401
    return 2 ** np.ceil(np.log2(np.maximum(numbers, 1))).astype(int)


def _local(product: Product, candidates: Candidates) -> Sketch:
    s, count = candidates.schedules, len(candidates)
    batch, rows, cols, inner = product.sizes
    depth, threads, tile_rows = np.asarray(s.depth), s.threads, np.asarray(s.tile_rows)
    tile_cols, deepest = np.asarray(s.vectors) * s.vector, last_of(product.inner)
    cuts = {step: depth_of(product, step).blocks for step in np.unique(depth).tolist()}
    blocks = np.array([cuts[step] for step in np.atleast_1d(depth).tolist()])
    chunks = _over(blocks, s.slices)
    covered = {"rows": s.block_rows, "cols": s.block_cols, "inner": _over(inner, s.slices)}
    reads: list[tuple[Walk, Access]] = []
    fetched: Any = 0
    for is_rows in (True, False):
        operand, loops, contiguous, role = _operand(product, is_rows)
        extent = np.asarray(s.block_rows if is_rows else s.block_cols)
        last = last_of(loops)
        along_inner = last not in contiguous
        lane = deepest if along_inner else last
        share = extent * depth // threads
        width = (
            _widths(lane, LANES, share) * np.ones(count, int) if lane in contiguous else np.ones(count, int)
        )
        short = (depth if along_inner else extent) // width
        beside = Digit("inner" if along_inner else role, short, width)
        below = Digit(role if along_inner else "inner", _over(threads, short), 1)
        rounds = share // width
        advance = Digit(below.role, rounds, _over(threads, short))
        walked = Walk(_roles(product), (advance, Digit("inner", 1 << 30, depth)), (beside, below), covered)
        reads += [(walked, a) for a in accesses_of(reads_of(operand), lane, width, rounds * chunks)]
        fetched = fetched + rounds * width
    across = np.asarray(s.block_cols) // tile_cols
    lanes = (Digit("cols", across, LANES), Digit("rows", threads // across, LANES))
    time = (Digit("cols", s.vectors, across * LANES), Digit("rows", tile_rows, 1))
    more, writes = _results(
        product,
        Walk(_roles(product), time, lanes, covered),
        tile_rows * tile_cols,
        widest(last_of(product.cols), LANES),
    )
    blocks = batch * _over(rows, s.block_rows) * _over(cols, s.block_cols)
    points = chunks * depth
    columns = {
        "items": blocks * threads * s.slices * np.ones(count),
        "group": _three((threads,), count),
        "flops": 2.0 * tile_rows * tile_cols * points,
        "registers": ADDRESSES + 4 * (tile_rows * tile_cols + tile_rows + tile_cols + fetched),
        "local_bytes": 2.0 * depth * (s.block_rows + s.block_cols + 2 * PAD) * product.itemsize,
        "local_traffic": 4.0 * chunks * fetched,
        "tile_reads": points * (tile_rows + tile_cols) / LANES,
        "barriers": chunks + 1,
        "vector": s.vector,
        "chains": tile_rows * np.asarray(s.vectors),
    }
    return Sketch(count, columns, (*reads, *more), writes, s.slices)


def _panel(product: Product, candidates: Candidates) -> Sketch:
    s, count = candidates.schedules, len(candidates)
    batch, rows, cols, inner = product.sizes
    tile_rows, vectors, vector = np.asarray(s.tile_rows), np.asarray(s.vectors), np.asarray(s.vector)
    tile_cols, deepest = vectors * vector, last_of(product.inner)
    height, breadth = np.minimum(s.block_rows, rows), np.minimum(s.block_cols, cols)
    blocks_down, blocks_across = _over(rows, s.block_rows), _over(cols, s.block_cols)
    points = inner / np.asarray(s.slices)
    chunks = np.maximum(1.0, points / np.minimum(s.depth, points))
    covered = {"rows": height, "cols": breadth, "inner": _over(inner, s.slices)}
    reads: list[tuple[Walk, Access]] = []
    for is_rows, extent in ((True, height), (False, breadth)):
        operand, loops, contiguous, role = _operand(product, is_rows)
        last = last_of(loops)
        along_inner = (
            deepest in contiguous or last not in contiguous
            if is_rows
            else deepest in contiguous and last not in contiguous
        )
        lane = deepest if along_inner else last
        limits = (vector,) if along_inner == is_rows else (vector, tile_rows if is_rows else tile_cols)
        width = _widths(lane, *limits) * np.ones(count, int)
        deep = Digit(
            "inner",
            _over(np.minimum(s.depth, inner), width if along_inner else 1),
            width if along_inner else 1,
        )
        wide = Digit(role, _over(extent, 1 if along_inner else width), 1 if along_inner else width)
        time = (deep, wide) if along_inner or is_rows else (wide, deep)
        walked = Walk(_roles(product), time, (), covered)
        reads += [(walked, a) for a in accesses_of(reads_of(operand), lane, width, extent * points / width)]
    # Whole tiles are computed; the last block of a row or column of blocks has fewer.
    padded_rows = _over(rows, tile_rows) * tile_rows / blocks_down
    padded_cols = _over(cols, tile_cols) * tile_cols / blocks_across
    tiles = (padded_rows / tile_rows) * (padded_cols / tile_cols)
    width = widest(last_of(product.cols), int(np.max(vector)))
    more, writes = _results(
        product,
        Walk(_roles(product), (Digit("cols", _over(breadth, width), width),), (), covered),
        height * breadth,
        width,
    )
    lane_bytes = 4.0 * vector
    # Each round of a tile loads its columns, and one value of each row into all lanes.
    traffic = tiles * (points * (tile_rows + vectors) + 2 * chunks * tile_rows * vectors) * lane_bytes
    columns = {
        "items": batch * blocks_down * blocks_across * np.asarray(s.slices, float) * np.ones(count),
        "group": np.ones(3),
        "flops": 2.0 * padded_rows * padded_cols * points,
        "registers": lane_bytes * (tile_rows * vectors + vectors + 1),
        "local_bytes": 4.0 * (np.asarray(s.depth) * (s.block_rows + np.asarray(s.block_cols))),
        "local_traffic": traffic + (height + breadth) * points * 8.0,
        "vector": vector,
        "chains": tile_rows * vectors,
    }
    return Sketch(count, columns, (*reads, *more), writes, s.slices)


def _sum(product: Product, candidates: Candidates, target: Target) -> Sketch:
    """The launch that adds the slices of contractions."""
    s, count = candidates.schedules, len(candidates)
    batch, rows, cols, _ = product.sizes
    slices = np.asarray(s.slices)
    width = widest(last_of(product.cols), target.vector)
    across = min(64, 1 << (cols // width).bit_length() - 1)
    whole = Walk(_roles(product), (), (Digit("cols", across, width),), {"cols": across * width, "rows": 1})
    reads, writes = _results(product, whole, width, width)
    nbytes = float(batch * rows * cols * product.itemsize)
    moved = width * product.itemsize
    slice_reads = _scratch(slices, moved, slices * nbytes, lines=max(1, across * moved / 128), share=across)
    columns = {
        "items": _over(cols // width, across) * across * rows * batch * np.ones(count),
        "group": np.array([float(across), 1.0, 1.0]),
        "flops": slices * float(width),
        "registers": ADDRESSES + 8.0 * width,
        "vector": float(width),
    }
    return Sketch(count, columns, reads, writes, scratch=(slice_reads,))
