"""Reductions over rows as kernels: sums, softmax, layer norm, windows of pooling and depthwise convolution.

Two ways to walk: *across* neighbouring rows, one row a lane (windows, sums over a batch), or *along* a row,
its neighbouring elements in the lanes (softmax, layer norm), then by a whole work-group where there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torchedge.expressions.dialect import COMPUTE, offset_of
from torchedge.expressions.indices import Axis, Index, axes_of, flatten, of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Local, Read, Scalar, walk
from torchedge.lowering.expansion import substitute
from torchedge.lowering.fusion import Computed, FusionGroup
from torchedge.lowering.kernels.accumulators import Accumulator
from torchedge.lowering.kernels.drafts import (
    Arguments,
    Items,
    KernelSource,
    arguments_of,
    fill,
    name_in,
    preamble_of,
    spread,
    written_by,
)
from torchedge.lowering.kernels.loops import in_memory_order, joined, strides_of
from torchedge.lowering.kernels.pointwise import every_offset, traffic_of, width_of, work_of
from torchedge.lowering.nodes import Node, Rows, Stage
from torchedge.lowering.programs import Kernel
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

_Body = Callable[[int, list[str]], None]

LONG = 64
"""Rounds of a loop from which on sums carry their rounding errors along."""
SHORT = 16
"""Loops of no more rounds than this are unrolled."""


@dataclass(slots=True)
class _Walk:
    """How one kernel goes over its rows: loops over rows and within them, lanes, members of a work-group."""

    rows: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    moved: dict[Axis, Index]
    order: tuple[Axis, ...]
    lane: Axis | None
    width: int
    along: bool
    group: int
    arguments: Arguments
    lines: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)
    uniform: set[str] = field(default_factory=set)
    scratch: list[tuple[str, str]] = field(default_factory=list)
    renderers: int = 0

    def renderer(self, width: int, lines: list[str]) -> Renderer:
        """Return a fresh scope that writes into `lines`."""
        self.renderers += 1
        lane = self.lane if width > 1 else None
        uniform = frozenset(self.uniform)
        return Renderer(
            self.arguments.site_of, lane, width, lines, self.helpers, f"v{self.renderers}_", uniform
        )


def write_rows(group: FusionGroup, layouts: Mapping[Node, Layout], target: Target) -> KernelSource:
    """Return the kernel of a group whose host reduces rows."""
    host = group.host
    assert isinstance(host, Rows)
    arguments = arguments_of(written_by(group), list(group.reads), layouts, target.checks)
    walk_ = _plan(group, host, arguments, target)
    levels = _levels(host.stages, group.bodies)
    for level in levels:
        _reduce(walk_, level)
    by_row, by_element = _stores(group, host)
    if by_element:
        _write_elements(walk_, by_element)
    if by_row:
        _write_rows(walk_, by_row)
    items = _items(walk_, target)
    source = fill(
        "rows.cl.jinja",
        preamble=preamble_of(walk_.helpers),
        arguments=arguments.text,
        axes=items.axes,
        guards=items.guards,
        lines=walk_.lines,
        group=walk_.group,
        scratch=walk_.scratch,
    )
    elements = host.numel * prod([a.extent for a in host.inner])
    kernel = Kernel(
        name_in(source),
        source,
        arguments.access,
        host.name,
        (work_of(group.bodies) + len(host.stages)) * elements,
        traffic_of(arguments),
        f"{host.name} over rows of {elements // max(1, host.numel)} elements",
        arguments.checks,
    )
    return KernelSource(kernel, arguments.tensors, items.global_size, items.local_size, group.scope)


def _levels(stages: Sequence[Stage], bodies: Sequence[Scalar]) -> list[list[tuple[Stage, Scalar]]]:
    """Return the stages in rounds: a stage runs together with others that do not need its result."""
    level: dict[str, int] = {}
    rounds: list[list[tuple[Stage, Scalar]]] = []
    for stage, body in zip(stages, bodies, strict=True):
        needed = [level[s.name] for s in walk(body) if isinstance(s, Local) and s.name in level]
        level[stage.name] = max(needed, default=-1) + 1
        if level[stage.name] == len(rounds):
            rounds.append([])
        rounds[level[stage.name]].append((stage, body))
    return rounds


def _plan(group: FusionGroup, host: Rows, arguments: Arguments, target: Target) -> _Walk:
    """Choose loops and lanes from how the largest operand, and what is written, lie in memory."""
    strides = _strides(group, host, arguments)
    outer, inner = in_memory_order(host.outer, strides), in_memory_order(host.inner, strides)
    stores = [(n, group.computed[n]) for n in group.stored]
    values = [*group.bodies, *[c.value for _, c in stores]]
    indices = every_offset(values, stores, arguments)
    rows, moved = joined(outer, indices)
    rename = {a: Axis(f"r{k}", a.extent) for k, a in enumerate(rows)}
    indices = [i.substitute(moved) for i in indices]
    loops, moved_inner = joined(inner, indices)
    within = {a: Axis(f"k{k}", a.extent) for k, a in enumerate(loops)}
    full = {a: _renamed(i, rename) for a, i in moved.items()}
    full |= {a: _renamed(i, within) for a, i in moved_inner.items()}
    rows, loops = tuple(rename.values()), tuple(within.values())
    arg = any(s.kind.startswith("arg") for s in host.stages)
    fastest_inner = min([strides.get(a, 1 << 60) for a in host.inner if a.extent > 1], default=1 << 60)
    fastest_outer = min([strides.get(a, 1 << 60) for a in host.outer if a.extent > 1], default=1 << 60)
    along = bool(loops) and (fastest_inner < fastest_outer or not rows)
    lane = loops[-1] if along else (rows[-1] if rows else None)
    if along:
        width = 1 if arg or lane is None else min(target.vector, _floor_power(lane.extent))
    else:
        width = width_of(lane.extent, target.vector) if lane else 1
    long_row = along and not arg and prod([a.extent for a in loops]) >= 4 * target.row_group
    members = target.row_group if long_row else 1
    return _Walk(rows, loops, full, host.inner, lane, width, along, members, arguments)


def _renamed(index: Index, names: Mapping[Axis, Axis]) -> Index:
    return index.substitute({old: of(new) for old, new in names.items()})


def _floor_power(extent: int) -> int:
    return 1 << (extent.bit_length() - 1)


def _strides(group: FusionGroup, host: Rows, arguments: Arguments) -> dict[Axis, int]:
    """Return the strides of the host's axes in its largest operand, completed by the next ones."""
    loads = [s for s in walk(*group.bodies) if isinstance(s, Read)]
    loads.sort(key=lambda s: -arguments.sites[s.tensor].layout.nbytes(s.tensor.shape, s.dtype))
    found: dict[Axis, int] = {}
    for load in loads:
        for axis, stride in strides_of(offset_of(arguments.sites[load.tensor], load.indices)).items():
            found.setdefault(axis, abs(stride))
    for node in group.stored:
        element = group.computed[node].element
        for axis, stride in strides_of(offset_of(arguments.sites[node], element)).items():
            found.setdefault(axis, abs(stride))
    return found


