"""The paper's overlap model (FlashMem, sections 3.1 and 3.2) for OR-Tools CP-SAT, whole or in windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

from torchedge.errors import InputError, MissingExtraError
from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import Chunks, OverlapPlan, infeasible_plan, make_plan

__all__ = [
    "MAX_PAIRS",
    "Answer",
    "SolverLimits",
    "Window",
    "ask",
    "count_pairs",
    "direct_cp_sat",
    "whole_window",
    "widest_reach",
]


STRATEGY = "cp-sat"
MAX_PAIRS = 150_000
"""Most (weight, layer) pairs of one model: each takes two variables, about 35 kB of CP-SAT's memory with two
workers, and presolve heeds no limit."""
SAFE = 2**60
"""CP-SAT refuses sums that may leave 64 bits."""


@dataclass(frozen=True, slots=True)
class Window:
    """Weights to decide, and what is left for them at layers 1..N (entry 0 of each tuple is unused).

    `capacity` is left of C3, `in_flight` of C2 and `memory` of the limit on preloaded chunks and those in
    flight together (both in chunks; None: no limit).
    """

    instance: Instance
    weights: tuple[Weight, ...]
    capacity: tuple[int, ...]
    in_flight: tuple[int, ...] | None
    memory: tuple[int, ...] | None


def whole_window(instance: Instance) -> Window:
    """Return the window in which nothing is decided yet."""

    def level(limit: int | None) -> tuple[int, ...] | None:
        # More than all chunks is no limit: small numbers keep solvers' sums from overflowing.
        return None if limit is None else (min(limit, instance.total_chunks),) * (len(instance.layers) + 1)

    most = instance.total_chunks
    capacity = (0, *(min(layer.capacity_chunks, most) for layer in instance.layers))
    return Window(
        instance, instance.weights, capacity, level(instance.m_peak_chunks), level(instance.memory_chunks)
    )


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """When CP-SAT stops: deterministic time, or (not reproducible) `seconds` of wall time; its workers."""

    deterministic: float
    seconds: float | None = None
    workers: int = 2

    def __post_init__(self) -> None:
        for name, least in (("deterministic", 0), ("seconds", 0), ("workers", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise InputError(f"the limit {name} is {value!r}; expected a number from {least} on")


@dataclass(frozen=True, slots=True)
class Answer:
    """What CP-SAT found: its status, the chunks of streamed weights (None: nothing), its bound in prices."""

    status: str
    streamed: Chunks | None
    bound: int | None


def direct_cp_sat(
    instance: Instance,
    *,
    seconds: float | None = None,
    deterministic_limit: float = 120.0,
    window: int | None = None,
    hint: OverlapPlan | None = None,
    workers: int = 2,
) -> OverlapPlan | None:
    """Solve the paper's model whole with CP-SAT: C0, C1 as implications, C2, C3 and the memory limit.

    Args:
        instance: the problem; its objective in whole-number prices.
        seconds: wall time for the solver instead of the deterministic limit; not reproducible.
        deterministic_limit: CP-SAT's deterministic time, about a second of one worker each.
        window: layers before its first use that may load a weight; None: all of them. Where a window cuts
            loads off, what CP-SAT proves holds for the window only: no bound, never OPTIMAL.
        hint: a plan to start from.
        workers: CP-SAT's workers; they take turns (interleaved search), so that results repeat.

    Returns:
        The plan, INFEASIBLE where CP-SAT proved that there is none; None where it found none in time or in
        the window.

    Raises:
        InputError: the model has more than MAX_PAIRS pairs of a weight and a layer, or numbers that CP-SAT
            cannot sum, or a limit is none.
        MissingExtraError: ortools is not installed.
    """
    if window is not None and window < 0:
        raise InputError(f"window is {window}; expected a number of layers, 0 or more")
    whole = whole_window(instance)
    reach = len(instance.layers) if window is None else window
    start = None if hint is None else _chunks_of(hint)
    answer = ask(whole, SolverLimits(deterministic_limit, seconds, workers), reach=reach, hint=start)
    pairs = sum(count_pairs(whole, reach))
    cut = pairs < sum(count_pairs(whole, len(instance.layers)))
    facts = {
        "strategy": STRATEGY,
        "cp_sat": answer.status,
        "window": reach if cut else None,
        "pairs": pairs,
        "workers": workers,
        "limit": f"{seconds:g} s" if seconds is not None else f"{deterministic_limit:g} deterministic",
    }
    if answer.streamed is not None:
        optimal = answer.status == "OPTIMAL" and not cut
        bound = None if cut else answer.bound
        return make_plan(instance, answer.streamed, facts, optimal=optimal, bound=bound)
    if answer.status == "INFEASIBLE" and not cut:
        return infeasible_plan(
            facts, f"no plan keeps {instance.memory_chunks} chunks of memory; raise memory_chunks"
        )
    return None


def count_pairs(window: Window, reach: int) -> list[int]:
    """Return for each weight how many layers may load it, at most `reach` before its first use."""
    usable = [0, *accumulate(int(c > 0) for c in window.capacity)]
    return [usable[w.first_use] - usable[max(1, w.first_use - reach)] for w in window.weights]


def widest_reach(window: Window, pairs: int) -> int:
    """Return the most layers back that keep within so many pairs; 0 where none does."""
    low, high = 0, len(window.capacity) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(count_pairs(window, middle)) <= pairs else (low, middle - 1)
    return low


def ask(window: Window, limits: SolverLimits, *, reach: int, hint: Chunks | None = None) -> Answer:
    """Let CP-SAT decide a window's weights; loads come at most `reach` layers before the first use.

    Raises:
        InputError: more than MAX_PAIRS pairs, or numbers that CP-SAT cannot sum.
        MissingExtraError: ortools is not installed.
    """
    cp_model = _import_cp_model()
    _check_size(window, reach)
    model = _Model(cp_model, window, reach)
    if hint is not None:
        model.start_from(hint)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = limits.workers
    parameters.random_seed = 0
    if limits.seconds is None:
        parameters.interleave_search = True  # without it two workers race, and results differ
        parameters.max_deterministic_time = limits.deterministic
    else:
        parameters.max_time_in_seconds = limits.seconds
    status = solver.solve(model.model)
    name = solver.status_name(status)
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    # The objective is whole, but its float may come as 6.999.
    bound = math.ceil(solver.best_objective_bound - 1e-3) if solved else None
    return Answer(name, model.read(solver) if solved else None, bound)


def _import_cp_model() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError.of("ortools", purpose="the paper's CP-SAT model") from error
    module: ModuleType = cp_model
    return module


def _check_size(window: Window, reach: int) -> None:
    pairs = sum(count_pairs(window, reach))
    if pairs > MAX_PAIRS:
        raise InputError(
            f"CP-SAT's model of {window.instance.name} has {pairs} pairs of a weight and a layer; expected "
            f"at most {MAX_PAIRS}: give a window of {widest_reach(window, MAX_PAIRS)} layers at most, or "
            "another strategy"
        )
    p, d, _ = window.instance.prices
    size = sum(w.chunks * (p + d * w.first_use) for w in window.weights)
    if max(size, len(window.capacity) * window.instance.total_chunks) > SAFE:
        raise InputError(
            f"the prices of {window.instance.name} add up to more than 2^60, which CP-SAT cannot sum; use "
            "larger chunks, a lambda of fewer digits, or another strategy"
        )


def _chunks_of(plan: OverlapPlan) -> Chunks:
    streamed: dict[str, dict[int, int]] = {}
    for load in plan.loads:
        of_weight = streamed.setdefault(load.weight, {})
        of_weight[load.layer] = of_weight.get(load.layer, 0) + load.chunks
    return streamed


class _Model:
    """Variables x_{w,l}, z_w and whether w is in W, with C0 to C3, for one window."""

    def __init__(self, cp_model: ModuleType, window: Window, reach: int) -> None:
        self.window = window
        self.reach = reach
        self.model: Any = cp_model.CpModel()
        self.preloaded = [self.model.new_bool_var("") for _ in window.weights]
        self.start: list[Any] = []
        self.loaded: list[dict[int, Any]] = []
        self.used: list[dict[int, Any]] = []
        for w, preloaded in zip(window.weights, self.preloaded, strict=True):
            self._add_weight(w, preloaded)
        self._add_capacities()
        if window.in_flight is not None or window.memory is not None:
            add = self._add_residency if window.instance.residency == "weights" else self._add_flight
            add(list(window.weights))
        p, d, _ = window.instance.prices
        by_chunks = window.instance.distance == "chunks"
        self.model.minimize(
            sum(p * w.chunks * b for w, b in zip(window.weights, self.preloaded, strict=True))
            + sum(
                d * (w.chunks if by_chunks else 1) * (w.first_use - z)
                for w, z in zip(window.weights, self.start, strict=True)
            )
        )

    def _add_weight(self, w: Weight, preloaded: Any) -> None:  # noqa: ANN401
        model, capacity = self.model, self.window.capacity
        earliest = max(1, w.first_use - self.reach)
        z = model.new_int_var(earliest, w.first_use, "")
        loaded, used = {}, {}
        for layer in range(earliest, w.first_use):
            if not capacity[layer]:
                continue
            x = loaded[layer] = model.new_int_var(0, min(capacity[layer], w.chunks), "")
            loads = used[layer] = model.new_bool_var("")
            model.add(x == 0).only_enforce_if(~loads)
            model.add(z <= layer).only_enforce_if(loads)  # C1
        model.add(sum(loaded.values()) + w.chunks * preloaded == w.chunks)  # C0
        self.start.append(z)
        self.loaded.append(loaded)
        self.used.append(used)

    def _add_capacities(self) -> None:
        """C3."""
        for layer, xs in self._by_layer().items():
            self.model.add(sum(xs) <= self.window.capacity[layer])

    def _by_layer(self) -> dict[int, list[Any]]:
        by_layer: dict[int, list[Any]] = {}
        for loaded in self.loaded:
            for layer, x in loaded.items():
                by_layer.setdefault(layer, []).append(x)
        return by_layer

    def _preloaded_chunks(self) -> Any:  # noqa: ANN401
        return sum(w.chunks * b for w, b in zip(self.window.weights, self.preloaded, strict=True))

    def _add_flight(self, weights: Sequence[Weight]) -> None:
        """C2 in chunks: what is in flight at a layer is what was before, and its loads, less what expired."""
        window, by_layer = self.window, self._by_layer()
        expiring: dict[int, list[Any]] = {}
        for w, preloaded in zip(weights, self.preloaded, strict=True):
            expiring.setdefault(w.last_use + 1, []).append(w.chunks * (1 - preloaded))
        most = sum(w.chunks for w in weights)
        preload = self.model.new_int_var(0, most, "")
        self.model.add(preload == self._preloaded_chunks())
        # Between layers that load or let go nothing changes: the tightest limit holds for all of them.
        steps = sorted({1, *by_layer, *(layer for layer in expiring if layer < len(window.capacity))})
        flying: Any = 0
        for layer, following in zip(steps, [*steps[1:], len(window.capacity)], strict=True):
            limit = most if window.in_flight is None else min(most, *window.in_flight[layer:following])
            now = self.model.new_int_var(0, limit, "")
            loaded, gone = sum(by_layer.get(layer, ())), sum(expiring.get(layer, ()))
            self.model.add(now == flying + loaded - gone)
            if window.memory is not None:
                self.model.add(now + preload <= min(window.memory[layer:following]))
            flying = now

    def _add_residency(self, weights: Sequence[Weight]) -> None:
        """C2 in whole weights, from z_w to the last use: a cumulative constraint for each limit."""
        window, model = self.window, self.model
        intervals, demands = [], []
        for w, z, preloaded in zip(weights, self.start, self.preloaded, strict=True):
            end, size = w.last_use + 1, w.last_use + 1 - z
            intervals.append(model.new_optional_interval_var(z, size, end, ~preloaded, ""))
            demands.append(w.chunks)
        if window.in_flight is not None:
            self._add_cumulative(window.in_flight, intervals, demands)
        if window.memory is not None:
            preload = model.new_int_var(0, sum(demands), "")
            model.add(preload == self._preloaded_chunks())
            always = model.new_fixed_size_interval_var(1, len(window.capacity) - 1, "")
            self._add_cumulative(window.memory, [*intervals, always], [*demands, preload])

    def _add_cumulative(
        self, limits: tuple[int, ...], intervals: Sequence[Any], demands: Sequence[Any]
    ) -> None:
        """Capacity that varies is a constant one less what fixed intervals take."""
        most, blocks, heights, first = max(limits[1:]), [], [], 1
        for layer in range(1, len(limits)):
            if layer + 1 == len(limits) or limits[layer + 1] != limits[layer]:
                if limits[layer] < most:
                    blocks.append(self.model.new_fixed_size_interval_var(first, layer + 1 - first, ""))
                    heights.append(most - limits[layer])
                first = layer + 1
        self.model.add_cumulative([*intervals, *blocks], [*demands, *heights], most)

    def start_from(self, hint: Chunks) -> None:
        """Hint every variable with a plan's; loads outside the window are left out."""
        add = self.model.add_hint
        for place, w in enumerate(self.window.weights):
            loads = hint.get(w.name)
            add(self.preloaded[place], int(loads is None))
            earliest = max(1, w.first_use - self.reach)
            add(self.start[place], w.first_use if loads is None else max(earliest, min(loads)))
            for layer, x in self.loaded[place].items():
                chunks = 0 if loads is None else loads.get(layer, 0)
                add(x, chunks)
                add(self.used[place][layer], int(chunks > 0))

    def read(self, solver: Any) -> Chunks:  # noqa: ANN401
        """Return the chunks of the weights that the solution streams."""
        streamed: dict[str, dict[int, int]] = {}
        for place, w in enumerate(self.window.weights):
            if not solver.boolean_value(self.preloaded[place]):
                values = {layer: solver.value(x) for layer, x in self.loaded[place].items()}
                streamed[w.name] = {layer: chunks for layer, chunks in values.items() if chunks}
        return streamed
