"""The independent check of overlap plans: every rule from its definition, no code from the solver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from torchedge.errors import PlanError
from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan

MOST_PROBLEMS = 100
TOLERANCE = Fraction(1, 10**6)
ROUNDING = Fraction(1, 10**12)
LAMBDA_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True)
class Verification:
    """The true cost and memory of a plan, and every rule of its instance that it breaks.

    `objective` is exact and in the units of `Instance`; None for an INFEASIBLE plan. `preloaded_chunks`
    belong to the preload set W. `resident_chunks` is what is in flight at each layer (preloaded weights not
    counted), `peak_chunks` its largest. Invalid entries of the plan are not counted.
    `problems` holds a sentence for each broken rule, the first hundred of them.
    """

    objective: Fraction | None
    preloaded_chunks: int
    peak_chunks: int
    resident_chunks: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the plan keeps every rule."""
        return not self.problems


def check_plan(instance: Instance, plan: OverlapPlan) -> Verification:
    """Verify a plan and return its verification.

    Raises PlanError: the plan breaks a rule; the message names the first problems.
    """
    verified = verify_plan(instance, plan)
    if not verified.ok:
        first = "; ".join(verified.problems[:3])
        more = "; and more" if len(verified.problems) > 3 else ""
        raise PlanError(f"the plan for {instance.name} breaks its rules: {first}{more}; plan it anew")
    return verified


def check_complete(instance: Instance, plan: OverlapPlan) -> None:
    """Raise PlanError unless a plan loads every weight once, whole and before its first use (C0, C1)."""
    problems = _Problems()
    if plan.status == "INFEASIBLE":
        problems.add("it is INFEASIBLE")
    else:
        _complete_loads(instance, plan, problems)
    if problems.texts:
        raise PlanError(f"the plan for {instance.name} cannot run: {problems.texts[0]}; plan it anew")


def verify_plan(instance: Instance, plan: OverlapPlan, *, limits: bool = True) -> Verification:
    """Check a plan against every rule of its instance (FlashMem, section 3.1: C0 to C3).

    `limits=False` skips the limits that strategies for comparison ignore: capacities (C3), M_peak (C2) and
    the memory limit. Takes time linear in layers, weights and loads (but for sorting each weight's ranges).
    """
    problems = _Problems()
    if plan.status == "INFEASIBLE":
        _check_infeasible(instance, plan, problems)
        empty = (0,) * len(instance.layers)
        return Verification(None, 0, 0, empty, problems.listed())
    preloaded, loads = _complete_loads(instance, plan, problems)
    resident = _resident(instance, loads)
    chunks = sum(weight.chunks for weight in instance.weights if weight.name in preloaded)
    if limits:
        _check_capacities(instance, loads, problems)
        _check_limits(instance, chunks, resident, problems)
    objective = _objective(instance, chunks, loads)
    _check_claims(instance, plan, objective, max(resident), problems)
    return Verification(objective, chunks, max(resident), resident, problems.listed())


def _complete_loads(
    instance: Instance, plan: OverlapPlan, problems: _Problems
) -> tuple[set[str], dict[str, list[ChunkLoad]]]:
    """Return the preloaded weights and the valid loads of the others; report what is missing or wrong."""
    weights = {weight.name: weight for weight in instance.weights}
    preloaded = _preloaded(plan, weights, problems)
    loads = _loads(instance, plan, weights, preloaded, problems)
    for weight in instance.weights:
        if weight.name not in preloaded:
            _check_complete(weight, loads.get(weight.name, ()), problems)
    return preloaded, loads


