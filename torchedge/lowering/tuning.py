"""The tuner: which schedule every kernel takes, and where its operands lie, by predicted cost.

TMModel, sections 4 and 5: all combinations of access patterns, tiles, work-groups and unrolling are scored;
no kernel is written or run. The default stays where the model predicts no clear gain over it. Copies into
another layout are launches of their own (`lowering.copies`), chosen where they gain more than they cost. With
a timer, the best few predicted schedules of each kernel run on the device, and the fastest is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.expressions.dialect import Site
from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.rendering import writes_texels
from torchedge.expressions.scalars import reads_of
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.candidates import Candidates, candidates_of
from torchedge.lowering.copies import copied_reads, copied_updates, copy_group, overwritten_in
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernel_work import OperandWorks, sketches_of
from torchedge.lowering.kernels.alike import Forms
from torchedge.lowering.kernels.loops import work_of
from torchedge.lowering.kernels.nests import Nest, beyond_texels, write_kernel, written
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.lowering.nodes import Contraction, Node
from torchedge.lowering.schedules import RowsSchedule, Schedule
from torchedge.lowering.targets import Target
from torchedge.lowering.trials import Trials, known_of, search
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import LANES, PATTERNS, Layout, image_layouts
from torchedge.textures.model import TERMS, KernelCost, predict_kernels, predict_reuse

MARGIN = 0.1
"""Predicted gain over the default, relative and beside a launch, below which the default stays."""
LARGEST_OPERANDS = 3
"""Tensors of a kernel whose layouts are chosen together; those of the others stay as they are."""
BEAM = 6
"""Schedules for each way to lay out a kernel's tensors that are combined with all others."""
ALIKE = (0, 1, -1)
"""Numbers of the layouts in which schedules are compared first: the default, buffers, the widest blocks."""
SWEEPS = 4
"""Most rounds over all tensors in the search for layouts."""
COVERED = 0.98
"""Share of the predicted time whose kernels are measured by several schedules; of the others only one is."""
TIMED_MARGIN = 0.02
"""Measured gain over the default, relative, below which the default stays: about the timer's noise."""

