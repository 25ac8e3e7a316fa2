"""Modules without some of their channels, by the map of every parameter's dimensions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.errors import InputError
from torchedge.pruning.channels import ChannelMap, ChannelRanges

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