class _Problems:
    """The first hundred problems in words, and how many there are."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        self.count += 1
        if self.count <= MOST_PROBLEMS:
            self.texts.append(text)

    def listed(self) -> tuple[str, ...]:
        rest = self.count - len(self.texts)
        return (*self.texts, f"{rest} problems more") if rest else tuple(self.texts)


def _check_infeasible(instance: Instance, plan: OverlapPlan, problems: _Problems) -> None:
    if plan.objective is not None:
        problems.add(f"objective is {plan.objective} in an INFEASIBLE plan, which has none")
    if plan.lower_bound is not None:
        problems.add(f"lower_bound is {plan.lower_bound} in an INFEASIBLE plan, which has none")
    if plan.preload or plan.loads:
        problems.add("an INFEASIBLE plan preloads or loads weights")
    if plan.peak_chunks != 0:
        problems.add(f"peak_chunks is {plan.peak_chunks} in an INFEASIBLE plan, where it is 0")
    reason = plan.solver.get("reason")
    if not isinstance(reason, str) or not reason:
        problems.add("an INFEASIBLE plan gives no reason (solver has no text 'reason')")
    total = sum(weight.chunks for weight in instance.weights)
    if instance.memory_chunks is None or total <= instance.memory_chunks:
        problems.add("the plan is INFEASIBLE, but preloading every weight breaks no limit")


# the plan's entries ---------------------------------------------------------------------------------------


def _preloaded(plan: OverlapPlan, weights: dict[str, Weight], problems: _Problems) -> set[str]:
    preloaded: set[str] = set()
    names: tuple[object, ...] = plan.preload
    for name in names:
        if not isinstance(name, str) or name not in weights:
            problems.add(f"preload names {_short(name)}, which is no weight")
        elif name in preloaded:
            problems.add(f"preload names {_short(name)} twice")
        else:
            preloaded.add(name)
    return preloaded


def _loads(
    instance: Instance,
    plan: OverlapPlan,
    weights: dict[str, Weight],
    preloaded: set[str],
    problems: _Problems,
) -> dict[str, list[ChunkLoad]]:
    """Return the valid loads of each streamed weight; report the others."""
    loads: dict[str, list[ChunkLoad]] = {}
    for place, load in enumerate(plan.loads):
        problem = _problem_of(load, len(instance.layers), weights, preloaded)
        if problem is None:
            loads.setdefault(load.weight, []).append(load)
        else:
            problems.add(f"loads[{place}] {problem}")
    return loads


def _problem_of(load: ChunkLoad, layers: int, weights: dict[str, Weight], preloaded: set[str]) -> str | None:
    name: object = load.weight
    if not isinstance(name, str) or name not in weights:
        return f"names {_short(name)}, which is no weight"
    called, weight = _short(name), weights[name]
    for what in ("layer", "chunks", "first_chunk"):
        value = getattr(load, what)
        if type(value) is not int:
            return f"of {called}: {what} is {_short(value)}, expected a whole number"
    if name in preloaded:
        return f"loads {called}, which is preloaded"
    if not 1 <= load.layer <= layers:
        return f"loads {called} by layer {load.layer}, expected 1 to {layers}"
    if load.layer >= weight.first_use:
        return (
            f"(C1) loads {called} by layer {load.layer}, expected before its first use by {weight.first_use}"
        )
    if load.chunks < 1 or load.first_chunk < 0 or load.first_chunk + load.chunks > weight.chunks:
        return (
            f"loads {load.chunks} chunks of {called} from chunk {load.first_chunk}, "
            f"expected at least 1 of chunks 0 to {weight.chunks - 1}"
        )
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# the rules --------------------------------------------------------------------------------------------------


def _check_complete(weight: Weight, loads: Sequence[ChunkLoad], problems: _Problems) -> None:
    """C0: the ranges of a streamed weight cover its chunks, each once."""
    if not loads:
        problems.add(f"(C0) {_short(weight.name)} is neither preloaded nor loaded")
        return
    covered = 0
    for start, chunks in sorted((load.first_chunk, load.chunks) for load in loads):
        if start > covered:
            problems.add(f"(C0) {_short(weight.name)}: chunks {covered} to {start - 1} are never loaded")
        elif start < covered:
            end = min(covered, start + chunks)
            problems.add(f"(C0) {_short(weight.name)}: chunks {start} to {end - 1} are loaded twice")
        covered = max(covered, start + chunks)
    if covered < weight.chunks:
        problems.add(f"(C0) {_short(weight.name)}: chunks {covered} to {weight.chunks - 1} are never loaded")


def _check_capacities(instance: Instance, loads: dict[str, list[ChunkLoad]], problems: _Problems) -> None:
    """C3: no layer loads more than its capacity."""
    loaded = [0] * len(instance.layers)
    for entries in loads.values():
        for load in entries:
            loaded[load.layer - 1] += load.chunks
    for number, (layer, chunks) in enumerate(zip(instance.layers, loaded, strict=True), 1):
        if chunks > layer.capacity_chunks:
            problems.add(
                f"(C3) layer {number} loads {chunks} chunks, expected at most {layer.capacity_chunks}"
            )


def _resident(instance: Instance, loads: dict[str, list[ChunkLoad]]) -> tuple[int, ...]:
    """Return the chunks in flight at each layer, by the instance's kind of residency."""
    change = [0] * (len(instance.layers) + 1)
    for weight in instance.weights:
        entries = loads.get(weight.name)
        if not entries:
            continue
        if instance.residency == "weights":
            change[min(load.layer for load in entries) - 1] += weight.chunks
            change[weight.last_use] -= weight.chunks
        else:
            for load in entries:
                change[load.layer - 1] += load.chunks
                change[weight.last_use] -= load.chunks
    return tuple(accumulate(change[:-1]))


