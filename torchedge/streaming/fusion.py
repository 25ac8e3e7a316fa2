"""Fusion: which operations become one kernel, and which kernels are split again (FlashMem, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from torchedge.errors import InputError
from torchedge.ops import UNKNOWN, Work, spec_of
from torchedge.streaming.instances import Instance, LoadClassName
from torchedge.streaming.layering import InferenceGraph, Operation
from torchedge.streaming.plans import OverlapPlan

__all__ = [
    "BATCH_NORMS",
    "FOLLOWERS",
    "AdaptiveFusion",
    "Cut",
    "Groups",
    "Outcome",
    "Role",
    "Round",
    "Split",
    "as_part",
    "assemble",
    "count_crossings",
    "find_cuts",
    "find_groups",
    "fuse",
    "readers_of",
    "role_of",
    "split_adaptively",
    "weigh_kernels",
]

Groups = tuple[tuple[int, ...], ...]
"""The kernels of a graph: positions of the operations that each is made of, by the place of the last one."""

Role = Literal["product", "row", "element", "other"]

FOLLOWERS: Mapping[Role, frozenset[Role]] = MappingProxyType(
    {
        "product": frozenset({"element"}),  # linear/matmul/convolution (+ bias, batch norm, activation, add)
        "row": frozenset({"element"}),  # softmax, layer norm, mean, ... (+ scale, activation, add)
        "element": frozenset({"element"}),  # chains; into a product or a row it would be computed repeatedly
        "other": frozenset(),  # moves data, creates it, draws it or loops: a kernel of its own
    }
)
"""What may read the result of what inside one kernel. A kernel holds at most one product or row."""

_ELEMENTWISE = frozenset({Work.ARITHMETIC, Work.SUM, Work.ACTIVATION})
_NOT_ELEMENTWISE = frozenset({"glu"})
BATCH_NORMS = frozenset(
    {
        *("batch_norm", "native_batch_norm", "cudnn_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "sync_batch_norm"),
    }
)
"""In inference a scale and a shift by channel, computed from stored statistics: element-wise."""


def role_of(operation: Operation) -> Role:
    """Return what an operation is to fusion, by its operator's work and load class; a kernel is "other"."""
    if operation.parts:
        return "other"
    if operation.kind in BATCH_NORMS:
        return "element"
    spec = spec_of(operation.kind)
    if operation.load_class == "hierarchical":
        return "row"
    if operation.load_class == "reusable":
        return "other" if spec.work is Work.RECURRENT or spec is UNKNOWN else "product"
    if spec is UNKNOWN or operation.kind in _NOT_ELEMENTWISE:
        return "other"
    return "element" if spec.work in _ELEMENTWISE else "other"


def fuse(graph: InferenceGraph) -> InferenceGraph:
    """Return the graph with operations merged into kernels by `FOLLOWERS`, without more activation memory.

    An operation joins the kernel that alone reads its result, where both are of the same size. The kernel
    stands where its last part stood, so that all its inputs are there and no weight is needed earlier.
    """
    return assemble(graph, find_groups(graph))


def find_groups(graph: InferenceGraph) -> Groups:
    """Return the operations of each kernel of the fused graph; every operation is in one."""
    return _Fuser(graph).groups()


class _Fuser:
    """Grows kernels backwards from their last operation; `place[p]` is where operation p runs now."""

    def __init__(self, graph: InferenceGraph) -> None:
        self.operations = graph.operations
        self.returned = frozenset(graph.outputs)
        self.roles = [role_of(operation) for operation in graph.operations]
        self.place = list(range(len(graph.operations)))
        self.readers = readers_of(graph)
        for last in reversed(range(len(self.operations))):
            if self.place[last] == last:
                self._grow(last)

    def groups(self) -> Groups:
        members: dict[int, list[int]] = {}
        for position, last in enumerate(self.place):
            members.setdefault(last, []).append(position)
        return tuple(tuple(members[last]) for last in sorted(members))

    def _grow(self, last: int) -> None:
        """Take in producers, along one path to its product or row first, until none may join."""
        group = {last}
        path = [last]
        while path:
            sources = sorted(self.operations[path[-1]].inputs, reverse=True)
            found = next((s for s in sources if s not in group and self._joins(s, group, last)), None)
            if found is None:
                path.pop()
            else:
                group.add(found)
                path.append(found)
                self.place[found] = last

    def _joins(self, source: int, group: set[int], last: int) -> bool:
        role = self.roles[source]
        readers = self.readers[source]
        if source in self.returned or not all(reader in group for reader in readers):
            return False
        if not all(self.roles[reader] in FOLLOWERS[role] for reader in readers):
            return False
        headed = any(self.roles[member] != "element" for member in group)
        if headed and (role != "element" or self._has_head(source)):
            return False
        size = self.operations[source].output_bytes
        if any(self.operations[reader].output_bytes != size for reader in readers):
            return False
        return self._is_next(source, last) or self._held_bytes(source, last) <= size

    def _has_head(self, position: int) -> bool:
        """Whether an element-wise operation ends a chain behind a product or row of its own."""
        found = True
        while found:
            found = False
            for source in self.operations[position].inputs:
                if self.readers[source] == [position] and "element" in FOLLOWERS[self.roles[source]]:
                    if self.roles[source] != "element":
                        return True
                    position, found = source, True
                    break
        return False

    def _is_next(self, source: int, last: int) -> bool:
        """Whether no other kernel runs between an operation and the kernel it would join."""
        return all(self.place[between] == last for between in range(source + 1, last))

    def _held_bytes(self, source: int, last: int) -> int:
        """Bytes of inputs that would live longer if the operation ran at `last`."""
        return sum(
            self.operations[value].output_bytes
            for value in set(self.operations[source].inputs)
            if value not in self.returned and max(self.place[reader] for reader in self.readers[value]) < last
        )


