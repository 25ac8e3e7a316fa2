"""Reductions over rows as kernels: sums, softmax, layer norm, windows of pooling and depthwise convolution.

The lanes of a kernel are either neighbouring rows (windows, sums over a batch) or neighbouring elements of
one row (softmax, layer norm). A work-group shares a long row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from math import prod

from torchedge.expressions.dialect import COMPUTE, literal, offset_of
from torchedge.expressions.indices import Axis, Index, axes_of, flatten, of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Local, Read, Scalar, substitute, walk
from torchedge.lowering.fusion import Computed, FusionGroup
from torchedge.lowering.kernels.loading import TURN
from torchedge.lowering.kernels.loops import (
    Stores,
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
    WorkItems,
    arguments_of,
    declared,
    spread,
)
from torchedge.lowering.nodes import Node, ReduceKind, Rows, Stage
from torchedge.lowering.schedules import RowsExtents, RowsSchedule
from torchedge.textures.layouts import Layout

LONG = 64
"""Rounds of a loop above which sums are compensated for rounding errors."""

_SCALAR_BYTES = {"float": 4, "double": 8, "long": 8, "int": 4, "uint": 4}

_JOIN = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "(({1} > {0}) | ({1} != {1})) ? {1} : {0}",
    "min": "(({1} < {0}) | ({1} != {1})) ? {1} : {0}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
}
_OF_WHOLE = {"max": "({1} > {0}) ? {1} : {0}", "min": "({1} < {0}) ? {1} : {0}"}


@dataclass(frozen=True, slots=True)
class RowsNest:
    """The loops of reductions over rows, in the order in which the largest operand lies.

    rows, inner: loops over rows and within them. bodies, stores: reduced values and results in terms of these
    loops. position: of an element among the host's inner axes, row-major. along: neighbours in memory belong
    to one row. searches: a reduction looks for a position.
    """

    rows: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    bodies: tuple[Scalar, ...]
    stores: Stores
    position: Index
    along: bool
    searches: bool

    @property
    def extents(self) -> RowsExtents:
        """Sizes of the loops."""
        rows, inner = (tuple([axis.extent for axis in loops]) for loops in (self.rows, self.inner))
        return RowsExtents(rows, inner, self.along, self.searches)

    def lane(self, along: bool) -> Axis | None:
        """Return the loop whose neighbours are the lanes."""
        loops = self.inner if along else self.rows
        return loops[-1] if loops else None

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
    """The statements of one kernel over rows. uniform: variables that are the same in all lanes."""

    nest: RowsNest
    schedule: RowsSchedule
    arguments: Arguments
    body: Body = field(default_factory=Body)
    uniform: set[str] = field(default_factory=set)
    shared: list[tuple[str, str]] = field(default_factory=list)
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
    def members(self) -> int:
        """Work-items that share a row."""
        return self.schedule.members

    def renderer(self, width: int, lines: list[str]) -> Renderer:
        """Return a new scope whose statements go to `lines`."""
        self.scopes += 1
        lane = self.nest.lane(self.along) if width > 1 else None
        prefix, uniform = f"v{self.scopes}_", frozenset(self.uniform)
        return Renderer(self.arguments.site_of, lane, width, lines, self.body.helpers, prefix, uniform)

    def loop(self, statements: Callable[[int], Sequence[str]], width: int) -> None:
        """Add the loops over a row around `statements(width)`; the remainder of a row follows at width 1."""
        inner = self.nest.inner
        rounds = prod([axis.extent for axis in inner]) // (width if self.along else 1)
        turn = [TURN] if rounds > self.schedule.unroll else []
        with ExitStack() as stack:
            for axis in inner[:-1] if self.along else inner:
                stack.enter_context(self.body.block(self._head(axis, axis.extent)))
            if not (self.along and inner):
                self.body.add(*turn, *statements(width))
                return
            last = inner[-1]
            blocks, remainder = divmod(last.extent, width)
            with self.body.block(self._head(last, blocks)):
                self.body.add(*turn, *statements(width))
            if remainder:
                head = f"for (int {last.name} = {blocks * width}; {last.name} < {last.extent}; ++{last.name})"
                if last is self._shared_axis:
                    head = f"if (member == 0) {head}"
                with self.body.block(head):
                    self.body.add(*statements(1))

    def _head(self, axis: Axis, rounds: int) -> str:
        name = axis.name
        if axis is self._shared_axis:
            return f"for (int {name} = member; {name} < {rounds}; {name} += {self.members})"
        unroll = "#pragma unroll\n  " if rounds <= self.schedule.unroll else ""
        return f"{unroll}for (int {name} = 0; {name} < {rounds}; ++{name})"

    @property
    def _shared_axis(self) -> Axis | None:
        """The loop whose rounds the members of a work-group share: the longest one."""
        inner = self.nest.inner
        if self.members == 1 or not inner:
            return None
        return max(inner, key=lambda a: a.extent // self.width if a is inner[-1] else a.extent)


def write_rows(
    group: FusionGroup,
    nest: RowsNest,
    layouts: Mapping[Node, Layout],
    schedule: RowsSchedule,
    checks: bool = False,
) -> KernelSource:
    """Return the kernel of a group whose host reduces rows."""
    host = group.host
    assert isinstance(host, Rows)
    arguments = arguments_of(group.stored, list(group.reads), layouts, checks)
    text = _Text(nest, schedule, arguments)
    for stages in _rounds(host.stages, nest.bodies):
        _reduce(text, stages)
    _store(text)
    items = _work_items(text)
    body, attributes = Body(helpers=text.body.helpers), ""
    if text.members > 1:
        attributes = f"__attribute__((reqd_work_group_size({text.members}, 1, 1))) "
        body.add("const int member = get_local_id(0);")
        body.add(*[f"__local {kind} {name}[{text.members}];" for kind, name in text.shared])
    body.add(*items.statements, "", *text.body.lines)
    elements = host.numel * prod([a.extent for a in host.inner])
    kernel = arguments.kernel(
        body.text("rows", arguments, attributes),
        host.name,
        (work_of(group.bodies) + len(host.stages)) * elements,
        f"{host.name} over rows of {elements // max(1, host.numel)} elements",
        text.members * sum(_SCALAR_BYTES[kind] for kind, _ in text.shared),
        "hierarchical",
    )
    return KernelSource(kernel, arguments.tensors, items.global_size, items.local_size, group.scope)


def _rounds(stages: Sequence[Stage], bodies: Sequence[Scalar]) -> list[list[tuple[Stage, Scalar]]]:
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
    rows, moved = joined(outer, indices)
    loops, moved_inner = joined(inner, [i.substitute(moved) for i in indices])
    rename = {a: Axis(f"r{k}", a.extent) for k, a in enumerate(rows)}
    within = {a: Axis(f"k{k}", a.extent) for k, a in enumerate(loops)}
    renamed = {a: _renamed(i, rename) for a, i in moved.items()}
    renamed |= {a: _renamed(i, within) for a, i in moved_inner.items()}
    rows, loops = tuple(rename.values()), tuple(within.values())
    position = flatten([renamed[a] for a in host.inner], [a.extent for a in host.inner])
    bodies = tuple([substitute(body, renamed) for body in group.bodies])
    searches = any(s.kind.startswith("arg") for s in host.stages)
    fastest_inner = min([strides.get(a, 1 << 60) for a in host.inner if a.extent > 1], default=1 << 60)
    fastest_outer = min([strides.get(a, 1 << 60) for a in host.outer if a.extent > 1], default=1 << 60)
    along = bool(loops) and (fastest_inner < fastest_outer or not rows)
    return RowsNest(rows, loops, bodies, in_loops(stores, renamed), position, along, searches)


def _renamed(index: Index, names: Mapping[Axis, Axis]) -> Index:
    return index.substitute({old: of(new) for old, new in names.items()})


def _strides(bodies: Sequence[Scalar], stores: Stores, arguments: Arguments) -> dict[Axis, int]:
    """Return the strides of the host's axes in its largest operand, then in smaller ones, then in results."""
    reads = [s for s in walk(*bodies) if isinstance(s, Read)]
    reads.sort(key=lambda s: -arguments.sites[s.tensor].layout.nbytes(s.tensor.shape, s.dtype))
    accesses = [(s.tensor, s.indices) for s in reads] + [(node, item.element) for node, item in stores]
    strides: dict[Axis, int] = {}
    for tensor, element in accesses:
        for axis, stride in strides_of(offset_of(arguments.sites[tensor], element)).items():
            strides.setdefault(axis, abs(stride))
    return strides