def _check_limits(instance: Instance, preloaded: int, resident: Sequence[int], problems: _Problems) -> None:
    """C2: what is in flight is within m_peak_chunks, and with what is preloaded within memory_chunks."""
    peak, memory = instance.m_peak_chunks, instance.memory_chunks
    for number, chunks in enumerate(resident, 1):
        if peak is not None and chunks > peak:
            problems.add(f"(C2) {chunks} chunks are in flight at layer {number}, expected at most {peak}")
        if memory is not None and preloaded + chunks > memory:
            problems.add(
                f"(memory) {preloaded} chunks are preloaded and {chunks} in flight at layer {number}, "
                f"expected at most {memory} together"
            )


def _objective(instance: Instance, preloaded: int, loads: dict[str, list[ChunkLoad]]) -> Fraction:
    lam = _lambda(instance)
    distance = 0
    for weight in instance.weights:
        entries = loads.get(weight.name)
        if entries:
            layers = weight.first_use - min(load.layer for load in entries)
            distance += layers * weight.chunks if instance.distance == "chunks" else layers
    return lam * preloaded + (1 - lam) * distance


def _lambda(instance: Instance) -> Fraction:
    """Return lambda as the file format defines it: the nearest fraction with a denominator to a million."""
    return Fraction(repr(float(instance.lam))).limit_denominator(LAMBDA_DENOMINATOR)


# the plan's claims ----------------------------------------------------------------------------------------


def _check_claims(
    instance: Instance, plan: OverlapPlan, objective: Fraction, peak: int, problems: _Problems
) -> None:
    """Compare status, objective, lower bound and peak with the true ones."""
    if plan.status not in ("OPTIMAL", "FEASIBLE"):
        problems.add(f"status is {plan.status!r}, expected OPTIMAL, FEASIBLE or INFEASIBLE")
    if type(plan.peak_chunks) is not int or plan.peak_chunks != peak:
        problems.add(f"peak_chunks is {plan.peak_chunks!r}, in fact {peak}")
    # Two objectives differ by a step or more: the stated one must be within half a step of the true one.
    step = Fraction(1, _lambda(instance).denominator)
    near = max(min(TOLERANCE * objective, step / 2), ROUNDING * max(objective, Fraction(1)))
    stated, bound = _number(plan.objective), _number(plan.lower_bound)
    if stated is None or abs(stated - objective) > near:
        problems.add(f"objective is {plan.objective!r}, in fact {float(objective)}")
    if bound is not None and bound > objective + near:
        problems.add(f"lower_bound {plan.lower_bound} is above the objective {float(objective)}")
    if bound is None and plan.lower_bound is not None:
        problems.add(f"lower_bound is {plan.lower_bound!r}, expected a finite number")
    if plan.status == "OPTIMAL" and (bound is None or bound < objective - near):
        problems.add(
            f"the plan is OPTIMAL with lower_bound {plan.lower_bound}, below its objective {float(objective)}"
        )


def _number(value: object) -> Fraction | None:
    """Return a finite number exactly; None for anything else."""
    if isinstance(value, float):
        return Fraction(value) if math.isfinite(value) else None
    return Fraction(value) if type(value) is int else None
