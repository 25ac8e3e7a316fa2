"""CP-SAT on what remains: instances small enough to be settled whole, from the best plan known."""

from __future__ import annotations

from dataclasses import replace

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.solving.limits import Smallest
from torchedge.streaming.strategies.cp_sat import count_pairs, direct_cp_sat
from torchedge.streaming.strategies.windows import whole_window

__all__ = ["settle", "settle_memory"]

MAX_PAIRS = 400
"""Pairs of a weight and a layer up to which the paper's model is solved whole."""
LIMIT = 20.0
"""CP-SAT's deterministic time."""


def _pairs(instance: Instance) -> int:
    return sum(count_pairs(whole_window(instance), len(instance.layers)))


def settle(instance: Instance, known: OverlapPlan | None, *, effort: float = 1.0) -> OverlapPlan | None:
    """Solve a small instance exactly, starting from a plan; None where it is too large or stays open.

    effort: scales the time of CP-SAT. An infeasible instance gives None, too: what works instead is for the
    caller to tell.
    """
    if _pairs(instance) > MAX_PAIRS:
        return None
    plan = direct_cp_sat(instance, deterministic_limit=LIMIT * effort, hint=known)
    if plan is None or plan.status != "OPTIMAL":
        return None
    return replace(plan, solver={**plan.solver, "strategy": "optimal", "methods": {"CP-SAT": 1}})


def settle_memory(instance: Instance) -> Smallest:
    """Find the smallest memory limit with which an instance has a plan, by bisection.

    Of an instance too large for CP-SAT: the memory of preloading everything, which always works.
    """
    total = instance.total_chunks
    low, high = 0, total  # high works
    if _pairs(instance) > MAX_PAIRS:
        return Smallest(total, frozenset(), False)
    while low < high:
        middle = (low + high) // 2
        plan = direct_cp_sat(replace(instance, memory_chunks=middle), deterministic_limit=LIMIT)
        if plan is not None and plan.status != "INFEASIBLE":
            high = middle
        else:
            low = middle + 1
    return Smallest(high, frozenset(), True)
