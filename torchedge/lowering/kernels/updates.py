"""Many small element-wise updates in one launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torchedge.expressions.rendering import Renderer
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loops import write_all
from torchedge.lowering.kernels.rows import elements_nest
from torchedge.lowering.kernels.sources import Body, KernelSource, arguments_of, declared
from torchedge.lowering.nodes import Node, Pointwise, Stored
from torchedge.lowering.schedules import group_size, width_of
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

SMALL = 1 << 14
"""Largest number of elements of an update that shares a launch."""
MOST_ARGUMENTS = 96
"""Largest number of tensors of one kernel: OpenCL promises 1,024 bytes of arguments."""


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
        nest = elements_nest(group, arguments)
        lane, axes, items = nest.lane(False), [], 1
        width = width_of(lane.extent if lane else 1, target.vector)
        renderer = Renderer(
            arguments.site_of, lane if width > 1 else None, width, helpers=body.helpers, prefix=f"v{number}_"
        )
        write_all(renderer, nest.stores, arguments)
        for axis in reversed(nest.rows):
            size = axis.extent // width if axis is lane else axis.extent
            axes.append((axis.name, f"(item / {items}) % {size}" if items > 1 else f"item % {size}"))
            items *= size
        if len(axes) == 1:
            axes = [(axes[0][0], "item")]
        with body.block(f"if (item < {items})"):
            body.add(*declared(axes), *renderer.lines, "return;")
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