def _reduce(text: _Text, stages: Sequence[tuple[Stage, Scalar]]) -> None:
    """Add one round of reductions: accumulators, loops over the row, and the join of lanes and members."""
    body, width, members = text.body, text.width, text.members
    points = prod([a.extent for a in text.nest.inner])
    rounds = points // (width * members if text.along else members)
    accumulators = [
        _Accumulator(s.name, s.kind, s.dtype, value.dtype, width, text.along, _is_exact(s, value, rounds))
        for s, value in stages
    ]
    for accumulator in accumulators:
        body.add(*accumulator.declare())
    values = [value for _, value in stages]
    text.loop(lambda lanes: _accumulate(text, accumulators, values, lanes), width)
    for accumulator in accumulators:
        body.add(*accumulator.close())
        if members > 1:
            text.shared.append((accumulator.type, f"{accumulator.name}_s"))
            body.add(*accumulator.share(members))
        if text.along:
            text.uniform.add(accumulator.name)


def _is_exact(stage: Stage, body: Scalar, rounds: int) -> bool:
    return stage.kind == "sum" and COMPUTE[body.dtype] in ("float", "double") and rounds > LONG


def _accumulate(
    text: _Text, accumulators: Sequence[_Accumulator], bodies: Sequence[Scalar], width: int
) -> list[str]:
    lines: list[str] = []
    renderer = text.renderer(width, lines)
    values = [renderer.value(body, wide=True) for body in bodies]
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

    if by_element:
        text.loop(lambda width: statements(by_element, width), text.width)
    if by_row:
        with text.body.block("if (member == 0)") if text.members > 1 else nullcontext():
            text.body.add(*statements(by_row, 1 if text.along else text.width))