_Works = dict[int, OperandWorks]
"""Work of operands, by the slices that a launch joins (0: the first launch), operand and layout."""
KernelCandidate = tuple[Sequence[KernelSource], Mapping[Node, Layout]]
"""A kernel by one schedule: its launches, and where its tensors lie."""
Timer = Callable[[Sequence[Sequence[KernelCandidate]]], list[list[float]]]
"""Returns the ms of each candidate of each kernel, infinite where it does not run."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the tuner decides for a step.

    groups: the kernels, copies included. layouts: of all tensors. schedules: by group, where they are not the
    default. ms, default_ms: times of all kernels as decided, and by default: predicted, or measured where
    there is a timer. bound_ms: no choice of schedules and layouts of these kernels is predicted below it.
    """

    groups: Sequence[FusionGroup]
    layouts: dict[Node, Layout]
    schedules: dict[FusionGroup, Schedule]
    ms: float
    default_ms: float
    bound_ms: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate of a kernel: its schedule, where its operands lie, and its predicted time."""

    schedule: Schedule
    layouts: Mapping[Node, Layout]
    ms: float


@dataclass(frozen=True, slots=True)
class Scores:
    """All candidates of one kernel: C choices of layouts, and N schedules for each.

    nest: its loops; kernels that do the same share the scores. sets: candidates by kind, with what is
    known of their operands' work. operands: the tensors whose layouts are chosen. ms: (C, N) predicted times,
    infinite where a result's image cannot be written. others: (C, N) costs by the levels of the model alone
    and by the reuse-distance baseline. The default is (0, 0). launch_ms: part of all times, a launch.
    """

    nest: Nest
    sets: tuple[tuple[Candidates, _Works], ...]
    operands: tuple[Node, ...]
    layouts: tuple[Mapping[Node, Layout], ...]
    ms: Array
    others: Mapping[str, Array]
    launch_ms: float

    def _located(self, place: int) -> tuple[int, Candidates, int]:
        """Return of a candidate the number of its layouts, its set, and its number in the set."""
        layouts, number = divmod(place, self.ms.shape[1])
        for candidates, _ in self.sets:
            if number < len(candidates):
                return layouts, candidates, number
            number -= len(candidates)
        raise IndexError(place)

    def choice(self, place: int) -> Choice:
        """Return a candidate by its place in `ms.ravel()`."""
        layouts, candidates, number = self._located(place)
        return Choice(candidates.pick(number), self.layouts[layouts], float(self.ms.reshape(-1)[place]))

    def terms(self, places: Array, target: Target, coefficients: KernelCoefficients) -> dict[str, Array]:
        """Return the ms of each term of some candidates' costs; they run side by side, launches excepted."""
        terms = {name: np.zeros(len(places)) for name in TERMS}
        located = [self._located(int(place)) for place in places]
        alike: dict[tuple[int, int], list[int]] = {}
        for row, (layouts, candidates, _) in enumerate(located):
            alike.setdefault((layouts, id(candidates)), []).append(row)
        for rows in alike.values():
            layouts, candidates, _ = located[rows[0]]
            chosen = candidates.subset(np.array([located[row][2] for row in rows]))
            for sketch, share in sketches_of(self.nest, chosen, target):
                cost = predict_kernels(sketch.work([self.layouts[layouts]], coefficients), coefficients)
                for name, ms in cost.terms.items():
                    terms[name][rows] += ms * share
        return terms

    def trials(self, places: Array, target: Target, coefficients: KernelCoefficients) -> Trials:
        """Return candidates that the search may time, the first of them the default; none is timed yet."""
        costs = np.stack(list(self.terms(places, target, coefficients).values()), axis=1)
        shares = costs / costs.sum(axis=1, keepdims=True)
        return Trials(self.fields()[places], shares, self.ms.reshape(-1)[places], {})

    def order(self, cost: Array | None = None) -> Array:
        """Return the places of all candidates that can be written, the fastest first (by `ms`)."""
        values = np.where(np.isfinite(self.ms), self.ms if cost is None else cost, np.inf).reshape(-1)
        places = np.argsort(values, kind="stable")
        return places[: int(np.isfinite(values).sum())]

    def fields(self) -> Array:
        """Return (C N, F) whole numbers: a candidate's schedule, then the operands' patterns; 0: a buffer."""
        schedules = np.concatenate([candidates.table() for candidates, _ in self.sets])
        patterns = np.zeros((len(self.layouts), LARGEST_OPERANDS), int)
        for number, choice in enumerate(self.layouts):
            for place, node in enumerate(self.operands):
                if choice[node].storage != "buffer":
                    patterns[number, place] = 1 + tuple(PATTERNS).index(choice[node].pattern)
        both = np.repeat(patterns, len(schedules), axis=0), np.tile(schedules, (len(patterns), 1))
        return np.concatenate(both[::-1], axis=1)

    def gains(self, ms: float, default_ms: float) -> bool:
        """Return whether a time is below the default's by more than the margin; launches take the same."""
        return (ms - self.launch_ms) * (1 + MARGIN) < default_ms - self.launch_ms

    def best(self) -> int:
        """Return the place of the fastest candidate; the default's where no other is faster by the margin."""
        place = int(self.order()[0])
        return place if self.gains(self.ms.reshape(-1)[place], self.ms[0, 0]) else 0


