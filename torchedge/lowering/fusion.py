"""Which tensors of a step are written to memory, and which of them one kernel computes together.

A tensor that is not kept in memory is computed again wherever it is read. Element-wise followers join the
kernel that makes their input: a bias, an activation, a residual or the update of a parameter costs no launch
where it reads the result of a product, a reduction or another element-wise kernel element by element
(DNNFusion; TMModel, section 5).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeGuard

from torchedge.expressions.functions import cost_of
from torchedge.expressions.indices import Axis, Index, axes_of, inverse, of, reshape
from torchedge.expressions.scalars import (
    Apply,
    Guarded,
    Local,
    Read,
    Scalar,
    children,
    depth_of,
    fetched_by,
    level_of,
    post_order,
    reads_of,
    substitute,
    substitute_index,
    walk,
)
from torchedge.graphs import ITEM_SIZES
from torchedge.graphs.graph import in_order
from torchedge.graphs.steps import UPDATES
from torchedge.lowering.building import view
from torchedge.lowering.nodes import (
    PACKED,
    Contraction,
    Node,
    Pointwise,
    Rows,
    RowsResult,
    Stored,
    indices_of,
    nodes_below,
)
from torchedge.lowering.row_writes import row_writes
from torchedge.lowering.targets import Kind, Target
from torchedge.lowering.translation import Translation

MOST_PIECES = 4
"""A node with more operands of its own size than this is written to memory: a concatenation of many."""
MOST_DEPTH = 64
"""Levels (`level_of`) behind one another in a kernel; a graph may be a chain of any length."""
MOST_SCALARS = 512
"""Functions, reads and guards of a kernel which others join."""
MOST_TENSORS = 48
"""Tensors that a kernel which others join reads or writes."""
MOST_EXTRA_WORK = 24
"""Arithmetic operations an element that may be spent again to spare a tensor its way through memory."""
OPERAND_BLOCKS: dict[Kind, int] = {"panel": 128, "local": 64, "register": 4}
"""Rows or columns for which a schedule of a contraction reads an element of an operand once."""
NEAR = 16
"""Element-wise groups, in the order of the graph, within which a group is merged with later ones."""
MOST_BESIDE = 1 << 20
"""Most elements of groups that are merged side by side: of large ones a launch is a small part."""
LEAST_SHARED = 16
"""Fewest elements of the operand that both read: a learning rate is no reason to merge."""
ACCUMULATED = "acc"
"""The local under which the followers of a contraction read its result."""


def choose_kept(roots: Sequence[Node]) -> set[Node]:
    """Return the pointwise nodes that are written to memory: roots, operands of contractions, costly ones.

    Each reader computes a node again where that moves no more bytes than writing and reading it, and costs
    little arithmetic. Contractions read memory, directly or through views. Quantised weights are dequantised
    where they are read: they are never in memory as floats.
    """
    order = nodes_below(roots)
    dequantised = _dequantised(order)
    readers: dict[Node, list[tuple[Node, float]]] = defaultdict(list)
    for node in order:
        for access, points in _reads(node):
            readers[access.tensor].append((node, points / max(1, access.tensor.numel)))
    kept: set[Node] = {n for n in roots if isinstance(n, Pointwise)}
    ratio: dict[Node, float] = {}
    for node in reversed(order):
        if not isinstance(node, Pointwise):
            continue
        ratio[node] = sum(share * (ratio.get(r, 1.0) if r not in kept else 1.0) for r, share in readers[node])
        contracted = _is_contracted(node, readers)
        if node in kept or is_access(node.body) or node in dequantised:
            continue
        if contracted or not _is_cheap(node.body, node.numel, ratio[node]):
            kept.add(node)
    return kept


def _dequantised(order: Sequence[Node]) -> set[Node]:
    """Return the nodes that are computed from frozen weights alone, with small integers, at little cost.

    Each element has bits of its own in memory, but fewer than it would have if it was written. order: of all
    nodes, operands before their users.
    """
    below: dict[Node, tuple[frozenset[Node], int]] = {}
    chosen = set[Node]()
    for node in order:
        if isinstance(node, Stored) and node.frozen:
            below[node] = frozenset([node]), 0
        elif isinstance(node, Pointwise) and all(n in below for n in node.operands):
            stored = frozenset[Node]().union(*[below[n][0] for n in node.operands])
            work = sum(cost_of(s.function) for s in walk(node.body) if isinstance(s, Apply))
            below[node] = stored, work + sum(below[n][1] for n in node.operands)
            packed = sum(_bytes_of(n) for n in stored if n.dtype in PACKED)
            saves = node.numel <= 8 * packed and sum(map(_bytes_of, stored)) < _bytes_of(node)
            if saves and below[node][1] <= MOST_EXTRA_WORK:
                chosen.add(node)
    return chosen


def at_limits(order: Sequence[Node], kept: Collection[Node]) -> set[Node]:
    """Return further nodes to write to memory, so that no kernel grows with the length of the graph.

    order: of all nodes, operands before their users.
    """
    further: set[Node] = set()
    reach: dict[Node, tuple[int, frozenset[Node]]] = {}
    for node in order:
        if not isinstance(node, Pointwise):
            continue
        inside = {n: reach[n] for n in node.operands if n in reach and n not in kept and n not in further}
        depths: dict[Scalar, int] = {}
        for scalar in walk(node.body):
            below = max([depths[part] for part in children(scalar)], default=0)
            inlined = inside.get(scalar.tensor, (0,))[0] if isinstance(scalar, Read) else 0
            depths[scalar] = level_of(scalar) + below + inlined
        direct = [n for n in node.operands if n not in inside]
        tensors = frozenset(direct).union(*[tensors for _, tensors in inside.values()])
        reach[node] = depths[node.body], tensors
        if depths[node.body] > MOST_DEPTH or len(tensors) > MOST_TENSORS:
            further.add(node)
    return further


def _bytes_of(node: Node) -> int:
    return node.numel * ITEM_SIZES[node.dtype]


def _is_contracted(node: Node, readers: Mapping[Node, Sequence[tuple[Node, float]]]) -> bool:
    """Return whether a contraction reads a node or a view of it."""
    waiting, seen = [node], {node}
    while waiting:
        for reader, _ in readers.get(waiting.pop(), ()):
            if isinstance(reader, Contraction):
                return True
            if isinstance(reader, Pointwise) and is_access(reader.body) and reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return False


def _is_cheap(body: Scalar, numel: int, ratio: float) -> bool:
    """Return whether to compute each of `numel` elements `ratio` times rather than to write and read them."""
    distinct = {s.tensor: s.tensor.numel for s in walk(body) if isinstance(s, Read)}
    traffic = sum(min(1.0, size / max(1, numel)) for size in distinct.values())
    large = [size for size in distinct.values() if 4 * size > numel]
    pieces = [s for s in walk(body) if isinstance(s, Guarded)]
    if max(len(large), len(pieces)) > MOST_PIECES:
        return False
    if ratio <= 1.0:
        return True
    work = sum(cost_of(s.function) for s in walk(body) if isinstance(s, Apply))
    return ratio * traffic <= traffic + 1 + ratio and (ratio - 1) * work <= MOST_EXTRA_WORK


def is_access(body: Scalar) -> bool:
    """Return whether an expression only reads one tensor at an index: a view, perhaps padded or converted."""
    while not isinstance(body, Read):
        if isinstance(body, Guarded) and not children(body.other):
            body = body.value
        elif isinstance(body, Apply) and body.function == "cast":
            body = body.args[0]
        else:
            return False
    return not children(body)


def _reads(node: Node) -> list[tuple[Read, int]]:
    """Return every read of a node with the number of times that it is executed."""
    if isinstance(node, Pointwise):
        return [(s, node.numel) for s in walk(node.body) if isinstance(s, Read)]
    if isinstance(node, Rows):
        inner = prod([a.extent for a in node.inner])
        executed = []
        for stage in node.stages:
            executed += [(s, node.numel * inner) for s in walk(stage.body) if isinstance(s, Read)]
        for output in node.outputs:
            points = prod([a.extent for a in output.axes])
            executed += [(s, points) for s in walk(output.body) if isinstance(s, Read)]
        return executed
    return [(s, s.tensor.numel) for root in node.roots for s in walk(root) if isinstance(s, Read)]


@dataclass(slots=True)
class Expander:
    """Expands expressions: reads of pointwise nodes outside `kept` become the bodies of those nodes."""

    kept: Collection[Node]
    bodies: dict[Node, Scalar] = field(default_factory=dict)

    def expand(self, scalar: Scalar) -> Scalar:
        """Return the expression over materialised tensors alone."""
        return substitute(scalar, {}, self._inline)

    def body(self, node: Pointwise) -> Scalar:
        """Return a pointwise node's body over materialised tensors, in its own axes."""
        for below in post_order([node], self._missing):
            if below not in self.bodies:
                self.bodies[below] = self.expand(below.body)
        return self.bodies[node]

    def _missing(self, node: Pointwise) -> list[Pointwise]:
        """Return the nodes whose bodies that of a node needs first."""
        if node in self.bodies:
            return []
        return [read.tensor for read in reads_of(node.body) if self._is_inlined(read.tensor)]

    def _is_inlined(self, node: Node) -> TypeGuard[Pointwise]:
        return isinstance(node, Pointwise) and node not in self.kept

    def _inline(self, access: Read) -> Scalar | None:
        node = access.tensor
        if not self._is_inlined(node):
            return None
        return substitute(self.body(node), dict(zip(node.axes, access.indices, strict=True)))


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that a group can store: its value at a point of the host's loops, and the element there."""

    value: Scalar
    element: tuple[Index, ...]

    def moved(
        self,
        axes: Mapping[Axis, Index],
        change: Callable[[Read], Scalar | None] = lambda _: None,
        known: dict[Scalar, Scalar] | None = None,
    ) -> Computed:
        """Return it in terms of other loops, reads replaced as in `substitute`."""
        element = tuple([substitute_index(index, axes, change, known) for index in self.element])
        return Computed(substitute(self.value, axes, change, known), element)