def _work_items(text: _Text) -> WorkItems:
    rows, lane = text.nest.rows, text.nest.lane(text.along)
    if text.members == 1:
        counts = {lane: lane.extent // text.width} if lane and not text.along else {}
        return spread(rows, counts, text.schedule.group)
    axes, step = [], 1
    for axis in reversed(rows):
        axes.append((axis.name, f"(get_group_id(0) / {step}) % {axis.extent}"))
        step *= axis.extent
    return WorkItems(tuple(declared(axes)), (step * text.members,), (text.members,))


@dataclass(frozen=True, slots=True)
class _Accumulator:
    """One reduction in a kernel.

    name: the variable of the result; `name_l` are the lanes while the loops run, `name_t` is the remainder of
    a row. kind, dtype: as in the stage. of: the dtype of the reduced values. width: lanes. along: the lanes
    are neighbours in one row, not rows of their own. exact: a long sum of floats is compensated (Kahan), so
    that its error does not grow with its length. Bools are 1 and 0 as scalars, masks of -1 and 0 in lanes.
    """

    name: str
    kind: ReduceKind
    dtype: str
    of: str
    width: int
    along: bool
    exact: bool = False

    @property
    def type(self) -> str:
        """OpenCL type of one result."""
        return COMPUTE[self.dtype]

    @property
    def searches(self) -> bool:
        """Whether it looks for a position: argmax and argmin."""
        return self.kind in ("argmax", "argmin")

    def start(self, lanes: bool = False) -> str:
        """The result over nothing."""
        kind = self.kind.removeprefix("arg")
        if kind in ("any", "all"):
            return "0" if kind == "any" else ("-1" if lanes else "1")
        if kind in ("sum", "prod"):
            return literal(0 if kind == "sum" else 1, self.of)
        if COMPUTE[self.of] in ("float", "double"):
            return literal(float("-inf") if kind == "max" else float("inf"), self.of)
        bits = 63 if COMPUTE[self.of] == "long" else 31
        return literal(-(2**bits) if kind == "max" else 2**bits - 1, self.of)

    def declare(self) -> list[str]:
        """Return the statements before the loops."""
        if self.searches:
            value, place = _sized(COMPUTE[self.of], self.width), _sized("int", self.width)
            return [
                f"{value} {self.name}_b = ({value})({self.start()});",
                f"{place} {self.name}_p = ({place})(0);",
            ]
        wide = _sized(self.type, self.width)
        lost = [f"{wide} {self.name}_c = ({wide})(0);"] if self.exact else []
        if self.width == 1:
            return [f"{self.type} {self.name} = {self.start()};", *lost]
        lines = [f"{wide} {self.name}_l = ({wide})({self.start(lanes=True)});", *lost]
        return [*lines, f"{self.type} {self.name}_t = {self.start()};"] if self.along else lines

    def add(self, value: str, position: str, tail: bool) -> list[str]:
        """Return the statements within the loops.

        position: of the element in its row, as C text. tail: for the remainder of a row.
        """
        if self.searches:
            best, sign = f"{self.name}_b", ">" if self.kind == "argmax" else "<"
            better = f"({value} {sign} {best})"
            if self._may_be_nan:
                better = f"({better} | (({value} != {value}) & ({best} == {best})))"
            place = _sized("int", self.width)
            mask = better  # as wide as the compared values
            if self.width > 1 and COMPUTE[self.of] in ("double", "long"):
                mask = f"convert_{place}({better})"
            return [
                f"{self.name}_p = {mask} ? ({place})({position}) : {self.name}_p;",
                f"{best} = {better} ? {value} : {best};",
            ]
        target = self.name if self.width == 1 else f"{self.name}_t" if tail else f"{self.name}_l"
        if self.exact and not tail:
            wide, lost, term = _sized(self.type, self.width), f"{self.name}_c", f"{self.name}_y"
            return [
                f"const {wide} {term} = {value} - {lost};",
                f"const {wide} {self.name}_n = {target} + {term};",
                f"{lost} = ({self.name}_n - {target}) - {term};",
                f"{target} = {self.name}_n;",
            ]
        return [f"{target} = {self._joined(target, value)};"]

    def close(self) -> list[str]:
        """Return the statements behind the loops, after which `name` holds the result."""
        if self.searches:
            wide = _sized("long", self.width)
            return [f"const {wide} {self.name} = convert_{wide}({self.name}_p);"]
        if self.width == 1:
            return []
        if not self.along:
            return [f"const {_sized(self.type, self.width)} {self.name} = {self.name}_l;"]
        lane = "({0}_l.s{1:x} != 0)" if self.dtype == "bool" else "{0}_l.s{1:x}"
        lines = [f"{self.type} {self.name}_{k} = {lane.format(self.name, k)};" for k in range(self.width)]
        half = self.width // 2
        while half:
            for k in range(half):
                lines.append(
                    f"{self.name}_{k} = {self._joined(f'{self.name}_{k}', f'{self.name}_{k + half}')};"
                )
            half //= 2
        return [*lines, f"{self.type} {self.name} = {self._joined(f'{self.name}_0', f'{self.name}_t')};"]

    def share(self, members: int) -> list[str]:
        """Return the statements that join the results of a work-group's members in a fixed order."""
        mine, other = f"{self.name}_s[member]", f"{self.name}_s[member + step]"
        return [
            f"{mine} = {self.name};",
            "barrier(CLK_LOCAL_MEM_FENCE);",
            f"for (int step = {members // 2}; step > 0; step >>= 1) {{",
            f"  if (member < step) {mine} = {self._joined(mine, other)};",
            "  barrier(CLK_LOCAL_MEM_FENCE);",
            "}",
            f"{self.name} = {self.name}_s[0];",
        ]

    def _joined(self, left: str, right: str) -> str:
        form = _JOIN[self.kind] if self._may_be_nan else _OF_WHOLE.get(self.kind, _JOIN[self.kind])
        return form.format(left, right)

    @property
    def _may_be_nan(self) -> bool:
        return COMPUTE[self.of] in ("float", "double")


def _sized(kind: str, width: int) -> str:
    return kind if width == 1 else f"{kind}{width}"
