"""Training programs that compute parts of their forward pass again, so that they hold fewer intermediates.

The forward pass is cut where few bytes cross: between layers, in most networks. What crosses a cut is kept;
what else the backward pass reads of a segment is computed again right before, by the same kernels, and so to
the same bits (Chen et al. 2016, arXiv 1604.06174). Launches that cost much for each element they make may be
exempt: then the fewest bytes are kept from which the others compute the rest, a minimum cut (as in
AOTAutograd's partitioner). Launches that write to parameters, states or outputs run once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from torchedge.graphs.graph import in_order
from torchedge.lowering.arenas import live_bytes, planned
from torchedge.lowering.programs import Launch, Program

INTENSITIES = (8.0, 64.0, 512.0, math.inf)
"""Levels: operations for each element made, up to which launches run again."""
MOST_CUTS = 400
"""Places between launches at which the forward pass may be cut."""
BUDGETS = 24
"""Sizes of segments that are tried, each at most 0.75 of the one before."""

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A program that computes parts of its forward pass again: one of the choices of `Checkpoints`.

    number: of the choice. segments: of the forward pass; again: those of which parts are computed again.
    operations, nbytes: arithmetic and least traffic of those parts, as shares of the whole step's.
    """

    program: Program = field(repr=False)
    number: int
    segments: int
    again: int
    operations: float
    nbytes: float

    def to_dict(self) -> dict[str, float]:
        """Return plain data: numbers of segments, and shares."""
        return {name: getattr(self, name) for name in ("segments", "again", "operations", "nbytes")}

    def __str__(self) -> str:
        return (
            f"the backward pass of {self.program.name} computes parts of {self.again} of {self.segments} "
            f"segments of the forward pass again: {100 * self.operations:.0f} % more arithmetic and "
            f"{100 * self.nbytes:.0f} % more traffic a step"
        )


class Checkpoints:
    """The choices of what a program computes again, from those that cost least to those that hold least.

    The program's first output is its loss. A program without a backward pass has no choice.
    """

    def __init__(self, program: Program) -> None:
        self._forward = _Forward(program)
        self._cuts = _cuts_of(self._forward)
        most = range(1, len(self._cuts) - 1)
        self._choices = [(level, count) for level in range(len(INTENSITIES)) for count in most]
        self._kept: dict[tuple[int, int], set[int]] = {}
        self._alive: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def program(self) -> Program:
        """The program that computes nothing again."""
        return self._forward.program

    @property
    def cheap(self) -> int:
        """The number of choices that repeat no launch which costs much."""
        return sum(1 for level, _ in self._choices if math.isfinite(INTENSITIES[level]))

    def live_bytes(self, number: int) -> int:
        """Return the most bytes of intermediates that are alive at once with a choice; -1: with none."""
        if number < 0:
            return self.program.arena.live_bytes
        if number not in self._alive:
            self._alive[number] = live_bytes(self._rewritten(number)[0])
        return self._alive[number]

    def choice(self, number: int, alignment: int) -> Recomputation:
        """Return one of the choices, with an arena."""
        program, again = self._rewritten(number)
        launches = self.program.launches
        whole, more = (
            np.array([(launches[p].flops, launches[p].nbytes) for p in places]).sum(axis=0)
            for places in (range(len(launches)), again)
        )
        segments = {int(np.searchsorted(self._cuts, place, side="right")) for place in again}
        shares = (more / np.maximum(whole, 1)).tolist()
        result = Recomputation(program, number, len(self._cuts) - 1, len(segments), *shares)
        noted = replace(program, notes=(*program.notes, str(result)))
        return replace(result, program=planned(noted, alignment))

    def _rewritten(self, number: int) -> tuple[Program, list[int]]:
        level, count = self._choices[number]
        kept: set[int] = set()
        for segment in range(len(self._cuts) - 1):
            kept |= self._kept_of(segment, level if segment < count else level - 1)
        return self._forward.rewritten(kept)

    def _kept_of(self, segment: int, level: int) -> set[int]:
        """Return what is kept of a segment at a level; at level -1, and of the last segment, everything."""
        begin, end = self._cuts[segment : segment + 2]
        if level < 0 or segment == len(self._cuts) - 2:
            return set(self._forward.made_between(begin, end))
        if (segment, level) not in self._kept:
            self._kept[segment, level] = self._forward.fewest_kept(begin, end, INTENSITIES[level])
        return self._kept[segment, level]


