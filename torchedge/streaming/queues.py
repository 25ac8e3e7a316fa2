"""Queues of models that run one after the other, planned together under one limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from torchedge.errors import InputError, PlanError
from torchedge.streaming.budgets import less_read_ahead
from torchedge.streaming.figures import Lane, lane_of_runs
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.plans import OverlapPlan, used_chunks
from torchedge.streaming.rates import Rates
from torchedge.streaming.simulation import RunTimeline, join_curves, simulate_plan
from torchedge.streaming.streaming_plans import StreamingPlan
from torchedge.streaming.verification import check_plan

__all__ = [
    "QueueGroup",
    "QueuePlan",
    "QueueRun",
    "Share",
    "join_instances",
    "plan_queue",
    "plan_queue_within",
    "simulate_queue",
]

MAX_MODELS = 100


@dataclass(frozen=True)
class QueueGroup:
    """Models planned together: places in the queue from `first` to `last`, their joint instance, its plan.

    Weight NAME of the model in place k (from 1) is called k/NAME in the joint instance.
    """

    first: int
    last: int
    instance: Instance
    plan: OverlapPlan


@dataclass(frozen=True, slots=True)
class Share:
    """Chunks of one model of a queue: loaded before its group runs, by the models before it, by itself."""

    preloaded: int
    carried: int
    own: int


@dataclass(frozen=True)
class QueuePlan:
    """The plan of a queue: each model alone, and groups of models planned together.

    Every plan is verified. Nothing is loaded ahead across two groups: together their models exceed the
    limit.
    """

    instances: tuple[Instance, ...]
    limit_bytes: int
    alone: tuple[OverlapPlan, ...]
    groups: tuple[QueueGroup, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """For each model in place, where its chunks are loaded."""
        return tuple(share for group in self.groups for share in _shares(self.instances, group))

    def __str__(self) -> str:
        lines = [f"{len(self.instances)} models within {self.limit_bytes / MEBIBYTE:,.1f} MiB of weights"]
        for place, (instance, share) in enumerate(zip(self.instances, self.shares, strict=True), 1):
            mib = [c * instance.chunk_bytes / MEBIBYTE for c in (share.preloaded, share.carried, share.own)]
            lines.append(
                f"{place}. {instance.name}: {mib[0]:,.1f} MiB preloaded, {mib[1]:,.1f} MiB loaded by the "
                f"models before, {mib[2]:,.1f} MiB by its own layers"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class QueueRun:
    """A queue simulated: its groups planned together, and each model alone, one after the other."""

    plan: QueuePlan
    together: tuple[RunTimeline, ...]
    apart: tuple[RunTimeline, ...]

    @property
    def latency_ms(self) -> float:
        """Time of the whole queue, planned together."""
        return sum(run.latency_ms for run in self.together)

    @property
    def apart_ms(self) -> float:
        """Time of the whole queue, one model at a time."""
        return sum(run.latency_ms for run in self.apart)

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Both for `draw_lanes`."""
        spans: list[tuple[str, float, float]] = []
        begin = 0.0
        for group, run in zip(self.plan.groups, self.together, strict=True):
            models = self.plan.instances[group.first - 1 : group.last]
            last_layers = np.cumsum([len(model.layers) for model in models])
            ends = [begin, *(begin + run.layers.ends_ms[last_layers - 1])]
            spans += [(m.name, float(ends[k]), float(ends[k + 1])) for k, m in enumerate(models)]
            begin += run.latency_ms
        joined = Lane("planned together", join_curves([run.memory for run in self.together]), tuple(spans))
        return joined, lane_of_runs("one at a time", self.apart)


def plan_queue(instances: Sequence[Instance], limit_bytes: int, solve: Solve) -> QueuePlan:
    """Plan models that run one after the other within `limit_bytes` of weights, preloaded and in flight.

    As many models as possible are planned together: the whole queue, or else a group from the front as long
    as `solve` finds a plan, then the next group. Only the first of a group has to preload what its first
    layer uses. In a joint plan the limit takes the place of the models' own M_peak; preloaded weights count
    against it until the whole group has run. Activations and reading ahead come on top: leave room.

    Raises:
        InputError: there are no models or more than 100, the limit is below 0, or models differ in chunk
            size, lambda, residency or distance.
        PlanError: `solve` finds no plan for a model alone within the limit, or one that breaks its rules.
    """
    _check_queue(instances, limit_bytes)
    alone = tuple(_plan_alone(instance, limit_bytes, solve) for instance in instances)
    groups: list[QueueGroup] = []
    while not groups or groups[-1].last < len(instances):
        first = groups[-1].last + 1 if groups else 1
        groups.append(_widest_group(instances, first, limit_bytes, solve, alone[first - 1]))
    return QueuePlan(tuple(instances), limit_bytes, alone, tuple(groups))


