"""Channel groups of a captured network: channels that can only be pruned together.

A convolution or linear layer makes a new group; additions, products and shared weights unite groups;
concatenations put them side by side; flattening repeats each channel. A group is frozen, with the
reason, if it reaches the network's output or an operator without a rule for channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from torchedge.graphs import Affine, ForwardGraph, Op, Size
from torchedge.graphs.families import with_shapes
from torchedge.graphs.sizes import Amount
from torchedge.ops import Work, spec_of

_CHANNEL = 1
"""The dimension that holds channels, in feature maps and in rows of features alike."""

_FOLLOWED = frozenset({Work.ACTIVATION, Work.SOFTMAX, Work.DROPOUT, Work.POOLING})
_ALIKE = frozenset({"clone", "contiguous", "detach", "mean", "to"})
_BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """A range of channels: `count` channels of a group (None: fixed ones), each `times` entries long."""

    group: str | None
    count: int
    times: int = 1


ChannelRanges = tuple[ChannelRange, ...]


class ChannelGroups:
    """Groups of channels by the name of the layer that makes them first; united ones share a root."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.frozen: dict[str, str] = {}
        self._parent: dict[str, str] = {}

    def add(self, name: str, count: int) -> str:
        """Return the root of a layer's group; a new layer gets a group of its own."""
        if name not in self._parent:
            self._parent[name] = name
            self.counts[name] = count
        return self.root(name)

    def root(self, name: str) -> str:
        """Return the name of the united group that contains a group."""
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def unite(self, one: str, other: str) -> None:
        """Unite two groups under the name that was added first."""
        first, second = sorted((self.root(one), self.root(other)), key=list(self._parent).index)
        if first != second:
            self._parent[second] = first
            if second in self.frozen:
                self.freeze(first, self.frozen[second])

    def freeze(self, name: str, why: str) -> None:
        """Exclude a group from pruning, with the reason."""
        self.frozen.setdefault(self.root(name), why)

    def free(self) -> list[str]:
        """Return the roots that may be pruned, in order of appearance."""
        roots = dict.fromkeys(self.root(name) for name in self._parent)
        return [root for root in roots if root not in self.frozen]


