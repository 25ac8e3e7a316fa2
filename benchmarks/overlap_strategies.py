"""Strategies that only benchmarks compare the solver with: the paper's LC-OPG, and its greedy fallback.

FlashMem, section 3.2: CP-SAT in rolling windows, with the paper's fallbacks; and the heuristic behind them:
late loading in order of consumption, the largest weights preloaded.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from paper_model import SolverLimits, Window, ask, count_pairs, whole_window

from torchedge.streaming import plans
from torchedge.streaming.instances import MAX_CHUNKS, Instance, Weight
from torchedge.streaming.plans import Chunks, OverlapPlan, in_flight, infeasible_plan, make_plan, price

WHOLE_SIZE = 4_000
"""Up to so many weights and pairs of a weight and a layer an instance is one window."""
WINDOW_SIZE = 1_000
REACH = 32
"""Layers before its first use that may load a weight where windows roll."""
MAX_WINDOWS = 60
"""More are left to the heuristic: presolve alone would take each one's time."""
ATTEMPTS = 3
RELAXED = (1.1, 1.25, 1.5, 2.0, 4.0)
"""Soft thresholds: factors on every layer's capacity, taken one after the other."""


def plan_greedily(instance: Instance) -> OverlapPlan:
    """Stream what fits, as late as it fits (FlashMem, section 3.2: the greedy heuristic backup).

    Weights are packed backwards in order of consumption; where a layer's capacity or M_peak is exceeded, the
    largest weight concerned is preloaded. Takes O((layers + weights) log weights). The plan is FEASIBLE
    without a lower bound; INFEASIBLE only where `memory_chunks` is exceeded, and then unproven.
    """
    streamed = pack(whole_window(instance))
    if streamed is None:
        return infeasible_plan(
            {"strategy": "greedy", "proven": False},
            f"the greedy plan needs more than {instance.memory_chunks} chunks of memory; raise memory_chunks "
            "or solve exactly",
        )
    return make_plan(instance, streamed, {"strategy": "greedy"})


def pack(window: Window) -> Chunks | None:
    """Return a valid packing of the window's weights; None where it exceeds the window's memory."""
    chosen = _fit_capacity(window)
    streamed = _sweep(window, chosen)
    if len(streamed) < len(chosen):
        # Chunks loaded of weights that ended in W took layers from others: pack those that stay once more.
        again = _sweep(window, [w for w in chosen if w.name in streamed])
        streamed = again if len(again) == len(streamed) else streamed
    return streamed if _fits_memory(window, streamed) else None


def _fits_memory(window: Window, streamed: Chunks) -> bool:
    if window.memory is None:
        return True
    preloaded = sum(w.chunks for w in window.weights if w.name not in streamed)
    used = in_flight(window.instance, window.weights, streamed)
    return all(taken + preloaded <= left for taken, left in zip(used[1:], window.memory[1:], strict=True))


def _fit_capacity(window: Window) -> list[Weight]:
    """Preload the largest weights until D(k) <= C_1 + ... + C_(k-1): the rest can be loaded in time."""
    before = [0, *accumulate(window.capacity)]
    largest: list[tuple[int, int]] = []
    preloaded, demand = set(), 0
    order = sorted(range(len(window.weights)), key=lambda place: window.weights[place].first_use)
    for place in order:
        w = window.weights[place]
        heapq.heappush(largest, (-w.chunks, place))
        demand += w.chunks
        while demand > before[w.first_use]:
            size, dropped = heapq.heappop(largest)
            demand += size
            preloaded.add(dropped)
    return [w for place, w in enumerate(window.weights) if place not in preloaded]


def _sweep(window: Window, weights: Collection[Weight]) -> Chunks:
    """Load backwards from the last layer; preload the largest weight in flight wherever C2 is exceeded."""
    whole = window.instance.residency == "weights"
    dying, ready = _by_layer(weights, last=True), _by_layer(weights, last=False)
    left = {w.name: w.chunks for w in weights}
    loads: dict[str, dict[int, int]] = {w.name: {} for w in weights}
    queue: deque[Weight] = deque()
    largest: list[tuple[int, str]] = []
    flying = 0
    for layer in range(len(window.capacity) - 1, 0, -1):
        for w in dying.get(layer, ()):
            flying += w.chunks
            heapq.heappush(largest, (-w.chunks, w.name))
        while window.in_flight is not None and flying > window.in_flight[layer]:
            size, name = heapq.heappop(largest)
            if name in loads and left[name]:
                flying -= -size if whole else left[name]
                del loads[name]
        queue.extend(ready.get(layer + 1, ()))
        room = window.capacity[layer]
        for w, chunks in _serve(queue, left, loads, room):
            loads[w.name][layer] = chunks
            left[w.name] -= chunks
            if not whole:
                flying -= chunks
            elif not left[w.name]:
                flying -= w.chunks
    return loads


