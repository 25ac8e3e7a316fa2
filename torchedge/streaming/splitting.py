"""Adaptive fusion: fused kernels are split where the capacity they lose costs more than they save.

A fused kernel saves a launch and the traffic of what its parts hand on, but loads only what its weakest part
can: C_fused = min(C_1, ..., C_k). The overlap problem, solved again for each change, decides between the two
(FlashMem, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchedge.errors import InputError
from torchedge.streaming.fusion import Groups, as_part, assemble, find_groups
from torchedge.streaming.instances import Instance
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.penalties import Cut, count_crossings, find_cuts, weigh_kernels
from torchedge.streaming.plans import OverlapPlan

__all__ = ["AdaptiveFusion", "Outcome", "Round", "Split", "split_adaptively"]

ATTEMPTS = 4
"""How often a change that does not pay is tried again with half of it."""
TOLERANCE = 1e-9


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
    plan: OverlapPlan
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
    solve: Callable[[Instance], OverlapPlan],
    *,
    alpha: float = 0.1,
    mu: float | None = None,
    latency_price: float = 1.0,
    split_rows: bool = False,
    limit: int = 24,
) -> AdaptiveFusion:
    """Fuse an unfused graph, then split the kernels whose penalty tells that splitting pays, and plan it.

    Each round ranks the kernels by penalty less the latency and the distances that splitting adds, splits
    all that promise a gain, solves again and keeps the change if `total` fell; else half as many. Splits
    that turn out not to be needed are taken back in the same way, until nothing pays. The penalty sees what
    one kernel costs, not what many cost together: so the same is done from the other end, where all is split
    that may be, and the better of the two is taken.

    Args:
        graph: operations as `lay_out` gives them, each without parts.
        make_instance: the overlap problem of a graph, one layer an operation; a fused one loads what the
            least of its parts could, as `capacities.rate_capacities` says.
        solve: gives the plan of an instance; splitting is as deterministic as it is.
        alpha: splitting must gain this share of the kernel's capacity.
        mu: weight of increased distances in the penalty; None: 1 - lambda of the instance.
        latency_price: objective that one ms of summed latency is worth. Preloading a chunk costs lambda and,
            where a framework transforms weights on a phone, some 2 ms of initialisation: at 1 a split has to
            earn more than that.
        split_rows: split kernels around a softmax, a norm or another reduction too, which the paper does not.
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
    return _Search(graph, make_instance, solve, alpha, mu, latency_price, split_rows).run(limit)


@dataclass(frozen=True, slots=True)
class _State:
    """One choice of kernels, planned; the penalty of each kernel."""

    groups: Groups
    graph: InferenceGraph
    instance: Instance
    plan: OverlapPlan
    outcome: Outcome
    penalties: tuple[float, ...]


_Change = Literal["split", "fuse"]
_Made = dict[Cut, Split]


@dataclass(frozen=True, slots=True)
class _Move:
    """A kernel to split, or to make whole again; the splits that this makes or takes back."""

    cut: Cut
    splits: _Made
    promise: float


