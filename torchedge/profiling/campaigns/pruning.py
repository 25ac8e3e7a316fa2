"""Structured pruning by levels of parameters removed, which varies the topologies of a campaign (§5.1).

Channels that depend on each other (residual sums, concatenations, depthwise convolutions) go together, as
`torchedge.pruning` finds in the captured graph. The number of parameters follows from the channels that every
group keeps, so that a level is found without pruning twice.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.errors import CaptureError, InputError, check_choice, check_whole, first_line
from torchedge.graphs import Mode
from torchedge.pruning.channels import ChannelGroups, ChannelMap, ParameterCount, channel_norms, prune_module
from torchedge.tracing.capturing import capture

Strategy = Literal["random", "l1"]
Scope = Literal["global", "uniform"]
Norms = Mapping[str, npt.NDArray[np.float64]]
Counts = npt.NDArray[np.int64]

TRAINED_SPREAD = 0.5
"""Standard deviation of the logarithm of filter norms in one layer."""


@dataclass(frozen=True, slots=True)
class PrunedModel:
    """A pruned copy of a model: the level reached, % of parameters removed, and how many stay."""

    model: nn.Module
    reached: float
    parameters: int


def prune(
    model: nn.Module,
    input_size: Sequence[int],
    level: float,
    *,
    strategy: Strategy = "random",
    scope: Scope = "global",
    round_to: int | None = None,
    seed: int = 0,
    norms: Norms | None = None,
) -> PrunedModel:
    """Return a copy of `model` with about `level` % of its parameters removed in whole channels (§5.1, §6.1).

    input_size: (C, H, W) of one sample. strategy: "random" takes filters with equal probability across all
    layers, "l1" those with the smallest mean absolute weight first; scope: "global" ranks the filters of all
    layers together, "uniform" takes the same share of each layer. round_to: channels that stay are multiples
    of it. A layer keeps at least one channel (or `round_to`), and the outputs keep their shape. Where a level
    cannot be reached exactly, the nearest one is taken and `reached` says which. The same seed gives the same
    network. norms: mean absolute weight of each filter by module path, in place of the weights' own: "l1"
    then works on the meta device too, as "random" does; see `untrained_norms`.

    Raises InputError for arguments out of range and for a model that cannot be pruned, with the reason.
    """
    _check(level, strategy, scope, round_to)
    size = tuple(int(s) for s in input_size)
    before = count_parameters(model)
    if level == 0:
        return PrunedModel(copy.deepcopy(model), 0.0, before)
    label = type(model).__name__
    shapes = _output_shapes(model, size, label)
    channels = _Channels(model, size, round_to, label)
    scores = channels.scores(strategy, seed, norms)
    pruned = channels.remove(_choose(channels, scores, level, scope))
    pruned_shapes = _output_shapes(pruned, size, f"{label} pruned by {level:g} %")
    if pruned_shapes != shapes:
        raise InputError(
            f"{label} cannot be pruned: its outputs change from {shapes} to {pruned_shapes}; prune it "
            "without the heads that make them"
        )
    for parameter in pruned.parameters():
        parameter.grad = None
    after = count_parameters(pruned)
    return PrunedModel(pruned, 100.0 * (1 - after / before), after)


def untrained_norms(model: nn.Module, seed: int) -> Norms:
    """Return norms of filters as if `model` were trained, from a seed: log-normal around 1/sqrt(fan-in).

    A stand-in where only topologies matter. Fresh filters of one layer have norms within a few per cent of
    each other, so that "l1" would empty one layer after the other; those of trained networks vary by factors.
    """
    generator = np.random.default_rng(seed)
    importances: dict[str, npt.NDArray[np.float64]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            typical = module.weight[0].numel() ** -0.5
            factors = np.exp(TRAINED_SPREAD * generator.standard_normal(module.weight.shape[0]))
            importances[name] = typical * factors
    return importances


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, each tensor once."""
    return sum(p.numel() for p in model.parameters())


def _check(level: float, strategy: str, scope: str, round_to: int | None) -> None:
    if not 0 <= level < 100:
        raise InputError(f"pruning level {level} is out of range; expected % of parameters, 0 to below 100")
    check_choice("strategy", strategy, get_args(Strategy))
    check_choice("scope", scope, get_args(Scope))
    if round_to is not None:
        check_whole("round_to", round_to)


