"""Structured pruning by levels of parameters removed, which varies the topologies of a campaign (§5.1).

Channels that depend on each other (residual sums, concatenations, depthwise convolutions) go together; which
do is Torch-Pruning's knowledge. What is removed, and how much, is decided here: the number of parameters
follows from the channels that every group of layers keeps, so that a level is found without pruning twice.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.errors import InputError, MissingExtraError

__all__ = ["PrunedModel", "Scope", "Strategy", "prune", "untrained_norms"]

Strategy = Literal["random", "l1"]
Scope = Literal["global", "uniform"]
Norms = Mapping[str, npt.NDArray[np.float64]]
Counts = npt.NDArray[np.int64]

TRAINED_SPREAD = 0.5
"""Standard deviation of the logarithm of filter norms in one layer."""


@dataclass(frozen=True, slots=True)
class PrunedModel:
    """A pruned copy of a model: the level asked for and reached, % of `parameters_before` removed."""

    model: nn.Module
    level: float
    reached: float
    parameters_before: int
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

    Raises InputError for arguments out of range and for a model that cannot be pruned, with the reason, and
    MissingExtraError without Torch-Pruning.
    """
    _check(level, strategy, scope, round_to)
    size = tuple(int(s) for s in input_size)
    pruned = copy.deepcopy(model)
    before = count_parameters(pruned)
    if level == 0:
        return PrunedModel(pruned, level, 0.0, before, before)
    gradients = {name: p.requires_grad for name, p in pruned.named_parameters()}
    training = {name: m.training for name, m in pruned.named_modules()}
    label = type(model).__name__
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        pruned.eval().requires_grad_(True)
        shapes = _output_shapes(pruned, size, label)
        channels = _Channels(pruned, size, round_to, label)
        scores = channels.scores(strategy, seed, norms)
        channels.remove(_choose(channels, scores, level, scope))
        found = _output_shapes(pruned, size, f"{label} pruned by {level:g} %")
    if found != shapes:
        raise InputError(
            f"{label} cannot be pruned: its outputs change from {shapes} to {found}; prune it without heads "
            "that Torch-Pruning cannot follow"
        )
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(gradients.get(name, True))
        parameter.grad = None
    for name, module in pruned.named_modules():
        module.training = training.get(name, False)
    after = count_parameters(pruned)
    return PrunedModel(pruned, level, 100.0 * (1 - after / before), before, after)


