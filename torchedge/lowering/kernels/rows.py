"""Reductions over rows as kernels: sums, softmax, layer norm, windows of pooling and depthwise convolution.

Element-wise work is rows of one element: no loops within a row, and nothing is reduced.

The lanes of a kernel are either neighbouring rows (windows, sums over a batch) or neighbouring elements of
one row (softmax, layer norm). The work-items of a group share long rows, neighbours reading neighbouring
memory; where rows are few, each is cut into slices, whose results a second kernel joins in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from math import prod

from torchedge.expressions.dialect import COMPUTE, TYPE_BYTES, offset_of
from torchedge.expressions.indices import ZERO, Axis, Fetched, Index, atoms_of, axes_of, flatten, of, rewrite
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Local, Read, Scalar, factored, reads_of, substitute, transform, walk
from torchedge.expressions.sizes import argument, digits
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.fusion import Computed, FusionGroup
from torchedge.lowering.kernels.accumulators import Accumulator, share
from torchedge.lowering.kernels.loading import TURN
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
from torchedge.lowering.kernels.sources import Arguments, Body, KernelSource, WorkItems, declared, spread
from torchedge.lowering.nodes import Node, Pointwise, Rows, Stage
from torchedge.lowering.schedules import RowsExtents, RowsSchedule, default_schedule
from torchedge.lowering.targets import Target

LONG = 64
"""Rounds of a loop above which sums are compensated for rounding errors."""
LONG_PRODUCT = 4096
"""The same of a product's sums, whose time counts; contractions compensate none."""
FEW_STAGES = 2
"""Most sums of a row of which a processor computes two rows at once: they stay in registers."""
MOST_UNROLLED = 64
"""Most copies of a row's statements by unrolled loops: hundreds of them compile for seconds."""

PART = Axis("part", 1 << 16)
"""The slice of a row, or of a product's inner loops, that a kernel reduces."""