@dataclass(eq=False)
class FusionGroup:
    """The nodes of one kernel: a host, and its followers, which are computed at the host's points.

    host: Pointwise, Rows or Contraction. bodies: the host's expressions over tensors in memory (stages of
    Rows, factors of a Contraction). computed: by tensor. stored: the tensors to write, each with the stored
    tensor that it overwrites (None: a tensor of its own). place, first: of its last and its first node in the
    order of the graph.
    operands: nodes computed where the host, a contraction, reads them.
    """

    host: Node
    computed: dict[Node, Computed]
    place: int
    bodies: tuple[Scalar, ...] = ()
    reads: dict[Node, None] = field(default_factory=dict)
    stored: dict[Node, Stored | None] = field(default_factory=dict)
    operands: list[Node] = field(default_factory=list)
    first: int = -1

    def __post_init__(self) -> None:
        """Begin where it stands."""
        self.first = self.place if self.first < 0 else self.first

    @property
    def scope(self) -> str:
        """The module path of the host."""
        return self.host.scope


@dataclass(slots=True)
class _Fuser:
    """State of one fusion: the groups, and by tensor its group, its overwriter and its readers."""

    expander: Expander
    groups: dict[FusionGroup, None]
    maker: dict[Node, FusionGroup]
    overwriter: dict[Stored, Node]
    readers: dict[Node, set[FusionGroup]] = field(default_factory=dict)

    def successors(self, group: FusionGroup) -> Iterator[FusionGroup]:
        """Yield the groups that must run after one."""
        for node in group.computed:
            yield from self.readers.get(node, ())
        for node in group.reads:
            if isinstance(node, Stored) and node in self.overwriter:
                maker = self.maker[self.overwriter[node]]
                if maker is not group:
                    yield maker

    def reaches(self, start: Iterable[FusionGroup], goal: FusionGroup) -> bool:
        """Return whether a group must run after one of some others.

        A reader ends behind the first node of what it reads. So groups that begin behind the goal lead back
        to it only through one that reaches across its place, or that overwrites what they read.
        """
        seen: set[FusionGroup] = set()
        stack, behind, last = list(start), list[FusionGroup](), goal.place
        while stack:
            group = stack.pop()
            if group is goal:
                return True
            if group not in seen:
                seen.add(group)
                if group.first > last:
                    behind.append(group)
                else:
                    stack += self.successors(group)
            if not stack and behind and self._leads_back(last, seen):
                stack = [after for group in behind for after in self.successors(group)]
                behind, last = [], sys.maxsize
        return False

    def _leads_back(self, place: int, seen: Collection[FusionGroup]) -> bool:
        if any(group.first <= place < group.place and group not in seen for group in self.groups):
            return True
        for target, node in self.overwriter.items():
            maker = self.maker[node]
            late = (group.first > place for group in self.readers.get(target, ()))
            if maker.first <= place and maker not in seen and any(late):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Fused:
    """The groups of a step in the order in which they run, and the nodes that are returned."""

    groups: tuple[FusionGroup, ...]
    outputs: tuple[Node, ...]


