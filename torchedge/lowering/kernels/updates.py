"""The updates of many small parameters in few launches: biases, and weights of normalizations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.drafts import (
    KernelSource,
    arguments_of,
    fill,
    group_size,
    name_in,
    preamble_of,
    written_by,
)
from torchedge.lowering.kernels.pointwise import Section, section_of, traffic_of
from torchedge.lowering.nodes import Node, Pointwise, Stored
from torchedge.lowering.programs import Kernel
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

SMALL = 1 << 14
"""Elements up to which an update shares a launch."""
MOST_ARGUMENTS = 96
"""Tensors one kernel may be given: OpenCL promises 1,024 bytes of arguments."""


@dataclass(frozen=True, slots=True)
class _Part:
    items: int
    axes: tuple[tuple[str, str], ...]
    lines: list[str]


def gather_updates(groups: Sequence[FusionGroup]) -> tuple[list[FusionGroup], list[list[FusionGroup]]]:
    """Return the groups that stay on their own, in order, and small updates to run together behind them.

    An update can wait where nothing reads its results in this step, and where nothing but itself overwrites
    what it reads.
    """
    read = {node for group in groups for node in group.reads}
    overwriter = {target: g for g in groups for target in g.stored.values() if target is not None}
    waiting = [g for g in groups if _can_wait(g, read, overwriter)]
    if len(waiting) < 2:
        return list(groups), []
    batches: list[list[FusionGroup]] = [[]]
    given: set[Node] = set()
    for group in waiting:
        needed = {*group.reads, *[t for t in group.stored.values() if t is not None]}
        if len(given | needed) > MOST_ARGUMENTS:
            batches.append([])
            given = set()
        batches[-1].append(group)
        given |= needed
    gathered = set(waiting)
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
    """Return the one kernel of several small updates."""
    written = [item for group in batch for item in written_by(group)]
    read = list(dict.fromkeys(node for group in batch for node in group.reads))
    arguments = arguments_of(written, read, layouts, target.checks)
    sections = [section_of(g, arguments, target, f"v{k}_") for k, g in enumerate(batch)]
    parts = [_part(section) for section in sections]
    helpers = {text: None for section in sections for text in section.helpers}
    source = fill("updates.cl.jinja", preamble=preamble_of(helpers), arguments=arguments.text, sections=parts)
    total = sum(part.items for part in parts)
    group = min(group_size(total, target), total)
    kernel = Kernel(
        name_in(source),
        source,
        arguments.access,
        "updates",
        sum(section.work for section in sections),
        traffic_of(arguments),
        f"{len(batch)} small updates, element by element",
        arguments.checks,
    )
    return KernelSource(kernel, arguments.tensors, (-(-total // group) * group,), (group,), batch[0].scope)


def _part(section: Section) -> _Part:
    axes, step = [], 1
    for axis in reversed(section.loops):
        size = section.counts.get(axis, axis.extent)
        axes.append((axis.name, f"(item / {step}) % {size}" if step > 1 else f"item % {size}"))
        step *= size
    if len(axes) == 1:
        axes = [(axes[0][0], "item")]
    return _Part(step, tuple(axes), section.lines)
