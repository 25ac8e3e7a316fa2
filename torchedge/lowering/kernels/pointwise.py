"""Element-wise groups as kernels, each in a launch of its own or many small updates in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torchedge.expressions.dialect import offset_of
from torchedge.expressions.indices import Axis, Fetched, atoms_of, of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import reads_of
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loops import (
    Stores,
    axes_below,
    every_offset,
    in_loops,
    in_memory_order,
    joined,
    strides_of,
    work_of,
    write_all,
)
from torchedge.lowering.kernels.sources import (
    Arguments,
    Body,
    KernelSource,
    arguments_of,
    declared,
    spread,
)
from torchedge.lowering.nodes import Node, Pointwise, Stored
from torchedge.lowering.schedules import PointwiseExtents, PointwiseSchedule, group_size, width_of
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

SMALL = 1 << 14
"""Largest number of elements of an update that shares a launch."""
MOST_ARGUMENTS = 96
"""Largest number of tensors of one kernel: OpenCL promises 1,024 bytes of arguments."""


@dataclass(frozen=True, slots=True)
class PointwiseNest:
    """The loops of an element-wise kernel, in the order in which its first result lies; what it stores."""

    loops: tuple[Axis, ...]
    stores: Stores

    @property
    def extents(self) -> PointwiseExtents:
        """Sizes of the loops."""
        return PointwiseExtents(tuple([axis.extent for axis in self.loops]), self._fetches)

    @property
    def _fetches(self) -> bool:
        """Whether a place that is read and that a tensor holds depends on the innermost loop."""
        fetched = [
            of(atom)
            for read in reads_of(*[item.value for _, item in self.stores])
            for index in read.indices
            for atom in atoms_of(index)
            if isinstance(atom, Fetched)
        ]
        return bool(axes_below(fetched) & {*self.loops[-1:]})

    @property
    def flops(self) -> int:
        """Arithmetic operations of a launch."""
        return work_of([c.value for _, c in self.stores]) * prod(self.extents.loops)

    def lines(
        self, arguments: Arguments, width: int, helpers: dict[str, None], prefix: str = "v"
    ) -> list[str]:
        """Return the statements of `width` neighbours of the innermost loop; add the `helpers` they need."""
        lane = self.loops[-1] if width > 1 else None
        renderer = Renderer(arguments.site_of, lane, width, helpers=helpers, prefix=prefix)
        write_all(renderer, self.stores, arguments)
        return renderer.lines

    def counts(self, width: int) -> dict[Axis, int]:
        """Return the vectors along the innermost loop."""
        return {self.loops[-1]: self.loops[-1].extent // width} if self.loops else {}


def pointwise_nest(group: FusionGroup, arguments: Arguments) -> PointwiseNest:
    """Return the loops of an element-wise group."""
    host = group.host
    assert isinstance(host, Pointwise)
    stores = [(node, group.computed[node]) for node in group.stored]
    node, first = stores[0]
    order = in_memory_order(host.axes, strides_of(offset_of(arguments.sites[node], first.element)))
    loops, moved = joined(order, every_offset([c.value for _, c in stores], stores, arguments))
    return PointwiseNest(loops, in_loops(stores, moved))


def write_pointwise(
    group: FusionGroup,
    nest: PointwiseNest,
    layouts: Mapping[Node, Layout],
    schedule: PointwiseSchedule,
    target: Target,
) -> KernelSource:
    """Return the kernel of an element-wise group."""
    arguments = arguments_of(group.stored, list(group.reads), layouts, target.checks)
    arguments = replace(arguments, in_place=_in_place_pairs(group, arguments))
    body = Body()
    lines = nest.lines(arguments, schedule.vector, body.helpers)
    loops, counts = nest.loops, nest.counts(schedule.vector)
    if schedule.items > 1:
        last = loops[-1]
        step = counts[last] // schedule.items
        first = Axis("first", last.extent)
        items = spread((*loops[:-1], first), {first: step}, schedule.group, serial=target.serial)
        head = f"for (int {last.name} = first; {last.name} < {counts[last]}; {last.name} += {step}) {{"
        lines = ["#pragma unroll", head, *["  " + line for line in lines], "}"]
    else:
        items = spread(loops, counts, schedule.group, serial=target.serial)
    body.spread(items, lines)
    return arguments.launch(
        body,
        "pointwise",
        "pointwise",
        (items.global_size, items.local_size),
        nest.flops,
        f"element by element for {group.scope or 'the step'}",
        group.scope,
    )


def _in_place_pairs(group: FusionGroup, arguments: Arguments) -> tuple[tuple[int, int], ...]:
    """Return (argument read, argument written) where a work-item reads only the element that it writes."""
    reads = reads_of(*[group.computed[n].value for n in group.stored])
    pairs: list[tuple[int, int]] = []
    for written, node in enumerate(arguments.tensors):
        if arguments.access[written] != "write" or node not in group.stored:
            continue
        there = arguments.sites[node]
        place = offset_of(there, group.computed[node].element)
        for read, source in enumerate(arguments.tensors):
            here = arguments.sites[source]
            own = [s for s in reads if s.tensor is source]
            free = arguments.access[read] == "read" and read not in {r for r, _ in pairs}
            alike = here.dtype == there.dtype and here.layout.storage == there.layout.storage == "buffer"
            if free and alike and own and all(offset_of(here, s.indices) == place for s in own):
                pairs.append((read, written))
                break
    return tuple(pairs)


def gather_updates(groups: Sequence[FusionGroup]) -> tuple[list[FusionGroup], list[list[FusionGroup]]]:
    """Return the groups with a launch of their own, in order, and batches of small updates to run after them.

    An update can be postponed where nothing reads its results in this step, and where no other group
    overwrites a tensor that it reads.
    """
    read = {node for group in groups for node in group.reads}
    overwriter = {target: g for g in groups for target in g.stored.values() if target is not None}
    postponed = [g for g in groups if _can_wait(g, read, overwriter)]
    if len(postponed) < 2:
        return list(groups), []
    batches: list[list[FusionGroup]] = [[]]
    tensors: set[Node] = set()
    for group in postponed:
        needed = {*group.reads, *[t for t in group.stored.values() if t is not None]}
        if len(tensors | needed) > MOST_ARGUMENTS:
            batches.append([])
            tensors = set()
        batches[-1].append(group)
        tensors |= needed
    gathered = set(postponed)
    return [g for g in groups if g not in gathered], batches


def _can_wait(group: FusionGroup, read: Collection[Node], overwriter: Mapping[Stored, FusionGroup]) -> bool:
    return (
        isinstance(group.host, Pointwise)
        and 0 < group.host.numel <= SMALL
        and all(target is not None for target in group.stored.values())
        and not any(node in read for node in group.computed)
        and all(overwriter.get(n, group) is group for n in group.reads if isinstance(n, Stored))
    )


def write_updates(
    batch: Sequence[FusionGroup], layouts: Mapping[Node, Layout], target: Target
) -> KernelSource:
    """Return the one kernel of several small updates; each has its range of work-items."""
    written = {node: over for group in batch for node, over in group.stored.items()}
    read = list(dict.fromkeys(node for group in batch for node in group.reads))
    arguments = arguments_of(written, read, layouts, target.checks)
    body = Body()
    body.add("int item = get_global_id(0);")
    total = flops = 0
    for number, group in enumerate(batch):
        nest = pointwise_nest(group, arguments)
        width = width_of(nest.loops[-1].extent if nest.loops else 1, target.vector)
        lines, counts = nest.lines(arguments, width, body.helpers, f"v{number}_"), nest.counts(width)
        axes, items = [], 1
        for axis in reversed(nest.loops):
            size = counts.get(axis, axis.extent)
            axes.append((axis.name, f"(item / {items}) % {size}" if items > 1 else f"item % {size}"))
            items *= size
        if len(axes) == 1:
            axes = [(axes[0][0], "item")]
        with body.block(f"if (item < {items})"):
            body.add(*declared(axes), *lines, "return;")
        body.add(f"item -= {items};")
        total, flops = total + items, flops + nest.flops
    size = min(group_size(total, target), total, target.largest_group)
    return arguments.launch(
        body,
        "updates",
        "updates",
        ((-(-total // size) * size,), (size,)),
        flops,
        f"{len(batch)} small updates, element by element",
        batch[0].scope,
    )
