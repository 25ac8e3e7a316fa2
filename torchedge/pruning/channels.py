"""Channel groups of a captured network: channels that can only be pruned together.

A convolution or linear layer makes a new group; additions, products and shared weights unite groups;
concatenations put them side by side; flattening repeats each channel; permuting moves them to another
dimension. A grouped convolution keeps the same channels of each of its groups. A group is
frozen, with the reason, if it reaches the network's output or an operator without a rule for channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph, Op
from torchedge.graphs.families import with_shapes
from torchedge.graphs.sizes import Affine, Amount, Size
from torchedge.ops import Work, spec_of

_CHANNEL = 1
"""The dimension that holds channels, in feature maps and in rows of features alike."""

_FLATTENING = frozenset({"flatten", "view", "reshape"})
_FOLLOWED = frozenset({Work.ACTIVATION, Work.SOFTMAX, Work.DROPOUT, Work.POOLING})
_WRITTEN = frozenset({"copy_slices", "view_again"})
"""What autograd makes of an operator in place on a view: the channels stay where all elements are written."""
_ALIKE = _WRITTEN | {"clone", "contiguous", "detach", "mean", "requires_grad", "to"}
_NORMS = frozenset({"batch_norm", "group_norm", "layer_norm"})
_BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})


@dataclass(frozen=True, slots=True)
class ChannelRange:
    """A range of channels: `count` channels of a group (None: fixed ones), each `times` entries long.

    A range with fewer channels than its group holds the first ones: a grouped convolution's weight reads as
    many channels as one of its groups has, and every group keeps the same ones.
    """

    group: str | None
    count: int
    times: int = 1


ChannelRanges = tuple[ChannelRange, ...]


class ChannelGroups:
    """Groups of channels by the name of the layer that makes them first; united ones share a root.

    `parts`: into how many equal parts a group falls, each of which keeps the same channels (grouped
    convolutions and group norms). `rigid`: groups whose number stands in an operator's attributes, so that a
    network can be pruned but `ChannelMap.template` cannot express it, with the reason.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.frozen: dict[str, str] = {}
        self.rigid: dict[str, str] = {}
        self.parts: dict[str, int] = {}
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
            if second in self.rigid:
                self.rigid.setdefault(first, self.rigid[second])
            self.split(first, self.parts.get(second, 1))

    def freeze(self, name: str, why: str) -> None:
        """Exclude a group from pruning, with the reason."""
        self.frozen.setdefault(self.root(name), why)

    def split(self, name: str, parts: int) -> None:
        """Keep the same channels in each of so many equal parts of a group."""
        root = self.root(name)
        self.parts[root] = lcm(self.parts.get(root, 1), parts)
        if self.counts[root] % self.parts[root]:
            self.freeze(root, f"{self.counts[root]} channels do not fall into {self.parts[root]} equal parts")

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

    def of(self, index: int | None, axis: int = _CHANNEL) -> ChannelRanges | None:
        """Return the ranges of a value's channels; None where they are not followed, or not in `axis`."""
        return None if index is None else self.axes.get(index, {}).get(axis)

    def _axis(self, index: int | None) -> int:
        """Return the dimension that holds an activation's channels."""
        return next(iter(self.axes.get(-1 if index is None else index, {})), _CHANNEL)

    def _fixed(self, index: int, axis: int = _CHANNEL) -> ChannelRanges:
        size = self.graph.values[index].shape[axis]
        return (ChannelRange(None, size),) if isinstance(size, int) else ()

    def _freeze(self, indices: Iterable[int | None], why: str) -> None:
        for index in indices:
            for ranges in self.axes.get(-1 if index is None else index, {}).values():
                for span in ranges:
                    if span.group is not None:
                        self.groups.freeze(span.group, why)

    def _stiffen(self, ranges: ChannelRanges, why: str) -> None:
        for span in ranges:
            if span.group is not None:
                self.groups.rigid.setdefault(self.groups.root(span.group), why)

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
        axis = self._axis(op.inputs[0] if op.inputs else None)
        if op.kind == "conv2d" and axis == _CHANNEL:
            self._convolution(position, op, where)
        elif op.kind == "linear":
            self._layer(op, where, self.graph.values[op.outputs[0]].shape)
        elif op.kind in _NORMS:
            self._norm(op, where)
        elif op.kind in _BINARY and len(op.inputs) == 2:
            self._binary(op, where)
        elif op.kind == "cat" and op.attrs.get("dim", 0) == _CHANNEL and self._channels_first(op):
            parts = [self.of(i) or self._fixed(i) for i in op.inputs if i is not None]
            self._pass(op, tuple(span for part in parts for span in part))
        elif op.kind in _FLATTENING and axis == _CHANNEL and self._is_flattening(op):
            self._flatten(op, where)
        elif op.kind in ("permute", "transpose"):
            order = _order(op, len(self.graph.values[op.outputs[0]].shape))
            self._pass(op, self.of(op.inputs[0], axis), order.index(axis) if axis in order else axis)
        elif (work in _FOLLOWED or op.kind in _ALIKE) and self._keeps_channels(op, axis):
            self._pass(op, self.of(op.inputs[0], axis), axis)
        else:
            self._freeze(op.inputs, where)

    def _pass(self, op: Op, ranges: ChannelRanges | None, axis: int = _CHANNEL) -> None:
        if ranges is not None:
            for index in op.outputs:
                self.axes[index] = {axis: ranges}

    def _channels_first(self, op: Op) -> bool:
        return all(self._axis(index) == _CHANNEL for index in op.inputs)

    def _keeps_channels(self, op: Op, axis: int) -> bool:
        """Whether an operator reads one value, and its outputs have as many channels."""
        read = [i for i in op.inputs if i is not None]
        if op.kind in _WRITTEN:
            return len({self.graph.values[index].numel for index in read}) == 1
        shapes = [self.graph.values[i].shape for i in (*read, *op.outputs)]
        if len(read) != 1 or any(len(s) < 2 for s in shapes):
            return False
        if axis != _CHANNEL:
            return spec_of(op.kind).work is not Work.POOLING and len(set(shapes)) == 1
        reduced = op.attrs.get("dim", (2, 3)) if op.kind == "mean" else ()
        spatial = isinstance(reduced, tuple) and all(d in (2, 3, -1, -2) for d in reduced)
        return spatial and len({s[_CHANNEL] for s in shapes}) == 1

    def _norm(self, op: Op, where: str) -> None:
        """Follow a norm with one entry a channel; layer norms run over the last dimension alone."""
        source, *parameters = op.inputs
        axis = self._axis(source)
        ranges = self.of(source, axis)
        if ranges is None:
            return
        if op.kind == "layer_norm":
            rank, normalized = len(self.graph.values[op.outputs[0]].shape), op.attrs.get("normalized_shape")
            fits = axis == rank - 1 and isinstance(normalized, tuple) and len(normalized) == 1
        elif op.kind == "group_norm":
            fits = axis == _CHANNEL and self._split(ranges, op.attrs.get("num_groups"))
        else:
            fits = axis == _CHANNEL
        if op.kind != "batch_norm":
            fits = fits and parameters[:1] not in ([], [None])  # the module's size follows its weight
            self._stiffen(ranges, where)
        if not fits:
            self._freeze([source], where)
            return
        for index in parameters:
            self._tie(index, 0, ranges, where)
        self._pass(op, ranges, axis)

    def _split(self, ranges: ChannelRanges, parts: object) -> bool:
        """Let a group keep the same channels in each part; False: the ranges are not one whole group."""
        name = ranges[0].group if len(ranges) == 1 and ranges[0].times == 1 else None
        if name is None or not isinstance(parts, int):
            return False
        self.groups.split(name, parts)
        return True

    def _convolution(self, position: int, op: Op, where: str) -> None:
        groups, weight = op.attrs.get("groups", 1), op.inputs[1]
        assert weight is not None
        out = self.graph.values[op.outputs[0]].shape
        outputs, inputs = self.graph.values[weight].shape[:2]
        if groups == 1 or not isinstance(outputs, int) or not isinstance(inputs, int):
            self._layer(op, where, out)
        elif inputs == 1 and outputs == groups:
            ranges = self.of(op.inputs[0])
            if ranges is not None:
                self.depthwise.add(position)
                for index in op.inputs[1:]:
                    self._tie(index, 0, ranges, where)
                self._pass(op, ranges)
        else:
            self._grouped(op, where, groups)

    def _grouped(self, op: Op, where: str, groups: int) -> None:
        """Follow a grouped convolution: each of its groups keeps the same inputs and the same outputs."""
        where = f"grouped {where}"
        source, weight = op.inputs[0], op.inputs[1]
        assert source is not None and weight is not None
        inputs = self.graph.values[weight].shape[_CHANNEL]
        ranges, read = self.of(source), self._fixed(weight)
        if isinstance(inputs, int) and inputs > 1 and ranges is not None and self._split(ranges, groups):
            self._stiffen(ranges, where)
            read = (replace(ranges[0], count=inputs),)
        else:
            self._freeze([source], where)
        self._layer(op, where, self.graph.values[op.outputs[0]].shape, read)
        own = self.of(op.outputs[0])
        if own is not None:
            self._split(own, groups)
            self._stiffen(own, where)

    def _layer(self, op: Op, where: str, out: Sequence[object], read: ChannelRanges | None = None) -> None:
        """Follow a layer: its outputs are a new group; the second dimension of its weight reads another."""
        source, weight = op.inputs[0], op.inputs[1]
        axis = len(out) - 1 if op.kind == "linear" else _CHANNEL
        count = out[axis] if len(out) > 1 else None
        last = self._axis(source) == axis or source not in self.axes
        if weight is None or source is None or not last or not isinstance(count, int):
            self._freeze(op.inputs, where)
            return
        name = self.graph.values[weight].name.removesuffix(".weight")
        own = (ChannelRange(self.groups.add(name, count), count),)
        self._tie(weight, 0, own, where)
        self._tie(weight, _CHANNEL, read or self.of(source, axis) or self._fixed(source, axis), where)
        for bias in op.inputs[2:]:
            self._tie(bias, 0, own, where)
        self._pass(op, own, axis)

    def _binary(self, op: Op, where: str) -> None:
        out = self.graph.values[op.outputs[0]].shape
        full, scales, broadcast = [], [], []
        for index in op.inputs:
            value = None if index is None else self.graph.values[index]
            shape = () if value is None else value.shape
            if value is not None and value.role in ("parameter", "buffer"):
                scales.append(index)
            elif (
                len(shape) == len(out)
                and index in self.axes
                and shape[axis := self._axis(index)] == out[axis]
            ):
                full.append(index)
            elif prod([1 if isinstance(d, Affine) else d for d in shape]) > 1:
                broadcast.append(index)
        axes = {self._axis(index) for index in full}
        axis = min(axes, default=_CHANNEL)
        known = [ranges for index in full if (ranges := self.of(index, axis)) is not None]
        if broadcast or len(axes) != 1 or not all(self._scale(i, axis, known[0], out) for i in scales):
            self._freeze(op.inputs, where)
            return
        for other in known[1:]:
            self._unite(known[0], other, where)
        self._pass(op, known[0], axis)

    def _scale(self, index: int | None, axis: int, ranges: ChannelRanges, out: Sequence[object]) -> bool:
        """Tie a parameter that holds one entry a channel (a layer scale), or one for all; False: neither."""
        shape = () if index is None else self.graph.values[index].shape
        at = axis - (len(out) - len(shape))
        if any(size != 1 for k, size in enumerate(shape) if k != at):
            return False
        if at >= 0 and shape[at] != 1:
            self._tie(index, at, ranges, "a parameter by channel")
        return True

    def _is_flattening(self, op: Op) -> bool:
        """Whether an operator makes rows of features of maps of channels."""
        source = op.inputs[0]
        shapes = [self.graph.values[i].shape for i in (source, op.outputs[0]) if i is not None]
        return (
            len(shapes) == 2 and len(shapes[0]) > 2 and len(shapes[1]) == 2 and shapes[0][0] == shapes[1][0]
        )

    def _flatten(self, op: Op, where: str) -> None:
        ranges, source = self.of(op.inputs[0]), op.inputs[0]
        if ranges is None or source is None:
            return
        if op.kind != "flatten":
            self._stiffen(ranges, where)
        spatial = self.graph.values[source].shape[2:]
        if all(isinstance(d, int) for d in spatial):
            times = prod([d for d in spatial if isinstance(d, int)])
            self._pass(op, tuple(ChannelRange(s.group, s.count, s.times * times) for s in ranges))
        else:
            self._freeze([source], where)

    # symbolic sizes -----------------------------------------------------------------------------------------

    def length(self, ranges: ChannelRanges) -> Amount:
        """Return the length of a dimension of these ranges; the size of a free group is a symbol."""
        total: Amount = 0
        for span in ranges:
            root = None if span.group is None else self.groups.root(span.group)
            free = root is not None and root not in self.groups.frozen
            total = total + span.times * (Size.symbol(root) if free and root else span.count)
        return total

    def sized(self, shape: Sequence[object], axes: Mapping[int, ChannelRanges]) -> tuple[Any, ...]:
        """Return a shape with the lengths of ranges as its dimensions."""
        return tuple([self.length(axes[k]) if k in axes else size for k, size in enumerate(shape)])

    def template(self, maps: Iterable[ChannelMap] = ()) -> ForwardGraph:
        """Return the graph with symbols in place of the channels that may be pruned.

        maps: of the model's other modes, which may read parameters that this one does not (auxiliary heads).
        """
        values, known = self.graph.values, _weights(maps)
        graph = with_shapes(self.graph, {i: self.sized(values[i].shape, a) for i, a in self.axes.items()})
        unread = []
        for value in graph.unread:
            channels, axes = known.get(value.name, (self, {}))
            unread.append(replace(value, shape=channels.sized(value.shape, axes)))
        ops = list(graph.ops)
        for position in self.depthwise:
            ranges = self.of(ops[position].inputs[0]) or ()
            attrs = {**ops[position].attrs, "groups": self.length(ranges)}
            ops[position] = replace(ops[position], attrs=attrs)
        return replace(graph, ops=tuple(ops), unread=tuple(unread))