def readers_of(graph: InferenceGraph) -> list[list[int]]:
    """Return the positions of the operations that read each operation's result."""
    readers: list[list[int]] = [[] for _ in graph.operations]
    for position, operation in enumerate(graph.operations):
        for source in dict.fromkeys(operation.inputs):
            readers[source].append(position)
    return readers


def assemble(graph: InferenceGraph, groups: Groups) -> InferenceGraph:
    """Return the graph whose kernels are these groups of operations, each at the place of its last one.

    The parts of a kernel are the operations as `graph` has them (and `as_part`), their inputs being positions
    there.

    Raises:
        InputError: an operation is in no group or in two, or a result inside a kernel is read outside it.
    """
    groups = tuple(sorted((tuple(sorted(group)) for group in groups), key=lambda group: group[-1]))
    if sorted(position for group in groups for position in group) != list(range(len(graph.operations))):
        raise InputError(f"groups of {graph.name} are no partition; expected each operation in one of them")
    kernel = {position: place for place, group in enumerate(groups) for position in group}
    result = {group[-1]: place for place, group in enumerate(groups)}
    needed = {
        source
        for position, operation in enumerate(graph.operations)
        for source in operation.inputs
        if kernel[source] != kernel[position]
    }
    if hidden := sorted((needed | set(graph.outputs)) - set(result)):
        name = graph.operations[hidden[0]].name
        raise InputError(f"{name} is read outside its kernel; expected only a kernel's last result to be")
    operations = tuple(_merge(graph, group, result) for group in groups)
    outputs = tuple(result[position] for position in graph.outputs)
    return replace(graph, operations=operations, outputs=outputs)


def _merge(graph: InferenceGraph, group: Sequence[int], result: Mapping[int, int]) -> Operation:
    """One kernel: FLOPs summed, what parts hand to one another not moved."""
    parts = [graph.operations[position] for position in group]
    inside = set(group)
    outside = dict.fromkeys(source for part in parts for source in part.inputs if source not in inside)
    inputs = tuple(result[source] for source in outside)
    if len(parts) == 1:
        return replace(parts[0], inputs=inputs)
    handed = sum(
        graph.operations[source].output_bytes for part in parts for source in part.inputs if source in inside
    )
    handed += sum(part.output_bytes for part in parts[:-1])
    head = next((part for part in parts if role_of(part) != "element"), parts[0])
    return Operation(
        name=head.name,
        kind="+".join(part.kind for part in parts),
        load_class=_dominating(parts),
        flops=sum(part.flops for part in parts),
        bytes_moved=max(sum(part.bytes_moved for part in parts) - handed, parts[-1].output_bytes),
        weights=tuple(dict.fromkeys(name for part in parts for name in part.weights)),
        inputs=inputs,
        output_bytes=parts[-1].output_bytes,
        parts=tuple(as_part(part) for part in parts),
    )


def as_part(operation: Operation) -> Operation:
    """Return an operation as it is inside a kernel: a batch norm is folded, and no longer hierarchical."""
    return replace(operation, load_class="elemental") if operation.kind in BATCH_NORMS else operation


def _dominating(parts: Iterable[Operation]) -> LoadClassName:
    """The class of the kernel's product or row; elemental where it has none."""
    roles = {role_of(part) for part in parts}
    if "product" in roles:
        return "reusable"
    return "hierarchical" if "row" in roles else "elemental"


