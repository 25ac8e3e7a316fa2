"""Adaptive fusion: fused kernels are split where the capacity they lose costs more than they save.

A fused kernel saves a launch and the traffic of what its parts hand on, but loads only what its weakest part
can: C_fused = min(C_1, ..., C_k). The overlap problem, solved again for each change, decides between the two
(FlashMem, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchedge.errors import InputError
from torchedge.streaming.fusion import Groups, as_part, assemble, find_groups
from torchedge.streaming.instances import Instance
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.penalties import Cut, count_crossings, find_cuts, weigh_kernels
from torchedge.streaming.plans import Plan

__all__ = ["AdaptiveFusion", "Outcome", "Round", "Split", "split_adaptively"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a choice of kernels comes to: its plan's objective and preload, its kernels' latency (ms).

    `total` is what is minimised: objective + latency_price * latency_ms, infinite without a valid plan.
    """

    kernels: int
    objective: float | None
    preloaded_chunks: int
    latency_ms: float
    total: float


@dataclass(frozen=True, slots=True)
class Split:
    """A kernel, the kinds of the two it falls into, their capacities (whole, first, second; chunks).

    `penalty` is lambda |W_new| + mu * (increase of distance) of the whole, `latency_ms` what splitting adds.
    """

    kernel: str
    into: tuple[str, str]
    capacities: tuple[int, int, int]
    penalty: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    """One change that was solved for: kernels split, or splits taken back; `penalty` sums all kernels'."""

    change: Literal["split", "fuse"]
    splits: tuple[Split, ...]
    accepted: bool
    before: Outcome
    after: Outcome
    penalty_before: float
    penalty_after: float


@dataclass(frozen=True, slots=True)
class AdaptiveFusion:
    """The kernels chosen, with their instance and plan, and how they came about.

    `unfused` has each operation as a kernel, `fused` all that fusion allows; `chosen` is never worse in
    `total` than `fused`.
    """

    graph: InferenceGraph
    instance: Instance
    plan: Plan
    groups: Groups
    unfused: Outcome
    fused: Outcome
    chosen: Outcome
    rounds: tuple[Round, ...]

    @property
    def gain(self) -> float:
        """What splitting saved of `total`; infinite where only splitting gave a valid plan."""
        return 0.0 if self.chosen.total == self.fused.total else self.fused.total - self.chosen.total


def split_adaptively(
    graph: InferenceGraph,
    make_instance: Callable[[InferenceGraph], Instance],
    solve: Callable[[Instance], Plan],
    *,
    alpha: float = 0.1,
    mu: float | None = None,
    latency_price: float = 1.0,
    limit: int = 24,
) -> AdaptiveFusion:
    """Fuse an unfused graph, then split the kernels whose penalty tells that splitting pays, and plan it.

    Each round ranks the kernels by penalty less the latency and the distances that splitting adds, splits
    all that promise a gain, solves again and keeps the change if `total` fell; else half as many. Splits
    that turn out not to be needed are taken back in the same way. It ends when nothing pays.

    Args:
        graph: operations as `lay_out` gives them, each without parts.
        make_instance: the overlap problem of a graph, one layer an operation; the capacity of a fused one is
            then set to the least of its parts'.
        solve: gives the plan of an instance; splitting is as deterministic as it is.
        alpha: splitting must gain this share of the kernel's capacity.
        mu: weight of increased distances in the penalty; None: 1 - lambda of the instance.
        latency_price: objective that one ms of summed latency is worth. Preloading a chunk costs lambda and,
            on a phone, takes about a millisecond at initialisation: hence 1.
        limit: most instances solved, those of the fused and of the unfused graph among them.

    Raises:
        InputError: an option is out of range, or the graph is fused already.
    """
    for name, value, low in (("alpha", alpha, 0), ("mu", mu, 0), ("latency_price", latency_price, 0)):
        if value is not None and not (math.isfinite(value) and value >= low):
            raise InputError(f"{name} is {value!r}; expected a number of at least {low}")
    if limit < 2:
        raise InputError(f"limit is {limit}; expected at least 2 instances to solve")
    if fused := next((op.name for op in graph.operations if op.parts), None):
        raise InputError(f"{fused} is a fused operation; expected the graph before fusion")
    return _Search(graph, make_instance, solve, alpha, mu, latency_price, limit).run()


