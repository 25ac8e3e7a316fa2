"""Queues of models within a budget: all memory of each simulated run under one limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchedge.errors import InputError
from torchedge.streaming.budgets import less_read_ahead
from torchedge.streaming.decisions import used_chunks
from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.queues import QueueGroup, QueuePlan, QueueRun, plan_queue
from torchedge.streaming.rates import Rates
from torchedge.streaming.simulation import simulate_plan
from torchedge.streaming.streaming_plans import StreamingPlan
from torchedge.streaming.timelines import RunTimeline

__all__ = ["plan_queue_within"]

_HALVINGS = 3
"""How often the memory left to weights is halved between what is too much and what works."""

Solve = Callable[[Instance], OverlapPlan]


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
        return tried(low, _refuse)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        found = tried(middle, solve)
        if _peak(found) <= limit_bytes:
            best, low = found, middle
        else:
            high = middle
    return best


def _refuse(instance: Instance) -> OverlapPlan:
    return OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "the models do not run together"})


def _run(queue: QueuePlan, models: Sequence[StreamingPlan], limit: int) -> QueueRun:
    """Run a queue; layers get their own capacities, as exceeding them takes its time."""
    alone = tuple(m.budgeted.instance for m in models)
    groups, together = [], []
    for group in queue.groups:
        members = models[group.first - 1 : group.last]
        layers = tuple(layer for m in members for layer in m.budgeted.instance.layers)
        groups.append(replace(group, instance=replace(group.instance, layers=layers)))
        single = members[0].timeline if len(members) == 1 else None
        together.append(single or _run_group(groups[-1], members, limit))
    found = replace(queue, instances=alone, groups=tuple(groups))
    return QueueRun(found, tuple(together), tuple(m.timeline for m in models))


def _run_group(group: QueueGroup, members: Sequence[StreamingPlan], limit: int) -> RunTimeline:
    """Run models planned together with as much reading ahead as keeps the limit, and any of them has."""
    held = [nbytes for m in members for nbytes in m.graph.activation_bytes]
    for rates in less_read_ahead(max((m.rates for m in members), key=_read_ahead)):
        run = simulate_plan(group.instance, group.plan, rates, held, keep_preloaded=False)
        if run.memory.peak.total <= limit:
            break
    return run


def _read_ahead(rates: Rates) -> float:
    return math.inf if rates.staging_bytes is None else rates.staging_bytes


def _peak(run: QueueRun) -> int:
    return max(int(timeline.memory.peak.total) for timeline in run.together)