def join_instances(instances: Sequence[Instance], limit_bytes: int, *, first: int = 1) -> Instance:
    """Return models that run one after the other as one instance, with the memory limit as its only limit.

    `first` is the place in the queue of the first of them, by which weights are named.

    Raises:
        InputError: the models differ in chunk size, lambda, residency or distance.
    """
    _check_queue(instances, limit_bytes)
    begins = [0, *accumulate(len(instance.layers) for instance in instances)]
    weights = [
        replace(w, name=f"{place}/{w.name}", first_use=begin + w.first_use, last_use=begin + w.last_use)
        for place, (instance, begin) in enumerate(zip(instances, begins[:-1], strict=True), first)
        for w in instance.weights
    ]
    return replace(
        instances[0],
        layers=tuple(layer for instance in instances for layer in instance.layers),
        weights=tuple(weights),
        m_peak_chunks=None,
        memory_chunks=min(_memory_chunks(instance, limit_bytes) for instance in instances),
        name=" + ".join(instance.name for instance in instances),
    )


def simulate_queue(
    queue: QueuePlan, rates: Rates, activation_bytes: Sequence[Sequence[int]] | None = None
) -> QueueRun:
    """Run a queue as planned together and, to compare, each model alone; each group starts from nothing.

    `activation_bytes` holds a sequence for each model. In a group, preloaded weights leave after their last
    use.

    Raises:
        InputError: `activation_bytes` does not match the models.
    """
    if activation_bytes is not None and len(activation_bytes) != len(queue.instances):
        raise InputError(
            f"activation_bytes is of {len(activation_bytes)} models; expected {len(queue.instances)}"
        )

    def alive(first: int, last: int) -> list[int] | None:
        chosen = None if activation_bytes is None else activation_bytes[first - 1 : last]
        return None if chosen is None else [nbytes for model in chosen for nbytes in model]

    together = tuple(
        simulate_plan(g.instance, g.plan, rates, alive(g.first, g.last), keep_preloaded=False)
        for g in queue.groups
    )
    apart = tuple(
        simulate_plan(instance, plan, rates, alive(place, place))
        for place, (instance, plan) in enumerate(zip(queue.instances, queue.alone, strict=True), 1)
    )
    return QueueRun(queue, together, apart)


def _check_queue(instances: Sequence[Instance], limit_bytes: int) -> None:
    if not 1 <= len(instances) <= MAX_MODELS:
        raise InputError(f"the queue holds {len(instances)} models; expected 1 to {MAX_MODELS}")
    if type(limit_bytes) is not int or limit_bytes < 0:
        raise InputError(f"the limit is {limit_bytes!r}; expected a whole number of bytes from 0")
    for name in ("chunk_bytes", "lam", "residency", "distance"):
        values = {getattr(instance, name) for instance in instances}
        if len(values) > 1:
            shown = ", ".join(sorted(str(value) for value in values))
            raise InputError(f"the models of a queue differ in {name}: {shown}; expected one for all")


def _memory_chunks(instance: Instance, limit_bytes: int) -> int:
    chunks = limit_bytes // instance.chunk_bytes
    return chunks if instance.memory_chunks is None else min(chunks, instance.memory_chunks)


def _limited(instance: Instance, limit_bytes: int) -> Instance:
    return replace(instance, memory_chunks=_memory_chunks(instance, limit_bytes))


def _plan_alone(instance: Instance, limit_bytes: int, solve: Solve) -> OverlapPlan:
    limited = _limited(instance, limit_bytes)
    plan = solve(limited)
    if plan.status == "INFEASIBLE":
        reason = str(plan.solver.get("reason", "no reason was given"))
        raise PlanError(
            f"{instance.name} alone has no plan within {limit_bytes} bytes of weights ({reason}); raise the "
            "limit"
        )
    check_plan(limited, plan)
    return plan


def _widest_group(
    instances: Sequence[Instance], first: int, limit_bytes: int, solve: Solve, alone: OverlapPlan
) -> QueueGroup:
    """Plan as many models from place `first` on together as possible."""
    count = len(instances)
    whole = _plan_group(instances, first, count, limit_bytes, solve) if first < count else None
    if whole is not None:
        return whole
    group = _group_of_one(instances[first - 1], first, limit_bytes, alone)
    for last in range(first + 1, count):
        longer = _plan_group(instances, first, last, limit_bytes, solve)
        if longer is None:
            break
        group = longer
    return group


def _plan_group(
    instances: Sequence[Instance], first: int, last: int, limit_bytes: int, solve: Solve
) -> QueueGroup | None:
    """Plan the models in places `first` to `last` together; None where there is no plan."""
    joint = join_instances(instances[first - 1 : last], limit_bytes, first=first)
    plan = solve(joint)
    if plan.status == "INFEASIBLE":
        return None
    check_plan(joint, plan)
    return QueueGroup(first, last, joint, plan)