def tune(
    groups: Sequence[FusionGroup],
    layouts: Mapping[Node, Layout],
    fixed: Collection[Node],
    target: Target,
    coefficients: KernelCoefficients,
    timer: Timer | None = None,
    forms: Forms | None = None,
) -> Tuned:
    """Choose the schedules of all kernels of a step, and where its tensors lie, by predicted cost.

    A layout is paid by the kernel that writes the tensor and by every one that reads it: layouts are chosen
    one after the other, each the best for all its kernels while the others stay, until nothing changes.
    Tensors that are overwritten, and then those that one kernel reads, may be copied into another layout.
    fixed: tensors that stay where they are. Layouts are chosen where the target stores tensors in images;
    without images to choose and without a timer, only contractions get schedules. timer: measures the best
    few predicted schedules of each kernel, in the layouts chosen. forms: of the groups.
    """
    pairs = [pair for group in groups for pair in group.stored.items() if pair[1] is not None]
    settled = {*fixed, *[node for pair in pairs for node in pair]}
    free = {
        node: layout_options(node, layout, target, splits=None)
        for node, layout in layouts.items()
        if target.storage == "image" and node not in settled
    }
    free = {node: options for node, options in free.items() if len(options) > 1}
    known: dict[Any, Scores] = {}
    keys = _Keys(Forms() if forms is None else forms)
    # Predictions of other kernels have not been held against a GPU's measurements yet.
    everything = target.storage == "image" or timer is not None
    judged = [group for group in groups if everything or isinstance(group.host, Contraction)]
    free = _with_one_split(judged, keys, layouts, free, target, coefficients)
    tables = [_table(group, keys, layouts, free, target, coefficients, known) for group in judged]
    chosen = _search(tables, {node: len(options) for node, options in free.items()})
    if sum(t.cost(chosen) for t in tables) * (1 + MARGIN) >= sum(t.cost({}) for t in tables):
        chosen = {}
    placed = {**layouts, **{node: free[node][number] for node, number in chosen.items()}}
    if target.storage == "image":
        copier = _Copier(target, coefficients, free, chosen, placed, known, keys)
        tables = copier.update_images(tables, fixed)
        tables = copier.copy_reads(tables)
    if timer is not None:
        return _timed(tables, chosen, placed, target, coefficients, timer)
    schedules = {}
    for table in tables:
        place = table.best(chosen)
        if place != table.row(chosen) * table.scores.ms.shape[1]:
            schedules[table.group] = table.scores.choice(place).schedule
    return Tuned(
        [table.group for table in tables] if everything else groups,
        placed,
        schedules,
        sum(float(t.scores.ms.reshape(-1)[t.best(chosen)]) for t in tables),
        sum(float(t.scores.ms[0, 0]) for t in tables),
        sum(float(t.scores.ms.min()) for t in tables),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """One kernel: its candidates in every combination of its tensors' layouts.

    placed: where its tensors lie in `nest`. nodes: the tensors whose layouts are chosen. steps: how far apart
    their layouts are among the combinations. least: (C,) ms of the best schedule of each.
    """

    group: FusionGroup
    forms: Forms
    placed: Mapping[Node, Layout]
    scores: Scores
    nodes: tuple[Node, ...]
    steps: tuple[int, ...]
    least: Array

    @property
    def nest(self) -> Nest:
        """The kernel's loops."""
        return self.forms.nest(self.group, self.placed)

    def row(self, chosen: Mapping[Node, int]) -> int:
        """Return the number of the combination of layouts."""
        return sum(chosen.get(node, 0) * step for node, step in zip(self.nodes, self.steps, strict=True))

    def best(self, chosen: Mapping[Node, int]) -> int:
        """Return the place of the best schedule; the default's where none is clearly better."""
        row = self.scores.ms[self.row(chosen)]
        number = int(np.argmin(row))
        keeps = np.isfinite(row[0]) and not self.scores.gains(row[number], row[0])
        return self.row(chosen) * len(row) + (0 if keeps else number)

    def schedule(self, chosen: Mapping[Node, int], number: int) -> Schedule:
        """Return a schedule by its number in one combination of layouts."""
        return self.scores.choice(self.row(chosen) * self.scores.ms.shape[1] + number).schedule

    def trials(
        self, chosen: Mapping[Node, int], target: Target, coefficients: KernelCoefficients, most: int
    ) -> Trials:
        """Return the schedules in one combination of layouts, the first ones; none is timed yet."""
        row, count = self.row(chosen), self.scores.ms.shape[1]
        return self.scores.trials(row * count + np.arange(min(most, count)), target, coefficients)

    def cost(self, chosen: Mapping[Node, int]) -> float:
        """Return the predicted ms of the best schedule."""
        return float(self.least[self.row(chosen)])

    def costs(self, chosen: Mapping[Node, int], node: Node, count: int) -> Array:
        """Return (count,) the predicted ms of the best schedule for each layout of a tensor."""
        step = self.steps[self.nodes.index(node)]
        costs: Array = self.least[self.row(chosen) + (np.arange(count) - chosen.get(node, 0)) * step]
        return costs


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys that kernels with the same work share, found once for all groups of one form."""

    forms: Forms
    known: dict[Any, Any] = field(default_factory=dict)

    def of(
        self,
        group: FusionGroup,
        placed: Mapping[Node, Layout],
        layouts: Mapping[Node, Layout],
        nodes: Sequence[Node],
    ) -> Any:  # noqa: ANN401
        """Return the key of a group's loops in `placed`, with tensors in `layouts`."""
        form = self.forms.of(group)
        numbers = tuple([form.nodes.index(node) for node in nodes])
        own = form.text, form.layouts(placed), form.layouts(layouts), numbers
        if own not in self.known:
            self.known[own] = _key(self.forms.nest(group, placed), layouts, nodes)
        return self.known[own]


@dataclass(frozen=True, slots=True)
class _Copier:
    """Chooses copies for a step whose layouts are chosen.

    free, chosen: the layouts of tensors that were free, and the number of the one that is taken. placed: the
    layouts of all tensors; those of copies are added. known: scores by kernel.
    """

    target: Target
    coefficients: KernelCoefficients
    free: Mapping[Node, Sequence[Layout]]
    chosen: Mapping[Node, int]
    placed: dict[Node, Layout]
    known: dict[Any, Any]
    keys: _Keys

    def update_images(self, tables: Sequence[_Table], fixed: Collection[Node]) -> list[_Table]:
        """Let tensors that kernels overwrite lie in images where all that read them gain more than a copy."""
        images: dict[Node, Layout] = {}
        for over, node in overwritten_in([table.group for table in tables]).items():
            users = [table for table in tables if over in table.group.reads]
            if (
                over in fixed
                or len(users) < 2
                or self._least_ms(over) > sum(t.cost(self.chosen) for t in users)
            ):
                continue
            options = layout_options(over, self.placed[over], self.target)
            if len(options) < 2:
                continue
            costs = np.sum([self._costs(table, over, options) for table in users], axis=0)
            number = int(np.argmin(costs))
            if options[number].storage != "buffer":
                copy_ms = self._copy_ms(node, Layout(options[0].order), over, options[number])
                if (costs[number] + copy_ms) * (1 + MARGIN) < costs[0]:
                    images[over] = options[number]
        self.placed.update(images)
        groups = copied_updates([table.group for table in tables], images, self.placed)
        return self._tables(
            groups, [table for table in tables if not images.keys() & table.group.reads.keys()]
        )

    def copy_reads(self, tables: Sequence[_Table]) -> list[_Table]:
        """Let kernels read a copy of one operand where they gain more by its layout than it costs."""
        copies: dict[FusionGroup, tuple[Node, Layout]] = {}
        for table in tables:
            best = table.cost(self.chosen) / (1 + MARGIN)
            for node in table.group.reads:
                if node in table.group.stored.values() or self._least_ms(node) >= best:
                    continue
                options, home = self._options(table, node)
                if len(options) < 2:
                    continue
                costs = self._costs(table, node, options)
                number = int(np.argmin(costs))
                if number != home and costs[number] + self._least_ms(node) < best:
                    copied = Node(node.shape, node.dtype)
                    copy_ms = self._copy_ms(node, self.placed[node], copied, options[number])
                    if costs[number] + copy_ms < best:
                        best, copies[table.group] = costs[number] + copy_ms, (node, options[number])
        groups = copied_reads([table.group for table in tables], copies, self.placed)
        return self._tables(groups, tables)

    def _least_ms(self, node: Node) -> float:
        """Return what any copy of a tensor takes: a launch, and its way through main memory and back."""
        main = max(self.coefficients.image.main_gb_s, self.coefficients.buffer.main_gb_s)
        return self.coefficients.launch_us / 1e3 + 2 * node.numel * ITEM_SIZES[node.dtype] / main / 1e6

    def _options(self, table: _Table, node: Node) -> tuple[Sequence[Layout], int]:
        """Return the layouts that a kernel's operand may have, and the number of the one that it has."""
        if node in table.nodes:
            return self.free[node], self.chosen.get(node, 0)
        return layout_options(node, self.placed[node], self.target), 0

    def _costs(self, table: _Table, node: Node, options: Sequence[Layout]) -> Array:
        """Return (K,) the predicted ms of a kernel's best schedule for each layout of one operand."""
        if node in table.nodes:
            return table.costs(self.chosen, node, len(options))
        own = self.keys.of(table.group, table.placed, self.placed, (node,))
        key = (own, table.nodes == (), tuple(options))
        if key not in self.known:
            placed = [{**self.placed, node: option} for option in options]
            parts = [
                _score_set(table.nest, *of, placed, self.target, self.coefficients, False)["tuner"]
                for of in table.scores.sets
            ]
            self.known[key] = np.concatenate(parts, axis=1).min(axis=1)
        costs: Array = self.known[key]
        return costs

    def _copy_ms(self, source: Node, before: Layout, copied: Node, after: Layout) -> float:
        placed = {**self.placed, source: before, copied: after}
        return self._scored(copy_group(source, copied), placed).cost({})

    def _scored(self, group: FusionGroup, placed: Mapping[Node, Layout]) -> _Table:
        return _table(group, self.keys, placed, {}, self.target, self.coefficients, self.known)

    def _tables(self, groups: Sequence[FusionGroup], tables: Sequence[_Table]) -> list[_Table]:
        """Return the tables of groups: those that there are, and new ones."""
        by_group = {table.group: table for table in tables}
        return [by_group.get(group) or self._scored(group, self.placed) for group in groups]


def _timed(
    tables: Sequence[_Table],
    chosen: Mapping[Node, int],
    layouts: Mapping[Node, Layout],
    target: Target,
    coefficients: KernelCoefficients,
    timer: Timer,
) -> Tuned:
    """Measure the best few predicted schedules of each kernel, kernels that do the same once, and choose."""
    alike: dict[tuple[int, int], list[_Table]] = {}
    for table in tables:
        alike.setdefault((id(table.scores), table.row(chosen)), []).append(table)
    kernels = sorted(alike.values(), key=lambda same: -same[0].cost(chosen) * len(same))
    predicted, covered, many = sum(same[0].cost(chosen) * len(same) for same in kernels), 0.0, 0
    for same in kernels:
        many += covered <= COVERED * predicted
        covered += same[0].cost(chosen) * len(same)
    trials = [
        same[0].trials(chosen, target, coefficients, sys.maxsize if number < many else 1)
        for number, same in enumerate(kernels)
    ]

    def times_of(wanted: Sequence[Sequence[int]]) -> list[list[float]]:
        return timer(
            [
                _candidates(same[0], chosen, layouts, numbers, target)
                for same, numbers in zip(kernels, wanted, strict=False)
            ]
        )

    search(trials, times_of, known_of(target.errors), many)
    decided: dict[FusionGroup, Schedule] = {}
    total = default_ms = 0.0
    for same, one in zip(kernels, trials, strict=True):
        best = min(one.times, key=lambda number: one.times[number])
        if one.times[best] * (1 + TIMED_MARGIN) >= one.times[0]:
            best = 0
        total += one.times[best] * len(same)
        default_ms += one.times[0] * len(same)
        decided.update({table.group: same[0].schedule(chosen, best) for table in same})
    return Tuned(
        [table.group for table in tables],
        dict(layouts),
        decided,
        total,
        default_ms,
        sum(float(t.scores.ms.min()) for t in tables),
    )


def _candidates(
    table: _Table,
    chosen: Mapping[Node, int],
    layouts: Mapping[Node, Layout],
    numbers: Sequence[int],
    target: Target,
) -> list[KernelCandidate]:
    """Return a kernel by some schedules; results that it cannot write by whole texels lie in buffers."""
    group, nest = table.group, table.nest
    candidates: list[KernelCandidate] = []
    for number in numbers:
        schedule = table.schedule(chosen, number)
        moved = beyond_texels(group, nest, layouts, schedule, target)
        placed = {**layouts, **{node: Layout(layouts[node].order) for node in moved}}
        candidates.append((write_kernel(group, nest, placed, schedule, target), placed))
    return candidates


def _table(
    group: FusionGroup,
    keys: _Keys,
    layouts: Mapping[Node, Layout],
    free: Mapping[Node, Sequence[Layout]],
    target: Target,
    coefficients: KernelCoefficients,
    known: dict[Any, Scores],
) -> _Table:
    """Score a group's kernel; kernels that do the same have one score."""
    tensors = [node for node in (*group.stored, *group.reads) if node in free]
    nodes = tuple(sorted(tensors, key=lambda node: -node.numel)[:LARGEST_OPERANDS])
    steps = tuple([prod([len(free[other]) for other in nodes[k + 1 :]]) for k in range(len(nodes))])
    options = {node: free[node] for node in nodes}
    key = (*keys.of(group, layouts, layouts, nodes), tuple(map(tuple, options.values())))
    if key not in known:
        nest = keys.forms.nest(group, layouts)
        known[key] = score(nest, layouts, target, coefficients, options, ablations=False, beam=BEAM)
    tensors = [node for node in keys.forms.of(group).nodes if node in layouts]
    placed = {node: layouts[node] for node in tensors}  # `layouts` may change
    return _Table(group, keys.forms, placed, known[key], nodes, steps, known[key].ms.min(axis=1))


def _with_one_split(
    groups: Sequence[FusionGroup],
    keys: _Keys,
    layouts: Mapping[Node, Layout],
    free: Mapping[Node, Sequence[Layout]],
    target: Target,
    coefficients: KernelCoefficients,
) -> dict[Node, list[Layout]]:
    """Keep of each tensor's layouts those with the split that suits its kernels, by their default schedules.

    Splits are compared in the target's pattern; the pattern is chosen later.
    """
    several = {
        node: splits
        for node, own in free.items()
        if len(splits := [o for o in own if o.storage != "buffer" and o.pattern == target.pattern]) > 1
    }
    costs = {node: np.zeros(len(options)) for node, options in several.items()}
    known: dict[Any, Array] = {}
    for group in groups:
        for node in [node for node in (*group.stored, *group.reads) if node in several]:
            key = keys.of(group, layouts, layouts, (node,))
            if key not in known:
                nest = keys.forms.nest(group, layouts)
                default = candidates_of(nest.extents, target)[0].subset(np.zeros(1, int))
                placed = [{**layouts, node: option} for option in several[node]]
                ms = _score_set(nest, default, {}, placed, target, coefficients, False)["tuner"][:, 0]
                known[key] = np.where(np.isfinite(ms), ms, 0)  # another schedule may write the image
            costs[node] += known[key]
    chosen = {node: list(options) for node, options in free.items()}
    for node, splits in several.items():
        split = splits[int(np.argmin(costs[node]))].split
        first, *options = chosen[node]
        chosen[node] = [first, *[o for o in options if o.storage == "buffer" or o.split == split]]
    return chosen


def _key(nest: Nest, layouts: Mapping[Node, Layout], nodes: Sequence[Node]) -> Any:  # noqa: ANN401
    """Return a key that kernels with the same work share."""
    reads = [(read.tensor, read.indices, read.dtype) for read in reads_of(*nest.scalars)]
    writes = [(node, item.element, node.dtype) for node, item in nest.stores]
    described = [
        (node.shape, dtype, indices, layouts[node], nodes.index(node) if node in nodes else -1)
        for node, indices, dtype in (*reads, *writes)
    ]
    return nest.extents, work_of(nest.scalars), len(reads), tuple(described)


def _search(tables: Sequence[_Table], counts: Mapping[Node, int]) -> dict[Node, int]:
    """Return the layouts of all tensors: each the best for its kernels while the others stay.

    counts: the number of layouts of each tensor. A tensor that is not returned has its first layout.
    """
    users: dict[Node, list[_Table]] = {}
    for table in tables:
        for node in table.nodes:
            users.setdefault(node, []).append(table)
    chosen = dict.fromkeys(users, 0)
    for _ in range(SWEEPS):
        before = dict(chosen)
        for node, its in users.items():
            costs: Any = sum(table.costs(chosen, node, counts[node]) for table in its)
            chosen[node] = int(np.argmin(costs))
        if chosen == before:
            break
    return {node: number for node, number in chosen.items() if number}


def score(
    nest: Nest,
    layouts: Mapping[Node, Layout],
    target: Target,
    coefficients: KernelCoefficients,
    options: Mapping[Node, Sequence[Layout]] | None = None,
    *,
    ablations: bool = True,
    beam: int = 0,
) -> Scores:
    """Return the predicted cost of all candidates of a kernel.

    options: layouts to choose among, by tensor; the first one is the default. All others stay as in
    `layouts`. ablations: predict those, too. beam: combine with all layouts only those schedules that are
    among so many best ones where all tensors have the same number of their options (`ALIKE`); 0: all.
    """
    sets: list[tuple[Candidates, dict[Any, Any]]] = [
        (candidates, {}) for candidates in candidates_of(nest.extents, target)
    ]
    choices = [dict(zip(options or {}, chosen, strict=True)) for chosen in product(*(options or {}).values())]
    if beam and len(choices) > 1:
        alike = [
            {
                **layouts,
                **{node: of_node[min(k, len(of_node) - 1)] for node, of_node in (options or {}).items()},
            }
            for k in ALIKE
        ]
        sets = _promising(nest, sets, alike, target, coefficients, beam)
    placed = [{**layouts, **chosen} for chosen in choices]
    parts = [_score_set(nest, *of, placed, target, coefficients, ablations) for of in sets]
    costs = {way: np.concatenate([part[way] for part in parts], axis=1) for way in parts[0]}
    launch_ms = coefficients.launch_us / 1e3
    return Scores(
        nest, tuple(sets), tuple(options or ()), tuple(placed), costs.pop("tuner"), costs, launch_ms
    )


def _promising(
    nest: Nest,
    sets: Sequence[tuple[Candidates, _Works]],
    placed: Sequence[Mapping[Node, Layout]],
    target: Target,
    coefficients: KernelCoefficients,
    beam: int,
) -> list[tuple[Candidates, _Works]]:
    """Return the default, and the schedules that are among the best in some of these layouts."""
    parts = [_score_set(nest, *of, placed, target, coefficients, False)["tuner"] for of in sets]
    order = np.argsort(np.concatenate(parts, axis=1), axis=1, kind="stable")[:, :beam]
    chosen = np.union1d(order.reshape(-1), [0])
    first, subsets = 0, []
    for candidates, works in sets:
        own = chosen[(chosen >= first) & (chosen < first + len(candidates))] - first
        first += len(candidates)
        if len(own):
            known = {
                parts: of_launch if parts else {key: work.rows(own) for key, work in of_launch.items()}
                for parts, of_launch in works.items()
            }
            subsets.append((candidates.subset(own), known))
    return subsets


def _score_set(
    nest: Nest,
    candidates: Candidates,
    works: _Works,
    placed: Sequence[Mapping[Node, Layout]],
    target: Target,
    coefficients: KernelCoefficients,
    ablations: bool,
) -> dict[str, Array]:
    """Return (C, N) costs of one set of candidates by the tuner's model, and with ablations by all others."""
    totals: dict[str, Array] = {}
    for sketch, share in sketches_of(nest, candidates, target):
        work = sketch.work(placed, coefficients, works.setdefault(sketch.parts, {}))
        cost: KernelCost = predict_kernels(work, coefficients)
        costs = {"tuner": cost.ms}
        if ablations:
            costs |= {"pure": predict_kernels(work, coefficients, pure=True).ms, "warp": cost.warp_ns}
            costs |= {"thread": cost.thread_ns, "reuse distance": predict_reuse(work, coefficients)}
        for way, part in costs.items():
            totals[way] = totals.get(way, 0.0) + part.reshape(len(placed), -1) * share
    totals["tuner"] = np.where(_writable(nest, candidates, placed, target), totals["tuner"], np.inf)
    return totals


def _writable(
    nest: Nest, candidates: Candidates, placed: Sequence[Mapping[Node, Layout]], target: Target
) -> Array:
    """Return (C, N): whether a schedule's kernel writes its results, in images by whole texels."""
    legal = np.ones((len(placed), len(candidates)), bool)
    images = {node: [layouts[node] for layouts in placed] for node, _ in nest.stores}
    images = {n: own for n, own in images.items() if any(layout.storage != "buffer" for layout in own)}
    if not images:
        return legal
    s = candidates.schedules
    keys = np.stack([np.broadcast_to(c, (len(candidates),)) for c in (s.vector, getattr(s, "slices", 1))])
    _, first, kind = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    schedules = [candidates.pick(int(number)) for number in first]  # one of each width
    cut = [isinstance(schedule, RowsSchedule) and schedule.slices > 1 for schedule in schedules]
    writes = [list(written(nest, schedule, target)) for schedule in schedules]
    for node, own in images.items():
        known: dict[Layout, Array] = {}
        for number, layout in enumerate(own):
            if layout not in known:
                site = Site("", node.shape, node.dtype, layout)
                whole = [
                    not parts and all(_whole(site, *how) for other, *how in every if other is node)
                    for parts, every in zip(cut, writes, strict=True)
                ]
                known[layout] = np.array(whole) | (layout.storage == "buffer")
            legal[number] &= known[layout][kind.reshape(-1)]
    return legal


@lru_cache(maxsize=1 << 14)
def _whole(site: Site, element: tuple[Index, ...], lane: Axis | None, width: int) -> bool:
    return width in (1, LANES) and writes_texels(site, element, lane, width)


def layout_options(node: Node, layout: Layout, target: Target, splits: int | None = 1) -> list[Layout]:
    """Return where a tensor may lie: as it does, in a buffer, and in an image by every access pattern.

    splits: how many divisions of its dimensions into lines and steps each pattern comes in; None: all that
    differ. The first one is that of the default, where that is an image.
    """
    options = [layout, Layout(layout.order)]
    whole = len(node.shape) >= 2 and node.shape[layout.order[-1]] % LANES == 0
    if whole and target.has_images_of(node.dtype):
        for pattern in PATTERNS:
            image = Layout(layout.order, "image", 0, pattern)
            images = image_layouts(image, node.shape, target.image_width, target.image_height)
            options += sorted(images, key=lambda image: image.split != layout.split)[:splits]
    return list(dict.fromkeys(options))
