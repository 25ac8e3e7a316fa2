"""Strategies to compare the solver with: the paper's LC-OPG, its greedy fallback, and naive prefetching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.strategies.greedy import plan_greedily
from torchedge.streaming.strategies.lc_opg import plan_lc_opg
from torchedge.streaming.strategies.naive import always_next, preload_everything, same_type

__all__ = ["STRATEGIES"]

STRATEGIES: Mapping[str, Callable[[Instance], OverlapPlan]] = MappingProxyType(
    {
        "lc-opg": plan_lc_opg,
        "greedy": plan_greedily,
        "always-next": always_next,
        "same-type": same_type,
        "preload-all": preload_everything,
    }
)
"""Strategies by name, each with its default settings."""