def _group_of_one(instance: Instance, place: int, limit_bytes: int, alone: OverlapPlan) -> QueueGroup:
    """Return a group of one model: its plan alone, its weights named as in a joint instance."""
    limited = _limited(instance, limit_bytes)
    joint = replace(join_instances([limited], limit_bytes, first=place), m_peak_chunks=limited.m_peak_chunks)
    plan = replace(
        alone,
        preload=tuple(f"{place}/{name}" for name in alone.preload),
        loads=tuple(replace(load, weight=f"{place}/{load.weight}") for load in alone.loads),
    )
    return QueueGroup(place, place, joint, plan)


def _shares(instances: Sequence[Instance], group: QueueGroup) -> list[Share]:
    models = range(group.first, group.last + 1)
    begins = [0, *accumulate(len(instances[k - 1].layers) for k in models)]
    counts = [[0, 0, 0] for _ in models]
    chunks = {w.name: w.chunks for w in group.instance.weights}
    for name in group.plan.preload:
        counts[_place(name) - group.first][0] += chunks[name]
    for load in group.plan.loads:
        model = _place(load.weight) - group.first
        counts[model][2 if load.layer > begins[model] else 1] += load.chunks
    return [Share(*count) for count in counts]


def _place(name: str) -> int:
    return int(name.partition("/")[0])


_HALVINGS = 3
"""Bisection steps of the memory for weights."""

Solve = Callable[[Instance], OverlapPlan]


def plan_queue_within(
    models: Sequence[StreamingPlan],
    limit_bytes: int,
    solve: Solve,
    progress: Callable[[], object] | None = None,
) -> QueueRun:
    """Plan models that run one after the other; no simulated run exceeds `limit_bytes` of memory in all.

    models: each planned alone within that limit, on one device and with the same chunk size and lambda. As
    many as keep the limit are planned together (`plan_queue`), the others run alone. progress: called after
    each trial, up to five times.

    Raises:
        InputError: there are no models, more than 100, or they differ in chunk size or lambda.
        PlanError: a plan of `solve` breaks its rules.
    """
    if not models:
        raise InputError("no models were given; expected at least one, planned within the limit")
    known = {id(m.instance.weights): m.plan for m in models}

    def tried(chunks: int, joint: Solve) -> QueueRun:
        def solved(instance: Instance) -> OverlapPlan:
            return known.get(id(instance.weights)) or joint(instance)

        size = models[0].instance.chunk_bytes
        queue = plan_queue([m.instance for m in models], chunks * size, solved)
        if progress is not None:
            progress()
        return _run(queue, models, limit_bytes)

    low = max(used_chunks(m.instance, m.plan) for m in models)
    high = sum(m.instance.total_chunks for m in models)
    best = tried(high, solve)
    if _peak(best) <= limit_bytes:
        return best
    best = tried(low, solve)
    if _peak(best) > limit_bytes:
        return tried(low, _run_apart)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        trial = tried(middle, solve)
        if _peak(trial) <= limit_bytes:
            best, low = trial, middle
        else:
            high = middle
    return best


def _run_apart(instance: Instance) -> OverlapPlan:
    return OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "the models do not run together"})


def _run(queue: QueuePlan, models: Sequence[StreamingPlan], limit: int) -> QueueRun:
    """Run a queue with the layers' own capacities: loads beyond them take longer."""
    alone = tuple(m.budgeted.instance for m in models)
    groups, together = [], []
    for group in queue.groups:
        members = models[group.first - 1 : group.last]
        layers = tuple(layer for m in members for layer in m.budgeted.instance.layers)
        groups.append(replace(group, instance=replace(group.instance, layers=layers)))
        single = members[0].timeline if len(members) == 1 else None
        together.append(single or _run_group(groups[-1], members, limit))
    own = replace(queue, instances=alone, groups=tuple(groups))
    return QueueRun(own, tuple(together), tuple(m.timeline for m in models))


def _run_group(group: QueueGroup, members: Sequence[StreamingPlan], limit: int) -> RunTimeline:
    """Run models planned together with as much reading ahead as keeps the limit."""
    activations = [nbytes for m in members for nbytes in m.graph.activation_bytes]
    for rates in less_read_ahead(max((m.rates for m in members), key=_read_ahead)):
        run = simulate_plan(group.instance, group.plan, rates, activations, keep_preloaded=False)
        if run.memory.peak.total <= limit:
            break
    return run


def _read_ahead(rates: Rates) -> float:
    return math.inf if rates.staging_bytes is None else rates.staging_bytes


def _peak(run: QueueRun) -> int:
    return max(int(timeline.memory.peak.total) for timeline in run.together)
