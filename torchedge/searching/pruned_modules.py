"""Modules without some of their channels, by the map of every parameter's dimensions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.searching.channels import ChannelMap, ChannelRanges

Kept = Mapping[str, npt.NDArray[np.int64]]


def prune_module(model: nn.Module, maps: Iterable[ChannelMap], kept: Kept) -> nn.Module:
    """Return a copy of the model with only the kept channels in its parameters and buffers."""
    pruned = copy.deepcopy(model)
    done: set[str] = set()
    for channels in maps:
        for index, axes in channels.axes.items():
            value = channels.graph.values[index]
            if value.role not in ("parameter", "buffer") or value.name in done:
                continue
            done.add(value.name)
            path, _, leaf = value.name.rpartition(".")
            owner = pruned.get_submodule(path)
            _shrink(owner, leaf, {axis: _entries(channels, s, kept) for axis, s in axes.items()})
    for module in pruned.modules():
        _correct_attributes(module)
    return pruned


def _entries(channels: ChannelMap, ranges: ChannelRanges, kept: Kept) -> npt.NDArray[np.int64] | None:
    """Return the kept entries of a dimension; None: all."""
    entries, start, whole = [], 0, True
    for span in ranges:
        root = None if span.group is None else channels.groups.root(span.group)
        stays = np.arange(span.count)
        if root is not None and root in kept:
            stays, whole = kept[root], False
        entries.append((start + stays[:, None] * span.times + np.arange(span.times)).reshape(-1))
        start += span.count * span.times
    return None if whole else np.concatenate(entries)


def _shrink(owner: nn.Module, leaf: str, axes: Mapping[int, npt.NDArray[np.int64] | None]) -> None:
    old = getattr(owner, leaf)
    new = old.detach()
    for axis, entries in axes.items():
        if entries is not None:
            new = new.index_select(axis, torch.from_numpy(entries).to(new.device))
    if isinstance(old, nn.Parameter):
        setattr(owner, leaf, nn.Parameter(new.clone(), requires_grad=old.requires_grad))
    else:
        owner.register_buffer(leaf, new.clone())


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


def channel_norms(
    model: nn.Module, maps: Iterable[ChannelMap], names: Sequence[str]
) -> dict[str, npt.NDArray[np.float64]]:
    """Return by group the mean absolute weight of the filters that make each channel."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    norms: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
    seen: set[str] = set()
    for channels in maps:
        for index, axes in channels.axes.items():
            value = channels.graph.values[index]
            ranges = axes.get(0, ())
            makes = value.role == "parameter" and len(value.shape) > 1 and len(axes) > 1 and len(ranges) == 1
            group = ranges[0].group if makes else None
            if group is None or value.name in seen:
                continue
            seen.add(value.name)
            root, weight = channels.groups.root(group), parameters[value.name]
            if root in norms and not weight.is_meta:
                norm = weight.detach().abs().flatten(1).double().mean(1)
                norms[root].append(norm.cpu().numpy())
    counts = next(iter(maps)).groups.counts
    return {name: np.mean(rows, axis=0) if rows else np.ones(counts[name]) for name, rows in norms.items()}