def form_groups(
    translation: Translation,
    target: Target,
    apart: Collection[Node] = frozenset(),
    checks: Collection[Node] = frozenset(),
    whole: Collection[Stored] = frozenset(),
) -> Fused:
    """Return the groups of a step for a device class.

    apart: element-wise nodes that join neither the group that makes their input nor the one that reads them.
    checks: results that are computed as soon as they can be, before what is updated. whole: tensors whose
    new content is written whole.
    """
    roots, outputs, overwriter = _roots(translation)
    order, kept = _in_order(translation, roots), choose_kept(roots) | set(apart)
    kept |= at_limits(order, kept)
    fuser = _Fuser(Expander(kept), {}, {}, overwriter)
    for place, node in enumerate(order):
        if isinstance(node, RowsResult):
            group, output = fuser.maker[node.rows], node.rows.outputs[node.position]
            fuser.maker[node] = group
            group.computed[node] = Computed(fuser.expander.expand(output.body), indices_of(output.axes))
            group.reads = dict.fromkeys(_read_by(group))
        elif isinstance(node, (Rows, Contraction)) or node in kept:
            _add(fuser, node, place)
    _index_readers(fuser)
    _copy_where_unsafe(fuser)
    _write_rows_alone(fuser, {*whole, *apart}, set(roots))
    needed = {*roots, *fuser.overwriter.values()}
    for group in list(fuser.groups):
        if group in fuser.groups:
            _absorb_followers(fuser, group, apart)
    for group in list(fuser.groups):
        if set(group.computed) == {group.host} and group.host not in {*needed, *apart}:
            _join_operand(fuser, group, OPERAND_BLOCKS[target.schedule])
    _drop_unread(fuser, needed)
    _join_beside(fuser, apart)
    _choose_stores(fuser, set(roots))
    return Fused(tuple(_ordered(fuser, {fuser.maker[node] for node in checks})), outputs)