def _serve(
    queue: deque[Weight], left: dict[str, int], loads: dict[str, dict[int, int]], room: int
) -> Iterator[tuple[Weight, int]]:
    """Yield what one layer loads of the queue; finished and preloaded weights leave it."""
    while queue and room:
        w = queue[0]
        if w.name in loads:
            chunks = min(room, left[w.name])
            room -= chunks
            yield w, chunks
        if w.name not in loads or not left[w.name]:
            queue.popleft()


def _by_layer(weights: Collection[Weight], *, last: bool) -> dict[int, list[Weight]]:
    """Weights by last or first use; those first used together smallest first, which shortens distances."""
    found: dict[int, list[Weight]] = {}
    for w in sorted(weights, key=lambda w: (w.chunks, w.name)):
        found.setdefault(w.last_use if last else w.first_use, []).append(w)
    return found


def plan_lc_opg(
    instance: Instance,
    *,
    seconds: float | None = None,
    deterministic_limit: float = 30.0,
    hybrid: bool = True,
    workers: int = 4,
) -> OverlapPlan:
    """Plan as LC-OPG does, for comparison.

    The weights of the first layer are preloaded. Small instances go to CP-SAT whole; larger ones in rolling
    windows from the last layer back, each fixing what it decided (incremental scheduling). C4 in a window
    where CP-SAT finds nothing: its largest weight is preloaded and it is asked again (incremental
    preloading), at last the greedy heuristic packs it. Soft thresholds (higher capacities) are tried only
    where there is no plan otherwise, as `memory_chunks` alone can bring about: such a plan breaks C3, its
    `solver` says `respects_capacity` False and `capacity_factor`. Instances of more than MAX_WINDOWS windows
    are left to the heuristic.

    Args:
        instance: the problem.
        seconds: wall time for CP-SAT in all windows instead of the deterministic limit; not reproducible.
        deterministic_limit: CP-SAT's deterministic time for all windows together; where a window is asked
            again, or soft thresholds are tried, as much comes on top.
        hybrid: take greedy packing wherever it is better than what CP-SAT found in time.
        workers: CP-SAT's workers.

    Returns:
        A plan; OPTIMAL or with a lower bound only where one window held everything. INFEASIBLE where none
        was found: `solver["proven"]` says whether there is none.

    Raises:
        InputError: a limit that is none, or numbers that CP-SAT cannot sum.
        MissingExtraError: ortools is not installed.
    """
    run = _Run(instance, SolverLimits(deterministic_limit, seconds, workers), hybrid)
    streamed = run.roll()
    facts: dict[str, object] = {"strategy": "lc-opg", "hybrid": hybrid, **run.facts}
    if streamed is not None:
        bound = run.bound
        optimal = bound is not None and price(instance, instance.weights, streamed) <= bound
        return make_plan(instance, streamed, facts, optimal=optimal, bound=bound)
    facts["proven"] = run.proven_infeasible
    share = 1 / len(RELAXED)
    limits = SolverLimits(deterministic_limit * share, None if seconds is None else seconds * share, workers)
    for factor in RELAXED:
        streamed = _Run(_relax(instance, factor), limits, hybrid).roll()
        if streamed is not None:
            return make_plan(instance, streamed, {**facts, "capacity_factor": factor})
    return infeasible_plan(
        facts,
        f"no plan keeps {instance.memory_chunks} chunks of memory, not with {RELAXED[-1]:g} times the load "
        "capacity either; raise memory_chunks",
    )


def _relax(instance: Instance, factor: float) -> Instance:
    """Raise each capacity by a factor, at least by a chunk, but not beyond what can be of use."""
    most = min(instance.total_chunks, MAX_CHUNKS)
    layers = []
    for layer in instance.layers:
        raised = max(layer.capacity_chunks + 1, int(layer.capacity_chunks * factor))
        layers.append(replace(layer, capacity_chunks=max(layer.capacity_chunks, min(most, raised))))
    return replace(instance, layers=tuple(layers))


def _groups(window: Window) -> Iterator[tuple[Weight, ...]]:
    """Weights from the last first use back, in groups of about WINDOW_SIZE weights and pairs."""
    group: list[Weight] = []
    size = 0
    pairs = zip(window.weights, count_pairs(window, REACH), strict=True)
    for w, own in sorted(pairs, key=lambda pair: -pair[0].first_use):
        if group and size + own + 1 > WINDOW_SIZE:
            yield tuple(group)
            group, size = [], 0
        group.append(w)
        size += own + 1
    if group:
        yield tuple(group)