class _Search:
    """Solves, and remembers which cuts were made, so that they can be taken back."""

    def __init__(
        self,
        graph: InferenceGraph,
        make_instance: Callable[[InferenceGraph], Instance],
        solve: Callable[[Instance], OverlapPlan],
        alpha: float,
        mu: float | None,
        price: float,
        split_rows: bool,
    ) -> None:
        self.graph, self.make_instance, self.solve = graph, make_instance, solve
        self.alpha, self.price, self.split_rows = alpha, price, split_rows
        parts = replace(graph, operations=tuple(as_part(op) for op in graph.operations))
        self.capacities = [layer.capacity_chunks for layer in make_instance(parts).layers]
        self.peak = max(graph.activation_bytes, default=0)
        self.unfused = self._evaluate(tuple((p,) for p in range(len(graph.operations))), None)
        self.mu = 1 - self.unfused.instance.lam if mu is None else mu

    def run(self, limit: int) -> AdaptiveFusion:
        """Descend from the fused graph and from the most split one; take the better."""
        fused = self._evaluate(find_groups(self.graph), self.unfused.plan)
        best, rounds = self._descend(fused, {}, (limit - 2) // 2)
        left = limit - 2 - len(rounds)
        made = self._split_all(fused.groups)
        if left and made:
            loose = self._evaluate(_split(fused.groups, made), self.unfused.plan)
            first = _round("split", made.values(), True, fused, loose)
            other, later = self._descend(loose, made, left - 1)
            if other.outcome.total < best.outcome.total and self._fits(other):
                best, rounds = other, [first, *later]
        return AdaptiveFusion(
            best.graph,
            best.instance,
            best.plan,
            best.groups,
            self.unfused.outcome,
            fused.outcome,
            best.outcome,
            tuple(rounds),
        )

    def _descend(self, state: _State, made: _Made, limit: int) -> tuple[_State, list[Round]]:
        """Split, or take back what was split, while that lowers the total; solve at most `limit` times."""
        rounds: list[Round] = []
        better: _State | None = state
        while better is not None:
            state = better
            better = self._try("split", state, self._splits(state), made, rounds, limit)
            better = better or self._try("fuse", state, self._fusions(state, made), made, rounds, limit)
        return state, rounds

    def _try(
        self,
        change: _Change,
        state: _State,
        moves: Sequence[_Move],
        made: _Made,
        rounds: list[Round],
        limit: int,
    ) -> _State | None:
        """Solve with all moves, then with the better half of them, ...; return the first that is better."""
        for count in (len(moves) >> halving for halving in range(ATTEMPTS)):
            if not count or len(rounds) == limit:
                break
            taken = {move.cut: move for move in moves[:count]}
            groups = _split(state.groups, taken) if change == "split" else _join(state.groups, taken)
            after = self._evaluate(groups, self.unfused.plan)
            accepted = after.outcome.total < state.outcome.total - TOLERANCE and self._fits(after)
            done = {cut: split for move in taken.values() for cut, split in move.splits.items()}
            rounds.append(_round(change, done.values(), accepted, state, after))
            if accepted and change == "split":
                made.update(done)
            elif accepted:
                for cut in done:
                    del made[cut]
            if accepted:
                return after
        return None

    def _cuts(self, groups: Groups) -> tuple[Cut, ...]:
        return find_cuts(self.graph, groups, self.capacities, self.alpha, split_rows=self.split_rows)

    def _splits(self, state: _State) -> list[_Move]:
        """Cuts that promise a gain, the best first: penalty less latency and distance that they add."""
        places = {group: place for place, group in enumerate(state.groups)}
        cuts = tuple(cut for cut in self._cuts(state.groups) if state.penalties[places[cut.whole]] > 0)
        crossings = count_crossings(state.instance, state.plan)
        moves = []
        for cut, split in self._describe(
            state.groups, cuts, dict(zip(state.groups, state.penalties, strict=True))
        ).items():
            crossing = (1 - state.instance.lam) * crossings[places[cut.whole]]
            moves.append(_Move(cut, {cut: split}, split.penalty - self.price * split.latency_ms - crossing))
        return sorted((m for m in moves if m.promise > 0), key=lambda m: (-m.promise, m.cut.whole))

    def _split_all(self, groups: Groups) -> _Made:
        """Every split that the rules allow, splits of what was split included."""
        made: _Made = {}
        while cuts := self._cuts(groups):
            made |= self._describe(groups, cuts, {})
            groups = _split(groups, cuts)
        return made

    def _fusions(self, state: _State, made: _Made) -> list[_Move]:
        """Kernels that promise a gain if made whole again: latency and distance less what finds no room."""
        crossings = count_crossings(state.instance, state.plan)
        loaded = [0] * len(state.groups)
        for load in state.plan.loads:
            loaded[load.layer - 1] += load.chunks
        kernel = {p: place for place, group in enumerate(state.groups) for p in group}
        members = {cut: frozenset(cut.whole) for cut in made}
        moves = []
        for cut in made:
            undone = {c: split for c, split in made.items() if members[c] <= members[cut]}
            inside = sorted({kernel[p] for p in cut.whole})
            excess = max(0, sum(loaded[place] for place in inside) - cut.whole_capacity)
            saved = self.price * sum(split.latency_ms for split in undone.values())
            saved += (1 - state.instance.lam) * sum(crossings[place] for place in inside[:-1])
            moves.append(_Move(cut, undone, saved - state.instance.lam * excess))
        moves.sort(key=lambda m: (-m.promise, m.cut.whole))
        return _apart(move for move in moves if move.promise > 0)

    def _describe(
        self, groups: Groups, cuts: Iterable[Cut], penalties: Mapping[tuple[int, ...], float]
    ) -> _Made:
        """Say what each of some cuts does; what a split adds to the latency is worked out at once for all."""
        before, after = self._latencies(groups), self._latencies(_split(groups, cuts))
        found = {}
        for cut in cuts:
            kinds = [
                "+".join(self.graph.operations[p].kind for p in side) for side in (cut.first, cut.second)
            ]
            found[cut] = Split(
                self.graph.operations[cut.whole[0]].name,
                (kinds[0], kinds[1]),
                (cut.whole_capacity, cut.first_capacity, cut.second_capacity),
                penalties.get(cut.whole, 0.0),
                after[cut.first] + after[cut.second] - before[cut.whole],
            )
        return found

    def _latencies(self, groups: Groups) -> dict[tuple[int, ...], float]:
        layers = self.make_instance(assemble(self.graph, groups)).layers
        return {group: layer.latency_ms for group, layer in zip(groups, layers, strict=True)}

    def _fits(self, state: _State) -> bool:
        """Whether the kernels keep no more activations alive than the single operations do."""
        return max(state.graph.activation_bytes, default=0) <= self.peak

    def _evaluate(self, groups: Groups, reference: OverlapPlan | None) -> _State:
        graph = assemble(self.graph, groups)
        instance = self.make_instance(graph)
        plan = self.solve(instance)
        penalties: tuple[float, ...] = (0.0,) * len(groups)
        if reference is not None:
            penalties = weigh_kernels(groups, instance, plan, reference, self.mu)
        return _State(groups, graph, instance, plan, _outcome(instance, plan, self.price), penalties)


def _outcome(instance: Instance, plan: OverlapPlan, price: float) -> Outcome:
    latency = sum(layer.latency_ms for layer in instance.layers)
    total = math.inf if plan.objective is None else plan.objective + price * latency
    kept = set(plan.preload)
    preloaded = sum(w.chunks for w in instance.weights if w.name in kept)
    return Outcome(len(instance.layers), plan.objective, preloaded, latency, total)


def _round(change: _Change, splits: Iterable[Split], accepted: bool, before: _State, after: _State) -> Round:
    penalties = sum(before.penalties), sum(after.penalties)
    return Round(change, tuple(splits), accepted, before.outcome, after.outcome, *penalties)


def _apart(moves: Iterable[_Move]) -> list[_Move]:
    """The moves, less those about a kernel of which an earlier one is about too."""
    seen: set[int] = set()
    kept = []
    for move in moves:
        if seen.isdisjoint(move.cut.whole):
            seen.update(move.cut.whole)
            kept.append(move)
    return kept


def _split(groups: Groups, cuts: Iterable[Cut]) -> Groups:
    """The groups with these cuts made, in what cuts leave too."""
    sides = {cut.whole: (cut.first, cut.second) for cut in cuts}
    found, stack = [], list(groups)
    while stack:
        group = stack.pop()
        if group in sides:
            stack += sides[group]
        else:
            found.append(group)
    return _ordered(found)


def _join(groups: Groups, cuts: Iterable[Cut]) -> Groups:
    """The groups with what these cuts divided made whole."""
    wholes = {p: cut.whole for cut in cuts for p in cut.whole}
    return _ordered(dict.fromkeys(wholes.get(group[0], group) for group in groups))


def _ordered(groups: Iterable[tuple[int, ...]]) -> Groups:
    return tuple(sorted(groups, key=lambda group: group[-1]))