def _stores(
    group: FusionGroup, host: Rows
) -> tuple[list[tuple[Node, Computed]], list[tuple[Node, Computed]]]:
    """Return what is written once a row, and what once an element."""
    inner = {a for a in host.inner if a.extent > 1}
    rows: list[tuple[Node, Computed]] = []
    elements: list[tuple[Node, Computed]] = []
    for node in group.stored:
        item = group.computed[node]
        used = set().union(*[axes_of(i) for i in item.element]) if item.element else set()
        (elements if used & inner else rows).append((node, item))
    return rows, elements


def _reduce(plan: _Walk, level: Sequence[tuple[Stage, Scalar]]) -> None:
    """Add one round of reductions: accumulators, loops over the row, what joins the lanes."""
    wide = plan.width if plan.lane else 1
    rounds = prod([a.extent for a in plan.inner]) // (wide * plan.group if plan.along else 1)
    made = [
        Accumulator(s.name, s.kind, s.dtype, body.dtype, wide, plan.along, _is_exact(s, body, rounds))
        for s, body in level
    ]
    for accumulator in made:
        plan.lines += accumulator.declare()
    bodies = [substitute(body, plan.moved) for _, body in level]
    _loop(plan, lambda width, lines: _accumulate(plan, made, bodies, width, lines), wide)
    for accumulator in made:
        plan.lines += accumulator.close()
        if plan.group > 1:
            plan.scratch.append((accumulator.type, f"{accumulator.name}_s"))
            plan.lines += accumulator.share(plan.group)
        if plan.along:
            plan.uniform.add(accumulator.name)


def _is_exact(stage: Stage, body: Scalar, rounds: int) -> bool:
    return stage.kind == "sum" and COMPUTE[body.dtype] in ("float", "double") and rounds > LONG