def untrained_norms(model: nn.Module, seed: int, spread: float = TRAINED_SPREAD) -> Norms:
    """Return norms of filters as if `model` were trained, from a seed: log-normal around 1/sqrt(fan-in).

    A stand-in where only topologies matter. Fresh filters of one layer have norms within a few per cent of
    each other, so that "l1" would empty one layer after the other; those of trained networks vary by factors.
    """
    generator = np.random.default_rng(seed)
    found: dict[str, npt.NDArray[np.float64]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            typical = module.weight[0].numel() ** -0.5
            found[name] = typical * np.exp(spread * generator.standard_normal(module.weight.shape[0]))
    return found


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, each tensor once."""
    return sum(p.numel() for p in model.parameters())


def _check(level: float, strategy: str, scope: str, round_to: int | None) -> None:
    if not 0 <= level < 100:
        raise InputError(f"pruning level {level} is out of range; expected % of parameters, 0 to below 100")
    for what, given, known in (
        ("strategy", strategy, get_args(Strategy)),
        ("scope", scope, get_args(Scope)),
    ):
        if given not in known:
            raise InputError(f"pruning {what} {given!r} is unknown; expected one of {', '.join(known)}")
    if round_to is not None and round_to < 1:
        raise InputError(f"round_to is {round_to}; expected a whole number from 1 on")


def _output_shapes(model: nn.Module, size: tuple[int, ...], label: str) -> list[tuple[int, ...]]:
    from torch.utils._pytree import tree_leaves

    first = next(model.parameters(), None)
    if first is None:
        raise InputError(f"{label} has no parameters; expected a network with layers to prune")
    try:
        with torch.no_grad():
            outputs = model(torch.zeros(1, *size, device=first.device, dtype=first.dtype))
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise InputError(
            f"{label} does not run on an input of {size} ({type(error).__name__}: {said}); expected a "
            "network whose layers still fit together"
        ) from error
    return [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


# groups of channels -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Channels that go together: `units` of `width` channels each, of which at least `least` units stay.

    `step` divides the number that stays; `items` is what Torch-Pruning removes with the root's channels.
    """

    module: nn.Module
    handler: Callable[..., Any]
    items: Any
    units: int
    width: int
    least: int
    step: int

    def indices(self, units: Sequence[int]) -> list[int]:
        """Channels of the root layer that some units stand for."""
        return [unit + part * self.units for part in range(self.width) for unit in units]


class _Channels:
    """The groups of channels of a model that may be pruned, and the number of parameters that stay."""

    def __init__(self, model: nn.Module, size: tuple[int, ...], round_to: int | None, label: str) -> None:
        self._model = model
        first = next(model.parameters())
        example = torch.zeros(1, *size, device=first.device, dtype=first.dtype)
        try:
            self._dependencies = (
                _torch_pruning()
                .DependencyGraph()
                .build_dependency(model, example_inputs=example, verbose=False)
            )
            found = list(self._dependencies.get_all_groups())
        except Exception as error:
            said = (str(error).strip().splitlines() or ["no message"])[0]
            raise InputError(
                f"{label} cannot be pruned: Torch-Pruning finds no dependencies of its layers "
                f"({type(error).__name__}: {said})"
            ) from error
        self.groups = [g for g in (self._group(item, round_to) for item in found) if g is not None]
        if not self.groups:
            raise InputError(
                f"{label} has no channels that may be pruned; expected convolutions before the last layer"
            )
        self._count = _ParameterCount(model, self.groups, self._is_out)

    def _is_out(self, handler: Callable[..., Any]) -> bool:
        return bool(self._dependencies.is_out_channel_pruning_fn(handler))

    def _group(self, items: Any, round_to: int | None) -> _Group | None:  # noqa: ANN401 - Torch-Pruning's
        """Return a group, or None where the model's outputs depend on it."""
        width, root = 1, items[0].dep
        for dep, _ in items:
            module = dep.target.module
            reads = self._dependencies.is_in_channel_pruning_fn(dep.handler) and not self._is_out(dep.handler)
            if not dep.target.outputs and not reads:
                return None
            if isinstance(module, nn.Conv2d) and 1 < module.groups < module.out_channels:
                width = math.lcm(width, module.groups)
            if isinstance(module, nn.GroupNorm):
                width = math.lcm(width, module.num_groups)
        channels = len(items[0].idxs)
        if channels % width:
            return None
        step = (round_to or 1) // math.gcd(round_to or 1, width)
        units = channels // width
        return _Group(root.target.module, root.handler, items, units, width, min(units, step), step)

    def scores(self, strategy: Strategy, seed: int, norms: Norms | None) -> list[npt.NDArray[np.float64]]:
        """Return a number for each unit of each group: the smallest go first."""
        if strategy == "random":
            generator = np.random.default_rng(seed)
            return [generator.random(group.units) for group in self.groups]
        given = norms or {}
        known = {module: given[name] for name, module in self._model.named_modules() if name in given}
        return [self._norms(group, known) for group in self.groups]

    def _norms(
        self, group: _Group, known: Mapping[nn.Module, npt.NDArray[np.float64]]
    ) -> npt.NDArray[np.float64]:
        """Mean absolute weight of the filters that make each unit's channels."""
        total = np.zeros(group.units * group.width)
        count = np.zeros_like(total)
        for item in group.items:
            module = item.dep.target.module
            if not isinstance(module, (nn.Conv2d, nn.Linear)) or not self._is_out(item.dep.handler):
                continue
            if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
                continue  # depthwise: one kernel a channel follows the filter that makes it
            norm = known.get(module)
            if norm is None and module.weight.is_meta:
                raise InputError("pruning by l1 needs weights; pass norms= for a model on the meta device")
            if norm is None:
                norm = module.weight.detach().abs().flatten(1).mean(1).double().cpu().numpy()
            np.add.at(total, np.asarray(item.root_idxs), norm[np.asarray(item.idxs)])
            np.add.at(count, np.asarray(item.root_idxs), 1)
        norms = total / np.maximum(count, 1)
        return np.asarray(norms.reshape(group.width, group.units).mean(0))

    def parameters(self, removed: Counts) -> int:
        """Return the number of parameters that stay when each group loses so many units."""
        return self._count.after(removed)

    def allowed(self, removed: Counts) -> Counts:
        """Return the units each group may really lose: some stay, and `step` divides those that do."""
        units, least, step = (
            np.array([getattr(g, name) for g in self.groups]) for name in ("units", "least", "step")
        )
        kept = np.maximum(units - removed, least)
        rounded = np.minimum(np.maximum((2 * kept + step) // (2 * step) * step, least), units)
        return np.where(removed == 0, 0, units - np.where(step == 1, kept, rounded))

    def remove(self, chosen: Sequence[Sequence[int]]) -> None:
        """Remove the chosen units of each group."""
        for group, units in zip(self.groups, chosen, strict=True):
            if len(units):
                self._dependencies.get_pruning_group(
                    group.module, group.handler, sorted(group.indices(units))
                ).prune(record_history=False)


class _ParameterCount:
    """The number of parameters as a function of the units that each group loses."""

    def __init__(
        self, model: nn.Module, groups: Sequence[_Group], is_out: Callable[[Callable[..., Any]], bool]
    ) -> None:
        rows: dict[int, int] = {}
        outs: list[npt.NDArray[np.float64]] = []
        ins: list[npt.NDArray[np.float64]] = []
        both: list[float] = []
        one: list[float] = []
        for column, group in enumerate(groups):
            for item in group.items:
                module = item.dep.target.module
                sizes = _sizes(module)
                if sizes is None:
                    continue
                if id(module) not in rows:
                    rows[id(module)] = len(rows)
                    outs.append(np.zeros(len(groups)))
                    ins.append(np.zeros(len(groups)))
                    both.append(sizes[2])
                    one.append(sizes[3])
                row = rows[id(module)]
                side, full = (outs, sizes[0]) if is_out(item.dep.handler) else (ins, sizes[1])
                side[row][column] += len(item.idxs) / group.units / full
        self._outs, self._ins = np.array(outs), np.array(ins)
        self._both, self._one = np.array(both), np.array(one)
        self._rest = count_parameters(model) - float(self._both.sum() + self._one.sum())

    def after(self, removed: Counts) -> int:
        """Return the number of parameters that stay."""
        out, into = 1 - self._outs @ removed, 1 - self._ins @ removed
        return round(self._rest + float(self._both @ (out * into) + self._one @ out))


def _sizes(module: Any) -> tuple[int, int, int, int] | None:  # noqa: ANN401 - a module or a bare parameter
    """Return outputs, inputs, parameters in proportion to both, and to outputs alone; None: no parameters."""
    if isinstance(module, nn.Parameter):
        return int(max(module.shape)), 1, 0, module.numel()
    total = sum(p.numel() for p in module.parameters(recurse=False))
    if not total:
        return None
    weight = getattr(module, "weight", None)
    if weight is None:
        raise InputError(
            f"a {type(module).__name__} cannot be pruned; expected convolutions, linear layers and norms"
        )
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        depthwise = isinstance(module, nn.Conv2d) and module.groups == module.out_channels > 1
        inputs = module.in_channels if isinstance(module, nn.Conv2d) else module.in_features
        if not depthwise:
            return weight.shape[0], inputs, weight.numel(), total - weight.numel()
    return weight.shape[0], weight.shape[0], 0, total


# levels -----------------------------------------------------------------------------------------------------


def _choose(
    channels: _Channels, scores: list[npt.NDArray[np.float64]], level: float, scope: Scope
) -> list[list[int]]:
    """Return the units to remove from each group so that the share of parameters removed is nearest."""
    units = np.array([g.units for g in channels.groups])
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

    low, high = 0, steps  # parameters stay above the wanted ones at `low`
    while high - low > 1:
        middle = (low + high) // 2
        if channels.parameters(removed(middle)) > wanted:
            low = middle
        else:
            high = middle
    best = min((low, high), key=lambda step: abs(channels.parameters(removed(step)) - wanted))
    return [
        np.argsort(score, kind="stable")[:count].tolist()
        for score, count in zip(scores, removed(best), strict=True)
    ]


def _torch_pruning() -> Any:  # noqa: ANN401 - the module
    try:
        import torch_pruning
    except ImportError as error:
        raise MissingExtraError.of("torch-pruning", extra="prune", purpose="pruning networks") from error
    return torch_pruning
