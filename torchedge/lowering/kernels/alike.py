"""Groups that differ in their tensors alone, as those of equal layers do: their loops are found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchedge.expressions.indices import Atom, Axis, Fetched, Floor, Index
from torchedge.expressions.scalars import Apply, Guarded, Position, Read, Scalar, walk
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.nests import Nest, nest_of
from torchedge.lowering.kernels.rows import reference_of
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.lowering.nodes import Contraction, Node, Pointwise, Rows, Stored
from torchedge.textures.layouts import Layout


@dataclass(frozen=True, slots=True)
class Form:
    """A group without its tensors, as text, and those tensors in the order in which the text names them."""

    text: str
    nodes: tuple[Node, ...]

    def layouts(self, layouts: Mapping[Node, Layout]) -> tuple[Layout | None, ...]:
        """Return where its tensors lie; None: in no memory."""
        return tuple(map(layouts.get, self.nodes))


@dataclass(slots=True)
class Forms:
    """The forms of groups, found once, and the loops of groups in given layouts."""

    known: dict[FusionGroup, Form] = field(default_factory=dict)
    nests: dict[tuple[FusionGroup, tuple[Layout | None, ...]], Nest] = field(default_factory=dict)

    def of(self, group: FusionGroup) -> Form:
        """Return the form of a group."""
        if group not in self.known:
            self.known[group] = _Writer().form(group)
        return self.known[group]

    def nest(self, group: FusionGroup, layouts: Mapping[Node, Layout]) -> Nest:
        """Return the loops of a group."""
        key = group, self.of(group).layouts(layouts)
        if key not in self.nests:
            self.nests[key] = nest_of(group, layouts)
        return self.nests[key]

    def moved(
        self, sources: Sequence[KernelSource], one: FusionGroup, other: FusionGroup
    ) -> list[KernelSource]:
        """Return the kernels of a group for another one of the same form."""
        place = dict(zip(self.of(one).nodes, self.of(other).nodes, strict=True))
        moved = []
        for source in sources:
            for node in source.tensors:
                if node not in place:  # the slices of a sum
                    place[node] = Node(node.shape, node.dtype)
            launch = replace(source.launch, scope=other.scope)
            if launch.reference == reference_of(one.scope):
                launch = replace(launch, reference=reference_of(other.scope))
            tensors = tuple([place[node] for node in source.tensors])
            moved.append(replace(source, tensors=tensors, launch=launch))
        return moved


class _Writer:
    """Writes the form of one group: tensors, loops and expressions by number, in the order of appearance."""

    def __init__(self) -> None:
        self.nodes: dict[Node, int] = {}
        self.axes: dict[Axis, int] = {}
        self.scalars: dict[Scalar, int] = {}
        self.lines: list[str] = []

    def form(self, group: FusionGroup) -> Form:
        """Return the form of a group."""
        host = group.host
        line = [type(host).__name__, getattr(host, "name", ""), self.node(host)]
        if isinstance(host, Contraction):
            line += [self.loops(host.axes), host.roles, self.loops(host.inner)]
        elif isinstance(host, Rows):
            line += [self.loops(host.outer), self.loops(host.inner)]
            line += [(s.name, s.kind, s.dtype) for s in host.stages]
            line += [(self.loops(o.axes), o.dtype) for o in host.outputs]
        elif isinstance(host, Pointwise):
            line.append(self.loops(host.axes))
        line.append([self.scalar(root) for root in (*host.roots, *group.bodies)])
        for node, item in group.computed.items():
            line.append((self.node(node), self.scalar(item.value), [*map(self.index, item.element)]))
        line.append([(self.node(n), over and self.node(over)) for n, over in group.stored.items()])
        line.append([*map(self.node, (*group.reads, *group.operands))])
        self.lines.append(str(line))
        return Form("\n".join(self.lines), tuple(self.nodes))

    def node(self, node: Node) -> int:
        number = self.nodes.get(node)
        if number is None:
            number = self.nodes[node] = len(self.nodes)
            frozen = isinstance(node, Stored) and node.frozen
            self.lines.append(f"t{number} {type(node).__name__} {node.dtype}{node.shape} {frozen}")
        return number

    def loops(self, axes: tuple[Axis, ...]) -> list[str]:
        return [*map(self.atom, axes)]

    def atom(self, atom: Atom) -> str:
        if isinstance(atom, Axis):
            number = self.axes.setdefault(atom, len(self.axes))
            return f"i{number}:{atom.extent}"
        if isinstance(atom, Fetched):
            return f"s{self.scalar(atom.value)}[{atom.low},{atom.high}]"
        sign = "//" if isinstance(atom, Floor) else "%"
        return f"({self.index(atom.index)}){sign}{atom.divisor}"

    def index(self, index: Index) -> str:
        return f"{[(self.atom(atom), factor) for atom, factor in index.terms]}+{index.const}"

    def scalar(self, root: Scalar) -> int:
        known = self.scalars
        for scalar in walk(root):
            if scalar not in known:
                line = self.described(scalar)
                known[scalar] = len(known)
                self.lines.append(f"s{known[scalar]} {scalar.dtype} {line}")
        return known[root]

    def described(self, scalar: Scalar) -> object:
        known = self.scalars
        if isinstance(scalar, Apply):
            return scalar.function, [known[part] for part in scalar.args]
        if isinstance(scalar, Read):
            return self.node(scalar.tensor), [*map(self.index, scalar.indices)]
        if isinstance(scalar, Guarded):
            bounds = [(self.index(index), low, high) for index, low, high in scalar.bounds]
            return bounds, known[scalar.value], known[scalar.other]
        if isinstance(scalar, Position):
            return self.index(scalar.index)
        return repr(scalar)  # a number or a local
