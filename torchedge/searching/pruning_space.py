"""The space of a network's prunings: how many channels each group keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import nn

from torchedge.errors import InputError, check_choice, check_whole, checked_call, not_a_module
from torchedge.graphs import ForwardGraph, GraphFamily, Mode
from torchedge.pruning.channels import ChannelGroups, ChannelMap, channel_norms, prune_module
from torchedge.searching.spaces import Genes, SearchSpace
from torchedge.tracing.capturing import capture

RATIOS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
Strategy = Literal["l1", "random"]
_LEAST = 2


class PruningSpace(SearchSpace):
    """Structured prunings of a module: an encoding maps each group of layers to its number of channels.

    model: the network to prune; it does not change. input_size: shape of one sample. ratios: shares of a
    group's channels to choose from. round_to: kept channels are rounded to a multiple of it (odd numbers
    can make convolutions several times slower). strategy: keep the channels with the largest mean
    absolute weights ("l1") or random ones ("random", drawn with `seed`). A group is the channels that
    additions and depthwise convolutions tie together, named after the first layer that makes them;
    `frozen` lists the groups that cannot be pruned, with the reason.

    Raises InputError for a model without a channel to prune, CaptureError for one that cannot be captured.
    """

    @checked_call()
    def __init__(
        self,
        model: nn.Module,
        input_size: Sequence[int] = (3, 224, 224),
        *,
        ratios: Sequence[float] = RATIOS,
        round_to: int = 8,
        strategy: Strategy = "l1",
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        self._check(model, ratios, round_to, strategy)
        size: object = input_size
        if not isinstance(size, (tuple, list)):
            raise InputError(
                f"input_size is {input_size!r}; expected the shape of one sample, like (3, 224, 224)"
            )
        self.input_size = tuple(input_size)
        self.name = name or type(model).__name__
        self.ratios, self.round_to = tuple(sorted(set(map(float, ratios)))), round_to
        self.strategy, self.seed = strategy, seed
        self.model: nn.Module | None = model
        groups = ChannelGroups()
        options: dict[str, Any] = {"input_size": self.input_size, "name": self.name}
        self._maps = {
            mode: ChannelMap(capture(model, mode=mode, **options), groups) for mode in get_args(Mode)
        }
        for group, why in groups.rigid.items():
            groups.freeze(group, why)  # graphs of one family differ in sizes alone
        self.groups = groups
        for group in groups.free():
            if self._options(groups.counts[group]) == (groups.counts[group],):
                groups.freeze(group, f"{groups.counts[group]} channels are too few to keep a smaller number")
        free = groups.free()
        if not free:
            reasons = "; ".join(f"{n}: {why}" for n, why in list(groups.frozen.items())[:3])
            raise InputError(
                f"{self.name} has no channels that may be pruned ({reasons or 'no convolutions'}); "
                "expected a layer between its input and its last layer: choose a deeper model"
            )
        self.choices = {group: self._options(groups.counts[group]) for group in free}
        self._families: dict[Mode, GraphFamily] = {}
        self._norms: dict[str, npt.NDArray[np.float64]] = {}

    @staticmethod
    def _check(model: object, ratios: Sequence[object], round_to: object, strategy: str) -> None:
        if not isinstance(model, nn.Module):
            raise not_a_module(model)
        if not ratios or not all(isinstance(r, (int, float)) and 0 < r <= 1 for r in ratios):
            raise InputError(f"ratios is {ratios!r}; expected shares above 0 and up to 1")
        check_whole("round_to", round_to)
        check_choice("strategy", strategy, ("l1", "random"))

    def _options(self, count: int) -> tuple[int, ...]:
        """Return the numbers of channels that a group may keep."""
        options = set()
        for ratio in self.ratios:
            rounded = max(round(ratio * count / self.round_to), 1) * self.round_to
            options.add(count if ratio == 1 else min(max(rounded, _LEAST), count))
        return tuple(sorted(options))

    @property
    def frozen(self) -> Mapping[str, str]:
        """Groups that are not pruned, with the reason."""
        return dict(self.groups.frozen)

    def landmarks(self) -> Sequence[Any]:
        """Return the prunings that keep the same share of every group."""
        rows = []
        for ratio in self.ratios:
            nearest = {
                name: min(options, key=lambda kept, n=options[-1]: abs(kept - ratio * n))  # type: ignore[misc]
                for name, options in self.choices.items()
            }
            rows.append(nearest)
        return rows

    def graph(self, encoding: Any, mode: Mode = "train") -> ForwardGraph:  # noqa: ANN401 - as in SearchSpace
        """Return the ForwardGraph of a pruning: the captured one with other sizes."""
        self.encode(encoding)
        return self._family(mode).graph([encoding[name] for name in self.choices], self.name)

    def sketch(self, genes: Genes, mode: Mode) -> list[tuple[GraphFamily, npt.NDArray[np.int64], list[int]]]:
        """Return the graphs of candidates: all are of one family."""
        counts = [np.array(options)[genes[:, k]] for k, options in enumerate(self.choices.values())]
        return [(self._family(mode), np.array(counts, dtype=np.int64), list(range(len(genes))))]

    def _family(self, mode: Mode) -> GraphFamily:
        if mode not in self._families:
            self._families[mode] = GraphFamily(
                self._maps[mode].template(self._maps.values()), tuple(self.choices)
            )
        return self._families[mode]

    def build(self, encoding: Any) -> nn.Module:  # noqa: ANN401 - as in SearchSpace
        """Return a copy of the model with the channels of the encoding."""
        self.encode(encoding)
        if self.model is None:
            raise InputError(
                "this space was unpickled without its model; build in the process that made the space"
            )
        return prune_module(self.model, list(self._maps.values()), self.kept(encoding))

    def kept(self, encoding: Mapping[str, int]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the kept channels by group, in ascending order."""
        norms = self.norms()
        return {
            name: np.sort(np.argsort(-norms[name], kind="stable")[:count]) for name, count in encoding.items()
        }

    def kept_norm(self, encodings: Sequence[Mapping[str, int]]) -> list[float]:
        """Return for each encoding the kept share of the groups' weights (mean absolute value).

        A stand-in for accuracy that needs no data: between 0 and 1, the mean over the groups.
        """
        shares = {}
        for name, norms in self.norms().items():
            running = np.concatenate([[0.0], np.cumsum(np.sort(norms)[::-1])])
            shares[name] = running / running[-1] if running[-1] else np.linspace(0, 1, len(running))
        return [float(np.mean([shares[n][count] for n, count in e.items()])) for e in encodings]

    def norms(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return a norm of each channel by group; the channels with the largest norms are kept."""
        if not self._norms and self.strategy == "random":
            rng = np.random.default_rng(self.seed)
            self._norms = {name: rng.random(self.groups.counts[name]) for name in self.choices}
        elif not self._norms:
            assert self.model is not None
            self._norms = channel_norms(self.model, list(self._maps.values()), list(self.choices))
        return self._norms

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the weights: predictions need only the graphs."""
        families = {mode: self._family(mode) for mode in ("train", "infer")}
        return {**self.__dict__, "model": None, "_maps": {}, "_families": families}