class _Forward:
    """The forward pass of a program: which launch makes each intermediate, and which read it.

    end: the number of its launches. maker: by intermediate that one launch of it writes. read_last: the last
    launch of it that reads the intermediate. needed: intermediates that the backward pass reads.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        uses = [_uses(program, launch) for launch in program.launches]
        self._reads, self._writes = ([use[kind] for use in uses] for kind in (0, 1))
        times = Counter(t for written in self._writes for t in written)
        loss = [p for p, written in enumerate(self._writes) if set(program.outputs[:1]) & set(written)]
        self.end = loss[0] + 1 if loss else 0
        own = {t for t, tensor in enumerate(program.tensors) if tensor.role == "intermediate"}
        self._pure = [own.issuperset(w) and all(times[t] == 1 for t in w) for w in self._writes]
        self.maker = {
            t: place for place in range(self.end) for t in self._writes[place] if t in own and times[t] == 1
        }
        self.read_last: dict[int, int] = {}
        self.needed: set[int] = set()
        for place, read in enumerate(self._reads):
            for tensor in self.maker.keys() & set(read):
                if place < self.end:
                    self.read_last[tensor] = place
                else:
                    self.needed.add(tensor)

    def made_between(self, begin: int, end: int) -> Iterator[int]:
        """Yield the intermediates that some launches of the forward pass make."""
        for place in range(begin, end):
            yield from [t for t in self._writes[place] if t in self.maker]

    def nbytes(self, tensor: int) -> int:
        """Return the bytes of a tensor."""
        return self.program.tensors[tensor].nbytes

    def fewest_kept(self, begin: int, end: int, intensity: float) -> set[int]:
        """Return the fewest bytes from which cheap launches compute what the backward pass reads.

        begin, end: of the segment; all that crosses its end is kept. intensity: the most operations for each
        element made of launches that run again.
        """
        crossing = {t for t in self.made_between(begin, end) if self.read_last.get(t, 0) >= end}
        edges: dict[object, dict[object, float]] = defaultdict(dict)
        for place in range(begin, end):
            made = [t for t in self._writes[place] if t in self.maker and t not in crossing]
            elements = max(1, sum(prod(self.program.tensors[t].shape) for t in self._writes[place]))
            dear = self.program.launches[place].flops > intensity * elements or not self._pure[place]
            below = [t for t in self._reads[place] if self.maker.get(t, -1) >= begin and t not in crossing]
            for tensor in made:
                edges["in", tensor]["out", tensor] = self.nbytes(tensor)
                for source in ["source"] if dear else [("out", t) for t in below]:
                    edges[source]["in", tensor] = math.inf
                if tensor in self.needed:
                    edges["out", tensor]["sink"] = math.inf
        reached = _reached_by_flow(edges)
        cut = {t for t in self.made_between(begin, end) if ("in", t) in reached and ("out", t) not in reached}
        return crossing | cut

    def rewritten(self, kept: Collection[int]) -> tuple[Program, list[int]]:
        """Return the program that keeps some intermediates of the forward pass, and the launches it repeats.

        A launch is repeated right before the first that needs it. The arena is not planned.
        """
        launches, tensors = self.program.launches, list(self.program.tensors)
        order: list[tuple[int, Launch]] = [(place, launches[place]) for place in range(self.end)]
        copy: dict[int, int] = {}
        again: list[int] = []

        def moved(launch: Launch, own: Mapping[int, int]) -> Launch:
            return replace(launch, tensors=tuple([own.get(t, copy.get(t, t)) for t in launch.tensors]))

        for place in range(self.end, len(launches)):
            wanted: set[int] = set()
            waiting = [place]
            while waiting:
                for tensor in self._reads[waiting.pop()]:
                    maker = self.maker.get(tensor)
                    there = maker is None or tensor in kept or tensor in copy
                    if maker is not None and not there and maker not in wanted:
                        wanted.add(maker)
                        waiting.append(maker)
            for below in sorted(wanted):
                own = {}
                for tensor in self._writes[below]:
                    own[tensor] = len(tensors)
                    tensors.append(replace(tensors[tensor], name=f"t{len(tensors)}"))
                order.append((below, moved(launches[below], own)))
                copy |= {tensor: index for tensor, index in own.items() if tensor not in kept}
                again.append(below)
            order.append((place, moved(launches[place], {})))
        program = replace(self.program, tensors=tuple(tensors), launches=self._sorted(order))
        return program, again

    def _sorted(self, order: Sequence[tuple[int, Launch]]) -> tuple[Launch, ...]:
        """Return launches in an order in which repeated ones read tensors before they are overwritten."""
        program = self.program
        uses = [_uses(program, launch) for _, launch in order]
        readers: dict[int, list[int]] = defaultdict(list)
        writers: dict[int, list[int]] = defaultdict(list)
        for number, (read, written) in enumerate(uses):
            for tensor in read:
                readers[tensor].append(number)
            for tensor in written:
                writers[tensor].append(number)
        after: list[set[int]] = [set() for _ in order]
        for tensor, writing in writers.items():
            for number in {*readers[tensor], *writing}:
                for writer in writing:
                    before = order[number][0] < order[writer][0]
                    if number != writer:
                        after[number if before else writer].add(writer if before else number)
        return tuple([order[number][1] for number in in_order(after)])


def _uses(program: Program, launch: Launch) -> tuple[list[int], list[int]]:
    """Return the tensors that a launch reads and those that it writes."""
    used = list(zip(launch.tensors, program.kernels[launch.kernel].access, strict=True))
    return [t for t, access in used if access != "write"], [t for t, access in used if access != "read"]


def _cuts_of(forward: _Forward) -> list[int]:
    """Return the places between launches at which few bytes are kept and no segment makes many.

    The first is 0 and the last the number of launches. The bytes kept and those of the largest segment are
    fewest together.
    """
    tensors = list(forward.made_between(0, forward.end))
    if not forward.needed:
        return [0, forward.end]
    sizes = np.array([forward.nbytes(t) for t in tensors], np.int64)
    made = np.array([forward.maker[t] for t in tensors], np.int64)
    read = np.array([forward.read_last.get(t, forward.maker[t]) for t in tensors], np.int64)
    needed = np.array([t in forward.needed for t in tensors])
    # Fewer bytes cross at a cut than beside it.
    change = np.zeros(forward.end + 2, np.int64)
    np.add.at(change, made + 1, sizes)
    np.add.at(change, read + 1, -sizes)
    across = np.cumsum(change)
    inner = np.arange(1, forward.end)
    narrow = inner[(across[inner] <= across[inner - 1]) & (across[inner] < across[inner + 1])]
    narrow = narrow[np.argsort(across[narrow], kind="stable")[:MOST_CUTS]]
    grid = np.unique(np.concatenate([[0], narrow, [forward.end]]))
    first = np.searchsorted(grid, made, side="right")  # the first cut that it may cross
    last = np.searchsorted(grid, read, side="right") - 1  # the last cut that it crosses
    crossing = np.zeros((len(grid) + 1, len(grid) + 1), np.int64)
    np.add.at(crossing, (first, last), np.where(last >= first, sizes, 0))
    # below[i, j]: bytes made before cut i that cross cut j.
    below = np.cumsum(np.cumsum(crossing, axis=0)[:, ::-1], axis=1)[:, ::-1]
    inside = np.zeros(len(grid), np.int64)
    np.add.at(inside, first[needed], sizes[needed])
    inside = np.cumsum(inside)
    best, cuts, budget = math.inf, [0, forward.end], float(inside[-1])
    while (places := _fewest_crossing(below, inside, budget)) and len(places) <= MOST_CUTS:
        kept = sum(int(below[b, b] - below[a, b]) for a, b in pairwise(places[:-1]))
        largest = max(int(inside[b] - inside[a]) for a, b in pairwise(places))
        if kept + largest < best:
            best, cuts = kept + largest, [int(grid[place]) for place in places]
        budget = 0.75 * min(budget, largest)
        if budget < inside[-1] * 0.75**BUDGETS:
            break
    return cuts


def _fewest_crossing(below: _Bytes, inside: _Bytes, budget: float) -> list[int]:
    """Return the cuts with the fewest bytes kept whose segments keep a budget; empty: there are none."""
    last = len(inside) - 1
    kept = np.full(last + 1, np.inf)
    before = np.zeros(last + 1, np.int64)
    kept[0] = 0
    for place in range(1, last + 1):
        fits = np.nonzero(inside[place] - inside[:place] <= budget)[0]
        if len(fits):
            costs = kept[fits] + (0 if place == last else below[place, place] - below[fits, place])
            before[place], kept[place] = fits[int(np.argmin(costs))], costs.min()
    if not math.isfinite(kept[last]):
        return []
    places = [last]
    while places[-1]:
        places.append(int(before[places[-1]]))
    return places[::-1]


def _reached_by_flow(edges: Mapping[object, Mapping[object, float]]) -> set[object]:
    """Return what is reachable from "source" beside a largest flow to "sink"."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for start, ends in edges.items():
        graph.add_weighted_edges_from([(start, *end) for end in ends.items()], weight="capacity")
    left = nx.algorithms.flow.edmonds_karp(graph, "source", "sink")
    full = [(a, b) for a, b, edge in left.edges(data=True) if edge["flow"] >= edge["capacity"]]
    left.remove_edges_from(full)
    return {"source", *nx.descendants(left, "source")}
