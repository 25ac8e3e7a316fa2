"""The work of a kernel's candidates, from its loops alone: what the cost model of `textures.model` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.expressions.indices import Axis
from torchedge.expressions.scalars import reads_of
from torchedge.lowering.candidates import Candidates
from torchedge.lowering.kernels.loops import work_of
from torchedge.lowering.kernels.nests import Nest
from torchedge.lowering.kernels.products import Product, last_of, size
from torchedge.lowering.kernels.rows import RowsNest, joining_schedule, rounds_of
from torchedge.lowering.kernels.tilings import Tiling, tiling_of
from torchedge.lowering.nodes import Node
from torchedge.lowering.schedules import RowsExtents, ceil_div, launch_sizes
from torchedge.lowering.targets import Target
from torchedge.lowering.walks import Access, Digit, Walk, access_works, accesses_of
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import Layout, row_major
from torchedge.textures.work import KernelWork, ReadWork

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
    parts: int = 0

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
            in_order = row_major(len(access.tensor.shape))  # slices, which are no tensor of the step
            own = [layouts.get(access.tensor, in_order) for layouts in placed]
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
        return KernelWork(**columns, reads=tuple(operands[: len(self.reads)]), writes=tuple(writes))


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
    """Return the launches of a kernel's candidates: (launch, 1 for candidates that have it, else 0).

    What is cut into slices has a second launch, which joins them: another one for each number of slices, and
    one candidate for all that have so many.
    """
    count = len(candidates)
    if isinstance(nest, Product):
        tiling = tiling_of(nest, candidates.schedules)
        slices, first = np.asarray(tiling.schedule.slices), _contraction(tiling, count)
    else:
        shares, cuts = _shares(candidates, nest.extents)
        slices, first = np.prod(cuts, axis=1), _rows(nest, candidates, shares, cuts)
    launches: list[tuple[Sketch, Any]] = [(first, 1.0)]
    for parts in np.unique(slices[slices > 1]).tolist():
        _, joining = nest.sliced(parts)
        same = Candidates(joining_schedule(joining, target), 1)  # for all candidates with these slices
        sketch = _rows(joining, same, *_shares(same, joining.extents))
        launches.append((replace(sketch, parts=parts), slices == parts))
    return launches


# rows -------------------------------------------------------------------------------------------------------


def _launch_walk(loops: Sequence[Axis], group: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, ...]:
    """Return (roles, lanes, group) of loops spread over a launch, the innermost loop first."""
    order = list(reversed(loops))
    roles = {"x": tuple(order[:1]), "y": tuple(order[1:2]), "z": tuple(reversed(order[2:]))}
    names = [name for name, axes in roles.items() if axes]
    lanes = tuple([Digit(n, g, w) for n, g, w in zip(names, group, weights, strict=False)])
    covered = {n: np.asarray(g) * w for n, g, w in zip(names, group, weights, strict=False)}
    return roles, lanes, covered


def _three(group: Sequence[Any], candidates: int) -> Array:
    """Return (N, 3) work-group sizes."""
    columns = [np.broadcast_to(np.asarray(g, float), (candidates,)) for g in (*group, 1, 1)[:3]]
    return np.stack(columns, axis=1)


def _rows(nest: RowsNest, candidates: Candidates, shares: Array, cuts: Array) -> Sketch:
    """Describe reductions: each work-item has rows of its own, or a work-group shares its rows.

    Element by element a work-item has several vectors of the innermost loop.
    """
    s, count, extents = candidates.schedules, len(candidates), nest.extents
    vector, lane, several = np.asarray(s.vector), nest.lane(s.along), 1 + np.asarray(s.further)
    loops = (*nest.rows, *nest.inner)
    weight = {axis.name: vector if axis is lane else 1 for axis in loops}
    rounds = {axis.name: axis.extent // weight[axis.name] for axis in loops}
    share = {axis.name: shares[:, k] for k, axis in enumerate(loops)}
    cut = {axis.name: cuts[:, k] for k, axis in enumerate(loops)}
    slices = np.prod(cuts, axis=1)
    members = np.prod(shares[:, len(nest.rows) :], axis=1)
    if np.max(s.members) > 1:
        threads = np.prod(shares, axis=1)
        roles = {axis.name: (axis,) for axis in loops}
        lanes = tuple([Digit(a.name, share[a.name], weight[a.name]) for a in nest.memory])
        covered = {a.name: share[a.name] * weight[a.name] for a in nest.rows}
        group = _three((threads,), count)
        items = prod([ceil_div(rounds[a.name], share[a.name]) for a in nest.rows]) * threads * slices
    else:
        below = vector if not s.along else 1
        roles, lanes, covered = _launch_walk(nest.rows, s.group, (below, 1, 1))
        roles |= {axis.name: (axis,) for axis in nest.inner}
        group = _three(s.group, count)
        counts = [slices, *[rounds[axis.name] for axis in nest.rows]]  # slices are one more loop
        counts[-1] = counts[-1] // several
        sizes = (*s.group[: len(nest.rows)], 1, 1)[: min(len(counts), 3)]
        launched = zip(launch_sizes(counts), sizes, strict=True)  # in whole work-groups
        items = prod([ceil_div(np.asarray(n), g) * g for n, g in launched]) * np.ones(count)
    own = {a.name: ceil_div(rounds[a.name], share[a.name] * cut[a.name]) for a in nest.inner}
    time = tuple([Digit(a.name, own[a.name], share[a.name] * weight[a.name]) for a in reversed(nest.inner)])
    covered |= {a.name: ceil_div(a.extent, cut[a.name]) for a in nest.inner}
    times = prod(own.values()) if own else np.ones(count)
    by_element, by_row = nest.split_stores()
    if not nest.stages:
        by_element, by_row, times = by_row, [], several
        if nest.rows:
            time = (Digit("x", several, nest.rows[-1].extent // several),)
            covered["x"] = covered["x"] * several
    walked = Walk(roles, time, lanes, covered)
    values, stages = [item.value for _, item in by_element], len(nest.bodies)
    steps = np.log2(members)
    vectors = 1 if s.along else vector  # of a sum
    kept = 2 + 2 * stages if stages else (1 + len(reads_of(*values))) * np.minimum(several, 4)
    columns = {
        "items": items,
        "group": group,
        "flops": (work_of(nest.bodies) + (4 * stages or 1) + work_of(values)) * times * vector,
        "registers": ADDRESSES + 4 * vector * kept,
        "local_bytes": np.where(members > 1, np.prod(group, axis=1) * extents.sum_bytes * vectors, 0),
        "local_traffic": np.where(members > 1, 12 * steps * stages, 0),
        "barriers": np.where(members > 1, (1 + steps) * len(rounds_of(nest.stages, nest.bodies)), 0),
        "vector": vector,
        # A sum waits for the one before it; compensated sums are four operations in a row.
        "chains": 0.25 if stages else several,
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
    if np.max(s.members) == np.max(s.slices) == 1:
        ones = np.ones((count, len(extents.rows) + len(extents.inner)), int)
        return ones, ones
    keys = np.stack(
        [np.broadcast_to(c, (count,)) for c in (s.vector, s.members, prod(s.group), s.slices)], axis=1
    )
    _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    schedules = [candidates.pick(int(k)) for k in first]  # of each kind once
    shares = np.array([schedule.shares(extents) for schedule in schedules])  # type: ignore[union-attr]
    cuts = np.array([schedule.cuts(extents) for schedule in schedules])  # type: ignore[union-attr]
    place = place.reshape(-1)
    return shares[place].reshape(count, -1), cuts[place].reshape(count, -1)


# contractions -----------------------------------------------------------------------------------------------


def _contraction(t: Tiling, count: int) -> Sketch:
    """Count a product by all schedules at once, from the data that its kernels are written from."""
    product, s = t.product, t.schedule
    roles = {"batch": product.batch, "rows": product.rows, "cols": product.cols, "inner": product.inner}
    covered = {"rows": t.block[0], "cols": t.block[1], "inner": ceil_div(size(product.inner), s.slices)}
    reads = [
        (walked, access)
        for operand in (t.a, t.b)
        for walked in [Walk(roles, operand.time, operand.lanes, covered)]
        for access in accesses_of(reads_of(operand.value), operand.lane, operand.width, operand.reads)
    ]
    walked = Walk(roles, t.time, t.lanes, covered)
    last, times = last_of(product.cols), t.stored / t.width
    values = [item.value for _, item in product.stores]
    reads += [(walked, access) for access in accesses_of(reads_of(*values), last, t.width, times)]
    columns = {
        "items": prod([np.asarray(n, float) for n in t.global_size]),
        "group": _three(t.group, count),
        "flops": 2.0 * t.tile[0] * t.tile[1] * t.points,
        "vector": s.vector,
        "chains": s.tile_rows * np.asarray(s.vectors),
        **t.columns,
        "registers": ADDRESSES * (s.kind != "panel") + t.columns["registers"],
    }
    writes = [(walked, Access(n, c.element, n.dtype, last, t.width, times)) for n, c in product.stores]
    return Sketch(count, columns, tuple(reads), tuple(writes), s.slices)