def _order(op: Op, rank: int) -> tuple[int, ...]:
    """Return the dimensions that a permute or a transpose takes, in order."""
    if op.kind == "transpose":
        order = list(range(rank))
        one, other = (int(op.attrs[name]) % rank for name in ("dim0", "dim1"))
        order[one], order[other] = order[other], order[one]
        return tuple(order)
    dims = op.attrs["dims"]  # permute(0, 2, 1) and permute((0, 2, 1))
    listed = dims if isinstance(dims, (tuple, list)) else op.attrs.values()
    return tuple(int(d) % rank for d in listed)


# modules without some of their channels, by the map of every parameter's dimensions -------------------------


Kept = Mapping[str, npt.NDArray[np.int64]]


def prune_module(model: nn.Module, maps: Iterable[ChannelMap], kept: Kept) -> nn.Module:
    """Return a copy of the model with only the kept channels in its parameters and buffers."""
    pruned = copy.deepcopy(model)
    tensors: dict[str, torch.Tensor] = dict(pruned.named_parameters(remove_duplicate=False))
    tensors.update(pruned.named_buffers(remove_duplicate=False))
    owners: dict[int, list[tuple[dict[str, Any], str]]] = {}  # by tensor, all places that share it
    for module in pruned.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in tables:
            for key, tensor in slots.items():
                owners.setdefault(id(tensor), []).append((slots, key))
    for name, (channels, axes) in _weights(maps).items():
        old = tensors[name]
        new = _shrink(old, {axis: _entries(channels, s, kept) for axis, s in axes.items()})
        for table, key in owners[id(old)]:
            table[key] = new
    for module in pruned.modules():
        _correct_attributes(module)
    return pruned