@dataclass(frozen=True, slots=True)
class _State:
    """One choice of kernels, planned; the penalty of each kernel."""

    groups: Groups
    graph: InferenceGraph
    instance: Instance
    plan: Plan
    outcome: Outcome
    penalties: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Move:
    cut: Cut
    split: Split
    promise: float


class _Search:
    """Solves, and remembers which cuts were made, so that they can be taken back."""

    def __init__(
        self,
        graph: InferenceGraph,
        make_instance: Callable[[InferenceGraph], Instance],
        solve: Callable[[Instance], Plan],
        alpha: float,
        mu: float | None,
        price: float,
        limit: int,
    ) -> None:
        self.graph, self.make_instance, self.solve = graph, make_instance, solve
        self.alpha, self.price, self.left = alpha, price, limit
        parts = replace(graph, operations=tuple(as_part(op) for op in graph.operations))
        self.capacities = [layer.capacity_chunks for layer in make_instance(parts).layers]
        self.peak = max(graph.activation_bytes, default=0)
        self.rounds: list[Round] = []
        self.made: list[_Move] = []
        single = tuple((p,) for p in range(len(graph.operations)))
        self.unfused = self._evaluate(single, None)
        self.mu = 1 - self.unfused.instance.lam if mu is None else mu

    def run(self) -> AdaptiveFusion:
        fused = state = self._evaluate(find_groups(self.graph), self.unfused.plan)
        while True:
            better = self._try("split", state, self._splits(state))
            better = better or self._try("fuse", state, self._fusions(state))
            if better is None:
                break
            state = better
        return AdaptiveFusion(
            state.graph,
            state.instance,
            state.plan,
            state.groups,
            self.unfused.outcome,
            fused.outcome,
            state.outcome,
            tuple(self.rounds),
        )

    def _try(self, change: Literal["split", "fuse"], state: _State, moves: Sequence[_Move]) -> _State | None:
        """Solve with all moves, then with the better half of them, ...; return the first that is better."""
        count = len(moves)
        while count and self.left:
            taken = moves[:count]
            cuts = [move.cut for move in taken]
            groups = _split(state.groups, cuts) if change == "split" else _join(state.groups, cuts)
            after = self._evaluate(groups, self.unfused.plan)
            accepted = after.outcome.total < state.outcome.total - 1e-9 and self._fits(after)
            penalties = sum(state.penalties), sum(after.penalties)
            splits = tuple(move.split for move in taken)
            self.rounds.append(Round(change, splits, accepted, state.outcome, after.outcome, *penalties))
            if accepted:
                self.made = [m for m in self.made if m.cut not in cuts]
                self.made += taken if change == "split" else []
                return after
            count //= 2
        return None

    def _splits(self, state: _State) -> list[_Move]:
        """Cuts that promise a gain, the best first: penalty less latency and distance that they add."""
        places = {group: place for place, group in enumerate(state.groups)}
        cuts = [
            cut
            for cut in find_cuts(self.graph, state.groups, self.capacities, self.alpha)
            if state.penalties[places[cut.whole]] > 0
        ]
        latencies = self._latencies(_split(state.groups, cuts))
        crossings = count_crossings(state.instance, state.plan)
        moves = []
        for cut in cuts:
            place = places[cut.whole]
            added = latencies[cut.first] + latencies[cut.second] - state.instance.layers[place].latency_ms
            cost = self.price * added + (1 - state.instance.lam) * crossings[place]
            moves.append(self._move(cut, state.penalties[place], added, state.penalties[place] - cost))
        return _ranked(moves)

    def _fusions(self, state: _State) -> list[_Move]:
        """Splits that promise a gain if taken back: latency and distance saved, less what finds no room."""
        places = {group: place for place, group in enumerate(state.groups)}
        made = [move for move in self.made if {move.cut.first, move.cut.second} <= set(places)]
        crossings = count_crossings(state.instance, state.plan)
        loaded = [0] * len(state.groups)
        for load in state.plan.loads:
            loaded[load.layer - 1] += load.chunks
        moves = []
        for move in made:
            first, second = places[move.cut.first], places[move.cut.second]
            excess = max(0, loaded[first] + loaded[second] - move.cut.whole_capacity)
            saved = self.price * move.split.latency_ms + (1 - state.instance.lam) * crossings[first]
            moves.append(replace(move, promise=saved - state.instance.lam * excess))
        return _ranked(moves)

    def _move(self, cut: Cut, penalty: float, added: float, promise: float) -> _Move:
        kinds = ["+".join(self.graph.operations[p].kind for p in side) for side in (cut.first, cut.second)]
        capacities = (cut.whole_capacity, cut.first_capacity, cut.second_capacity)
        name = self.graph.operations[cut.whole[0]].name
        return _Move(cut, Split(name, (kinds[0], kinds[1]), capacities, penalty, added), promise)

    def _latencies(self, groups: Groups) -> dict[tuple[int, ...], float]:
        layers = self.make_instance(assemble(self.graph, groups)).layers
        return {group: layer.latency_ms for group, layer in zip(groups, layers, strict=True)}

    def _fits(self, state: _State) -> bool:
        """Whether the kernels keep no more activations alive than the single operations do."""
        return max(state.graph.activation_bytes, default=0) <= self.peak

    def _evaluate(self, groups: Groups, reference: Plan | None) -> _State:
        self.left -= 1
        graph = assemble(self.graph, groups)
        instance = self.make_instance(graph)
        layers = tuple(
            layer
            if len(group) == 1
            else replace(layer, capacity_chunks=min(self.capacities[p] for p in group))
            for layer, group in zip(instance.layers, groups, strict=True)
        )
        instance = replace(instance, layers=layers)
        plan = self.solve(instance)
        penalties: tuple[float, ...] = (0.0,) * len(groups)
        if reference is not None:
            penalties = weigh_kernels(groups, instance, plan, reference, self.mu)
        return _State(groups, graph, instance, plan, _outcome(instance, plan, self.price), penalties)