def _in_order(translation: Translation, roots: Sequence[Node]) -> list[Node]:
    """Return all nodes that are needed, operands before their users.

    Those of a step that trains are in the step's order, so that each layer's gradients follow each other; all
    others in the order in which the roots need them.
    """
    order = nodes_below(roots)
    if not any(node.scope == UPDATES for node in order):
        return order
    alive = set(order)
    return nodes_below([*[node for node in translation.nodes.values() if node in alive], *roots])


def _roots(translation: Translation) -> tuple[list[Node], tuple[Node, ...], dict[Stored, Node]]:
    """Return the nodes to compute, the returned ones among them, and by stored tensor its new content."""
    roots: list[Node] = []
    overwriter: dict[Stored, Node] = {}
    for target, node in translation.updates:
        if node is target:
            continue
        own = not isinstance(node, Stored) and node not in roots
        overwriter[target] = node if own else copy_of(node)
        roots.append(overwriter[target])
    outputs = tuple([copy_of(n) if isinstance(n, Stored) else n for n in translation.outputs])
    return [*roots, *outputs], outputs, overwriter


def copy_of(node: Node) -> Pointwise:
    """Return a node with the same values in separate memory."""
    copied = view(node, node.shape, lambda *indices: indices)
    copied.scope = node.scope
    return copied


def _add(fuser: _Fuser, node: Node, place: int) -> None:
    computed: dict[Node, Computed] = {}
    if isinstance(node, Pointwise):
        computed[node] = Computed(fuser.expander.body(node), indices_of(node.axes))
    elif isinstance(node, Contraction):
        computed[node] = Computed(Local(ACCUMULATED, node.dtype), indices_of(node.axes))
    group = FusionGroup(node, computed, place, _bodies(node, fuser.expander))
    group.reads = dict.fromkeys(_read_by(group))
    fuser.groups[group] = None
    fuser.maker[node] = group


def _copy_where_unsafe(fuser: _Fuser) -> None:
    """Write a tensor's new content elsewhere and copy it where the old content is still read."""
    for target, node in list(fuser.overwriter.items()):
        group = fuser.maker[node]
        users = [g for g in fuser.readers.get(target, ()) if g is not group]
        del fuser.overwriter[target]
        after = [g for made in group.computed for g in fuser.readers.get(made, ())]
        if not _reads_safely(group, group.computed, target, node) or any(
            fuser.reaches(after, user) for user in users
        ):
            fuser.expander.kept = {*fuser.expander.kept, node}
            node = copy_of(node)
            _add(fuser, node, group.place + 1)
            _index_readers(fuser)
        fuser.overwriter[target] = node


