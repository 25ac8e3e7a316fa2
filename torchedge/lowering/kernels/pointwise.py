"""Element-wise groups as kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchedge.expressions.dialect import offset_of
from torchedge.expressions.functions import cost_of
from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Apply, Read, Scalar, reads_of, walk
from torchedge.lowering.expansion import substitute
from torchedge.lowering.fusion import Computed, FusionGroup
from torchedge.lowering.kernels.drafts import (
    Arguments,
    KernelSource,
    arguments_of,
    fill,
    name_in,
    preamble_of,
    spread,
    written_by,
)
from torchedge.lowering.kernels.loops import accessed, in_memory_order, joined, strides_of
from torchedge.lowering.nodes import Node, Pointwise
from torchedge.lowering.programs import Kernel
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout


@dataclass(frozen=True, slots=True)
class Section:
    """One element-wise group as statements; `width` neighbours of the innermost loop at a time."""

    loops: tuple[Axis, ...]
    width: int
    lines: list[str]
    helpers: dict[str, None]
    work: int

    @property
    def counts(self) -> dict[Axis, int]:
        """Work-items along the innermost loop."""
        return {self.loops[-1]: self.loops[-1].extent // self.width} if self.loops else {}


def section_of(group: FusionGroup, arguments: Arguments, target: Target, prefix: str = "v") -> Section:
    """Return an element-wise group as statements."""
    host = group.host
    assert isinstance(host, Pointwise)
    stores = [(node, group.computed[node]) for node in group.stored]
    node, first = stores[0]
    order = in_memory_order(host.axes, strides_of(offset_of(arguments.sites[node], first.element)))
    values = [c.value for _, c in stores]
    loops, moved = joined(order, every_offset(values, stores, arguments))
    width = width_of(loops[-1].extent if loops else 1, target.vector)
    renderer = Renderer(arguments.site_of, loops[-1] if width > 1 else None, width, prefix=prefix)
    write_all(renderer, stores, arguments, moved)
    return Section(loops, width, renderer.lines, renderer.helpers, work_of(values) * host.numel)


def write_pointwise(group: FusionGroup, layouts: Mapping[Node, Layout], target: Target) -> KernelSource:
    """Return the kernel of an element-wise group."""
    arguments = arguments_of(written_by(group), list(group.reads), layouts, target.checks)
    arguments = replace(arguments, in_place=in_place_pairs(group, arguments))
    section = section_of(group, arguments, target)
    items = spread(section.loops, section.counts, target)
    source = fill(
        "pointwise.cl.jinja",
        preamble=preamble_of(section.helpers),
        arguments=arguments.text,
        axes=items.axes,
        guards=items.guards,
        lines=section.lines,
    )
    reference = f"element by element for {group.scope or 'the step'}"
    kernel = Kernel(
        name_in(source),
        source,
        arguments.access,
        "pointwise",
        section.work,
        traffic_of(arguments),
        reference,
        arguments.checks,
        arguments.in_place,
    )
    return KernelSource(kernel, arguments.tensors, items.global_size, items.local_size, group.scope)


def in_place_pairs(group: FusionGroup, arguments: Arguments) -> tuple[tuple[int, int], ...]:
    """Return (argument read, argument written) where each element is read for its own place alone."""
    loads = reads_of(*[group.computed[n].value for n in group.stored])
    pairs: list[tuple[int, int]] = []
    for written, node in enumerate(arguments.tensors):
        if arguments.access[written] != "write" or node not in group.stored:
            continue
        there = arguments.sites[node]
        place = offset_of(there, group.computed[node].element)
        for read, source in enumerate(arguments.tensors):
            here = arguments.sites[source]
            own = [s for s in loads if s.tensor is source]
            free = arguments.access[read] == "read" and read not in {r for r, _ in pairs}
            alike = here.dtype == there.dtype and here.layout.storage == there.layout.storage == "buffer"
            if free and alike and own and all(offset_of(here, s.indices) == place for s in own):
                pairs.append((read, written))
                break
    return tuple(pairs)


def width_of(extent: int, widest: int) -> int:
    """Return the widest vector (a power of two) that divides an extent."""
    width = widest
    while extent % width:
        width //= 2
    return width


def every_offset(
    values: Sequence[Scalar], stores: Sequence[tuple[Node, Computed]], arguments: Arguments
) -> list[Index]:
    """Return all index arithmetic of a kernel: offsets of reads and writes, bounds, positions."""
    found = [offset_of(arguments.sites[n], c.element) for n, c in stores]
    for scalar in walk(*values):
        if isinstance(scalar, Read):
            found.append(offset_of(arguments.sites[scalar.tensor], scalar.indices))
    return found + accessed(*values)


def write_all(
    renderer: Renderer,
    stores: Sequence[tuple[Node, Computed]],
    arguments: Arguments,
    moved: Mapping[Axis, Index],
) -> None:
    """Add the statements that compute and then write every stored tensor at one point of the loops."""
    memo: dict[Scalar, Scalar] = {}
    values = [substitute(c.value, moved, known=memo) for _, c in stores]
    for value in values:  # all reads before the first write: a tensor may be overwritten in place
        renderer.value(value)
    for (node, item), value in zip(stores, values, strict=True):
        element = [i.substitute(moved) for i in item.element]
        renderer.store(arguments.sites[node], element, value)


def work_of(values: Sequence[Scalar]) -> int:
    """Return the arithmetic operations of one point."""
    return sum(cost_of(s.function) for s in walk(*values) if isinstance(s, Apply))


def traffic_of(arguments: Arguments) -> int:
    """Return the bytes of all arguments, each moved once."""
    sites = [arguments.sites[t] for t in arguments.tensors]
    return sum(s.layout.nbytes(s.shape, s.dtype) for s in sites)