class ChannelMap:
    """The ranges of channels in the dimensions of one graph's values."""

    def __init__(self, graph: ForwardGraph, groups: ChannelGroups) -> None:
        self.graph, self.groups = graph, groups
        self.axes: dict[int, dict[int, ChannelRanges]] = {}
        self.depthwise: set[int] = set()
        for position, op in enumerate(graph.ops):
            self._follow(position, op, spec_of(op.kind).work)
        for index in graph.outputs:
            self._freeze([index], "the network's output")

    # channels of a value -----------------------------------------------------------------------------

    def of(self, index: int | None) -> ChannelRanges | None:
        """Return the ranges of a value's channels; None where they are not followed."""
        return None if index is None else self.axes.get(index, {}).get(_CHANNEL)

    def _fixed(self, index: int) -> ChannelRanges:
        size = self.graph.values[index].shape[_CHANNEL]
        return (ChannelRange(None, size),) if isinstance(size, int) else ()

    def _freeze(self, indices: Iterable[int | None], why: str) -> None:
        for index in indices:
            for ranges in self.axes.get(-1 if index is None else index, {}).values():
                for span in ranges:
                    if span.group is not None:
                        self.groups.freeze(span.group, why)

    def _tie(self, index: int | None, axis: int, ranges: ChannelRanges, why: str) -> None:
        """Record the ranges of a value's dimension; unite them with those already recorded."""
        if index is None:
            return
        before = self.axes.setdefault(index, {}).setdefault(axis, ranges)
        if before is not ranges:
            self._unite(before, ranges, why)

    def _unite(self, one: ChannelRanges, other: ChannelRanges, why: str) -> None:
        if [(s.count, s.times) for s in one] == [(s.count, s.times) for s in other]:
            for left, right in zip(one, other, strict=True):
                if left.group is None or right.group is None:
                    for name in filter(None, (left.group, right.group)):
                        self.groups.freeze(name, why)
                else:
                    self.groups.unite(left.group, right.group)
            return
        for span in (*one, *other):
            if span.group is not None:
                self.groups.freeze(span.group, why)

    # operators --------------------------------------------------------------------------------------------

    def _follow(self, position: int, op: Op, work: Work) -> None:
        where = f"{op.kind} at {op.scope or 'the top level'}"
        if op.kind == "conv2d":
            self._convolution(position, op, where)
        elif op.kind == "linear":
            self._layer(op, where)
        elif op.kind == "batch_norm":
            ranges = self.of(op.inputs[0])
            for index in op.inputs[1:]:
                if ranges is not None:
                    self._tie(index, 0, ranges, where)
            self._pass(op, ranges)
        elif op.kind in _BINARY and len(op.inputs) == 2:
            self._binary(op, where)
        elif op.kind == "cat" and op.attrs.get("dim", 0) == _CHANNEL:
            parts = [self.of(i) or self._fixed(i) for i in op.inputs if i is not None]
            self._pass(op, tuple(span for part in parts for span in part))
        elif op.kind == "flatten" and op.attrs.get("start_dim", 0) == 1 and op.attrs.get("end_dim", -1) == -1:
            self._flatten(op)
        elif (work in _FOLLOWED or op.kind in _ALIKE) and self._keeps_channels(op):
            self._pass(op, self.of(op.inputs[0]))
        else:
            self._freeze(op.inputs, where)

    def _pass(self, op: Op, ranges: ChannelRanges | None) -> None:
        if ranges is not None:
            for index in op.outputs:
                self.axes[index] = {_CHANNEL: ranges}

    def _keeps_channels(self, op: Op) -> bool:
        """Whether an operator reads one value, and its outputs have as many channels."""
        read = [i for i in op.inputs if i is not None]
        shapes = [self.graph.values[i].shape for i in (*read, *op.outputs)]
        if len(read) != 1 or any(len(s) < 2 for s in shapes):
            return False
        reduced = op.attrs.get("dim", (2, 3)) if op.kind == "mean" else ()
        spatial = isinstance(reduced, tuple) and all(d in (2, 3, -1, -2) for d in reduced)
        return spatial and len({s[_CHANNEL] for s in shapes}) == 1

    def _convolution(self, position: int, op: Op, where: str) -> None:
        groups, weight = op.attrs.get("groups", 1), op.inputs[1]
        assert weight is not None
        outputs, inputs = self.graph.values[weight].shape[:2]
        if groups == 1 or not isinstance(outputs, int) or not isinstance(inputs, int):
            self._layer(op, where)
        elif inputs == 1 and outputs == groups:
            ranges = self.of(op.inputs[0])
            if ranges is not None:
                self.depthwise.add(position)
                for index in op.inputs[1:]:
                    self._tie(index, 0, ranges, where)
                self._pass(op, ranges)
        else:  # pruning would have to remove equally many channels from each group
            self._layer(op, where, reads=False)
            self._freeze((*op.inputs, *op.outputs), f"grouped {where}")

    def _layer(self, op: Op, where: str, reads: bool = True) -> None:
        """Follow a layer: its outputs are a new group; the second dimension of its weight reads another."""
        source, weight = op.inputs[0], op.inputs[1]
        out = self.graph.values[op.outputs[0]].shape
        rank = len(self.graph.values[weight].shape) if weight is not None else 0
        count = out[_CHANNEL] if len(out) > 1 else None
        if weight is None or len(out) != rank or not isinstance(count, int):
            self._freeze(op.inputs, where)
            return
        name = self.graph.values[weight].name.removesuffix(".weight")
        own = (ChannelRange(self.groups.add(name, count), count),)
        self._tie(weight, 0, own, where)
        if reads and source is not None:
            self._tie(weight, _CHANNEL, self.of(source) or self._fixed(source), where)
        for bias in op.inputs[2:]:
            self._tie(bias, 0, own, where)
        self._pass(op, own)

    def _binary(self, op: Op, where: str) -> None:
        out = self.graph.values[op.outputs[0]].shape
        full, broadcast = [], []
        for index in op.inputs:
            shape = () if index is None else self.graph.values[index].shape
            alike = len(shape) == len(out) and len(shape) > 1 and shape[_CHANNEL] == out[_CHANNEL]
            if alike:
                full.append(index)
            elif prod([1 if isinstance(d, Affine) else d for d in shape]) > 1:
                broadcast.append(index)
        known = [self.of(index) for index in full]
        if broadcast or None in known or not known:
            self._freeze(op.inputs, where)
            return
        first = known[0]
        assert first is not None
        for other in known[1:]:
            assert other is not None
            self._unite(first, other, where)
        self._pass(op, first)

    def _flatten(self, op: Op) -> None:
        ranges, source = self.of(op.inputs[0]), op.inputs[0]
        if ranges is None or source is None:
            return
        spatial = self.graph.values[source].shape[2:]
        if all(isinstance(d, int) for d in spatial):
            times = prod([d for d in spatial if isinstance(d, int)])
            self._pass(op, tuple(ChannelRange(s.group, s.count, s.times * times) for s in ranges))
        else:
            self._freeze([source], f"{op.kind} at {op.scope}")

    # symbolic sizes -----------------------------------------------------------------------------------------

    def length(self, ranges: ChannelRanges) -> Amount:
        """Return the length of a dimension of these ranges; the size of a free group is a symbol."""
        total: Amount = 0
        for span in ranges:
            root = None if span.group is None else self.groups.root(span.group)
            free = root is not None and root not in self.groups.frozen
            total = total + span.times * (Size.symbol(root) if free and root else span.count)
        return total

    def template(self) -> ForwardGraph:
        """Return the graph with symbols in place of the channels that may be pruned."""
        shapes: dict[int, tuple[object, ...]] = {}
        for index, axes in self.axes.items():
            shape: list[object] = list(self.graph.values[index].shape)
            for axis, ranges in axes.items():
                shape[axis] = self.length(ranges)
            shapes[index] = tuple(shape)
        graph = with_shapes(self.graph, shapes)
        ops = list(graph.ops)
        for position in self.depthwise:
            ranges = self.of(ops[position].inputs[0]) or ()
            attrs = {**ops[position].attrs, "groups": self.length(ranges)}
            ops[position] = replace(ops[position], attrs=attrs)
        return replace(graph, ops=tuple(ops))