def _write_rows_alone(fuser: _Fuser, whole: Collection[Node], roots: Collection[Node]) -> None:
    """Let groups that replace rows of a tensor in place loop over these rows alone; not those of `whole`."""
    for target, node in fuser.overwriter.items():
        group = fuser.maker[node]
        if group.host is not node or not isinstance(node, Pointwise) or {target, node} & {*whole}:
            continue
        value, source = _through_view(fuser, group, group.computed[node].value, roots)
        writes = row_writes(node, value, target, fuser.expander.expand)
        if writes is not None:
            if source is not group:
                del fuser.groups[source], fuser.maker[source.host]
            group.host = writes.host
            group.computed = {
                writes.host: Computed(writes.host.body, indices_of(writes.host.axes)),
                node: Computed(writes.value, writes.element),
            }
            group.reads = dict.fromkeys(_read_by(group))
            fuser.maker[writes.host] = group
    _index_readers(fuser)


def _through_view(
    fuser: _Fuser, group: FusionGroup, value: Scalar, roots: Collection[Node]
) -> tuple[Scalar, FusionGroup]:
    """Return a value, and the group that computes it: that of a tensor which only a view in a group reads."""
    if not isinstance(value, Read) or not isinstance(value.tensor, Pointwise) or value.tensor in roots:
        return value, group
    source = fuser.maker[value.tensor]
    if set(source.computed) != {value.tensor} or fuser.readers[value.tensor] != {group}:
        return value, group
    moved = dict(zip(value.tensor.axes, value.indices, strict=True))
    return substitute(source.computed[value.tensor].value, moved), source


def _bodies(host: Node, expander: Expander) -> tuple[Scalar, ...]:
    if isinstance(host, Rows):
        return tuple([expander.expand(s.body) for s in host.stages])
    return tuple(map(expander.expand, host.roots)) if isinstance(host, Contraction) else ()


def _read_by(group: FusionGroup) -> list[Node]:
    return [access.tensor for access in reads_of(*group.bodies, *[c.value for c in group.computed.values()])]


def _index_readers(fuser: _Fuser) -> None:
    fuser.readers.clear()
    for group in fuser.groups:
        for node in group.reads:
            fuser.readers.setdefault(node, set()).add(group)


def _absorb_followers(fuser: _Fuser, group: FusionGroup, apart: Collection[Node]) -> None:
    """Merge every element-wise group that can be computed at the host's points into the host's group."""
    waiting = list(group.computed)
    while waiting:
        node = waiting.pop(0)
        for follower in sorted(fuser.readers.get(node, ()), key=lambda g: g.place):
            if follower is group or not isinstance(follower.host, Pointwise) or follower.host in apart:
                continue
            joined = _joined(group, follower)
            if joined is None or not _may_merge(fuser, group, follower, joined):
                continue
            _merge(fuser, group, follower, joined)
            waiting += list(joined)


def _joined(group: FusionGroup, follower: FusionGroup) -> dict[Node, Computed] | None:
    """Return the follower's tensors in terms of the host's loops, None where elements do not match."""
    host = follower.host
    assert isinstance(host, Pointwise)
    body = follower.computed[host].value
    reads = [s for s in reads_of(body) if s.tensor in group.computed]
    moved = _axes_at_host(group, host, reads[0]) if reads else None
    if moved is None:
        return None

    def read(access: Read) -> Scalar | None:
        return group.computed[access.tensor].value if access.tensor in group.computed else None

    for access in reads:
        there = [i.substitute(moved) for i in access.indices]
        if tuple(there) != group.computed[access.tensor].element:
            return None
    joined = {node: item.moved(moved, read) for node, item in follower.computed.items()}
    return joined if _is_within_limits(group, follower, joined) else None


def _is_within_limits(group: FusionGroup, follower: FusionGroup, joined: Mapping[Node, Computed]) -> bool:
    """Return whether two groups are small enough for one kernel; one that nothing joins is as it is."""
    values = [item.value for item in joined.values()]
    scalars = sum(1 for _ in walk(*group.bodies, *[item.value for item in group.computed.values()], *values))
    tensors = {*group.reads, *follower.reads, *group.computed, *joined}
    return (
        scalars <= MOST_SCALARS and len(tensors) <= MOST_TENSORS and max(map(depth_of, values)) <= MOST_DEPTH
    )