@dataclass(frozen=True, slots=True)
class Cut:
    """A fused kernel and the two it is split into, as positions of their parts; the chunks each can load."""

    whole: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    whole_capacity: int
    first_capacity: int
    second_capacity: int


def find_cuts(
    graph: InferenceGraph,
    groups: Groups,
    capacities: Sequence[int],
    alpha: float,
    *,
    split_rows: bool = False,
) -> tuple[Cut, ...]:
    """Return the best cut of each kernel that may be split, in the kernels' order.

    A kernel is cut behind a part whose result alone the rest of it reads, with the capacity of each side the
    least of its parts' `capacities` (chunks, by position). Both sides together must reach (1 + alpha) times
    what the kernel can load, and more than it. A kernel around a softmax, a norm or another reduction stays
    intact unless `split_rows`, and a batch norm stays with what it is folded into. The cut of most capacity
    is taken; of equal ones the last, so that a bias stays with its product.
    """
    readers = readers_of(graph)
    found = []
    for group in groups:
        if not split_rows and any(role_of(graph.operations[p]) == "row" for p in group):
            continue
        whole = min(capacities[p] for p in group)
        best: Cut | None = None
        for first in _cut_off(graph, readers, group):
            second = tuple(p for p in group if p not in first)
            sides = [min(capacities[p] for p in side) for side in (first, second)]
            enough = sum(sides) >= (1 + alpha) * whole and sum(sides) > whole
            if enough and (best is None or sum(sides) >= best.first_capacity + best.second_capacity):
                best = Cut(group, first, second, whole, *sides)
        if best is not None:
            found.append(best)
    return tuple(found)


def _cut_off(
    graph: InferenceGraph, readers: Sequence[Sequence[int]], group: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield what may be cut off the front of a kernel: a part with all that leads to it inside."""
    members = set(group)
    for last in group[:-1]:
        if any(graph.operations[r].kind in BATCH_NORMS for r in readers[last] if r in members):
            continue
        front, stack = {last}, [last]
        while stack:
            for source in graph.operations[stack.pop()].inputs:
                if source in members and source not in front:
                    front.add(source)
                    stack.append(source)
        if all(reader in front for p in front if p != last for reader in readers[p]):
            yield tuple(sorted(front))


def weigh_kernels(
    groups: Groups, instance: Instance, plan: OverlapPlan, reference: OverlapPlan, mu: float
) -> tuple[float, ...]:
    """Return Penalty(v) = lambda |W_new| + mu * (increase of distance) of every kernel (section 4.3).

    `reference` is the plan of the same graph with every operation a kernel of its own. W_new holds the
    weights it streams and `plan` preloads; a kernel answers for those of their chunks that its parts load
    there. A weight that both stream, and that `plan` loads earlier, counts with its parts' share of it; both
    distances are counted in the layers of `instance`. A plan without objective has preloaded everything.
    """
    layer_of = {p + 1: layer for layer, group in enumerate(groups, 1) for p in group}
    now = _first_loads(plan) if plan.objective is not None else {}
    before: dict[str, int] = {}
    for load in reference.loads:
        layer = layer_of[load.layer]
        before[load.weight] = min(before.get(load.weight, layer), layer)
    sizes = {w.name: 1 if instance.distance == "chunks" else w.chunks for w in instance.weights}
    penalties = [0.0] * len(groups)
    for load in reference.loads:
        name = load.weight
        if name not in now:
            cost = instance.lam * load.chunks
        else:
            cost = mu * max(0, before[name] - now[name]) * load.chunks / sizes[name]
        penalties[layer_of[load.layer] - 1] += cost
    return tuple(penalty if len(group) > 1 else 0.0 for penalty, group in zip(penalties, groups, strict=True))


def count_crossings(instance: Instance, plan: OverlapPlan) -> tuple[int, ...]:
    """Return what one layer more behind each layer adds to the sum of distances: the weights under way there.

    A weight counts as one, or with its chunks where the instance counts distances so.
    """
    starts = _first_loads(plan)
    change = [0] * (len(instance.layers) + 1)
    for weight in instance.weights:
        if weight.name in starts:
            amount = weight.chunks if instance.distance == "chunks" else 1
            change[starts[weight.name] - 1] += amount
            change[weight.first_use - 1] -= amount
    crossings, total = [], 0
    for step in change[:-1]:
        total += step
        crossings.append(total)
    return tuple(crossings)


def _first_loads(plan: OverlapPlan) -> dict[str, int]:
    """z_w of every streamed weight."""
    first: dict[str, int] = {}
    for load in plan.loads:
        first[load.weight] = min(first.get(load.weight, load.layer), load.layer)
    return first


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