def _outcome(instance: Instance, plan: Plan, price: float) -> Outcome:
    latency = sum(layer.latency_ms for layer in instance.layers)
    total = math.inf if plan.objective is None else plan.objective + price * latency
    kept = set(plan.preload)
    preloaded = sum(w.chunks for w in instance.weights if w.name in kept)
    return Outcome(len(instance.layers), plan.objective, preloaded, latency, total)


def _ranked(moves: Sequence[_Move]) -> list[_Move]:
    """Those that promise something, the most first, of equal ones the earlier kernel."""
    return sorted((m for m in moves if m.promise > 0), key=lambda m: (-m.promise, m.cut.whole))


def _split(groups: Groups, cuts: Sequence[Cut]) -> Groups:
    sides = {cut.whole: (cut.first, cut.second) for cut in cuts}
    return _ordered(side for group in groups for side in sides.get(group, (group,)))


def _join(groups: Groups, cuts: Sequence[Cut]) -> Groups:
    wholes = {side: cut.whole for cut in cuts for side in (cut.first, cut.second)}
    return _ordered(dict.fromkeys(wholes.get(group, group) for group in groups))


def _ordered(groups: Iterable[tuple[int, ...]]) -> Groups:
    return tuple(sorted(groups, key=lambda group: group[-1]))