def _axes_at_host(group: FusionGroup, host: Pointwise, access: Read) -> dict[Axis, Index] | None:
    """Return the follower's axes at the point where the host computes the element that it reads."""
    computed = group.computed[access.tensor]
    if host.numel != access.tensor.numel or not host.numel or fetched_by(computed.element):
        return None  # a kernel that writes some of a tensor's rows has no others
    wide = [a for a in host.axes if a.extent != 1]
    moved = inverse(access.indices, computed.element, wide)
    if moved is not None:
        return moved
    there = reshape(computed.element, host.shape, access.tensor.shape)
    return {a: i for a, i in zip(host.axes, there, strict=True) if a.extent != 1}


def _join_beside(fuser: _Fuser, apart: Collection[Node]) -> None:
    """Merge element-wise groups over equal loops that share an operand, such as both caches of a layer."""
    order = sorted(
        (g for g in fuser.groups if _is_small_pointwise(g) and g.host not in apart), key=lambda g: g.place
    )
    for number, group in enumerate(order):
        for other in order[number + 1 : number + NEAR]:
            if group not in fuser.groups or other not in fuser.groups:
                continue
            joined = _beside(group, other)
            if joined is None or not _may_merge(fuser, group, other, joined):
                continue
            if fuser.reaches(fuser.successors(group), other) or fuser.reaches(fuser.successors(other), group):
                continue
            _merge(fuser, group, other, joined)


def _is_small_pointwise(group: FusionGroup) -> bool:
    return isinstance(group.host, Pointwise) and 1 < group.host.numel <= MOST_BESIDE


def _beside(group: FusionGroup, other: FusionGroup) -> dict[Node, Computed] | None:
    """Return the tensors of another element-wise group in terms of a group's loops, None if they differ."""
    host, neighbour = group.host, other.host
    assert isinstance(host, Pointwise)
    assert isinstance(neighbour, Pointwise)
    wide = [[axis for axis in node.axes if axis.extent != 1] for node in (host, neighbour)]
    shared = group.reads.keys() & other.reads.keys()
    if [a.extent for a in wide[0]] != [a.extent for a in wide[1]] or host.dtype != neighbour.dtype:
        return None
    if not any(node.numel >= LEAST_SHARED for node in shared):
        return None
    moved = dict(zip(wide[1], map(of, wide[0]), strict=True))
    joined = {node: item.moved(moved) for node, item in other.computed.items()}
    return joined if _is_within_limits(group, other, joined) else None


def _may_merge(
    fuser: _Fuser, group: FusionGroup, follower: FusionGroup, joined: Mapping[Node, Computed]
) -> bool:
    """Return whether two groups can be one: no group between them, no unsafe overwriting."""
    computed = {**group.computed, **joined}
    for target, node in fuser.overwriter.items():
        if node in computed and not _reads_safely(group, computed, target, node):
            return False
    between = [g for g in fuser.successors(group) if g is not follower and g is not group]
    return not fuser.reaches(between, follower)


def _reads_safely(group: FusionGroup, computed: Mapping[Node, Computed], target: Stored, node: Node) -> bool:
    """Return whether a kernel reads the tensor that it overwrites only at the element that it writes."""
    if any(access.tensor is target for access in reads_of(*group.bodies)):
        return False
    reads = reads_of(*[c.value for c in computed.values()])
    return all(access.indices == computed[node].element for access in reads if access.tensor is target)


def _merge(fuser: _Fuser, group: FusionGroup, follower: FusionGroup, joined: dict[Node, Computed]) -> None:
    group.computed.update(joined)
    for node in joined:
        fuser.maker[node] = group
    del fuser.groups[follower]
    group.reads = {n: None for n in (*group.reads, *follower.reads) if n not in group.computed}
    for node in follower.reads:
        fuser.readers[node].discard(follower)
    for node in group.reads:
        fuser.readers.setdefault(node, set()).add(group)
    for node in joined:
        fuser.readers.get(node, set()).discard(group)
    group.first, group.place = min(group.first, follower.first), max(group.place, follower.place)