@dataclass(slots=True)
class _Run:
    """One pass over an instance: how its windows came out, and what that proves."""

    instance: Instance
    limits: SolverLimits
    hybrid: bool
    windows: int = 1
    rolling: bool = False
    bound: int | None = None
    proven_infeasible: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def facts(self) -> dict[str, object]:
        """What the plan's solver facts tell of the run."""
        reach = REACH if self.rolling else None
        return {"windows": self.windows, "window_layers": reach, "outcomes": dict(self.outcomes)}

    def roll(self) -> Chunks | None:
        """Decide all weights but the first layer's; None where a limit on memory cannot be kept."""
        first = [w for w in self.instance.weights if w.first_use == 1]
        left = decide(whole_window(self.instance), first, {})
        if left.memory is not None and min(left.memory[1:]) < 0:
            self.proven_infeasible = True  # the first layer's weights alone are too many
            return None
        backup = pack(left)
        layers = len(self.instance.layers)
        self.rolling = sum(count_pairs(left, layers)) + len(left.weights) > WHOLE_SIZE
        groups = list(_groups(left)) if self.rolling else [left.weights]
        self.windows = len(groups)
        if len(groups) > MAX_WINDOWS:
            self.outcomes["greedy"] = len(groups)
            return backup
        streamed: dict[str, Mapping[int, int]] = {}
        end = time.monotonic() + (self.limits.seconds or 0.0)
        for place, group in enumerate(groups):
            found = self._decide(replace(left, weights=group), self._share(end, len(groups) - place))
            if found is None:
                return backup
            streamed |= found
            left = decide(left, group, found)
        if self.bound is not None:
            self.bound += price(self.instance, first, {})
        return self._cheaper(self.instance.weights, streamed, backup)

    def _share(self, end: float, windows: int) -> SolverLimits:
        """Return what the next of the windows left may take."""
        if self.limits.seconds is not None:
            return replace(self.limits, seconds=max(0.0, end - time.monotonic()) / windows)
        return replace(self.limits, deterministic=self.limits.deterministic / self.windows)

    def _decide(self, window: Window, limits: SolverLimits) -> Chunks | None:
        """Ask CP-SAT; where it finds nothing, preload the largest weight and ask again, or pack greedily."""
        reach = REACH if self.rolling else len(self.instance.layers)
        for attempt in range(ATTEMPTS):
            answer = ask(window, limits, reach=reach)
            if answer.streamed is not None:
                self.outcomes[answer.status.lower()] += 1
                self.bound = None if self.rolling or attempt else answer.bound
                if answer.status == "OPTIMAL":
                    return answer.streamed
                return self._cheaper(window.weights, answer.streamed, pack(window))
            if answer.status == "INFEASIBLE":
                # Memory is what lacks: preloading more never helps.
                self.proven_infeasible = not self.rolling and not attempt
                break
            if not window.weights:
                break
            largest = max(window.weights, key=lambda w: w.chunks)
            window = decide(window, [largest], {})
            self.outcomes["incrementally_preloaded"] += 1
        self.outcomes["greedy"] += 1
        return pack(window)

    def _cheaper(self, weights: Sequence[Weight], found: Chunks, packed: Chunks | None) -> Chunks:
        """In hybrid mode take greedy packing where it is better than what CP-SAT found."""
        if not self.hybrid or packed is None:
            return found
        return min(found, packed, key=lambda streamed: price(self.instance, weights, streamed))


def decide(window: Window, weights: Iterable[Weight], streamed: Chunks) -> Window:
    """Return what is left after `weights` are decided: loaded as `streamed` says, else preloaded."""
    decided = tuple(weights)
    names = {w.name for w in decided}
    capacity = list(window.capacity)
    for w in decided:
        for layer, chunks in streamed.get(w.name, {}).items():
            capacity[layer] -= chunks
    taken = in_flight(window.instance, decided, streamed)
    preloaded = sum(w.chunks for w in decided if w.name not in streamed)
    room, memory = window.in_flight, window.memory
    return replace(
        window,
        weights=tuple(w for w in window.weights if w.name not in names),
        capacity=tuple(capacity),
        in_flight=room and tuple(left - used for left, used in zip(room, taken, strict=True)),
        memory=memory and tuple(left - used - preloaded for left, used in zip(memory, taken, strict=True)),
    )


STRATEGIES = {**plans.STRATEGIES, "greedy": plan_greedily, "lc-opg": plan_lc_opg}
"""Strategies by name, the package's among them."""