def _output_shapes(model: nn.Module, size: tuple[int, ...], label: str) -> list[tuple[int, ...]]:
    from torch.utils._pytree import tree_leaves

    first = next(model.parameters(), None)
    if first is None:
        raise InputError(f"{label} has no parameters; expected a network with layers to prune")
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(model).eval()(
                torch.zeros(1, *size, device=first.device, dtype=first.dtype)
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{label} does not run on an input of {size} ({reason}); expected a network whose layers still "
            "fit together"
        ) from error
    return [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


# groups of channels -----------------------------------------------------------------------------------------


class _Channels:
    """The groups of channels of a model that may be pruned: each of `parts` equal parts of `units` channels.

    A unit stands for one channel in each part; at least `least` units stay, and `step` divides their number.
    """

    def __init__(self, model: nn.Module, size: tuple[int, ...], round_to: int | None, label: str) -> None:
        self._model, groups = model, ChannelGroups()
        try:
            self._maps = [
                ChannelMap(capture(model, input_size=size, mode=mode, name=label), groups)
                for mode in get_args(Mode)
            ]
        except CaptureError as error:
            raise InputError(f"{label} cannot be pruned: {error}") from error
        self.names = groups.free()
        if not self.names:
            raise InputError(
                f"{label} has no channels that may be pruned; expected convolutions before the last layer"
            )
        counts = np.array([groups.counts[name] for name in self.names])
        self.parts = np.array([groups.parts.get(name, 1) for name in self.names])
        self.units = counts // self.parts
        self.step = (round_to or 1) // np.gcd(round_to or 1, self.parts)
        self.least = np.minimum(self.units, self.step)
        self._count = ParameterCount(model, self._maps, self.names)

    def scores(self, strategy: Strategy, seed: int, norms: Norms | None) -> list[npt.NDArray[np.float64]]:
        """Return a number for each unit of each group: the smallest go first."""
        if strategy == "random":
            generator = np.random.default_rng(seed)
            return [generator.random(units) for units in self.units]
        by_channel = channel_norms(self._model, self._maps, self.names, norms or {})
        return [by_channel[n].reshape(k, -1).mean(0) for n, k in zip(self.names, self.parts, strict=True)]

    def parameters(self, removed: Counts) -> int:
        """Return the number of parameters that stay when each group loses `removed` units."""
        return self._count.after((self.units - removed) * self.parts)

    def allowed(self, removed: Counts) -> Counts:
        """Return the units each group may really lose: some stay, and `step` divides those that do."""
        kept, step = np.maximum(self.units - removed, self.least), self.step
        rounded = np.minimum(np.maximum((2 * kept + step) // (2 * step) * step, self.least), self.units)
        return np.where(removed == 0, 0, self.units - np.where(step == 1, kept, rounded))

    def remove(self, chosen: Sequence[Sequence[int]]) -> nn.Module:
        """Return a copy of the model without the chosen units of each group."""
        staying = {}
        for name, units, parts, gone in zip(self.names, self.units, self.parts, chosen, strict=True):
            stays = np.setdiff1d(np.arange(units), gone)
            staying[name] = (units * np.arange(parts)[:, None] + stays).reshape(-1)
        return prune_module(self._model, self._maps, staying)


# levels -----------------------------------------------------------------------------------------------------


def _choose(
    channels: _Channels, scores: list[npt.NDArray[np.float64]], level: float, scope: Scope
) -> list[list[int]]:
    """Return the units to remove from each group so that the share of parameters removed is nearest."""
    units = channels.units
    before = channels.parameters(np.zeros_like(units))
    wanted = before * (1 - level / 100)
    if scope == "uniform":
        steps = int(4 * units.max())

        def removed(step: int) -> Counts:
            return channels.allowed(np.floor(units * step / steps + 0.5).astype(np.int64))
    else:
        owner = np.repeat(np.arange(len(units)), units)[np.argsort(np.concatenate(scores), kind="stable")]
        steps = len(owner)

        def removed(step: int) -> Counts:
            return channels.allowed(np.bincount(owner[:step], minlength=len(units)))

    above = range(1, steps)  # up to the one that is searched, more parameters stay than the wanted ones
    low = bisect_left(above, True, key=lambda step: channels.parameters(removed(step)) <= wanted)
    best = min((low, low + 1), key=lambda step: abs(channels.parameters(removed(step)) - wanted))
    return [
        np.argsort(score, kind="stable")[:count].tolist()
        for score, count in zip(scores, removed(best), strict=True)
    ]