def _weights(maps: Iterable[ChannelMap]) -> dict[str, tuple[ChannelMap, Mapping[int, ChannelRanges]]]:
    """Return by name the parameters and buffers that hold channels, with the ranges of their dimensions."""
    weights: dict[str, tuple[ChannelMap, Mapping[int, ChannelRanges]]] = {}
    for channels in maps:
        for index, axes in channels.axes.items():
            value = channels.graph.values[index]
            if value.role in ("parameter", "buffer"):
                weights.setdefault(value.name, (channels, axes))
    return weights


def _entries(channels: ChannelMap, ranges: ChannelRanges, kept: Kept) -> npt.NDArray[np.int64] | None:
    """Return the kept entries of a dimension; None: all."""
    entries, start, whole = [], 0, True
    for span in ranges:
        root = None if span.group is None else channels.groups.root(span.group)
        stays = np.arange(span.count)
        if root is not None and root in kept:
            stays, whole = kept[root][kept[root] < span.count], False
        entries.append((start + stays[:, None] * span.times + np.arange(span.times)).reshape(-1))
        start += span.count * span.times
    return None if whole else np.concatenate(entries)


def _shrink(old: torch.Tensor, axes: Mapping[int, npt.NDArray[np.int64] | None]) -> torch.Tensor:
    new = old.detach()
    for axis, entries in axes.items():
        if entries is not None:
            new = new.index_select(axis, torch.from_numpy(entries).to(new.device))
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new.clone(), requires_grad=old.requires_grad)
    return new.clone()