def _join_operand(fuser: _Fuser, group: FusionGroup, block: int) -> None:
    """Compute an element-wise group where its only reader, a contraction, reads it, if that is cheap.

    So the scaling of an operand costs no launch. The contraction computes each element as often as it reads
    it: once for every `block` of its rows or columns.
    """
    readers = list(fuser.readers.get(group.host, ()))
    if not isinstance(group.host, Pointwise) or len(readers) != 1:
        return
    reader = readers[0]
    values = reads_of(*[c.value for c in reader.computed.values()])
    overwritten = any(n in fuser.overwriter for n in group.reads if isinstance(n, Stored))
    if not isinstance(reader.host, Contraction) or overwritten or any(r.tensor is group.host for r in values):
        return
    host, value = group.host, group.computed[group.host].value
    executed = sum(_times_read(reader.host, body, host, block) for body in reader.bodies)
    if not _is_cheap(value, host.numel, executed / host.numel):
        return

    def inline(access: Read) -> Scalar | None:
        if access.tensor is not host:
            return None
        return substitute(value, dict(zip(host.axes, access.indices, strict=True)))

    reader.bodies = tuple([substitute(body, {}, inline) for body in reader.bodies])
    reader.operands.append(host)
    reader.reads = dict.fromkeys(_read_by(reader))
    del fuser.groups[group], fuser.maker[host], fuser.readers[host]
    for node in group.reads:
        fuser.readers[node].discard(group)
    for node in reader.reads:
        fuser.readers.setdefault(node, set()).add(reader)


def _times_read(host: Contraction, body: Scalar, node: Node, block: int) -> int:
    """Return how often a contraction computes elements of an operand that reads a node."""
    reads = [read for read in reads_of(body) if read.tensor is node]
    if not reads:
        return 0
    indices = [i for read in reads_of(body) for i in read.indices]
    indices += [b[0] for s in walk(body) if isinstance(s, Guarded) for b in s.bounds]
    used = set[Axis]().union(*map(axes_of, indices))
    own = [a.extent for a in host.axes if a in used]
    others = [a.extent for a in host.axes if a not in used]
    return len(reads) * prod(own) * prod([a.extent for a in host.inner]) * -(-prod(others) // block)


def _drop_unread(fuser: _Fuser, roots: Collection[Node]) -> None:
    """Remove groups whose results nothing reads: a reader may turn out to read only padding."""
    waiting = list(reversed(fuser.groups))
    while waiting:
        group = waiting.pop(0)
        if group not in fuser.groups or any(n in roots or fuser.readers.get(n) for n in group.computed):
            continue
        del fuser.groups[group]
        for node in group.reads:
            fuser.readers[node].discard(group)
            if node in fuser.maker:
                waiting.append(fuser.maker[node])


def _choose_stores(fuser: _Fuser, roots: Collection[Node]) -> None:
    """Store tensors that other groups read, that are returned or that overwrite others."""
    target_of = {node: target for target, node in fuser.overwriter.items()}
    for group in fuser.groups:
        for node in group.computed:
            read = any(g is not group for g in fuser.readers.get(node, ()))
            if node in target_of or node in roots or read:
                group.stored[node] = target_of.get(node)


def _ordered(fuser: _Fuser, checks: Collection[FusionGroup]) -> list[FusionGroup]:
    """Return the groups in topological order, and in the order of the graph where that leaves a choice.

    Those of checks run first, and what overwrites a tensor after them, unless a check depends on it.
    """
    places = sorted(fuser.groups, key=lambda g: (g not in checks, g.place))
    number = {group: n for n, group in enumerate(places)}
    followers_of = {g: {s for s in fuser.successors(g) if s is not g} for g in number}
    if checks:
        updating = {fuser.maker[node] for node in fuser.overwriter.values()} - _before(checks, followers_of)
        for group in checks:
            followers_of[group] |= updating
    return [places[n] for n in in_order([{number[s] for s in followers_of[g]} for g in places])]


def _before(
    groups: Collection[FusionGroup], followers: Mapping[FusionGroup, Collection[FusionGroup]]
) -> set[FusionGroup]:
    """Return groups and all that must run before them."""
    earlier: dict[FusionGroup, list[FusionGroup]] = {}
    for group, after in followers.items():
        for follower in after:
            earlier.setdefault(follower, []).append(group)
    found, left = set(groups), list(groups)
    while left:
        new = [group for group in earlier.get(left.pop(), ()) if group not in found]
        found.update(new)
        left += new
    return found
