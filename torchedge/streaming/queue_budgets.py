"""Queues of models within a budget: all memory of each simulated run under one limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchedge.errors import InputError
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import Plan
from torchedge.streaming.queues import QueuePlan, QueueRun, plan_queue, simulate_queue
from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["plan_queue_within"]

_HALVINGS = 3
"""How often the memory left to weights is halved between what is too much and what works."""

Solve = Callable[[Instance], Plan]


def plan_queue_within(
    models: Sequence[StreamingPlan],
    limit_bytes: int,
    solve: Solve,
    progress: Callable[[], object] | None = None,
) -> QueueRun:
    """Plan models that run one after the other such that no simulated run exceeds `limit_bytes` altogether.

    models: each planned alone within that limit, on one device and with the same chunk size and lambda. As
    many as keep the limit are planned together (`plan_queue`); a model that no plan with others suits runs
    by its own. progress: called up to five times, whenever plans for the queue were tried.

    Raises:
        InputError: there are no models, more than 100, or they differ in chunk size or lambda.
        PlanError: a plan of `solve` breaks its rules.
    """
    if not models:
        raise InputError("no models were given; expected at least one, planned within the limit")
    usual = models[0].rates
    read_ahead = [m.rates.staging_bytes for m in models if m.rates.staging_bytes is not None]
    rates = replace(usual, staging_bytes=min(read_ahead, default=None))

    def tried(chunks: int, joint: Solve) -> QueueRun:
        size = models[0].instance.chunk_bytes
        queue = plan_queue([m.instance for m in models], chunks * size, _own_plans(models, joint))
        if progress is not None:
            progress()
        return simulate_queue(
            _as_devices_are(queue, models), rates, [m.graph.activation_bytes for m in models]
        )

    low = max(_used(m) for m in models)
    high = sum(m.instance.total_chunks for m in models)
    best = tried(high, solve)
    if _peak(best) <= limit_bytes:
        return best
    best = tried(low, solve)
    if _peak(best) > limit_bytes:
        return tried(low, _refuse)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        found = tried(middle, solve)
        if _peak(found) <= limit_bytes:
            best, low = found, middle
        else:
            high = middle
    return best


def _own_plans(models: Sequence[StreamingPlan], joint: Solve) -> Solve:
    """Return a solver that knows the plan of each model alone."""
    known = {id(m.instance.weights): m.plan for m in models}

    def solve(instance: Instance) -> Plan:
        plan = known.get(id(instance.weights))
        return joint(instance) if plan is None else plan

    return solve


def _refuse(instance: Instance) -> Plan:
    return Plan("INFEASIBLE", None, None, (), (), 0, {"reason": "the models do not run together"})


def _as_devices_are(queue: QueuePlan, models: Sequence[StreamingPlan]) -> QueuePlan:
    """Give the models' layers their own capacities, where plans exceed them: that takes its time."""
    alone = tuple(m.budgeted.instance for m in models)
    groups = tuple(
        replace(
            group,
            instance=replace(
                group.instance,
                layers=tuple(x for m in alone[group.first - 1 : group.last] for x in m.layers),
            ),
        )
        for group in queue.groups
    )
    return replace(queue, instances=alone, groups=groups)


def _used(model: StreamingPlan) -> int:
    chosen = set(model.plan.preload)
    return model.plan.peak_chunks + sum(w.chunks for w in model.instance.weights if w.name in chosen)


def _peak(run: QueueRun) -> int:
    return max(int(timeline.memory.peak.total) for timeline in run.together)