@dataclass(frozen=True, slots=True)
class RowsNest:
    """The loops of reductions over rows, in the order in which the largest operand lies; or of elements.

    rows, inner: loops over rows and within them. bodies, stores: reduced values and results in terms of these
    loops. position: of an element among the host's inner axes, row-major. memory: all loops, the fastest in
    memory first. along: neighbours in memory belong to one row. slices: rows may be cut into slices. stages:
    the reductions, by name, kind and dtype. product: they are sums of a product of matrices.
    """

    rows: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    bodies: tuple[Scalar, ...]
    stores: Stores
    position: Index
    memory: tuple[Axis, ...]
    along: bool
    slices: bool
    stages: tuple[Stage, ...]
    product: bool = False

    @property
    def searches(self) -> bool:
        """Whether a reduction looks for a position."""
        return any(stage.kind.startswith("arg") for stage in self.stages)

    @property
    def sum_bytes(self) -> int:
        """Bytes of all reductions of one row."""
        return sum(TYPE_BYTES[COMPUTE[stage.dtype]] for stage in self.stages)

    @property
    def extents(self) -> RowsExtents:
        """Sizes of the loops."""
        rows, inner = (tuple([axis.extent for axis in loops]) for loops in (self.rows, self.inner))
        number = {axis: k for k, axis in enumerate((*self.rows, *self.inner))}
        memory = tuple([number[axis] for axis in self.memory])
        how = (self.along, self.searches, memory, self.slices, self.sum_bytes)
        return RowsExtents(rows, inner, *how, fetches=not self.stages and self._fetches)

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
        return bool(axes_below(fetched) & {*self.rows[-1:]})

    @property
    def flops(self) -> int:
        """Arithmetic operations of a launch."""
        points = prod([axis.extent for axis in (*self.rows, *self.inner)])
        values = self.bodies if self.stages else [item.value for _, item in self.stores]
        return (work_of(values) + len(self.stages)) * points

    def lane(self, along: bool) -> Axis | None:
        """Return the loop whose neighbours are the lanes."""
        loops = self.inner if along else self.rows
        return loops[-1] if loops else None

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """All that is computed: the reduced values, then the results."""
        return (*self.bodies, *[item.value for _, item in self.stores])

    @property
    def positions(self) -> tuple[tuple[Axis, ...], ...]:
        """The loops whose positions are counted as one."""
        return self.rows, *[(axis,) for axis in self.inner]

    def sliced(self, parts: int) -> tuple[RowsNest, RowsNest]:
        """Return the loops that reduce each of some slices of rows, and those that join the results."""
        element, shape = list(map(of, self.rows)), (parts, *[axis.extent for axis in self.rows])
        scratch = [Node(shape, stage.dtype) for stage in self.stages]
        stores = tuple(
            [
                (node, Computed(Local(stage.name, node.dtype), (of(PART), *element)))
                for node, stage in zip(scratch, self.stages, strict=True)
            ]
        )
        joining = joined_slices(self.rows, element, scratch, self.stages, self.stores)
        return replace(self, stores=stores), joining

    def in_pairs(self, vector: int) -> RowsNest:
        """Return the loops of which a round adds up two neighbouring vectors, where these share a factor.

        The scale of quantised weights is then read, converted and multiplied with once for both.
        """
        if not self.inner or vector == 1 or self.inner[-1].extent % (2 * vector):
            return self
        *_, last = self.inner
        half = Axis(last.name, last.extent // 2)
        first = of(half) // vector * (2 * vector) + of(half) % vector
        bodies = []
        for body in self.bodies:
            total = substitute(body, {last: first}) + substitute(body, {last: first + vector})
            bodies.append(factored(total))
            if bodies[-1] is total:
                return self
        inner, memory = (
            tuple([half if axis is last else axis for axis in axes]) for axes in (self.inner, self.memory)
        )
        return replace(self, inner=inner, memory=memory, bodies=tuple(bodies))

    def in_row_pairs(self) -> RowsNest:
        """Return the loops of which a round takes two neighbouring rows: what these share is read once."""
        *others, last = self.rows
        half = Axis(last.name, last.extent // 2)
        bodies, stages, stores = list[Scalar](), list[Stage](), list[tuple[Node, Computed]]()
        for number, mark in enumerate(("", "n")):

            def marked(leaf: Scalar, mark: str = mark) -> Scalar | None:
                return replace(leaf, name=leaf.name + mark) if isinstance(leaf, Local) else None

            place = {last: of(half) * 2 + number}
            bodies += [substitute(body, place) for body in self.bodies]
            stages += [replace(stage, name=stage.name + mark) for stage in self.stages]
            for node, item in in_loops(self.stores, place):
                stores.append((node, replace(item, value=transform(item.value, rewrite, marked))))
        memory = tuple([half if axis is last else axis for axis in self.memory])
        whole = replace(self, rows=(*others, half), memory=memory, bodies=tuple(bodies))
        return replace(whole, stages=tuple(stages), stores=tuple(stores))

    def split_stores(self) -> tuple[Stores, Stores]:
        """Return the results with a value for each element of a row, and those with one for a row."""
        inner = set(self.inner)
        by_row: list[tuple[Node, Computed]] = []
        by_element: list[tuple[Node, Computed]] = []
        for node, item in self.stores:
            used = set[Axis]().union(*[axes_of(i) for i in item.element])
            (by_element if used & inner else by_row).append((node, item))
        return by_element, by_row


@dataclass(slots=True)
class _Text:
    """The statements of one kernel over rows.

    share, slices: work-items of a group and slices by loop, where they are not one. uniform: variables that
    are the same in all lanes.
    """

    nest: RowsNest
    schedule: RowsSchedule
    arguments: Arguments
    share: dict[Axis, int]
    slices: dict[Axis, int]
    body: Body = field(default_factory=Body)
    uniform: set[str] = field(default_factory=set)
    shared: list[Accumulator] = field(default_factory=list)
    scopes: int = 0

    @property
    def width(self) -> int:
        """Number of lanes."""
        return self.schedule.vector

    @property
    def along(self) -> bool:
        """Whether the lanes are neighbours in one row."""
        return self.schedule.along

    @property
    def items(self) -> dict[Axis, int]:
        """Rounds of each loop; a vector counts once."""
        lane = self.nest.lane(self.along)
        return {a: a.extent // self.width if a is lane else a.extent for a in self.nest.memory}

    @property
    def apart(self) -> int:
        """How far apart the vectors of a work-item are, in vectors."""
        return self.items[self.nest.rows[-1]] // (1 + self.schedule.further)

    @property
    def members(self) -> int:
        """Work-items that share a row."""
        return prod([self.share.get(axis, 1) for axis in self.nest.inner])

    @property
    def group(self) -> int:
        """Work-items of a group whose rows are shared."""
        return prod(self.share.values())

    @property
    def rounds(self) -> int:
        """Rounds of all loops over a row for one work-item."""
        cut = {axis: self.share.get(axis, 1) * self.slices.get(axis, 1) for axis in self.nest.inner}
        return prod([-(-self.items[axis] // n) for axis, n in cut.items()])

    def renderer(self, width: int, lines: list[str]) -> Renderer:
        """Return a new scope whose statements go to `lines`."""
        self.scopes += 1
        lane = self.nest.lane(self.along) if width > 1 else None
        prefix, uniform = f"v{self.scopes}_" if self.nest.stages else "v", frozenset(self.uniform)
        return Renderer(self.arguments.site_of, lane, width, lines, self.body.helpers, prefix, uniform)

    def loop(self, statements: Callable[[int], Sequence[str]], width: int) -> None:
        """Add the loops over a row around `statements(width)`; the remainder of a row follows at width 1."""
        inner = self.nest.inner
        rounds = prod([self.items[axis] for axis in inner])
        turn = [TURN] if rounds > self.schedule.unroll else []
        with ExitStack() as stack:
            for axis in inner[:-1] if self.along else inner:
                stack.enter_context(self.body.block(self._head(axis)))
            if not (self.along and inner):
                self.body.add(*turn, *statements(width))
                return
            last = inner[-1]
            with self.body.block(self._head(last)):
                self.body.add(*turn, *statements(width))
            if last.extent % width:
                with self.body.block(self._tail(last, last.extent // width * width)):
                    self.body.add(*statements(1))

    def _head(self, axis: Axis) -> str:
        name, rounds, step = axis.name, self.items[axis], self.share.get(axis, 1)
        slices = self.slices.get(axis, 1)
        within = prod([self.items[a] for a in self.nest.inner[self.nest.inner.index(axis) :]])
        unrolled = step == slices == 1 and rounds <= self.schedule.unroll and within <= MOST_UNROLLED
        first, end = ("0" if step == 1 else f"m_{name}"), str(rounds) if unrolled else argument(rounds, name)
        if slices > 1:
            length = argument(-(-rounds // (slices * step)) * step, f"part {name}")
            begin = f"part_{name} * {length}"
            first = begin if step == 1 else f"{begin} + {first}"
            end = f"min({begin} + {length}, {argument(rounds, name)})"
        declared_end = f", end = {end}" if slices > 1 else ""
        head = f"for (int {name} = {first}{declared_end}; {name} < {'end' if slices > 1 else end};"
        if step > 1:
            return f"{head} {name} += {step})"
        unroll = "#pragma unroll\n  " if unrolled else ""
        return f"{unroll}{head} ++{name})"

    def _tail(self, axis: Axis, begin: int) -> str:
        name, step = axis.name, self.share.get(axis, 1)
        start = argument(begin, f"tail {name}")
        first = f"{start} + m_{name}" if step > 1 else start
        head = f"for (int {name} = {first}; {name} < {argument(axis.extent, f'end {name}')}; "
        head += f"{name} += {step})" if step > 1 else f"++{name})"
        return f"if (part_{name} == 0) {head}" if self.slices.get(axis, 1) > 1 else head


def joined_slices(
    rows: tuple[Axis, ...],
    element: Sequence[Index],
    slices: Sequence[Node],
    stages: tuple[Stage, ...],
    stores: Stores,
) -> RowsNest:
    """Return the loops over results and their slices. element: of a slice, in terms of `rows`."""
    part = Axis("k0", slices[0].shape[0])
    bodies = tuple([Read(node, (of(part), *element), node.dtype) for node in slices])
    memory = (*reversed(rows), part)
    return RowsNest(rows, (part,), bodies, stores, of(part), memory, not rows, False, stages)


def joining_schedule(nest: RowsNest, target: Target) -> RowsSchedule:
    """Return the schedule of a kernel that joins slices."""
    schedule = default_schedule(nest.extents, target)
    assert isinstance(schedule, RowsSchedule)
    return replace(schedule, unroll=1)


def write_rows(
    group: FusionGroup, nest: RowsNest, arguments: Arguments, schedule: RowsSchedule, target: Target
) -> KernelSource:
    """Return the kernel of a group's rows or elements, or the one that joins slices."""
    host = group.host
    name = host.name if isinstance(host, Rows) else "sum of slices" if nest.stages else "pointwise"
    flops, length = nest.flops, prod([axis.extent for axis in nest.inner])
    if nest.product and schedule.along and schedule.members == schedule.slices == 1:
        nest = nest.in_pairs(schedule.vector)
        packed = any(ITEM_SIZES[read.dtype] == 1 for read in reads_of(*nest.bodies))
        even = nest.rows and nest.rows[-1].extent % 2 == 0
        if packed and even and target.serial and len(nest.stages) <= FEW_STAGES:
            nest = nest.in_row_pairs()
            schedule = replace(schedule, group=(-(-schedule.group[0] // 2), *schedule.group[1:]))
    axes = (*nest.rows, *nest.inner)
    share, slices = (
        {axis: n for axis, n in zip(axes, numbers, strict=True) if n > 1}
        for numbers in (schedule.shares(nest.extents), schedule.cuts(nest.extents))
    )
    text = _Text(nest, schedule, arguments, share, slices)
    if not nest.stages or (isinstance(host, Rows) and not slices and not _uneven(text)):
        # Not where further work-items of the last group read its last row again.
        arguments = text.arguments = replace(arguments, in_place=_in_place_pairs(group, arguments))
    for stages in rounds_of(nest.stages, nest.bodies):
        _reduce(text, stages)
    _store(text)
    items = _work_items(text, target.serial)
    body, attributes = Body(helpers=text.body.helpers), ""
    if text.members > 1:
        attributes = f"__attribute__((reqd_work_group_size({text.group}, 1, 1))) "
        body.add(*[f"__local {a.result_type} {a.name}_s[{text.group}];" for a in text.shared])
    body.spread(items, text.body.lines)
    reference = f"{name} over rows of {length} elements"
    return arguments.launch(
        body,
        "rows" if nest.stages else "pointwise",
        name,
        (items.global_size, items.local_size),
        flops,
        reference if nest.stages else reference_of(group.scope),
        group.scope,
        text.group * sum(a.nbytes for a in text.shared),
        "elemental" if not nest.stages else "reusable" if name == "matmul" else "hierarchical",
        attributes,
    )


def reference_of(scope: str) -> str:
    """Return the computation of element-wise operators of a module."""
    return f"element by element for {scope or 'the step'}"


def _in_place_pairs(group: FusionGroup, arguments: Arguments) -> tuple[tuple[int, int], ...]:
    """Return (argument read, argument written) where each element is read last where it is written.

    Of rows, all elements have been read for the reductions before the first one is written.
    """
    inner = set(group.host.inner) if isinstance(group.host, Rows) else set[Axis]()
    reads = reads_of(*group.bodies, *[group.computed[n].value for n in group.stored])
    pairs: list[tuple[int, int]] = []
    for written, node in enumerate(arguments.tensors):
        if arguments.access[written] != "write" or node not in group.stored:
            continue
        if inner and not inner & set[Axis]().union(*map(axes_of, group.computed[node].element)):
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


def rounds_of(stages: Sequence[Stage], bodies: Sequence[Scalar]) -> list[list[tuple[Stage, Scalar]]]:
    """Return the stages by rounds over the row; no stage reads the result of another one in its round."""
    level: dict[str, int] = {}
    rounds: list[list[tuple[Stage, Scalar]]] = []
    for stage, body in zip(stages, bodies, strict=True):
        needed = [level[s.name] for s in walk(body) if isinstance(s, Local) and s.name in level]
        level[stage.name] = max(needed, default=-1) + 1
        if level[stage.name] == len(rounds):
            rounds.append([])
        rounds[level[stage.name]].append((stage, body))
    return rounds


def rows_nest(group: FusionGroup, arguments: Arguments) -> RowsNest:
    """Return the loops of reductions by the memory order of the largest operand and of the results."""
    host = group.host
    assert isinstance(host, Rows)
    stores = [(n, group.computed[n]) for n in group.stored]
    strides = _strides(group.bodies, stores, arguments)
    outer, inner = in_memory_order(host.outer, strides), in_memory_order(host.inner, strides)
    indices = every_offset([*group.bodies, *[c.value for _, c in stores]], stores, arguments)
    rows, moved = joined(outer, indices, "r")
    loops, moved_inner = joined(inner, [i.substitute(moved) for i in indices], "k")
    moved |= moved_inner
    position = flatten([moved[a] for a in host.inner], [a.extent for a in host.inner])
    bodies = tuple([substitute(body, moved) for body in group.bodies])
    if host.name == "matmul":
        bodies = tuple(map(factored, bodies))
    searches = any(s.kind.startswith("arg") for s in host.stages)
    fastest = min([a for a in strides if a.extent > 1], key=strides.__getitem__, default=None)
    along = bool(loops) and (fastest in host.inner or not rows)
    memory = in_memory_order((*rows, *loops), _strides(group.bodies, stores, arguments, moved))[::-1]
    return RowsNest(
        rows,
        loops,
        bodies,
        in_loops(stores, moved),
        position,
        memory,
        along,
        not searches and _can_cut(host),
        host.stages,
        host.name == "matmul",
    )


def elements_nest(group: FusionGroup, arguments: Arguments) -> RowsNest:
    """Return the loops of an element-wise group, in the order in which its first result lies."""
    host = group.host
    assert isinstance(host, Pointwise)
    stores = [(node, group.computed[node]) for node in group.stored]
    node, first = stores[0]
    order = in_memory_order(host.axes, strides_of(offset_of(arguments.sites[node], first.element)))
    loops, moved = joined(order, every_offset([c.value for _, c in stores], stores, arguments))
    return RowsNest(loops, (), (), in_loops(stores, moved), ZERO, loops[::-1], False, False, ())


def _can_cut(host: Rows) -> bool:
    """Return whether slices of a row can be reduced by themselves, and their results later."""
    names, inner = {s.name for s in host.stages}, set(host.inner)
    own = any(isinstance(s, Local) and s.name in names for stage in host.stages for s in walk(stage.body))
    return not own and not any(inner & set(output.axes) for output in host.outputs)


def _strides(
    bodies: Sequence[Scalar], stores: Stores, arguments: Arguments, moved: Mapping[Axis, Index] | None = None
) -> dict[Axis, int]:
    """Return the strides of the host's axes in the operand that most is read of.

    Axes on which it does not depend follow with larger strides, in the order of the other operands and of the
    results. moved: the host's axes in terms of others, whose strides are wanted.
    """
    accesses = [(s.tensor, s.indices) for s in walk(*bodies) if isinstance(s, Read)]
    accesses += [(node, item.element) for node, item in stores]
    accesses.sort(key=lambda access: -prod([axis.extent for axis in axes_below(access[1])]))
    strides: dict[Axis, int] = {}
    for tensor, element in accesses:
        offset = offset_of(arguments.sites[tensor], element)
        steps = strides_of(offset if moved is None else offset.substitute(moved))
        beyond = max([stride * axis.extent for axis, stride in strides.items()], default=1)
        strides |= {axis: abs(stride) * beyond for axis, stride in steps.items() if axis not in strides}
    return strides


def _reduce(text: _Text, stages: Sequence[tuple[Stage, Scalar]]) -> None:
    """Add one round of reductions: accumulators, loops over the row, and the join of lanes and members."""
    body, accumulators = text.body, []
    for s, value in stages:
        long = text.rounds > (LONG_PRODUCT if text.nest.product else LONG)
        exact = s.kind == "sum" and COMPUTE[value.dtype] in ("float", "double") and long
        form = (s.name, s.kind, s.dtype, value.dtype, text.width, text.along, exact)
        accumulators.append(Accumulator(*form))
    for accumulator in accumulators:
        body.add(*accumulator.declare())
    values = [value for _, value in stages]
    text.loop(lambda lanes: _accumulate(text, accumulators, values, lanes), text.width)
    for accumulator in accumulators:
        body.add(*accumulator.close(shared=text.members > 1))
        if text.along:
            text.uniform.add(accumulator.name)
    if text.members > 1:
        text.shared += accumulators
        body.add(*share(accumulators, text.members, _apart(text)))


def _apart(text: _Text) -> int:
    """Return how far apart the members of a row are in local memory: neighbours use different banks."""
    first = next((axis for axis in text.nest.memory if axis in text.share), None)
    return 1 if first in text.nest.inner else text.group // text.members


def _accumulate(
    text: _Text, accumulators: Sequence[Accumulator], bodies: Sequence[Scalar], width: int
) -> list[str]:
    lines: list[str] = []
    renderer = text.renderer(width, lines)
    values = [
        renderer.inline(body) if a.contracts else renderer.value(body, wide=True)
        for a, body in zip(accumulators, bodies, strict=True)
    ]
    position = ""
    if any(a.searches for a in accumulators):  # the row-major position among the inner axes
        position = text.renderer(1, lines).integer(text.nest.position)
    for accumulator, value in zip(accumulators, values, strict=True):
        lines += accumulator.add(value, position, text.along and width < text.width)
    return lines


def _store(text: _Text) -> None:
    """Add the statements that write results: one value an element in loops, then one value a row."""
    by_element, by_row = text.nest.split_stores()

    def statements(stores: Stores, width: int) -> list[str]:
        lines: list[str] = []
        write_all(text.renderer(width, lines), stores, text.arguments)
        return lines

    beyond = ["inside"] if _uneven(text) else []
    if by_element:
        with _tested(text, beyond):
            text.loop(lambda width: statements(by_element, width), text.width)
    if by_row:
        with _tested(text, [*beyond, "member == 0"] if text.members > 1 else beyond), _vectors(text):
            text.body.add(*statements(by_row, 1 if text.along else text.width))


def _tested(text: _Text, tests: Sequence[str]) -> AbstractContextManager[None]:
    return text.body.block(f"if ({' && '.join(tests)})") if tests else nullcontext()


def _vectors(text: _Text) -> AbstractContextManager[None]:
    """Open the loop over the vectors of a work-item, if there are several."""
    if not text.schedule.further:
        return nullcontext()
    name, step, end = text.nest.rows[-1].name, text.apart, text.items[text.nest.rows[-1]]
    text.body.add("#pragma unroll")
    return text.body.block(f"for (int {name} = first; {name} < {end}; {name} += {step})")


def _uneven(text: _Text) -> list[Axis]:
    """Return the loops over rows of which the last group has too many work-items."""
    return [axis for axis in text.nest.rows if text.items[axis] % text.share.get(axis, 1)]


def _work_items(text: _Text, serial: bool) -> WorkItems:
    """Spread rows and slices: each work-item has rows of its own, or a work-group shares its rows."""
    nest, items, parts = text.nest, text.items, prod(text.slices.values())
    own = digits("part", [(f"part_{axis.name}", n) for axis, n in text.slices.items()])
    if text.schedule.members == 1:
        group = text.schedule.group
        loops = nest.rows
        if text.slices:  # one more loop
            group = group[: len(loops)]
            group = (*group, *[1] * (min(len(loops) + 1, 3) - len(group)))
            loops = (Axis(PART.name, parts), *loops)
        counts = {axis: items[axis] for axis in nest.rows}
        if text.schedule.further:
            first = Axis("first", loops[-1].extent)
            loops, counts = (*loops[:-1], first), {**counts, first: text.apart}
        return spread(loops, counts, group, serial=serial).followed(declared(own))
    share = {axis: text.share[axis] for axis in nest.memory if axis in text.share}
    statements = digits("get_local_id(0)", [(f"m_{axis.name}", n) for axis, n in share.items()])
    member, row = (_number(share, loops) for loops in (nest.inner, nest.rows))
    if text.members > 1:
        apart = _apart(text)
        within = f"{apart} * member" if apart > 1 else "member"
        beside = f"{text.members} * ({row})" if apart == 1 else row
        statements += [("member", member), ("slot", f"{within} + {beside}" if row else within)]
    uneven, over = _uneven(text), [axis for axis in nest.memory if axis not in nest.inner]
    blocks = {axis: -(-items[axis] // share.get(axis, 1)) for axis in over}
    numbers = [(f"g_{axis.name}", n) for axis, n in blocks.items()]
    statements += digits("get_group_id(0)", [*numbers, *([(PART.name, parts)] if parts > 1 else [])])
    for axis in over:
        place = f"g_{axis.name} * {share[axis]} + m_{axis.name}" if axis in share else f"g_{axis.name}"
        if axis in uneven:
            statements.append((f"x_{axis.name}", place))
            place = f"min(x_{axis.name}, {items[axis] - 1})"
        statements.append((axis.name, place))
    if uneven:
        inside = " && ".join([f"x_{axis.name} == {axis.name}" for axis in uneven])
        statements.append(("inside", inside))
    return WorkItems(
        tuple(declared([*statements, *own])), (prod(blocks.values()) * parts * text.group,), (text.group,)
    )


def _number(share: Mapping[Axis, int], loops: Sequence[Axis]) -> str:
    """Return the number of a work-item among those along some loops as C text."""
    terms, step = [], 1
    for axis, n in share.items():
        if axis in loops:
            terms.append(f"{step} * m_{axis.name}" if step > 1 else f"m_{axis.name}")
            step *= n
    return " + ".join(terms)
