"""From a group to its kernels: the loops, which do not depend on storage, then a schedule, then text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.rendering import writes_texels
from torchedge.expressions.scalars import reads_of
from torchedge.lowering.addressing import check_loops
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.contractions import write_contraction
from torchedge.lowering.kernels.loops import every_offset
from torchedge.lowering.kernels.products import Product, last_of, product_of
from torchedge.lowering.kernels.rows import RowsNest, elements_nest, joining_schedule, rows_nest, write_rows
from torchedge.lowering.kernels.sources import Arguments, KernelSource, arguments_of
from torchedge.lowering.kernels.tilings import result_width, tiling_of, widest
from torchedge.lowering.nodes import Contraction, Node, Pointwise, Rows, Stored
from torchedge.lowering.schedules import ContractionSchedule, RowsSchedule, Schedule
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout, row_major

Nest = Product | RowsNest


def nest_of(group: FusionGroup, layouts: Mapping[Node, Layout]) -> Nest:
    """Return the loops of a group's kernel: they follow the order of dimensions in memory.

    Raises:
        LoweringError: numbers of 32 bits do not count them, or do not address its tensors.
    """
    arguments = arguments_of(group.stored, list(group.reads), layouts)
    host, nest = group.host, _nest_of(group, arguments)
    indices = every_offset(nest.scalars, nest.stores, arguments)
    if isinstance(nest, RowsNest) and nest.searches:
        indices.append(nest.position)
    kind = host.name if isinstance(host, (Contraction, Rows)) else "the element-wise kernel"
    check_loops(f"{kind} of {group.scope or 'the step'}", nest.positions, indices)
    return nest


def _nest_of(group: FusionGroup, arguments: Arguments) -> Nest:
    if isinstance(group.host, Contraction):
        return product_of(group, arguments)
    return (rows_nest if isinstance(group.host, Rows) else elements_nest)(group, arguments)


def write_kernel(
    group: FusionGroup, nest: Nest, layouts: Mapping[Node, Layout], schedule: Schedule, target: Target
) -> Sequence[KernelSource]:
    """Return the kernels of a group: one, or two where sums are cut into slices.

    The results of slices lie in tensors of their own: bare Nodes, row-major, that the first kernel writes and
    the second one reads.
    """
    if isinstance(nest, Product):
        assert isinstance(schedule, ContractionSchedule)
        parts = int(tiling_of(nest, schedule).schedule.slices)
    else:
        assert isinstance(schedule, RowsSchedule)
        parts = prod(schedule.cuts(nest.extents))
    if parts == 1:
        return [_write_one(group, nest, group.stored, layouts, schedule, target)]
    first, joining = nest.sliced(parts)
    slices = [node for node, _ in first.stores]
    layouts = {**layouts, **{node: row_major(len(node.shape)) for node in slices}}
    last = joining_schedule(joining, target)
    return [
        _write_one(group, first, dict.fromkeys(slices), layouts, schedule, target),
        _write_one(group, joining, group.stored, layouts, last, target),
    ]


def _write_one(
    group: FusionGroup,
    nest: Nest,
    stored: Mapping[Node, Stored | None],
    layouts: Mapping[Node, Layout],
    schedule: Schedule,
    target: Target,
) -> KernelSource:
    read: Iterable[Node] = group.reads
    if not isinstance(group.host, Pointwise):  # a part of them where there are slices
        read = dict.fromkeys([read.tensor for read in reads_of(*nest.scalars)])
    arguments = arguments_of(stored, list(read), layouts, target.checks)
    if isinstance(nest, Product):
        assert isinstance(schedule, ContractionSchedule)
        return write_contraction(group, nest, arguments, schedule, target)
    assert isinstance(schedule, RowsSchedule)
    return write_rows(group, nest, arguments, schedule, target)


def beyond_texels(
    group: FusionGroup, nest: Nest, layouts: Mapping[Node, Layout], schedule: Schedule, target: Target
) -> list[Node]:
    """Return the results that lie in images which a schedule's kernel cannot write by whole texels."""
    arguments = arguments_of(group.stored, list(group.reads), layouts)
    if isinstance(schedule, RowsSchedule) and schedule.slices > 1:
        return [node for node in group.stored if layouts[node].storage != "buffer"]
    return [
        node
        for node, element, lane, width in written(nest, schedule, target)
        if layouts[node].storage != "buffer"
        and not writes_texels(arguments.sites[node], element, lane, width)
    ]


def written(
    nest: Nest, schedule: Schedule, target: Target
) -> Iterator[tuple[Node, Sequence[Index], Axis | None, int]]:
    """Yield every result: its element in terms of the loops, and the lanes with which it is written."""
    if isinstance(nest, Product):
        assert isinstance(schedule, ContractionSchedule)
        last = last_of(nest.cols)
        split = schedule.slices > 1  # another kernel adds the slices
        width = int(widest(last, target.vector) if split else result_width(nest, schedule))
        for node, item in nest.stores:
            yield node, item.element, last, width
    else:
        assert isinstance(schedule, RowsSchedule)
        by_element, by_row = nest.split_stores()
        lane = nest.lane(schedule.along)
        remainder = schedule.along and lane is not None and lane.extent % schedule.vector
        for node, item in by_element:
            yield node, item.element, lane, 1 if remainder else schedule.vector
        for node, item in by_row:
            yield node, item.element, lane, 1 if schedule.along else schedule.vector