def _accumulate(
    plan: _Walk, made: Sequence[Accumulator], bodies: Sequence[Scalar], width: int, lines: list[str]
) -> None:
    renderer = plan.renderer(width, lines)
    values = [renderer.value(body, wide=True) for body in bodies]
    position = _position(plan, lines) if any(a.searches for a in made) else ""
    for accumulator, value in zip(made, values, strict=True):
        tail = plan.along and width < plan.width
        lines += accumulator.add(value, position, tail)


def _position(plan: _Walk, lines: list[str]) -> str:
    """Return the row-major position among the inner axes, as C text."""
    place = flatten([plan.moved[a] for a in plan.order], [a.extent for a in plan.order])
    return plan.renderer(1, lines).integer(place)


def _loop(plan: _Walk, body: _Body, wide: int) -> None:
    """Add the loops over a row around what `body(width, lines)` adds; the odd rest of a row follows alone."""
    depth = 0
    loops = plan.inner
    shared = _shared_axis(plan)
    for axis in loops[:-1] if plan.along else loops:
        plan.lines.append("  " * depth + _header(axis.name, axis.extent, plan.group if axis is shared else 1))
        depth += 1
    if plan.along and loops:
        last = loops[-1]
        blocks, rest = divmod(last.extent, wide)
        members = plan.group if last is shared else 1
        _block(plan, depth, _header(last.name, blocks, members), wide, body)
        if rest:
            head = f"for (int {last.name} = {blocks * wide}; {last.name} < {last.extent}; ++{last.name}) {{"
            if members > 1:
                head = f"if (member == 0) {head}"
            _block(plan, depth, head, 1, body)
    else:
        inside: list[str] = []
        body(wide, inside)
        plan.lines += ["  " * depth + line for line in inside]
    for level in range(depth - 1, -1, -1):
        plan.lines.append("  " * level + "}")


def _block(plan: _Walk, depth: int, head: str, width: int, body: _Body) -> None:
    inside: list[str] = []
    body(width, inside)
    plan.lines.append("  " * depth + head)
    plan.lines += ["  " * (depth + 1) + line for line in inside]
    plan.lines.append("  " * depth + "}")


def _shared_axis(plan: _Walk) -> Axis | None:
    """Return the loop whose rounds the members of a work-group share: the longest one."""
    if plan.group == 1 or not plan.inner:
        return None
    last = plan.inner[-1]
    blocks = {a: a.extent // plan.width if a is last else a.extent for a in plan.inner}
    return max(plan.inner, key=lambda a: blocks[a])


def _header(name: str, rounds: int, members: int) -> str:
    if members > 1:
        return f"for (int {name} = member; {name} < {rounds}; {name} += {members}) {{"
    unroll = "#pragma unroll\n  " if rounds <= SHORT else ""
    return f"{unroll}for (int {name} = 0; {name} < {rounds}; ++{name}) {{"


def _write_rows(plan: _Walk, stores: Sequence[tuple[Node, Computed]]) -> None:
    width = 1 if plan.along else plan.width
    lines: list[str] = []
    renderer = plan.renderer(width, lines)
    _write(plan, renderer, stores)
    if plan.group > 1:
        lines = ["if (member == 0) {", *["  " + line for line in lines], "}"]
    plan.lines += lines


def _write_elements(plan: _Walk, stores: Sequence[tuple[Node, Computed]]) -> None:
    def body(width: int, lines: list[str]) -> None:
        _write(plan, plan.renderer(width, lines), stores)

    _loop(plan, body, plan.width if plan.lane else 1)


def _write(plan: _Walk, renderer: Renderer, stores: Sequence[tuple[Node, Computed]]) -> None:
    values = [substitute(c.value, plan.moved) for _, c in stores]
    for value in values:
        renderer.value(value)
    for (node, item), value in zip(stores, values, strict=True):
        element = [i.substitute(plan.moved) for i in item.element]
        renderer.store(plan.arguments.sites[node], element, value)


def _items(plan: _Walk, target: Target) -> Items:
    counts = {plan.lane: plan.lane.extent // plan.width} if plan.lane and not plan.along else {}
    if plan.group == 1:
        return spread(plan.rows, counts, target)
    count, axes, step = prod([a.extent for a in plan.rows]), [], 1
    for axis in reversed(plan.rows):
        axes.append((axis.name, f"(get_group_id(0) / {step}) % {axis.extent}"))
        step *= axis.extent
    return Items(tuple(axes), (), (max(1, count) * plan.group,), (plan.group,))
