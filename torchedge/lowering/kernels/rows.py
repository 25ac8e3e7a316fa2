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
    every_offset,
    in_memory_order,
    joined,
    strides_of,
    width_of,
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
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

LONG = 64
"""Rounds of a loop above which sums are compensated for rounding errors."""
SHORT = 16
"""Largest number of rounds of a loop that is unrolled."""

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

_Stores = Sequence[tuple[Node, Computed]]


@dataclass(slots=True)
class _Nest:
    """The loop nest of one kernel: loops over rows and within them, lanes, and its statements.

    moved: the host's axes in terms of these loops. order: the host's inner axes. along: the lanes lie along a
    row. members: work-items that share a row. uniform: variables that are the same in all lanes.
    """

    rows: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    moved: dict[Axis, Index]
    order: tuple[Axis, ...]
    lane: Axis | None
    width: int
    along: bool
    members: int
    arguments: Arguments
    body: Body = field(default_factory=Body)
    uniform: set[str] = field(default_factory=set)
    shared: list[tuple[str, str]] = field(default_factory=list)
    scopes: int = 0

    def renderer(self, width: int, lines: list[str]) -> Renderer:
        """Return a new scope whose statements go to `lines`."""
        self.scopes += 1
        lane = self.lane if width > 1 else None
        prefix, uniform = f"v{self.scopes}_", frozenset(self.uniform)
        return Renderer(self.arguments.site_of, lane, width, lines, self.body.helpers, prefix, uniform)

    def loop(self, statements: Callable[[int], Sequence[str]], width: int) -> None:
        """Add the loops over a row around `statements(width)`; the remainder of a row follows at width 1."""
        rounds = prod([axis.extent for axis in self.inner]) // (width if self.along else 1)
        turn = [TURN] if rounds > SHORT else []
        with ExitStack() as stack:
            for axis in self.inner[:-1] if self.along else self.inner:
                stack.enter_context(self.body.block(self._head(axis, axis.extent)))
            if not (self.along and self.inner):
                self.body.add(*turn, *statements(width))
                return
            last = self.inner[-1]
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
        unroll = "#pragma unroll\n  " if rounds <= SHORT else ""
        return f"{unroll}for (int {name} = 0; {name} < {rounds}; ++{name})"

    @property
    def _shared_axis(self) -> Axis | None:
        """The loop whose rounds the members of a work-group share: the longest one."""
        if self.members == 1 or not self.inner:
            return None
        last = self.inner[-1]
        return max(self.inner, key=lambda a: a.extent // self.width if a is last else a.extent)


def write_rows(group: FusionGroup, layouts: Mapping[Node, Layout], target: Target) -> KernelSource:
    """Return the kernel of a group whose host reduces rows."""
    host = group.host
    assert isinstance(host, Rows)
    arguments = arguments_of(group.stored, list(group.reads), layouts, target.checks)
    nest = _nest_of(group, host, arguments, target)
    for stages in _rounds(host.stages, group.bodies):
        _reduce(nest, stages)
    _store(nest, group, host)
    items = _work_items(nest, target)
    body, attributes = Body(helpers=nest.body.helpers), ""
    if nest.members > 1:
        attributes = f"__attribute__((reqd_work_group_size({nest.members}, 1, 1))) "
        body.add("const int member = get_local_id(0);")
        body.add(*[f"__local {kind} {name}[{nest.members}];" for kind, name in nest.shared])
    body.add(*items.statements, "", *nest.body.lines)
    elements = host.numel * prod([a.extent for a in host.inner])
    kernel = arguments.kernel(
        body.text("rows", arguments, attributes),
        host.name,
        (work_of(group.bodies) + len(host.stages)) * elements,
        f"{host.name} over rows of {elements // max(1, host.numel)} elements",
        nest.members * sum(_SCALAR_BYTES[kind] for kind, _ in nest.shared),
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


def _nest_of(group: FusionGroup, host: Rows, arguments: Arguments, target: Target) -> _Nest:
    """Choose loops and lanes by the memory order of the largest operand and of the results."""
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
    searches = any(s.kind.startswith("arg") for s in host.stages)
    fastest_inner = min([strides.get(a, 1 << 60) for a in host.inner if a.extent > 1], default=1 << 60)
    fastest_outer = min([strides.get(a, 1 << 60) for a in host.outer if a.extent > 1], default=1 << 60)
    along = bool(loops) and (fastest_inner < fastest_outer or not rows)
    lane = loops[-1] if along else (rows[-1] if rows else None)
    if along:
        width = 1 if searches or lane is None else min(target.vector, 1 << (lane.extent.bit_length() - 1))
    else:
        width = width_of(lane.extent, target.vector) if lane else 1
    long_row = along and not searches and prod([a.extent for a in loops]) >= 4 * target.row_group
    members = target.row_group if long_row else 1
    return _Nest(rows, loops, renamed, host.inner, lane, width, along, members, arguments)


def _renamed(index: Index, names: Mapping[Axis, Axis]) -> Index:
    return index.substitute({old: of(new) for old, new in names.items()})


def _strides(bodies: Sequence[Scalar], stores: _Stores, arguments: Arguments) -> dict[Axis, int]:
    """Return the strides of the host's axes in its largest operand, then in smaller ones, then in results."""
    reads = [s for s in walk(*bodies) if isinstance(s, Read)]
    reads.sort(key=lambda s: -arguments.sites[s.tensor].layout.nbytes(s.tensor.shape, s.dtype))
    accesses = [(s.tensor, s.indices) for s in reads] + [(node, item.element) for node, item in stores]
    strides: dict[Axis, int] = {}
    for tensor, element in accesses:
        for axis, stride in strides_of(offset_of(arguments.sites[tensor], element)).items():
            strides.setdefault(axis, abs(stride))
    return strides


def _reduce(nest: _Nest, stages: Sequence[tuple[Stage, Scalar]]) -> None:
    """Add one round of reductions: accumulators, loops over the row, and the join of lanes and members."""
    body, width = nest.body, nest.width if nest.lane else 1
    rounds = prod([a.extent for a in nest.inner]) // (width * nest.members if nest.along else 1)
    accumulators = [
        _Accumulator(s.name, s.kind, s.dtype, value.dtype, width, nest.along, _is_exact(s, value, rounds))
        for s, value in stages
    ]
    for accumulator in accumulators:
        body.add(*accumulator.declare())
    values = [substitute(value, nest.moved) for _, value in stages]
    nest.loop(lambda lanes: _accumulate(nest, accumulators, values, lanes), width)
    for accumulator in accumulators:
        body.add(*accumulator.close())
        if nest.members > 1:
            nest.shared.append((accumulator.type, f"{accumulator.name}_s"))
            body.add(*accumulator.share(nest.members))
        if nest.along:
            nest.uniform.add(accumulator.name)


def _is_exact(stage: Stage, body: Scalar, rounds: int) -> bool:
    return stage.kind == "sum" and COMPUTE[body.dtype] in ("float", "double") and rounds > LONG


def _accumulate(
    nest: _Nest, accumulators: Sequence[_Accumulator], bodies: Sequence[Scalar], width: int
) -> list[str]:
    lines: list[str] = []
    renderer = nest.renderer(width, lines)
    values = [renderer.value(body, wide=True) for body in bodies]
    position = ""
    if any(a.searches for a in accumulators):  # the row-major position among the inner axes
        place = flatten([nest.moved[a] for a in nest.order], [a.extent for a in nest.order])
        position = nest.renderer(1, lines).integer(place)
    for accumulator, value in zip(accumulators, values, strict=True):
        lines += accumulator.add(value, position, nest.along and width < nest.width)
    return lines


def _store(nest: _Nest, group: FusionGroup, host: Rows) -> None:
    """Add the statements that write results: one value an element in loops, then one value a row."""
    inner = {a for a in host.inner if a.extent > 1}
    by_row: list[tuple[Node, Computed]] = []
    by_element: list[tuple[Node, Computed]] = []
    for node in group.stored:
        item = group.computed[node]
        used = set().union(*[axes_of(i) for i in item.element])
        (by_element if used & inner else by_row).append((node, item))

    def statements(stores: _Stores, width: int) -> list[str]:
        lines: list[str] = []
        write_all(nest.renderer(width, lines), stores, nest.arguments, nest.moved)
        return lines

    if by_element:
        nest.loop(lambda width: statements(by_element, width), nest.width if nest.lane else 1)
    if by_row:
        with nest.body.block("if (member == 0)") if nest.members > 1 else nullcontext():
            nest.body.add(*statements(by_row, 1 if nest.along else nest.width))


def _work_items(nest: _Nest, target: Target) -> WorkItems:
    if nest.members == 1:
        counts = {nest.lane: nest.lane.extent // nest.width} if nest.lane and not nest.along else {}
        return spread(nest.rows, counts, target)
    axes, step = [], 1
    for axis in reversed(nest.rows):
        axes.append((axis.name, f"(get_group_id(0) / {step}) % {axis.extent}"))
        step *= axis.extent
    return WorkItems(tuple(declared(axes)), (step * nest.members,), (nest.members,))


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
