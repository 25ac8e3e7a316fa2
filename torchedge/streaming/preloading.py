"""Plans that preload more than others: which weights are worth it, and what such a plan is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.verification import verify_plan

__all__ = ["preload_also", "restate_plan", "worth_preloading"]


def worth_preloading(instance: Instance, plan: OverlapPlan, names: Iterable[str]) -> list[str]:
    """Return those of the streamed weights named that are cheaper preloaded, the most by chunk first."""
    p, d, _ = instance.prices
    wanted = set(names)
    first: dict[str, int] = {}
    for load in plan.loads:
        first[load.weight] = min(first.get(load.weight, load.layer), load.layer)
    found = []
    for w in instance.weights:
        if w.name in wanted and w.name in first:
            times = w.chunks if instance.distance == "chunks" else 1
            saved = d * (w.first_use - first[w.name]) * times - p * w.chunks
            if saved > 0:
                found.append((-saved / w.chunks, w.first_use, w.name))
    return [name for _, _, name in sorted(found)]


def preload_also(plan: OverlapPlan, names: Iterable[str]) -> OverlapPlan:
    """Return a plan that preloads some of its streamed weights; `restate_plan` makes its figures right."""
    more = [name for name in names if name not in plan.preload]
    loads = tuple(load for load in plan.loads if load.weight not in set(more))
    return replace(plan, preload=(*plan.preload, *more), loads=loads)


def restate_plan(instance: Instance, plan: OverlapPlan, bound: float | None, **facts: object) -> OverlapPlan:
    """Return a plan with its objective, peak and status as of this instance.

    bound: a lower bound of the instance, if one is known; `facts` are added to those of the solver.
    """
    found = verify_plan(instance, plan, limits=False)
    objective = float(found.objective or 0)
    return replace(
        plan,
        status="OPTIMAL" if bound is not None and objective <= bound else "FEASIBLE",
        objective=objective,
        lower_bound=bound if bound is None else min(bound, objective),
        peak_chunks=found.peak_chunks,
        solver={**plan.solver, **facts},
    )