def _correct_attributes(module: nn.Module) -> None:
    """Let a layer's own numbers follow its weights."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        running = getattr(module, "running_mean", None)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(running, torch.Tensor):
            module.num_features = running.shape[0]
    elif isinstance(module, nn.Conv2d):
        if module.groups == module.in_channels == module.out_channels and module.groups > 1:
            module.groups = weight.shape[0]
        module.out_channels, module.in_channels = weight.shape[0], weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.num_features = weight.shape[0]
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = weight.shape[0]
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(weight.shape)


def channel_norms(
    model: nn.Module,
    maps: Sequence[ChannelMap],
    names: Sequence[str],
    filters: Mapping[str, npt.NDArray[np.float64]] | None = None,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return by group the mean absolute weight of the filters that make each channel.

    filters: these means by module path, in place of the weights' own. Without them, a group whose weights are
    on the meta device has ones; InputError is raised where they lack such a group's layer.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    norms: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
    for name, (channels, axes) in _weights(maps).items():
        ranges = axes.get(0, ())
        group = ranges[0].group if len(axes) > 1 and len(ranges) == 1 else None
        if group is None or (root := channels.groups.root(group)) not in norms:
            continue
        norm, weight = (filters or {}).get(name.removesuffix(".weight")), parameters[name]
        if norm is None and weight.is_meta and filters is not None:
            raise InputError(f"pruning by l1 needs weights; pass norms= with {name} on the meta device")
        if norm is None and not weight.is_meta:
            norm = weight.detach().abs().flatten(1).double().mean(1).cpu().numpy()
        if norm is not None:
            norms[root].append(norm)
    counts = maps[0].groups.counts
    return {name: np.mean(rows, axis=0) if rows else np.ones(counts[name]) for name, rows in norms.items()}


class ParameterCount:
    """A model's number of parameters as a function of the channels that the groups `names` keep."""

    def __init__(self, model: nn.Module, maps: Sequence[ChannelMap], names: Sequence[str]) -> None:
        """List for each parameter with channels the factors of its size: a + b · kept, in two dimensions."""
        columns = {name: column for column, name in enumerate(names)}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        rows = [(parameters[n], maps_axes) for n, maps_axes in _weights(maps).items() if n in parameters]
        self._base, self._fixed = np.ones(len(rows)), np.zeros((2, len(rows)))
        self._slopes = np.zeros((2, len(rows), len(names)))
        for row, (parameter, (channels, axes)) in enumerate(rows):
            if len(axes) > 2:
                raise InputError(f"a weight of {tuple(parameter.shape)} has channels in three dimensions")
            for axis, size in enumerate(parameter.shape):
                self._base[row] *= 1 if axis in axes else size
            self._fixed[len(axes) :, row] = 1
            for side, ranges in enumerate(axes.values()):
                for span in ranges:
                    root = None if span.group is None else channels.groups.root(span.group)
                    if root is not None and root in columns:
                        share = span.times * span.count / channels.groups.counts[root]
                        self._slopes[side, row, columns[root]] += share
                    else:
                        self._fixed[side, row] += span.times * span.count
        unpruned = np.array([maps[0].groups.counts[name] for name in names])
        self._rest = sum(p.numel() for p in model.parameters()) - self._of_rows(unpruned)

    def _of_rows(self, kept: npt.NDArray[np.int64]) -> float:
        one, other = self._fixed + self._slopes @ kept
        return float(self._base @ (one * other))

    def after(self, kept: npt.NDArray[np.int64]) -> int:
        """Return the number of parameters that stay when each group keeps so many channels."""
        return round(self._rest + self._of_rows(kept))
