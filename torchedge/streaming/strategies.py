"""Strategies to compare the solver with (FlashMem, section 5.4, figure 9): none asks for capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan, make_plan


def preload_everything(instance: Instance) -> OverlapPlan:
    """Preload every weight, as frameworks without streaming do; nothing is in flight.

    `solver["respects_memory"]` is False where `memory_chunks` is exceeded.
    """
    return make_plan(instance, {}, {"strategy": "preload-all"})


def always_next(instance: Instance) -> OverlapPlan:
    """Load each weight whole in the layer just before its first use ("Always-Next Loading").

    No capacity is asked for: `solver["respects_capacity"]` is False where C3 is broken, and so with
    `respects_m_peak` and `respects_memory`. Weights of the first layer are preloaded.
    """
    streamed = {w.name: {w.first_use - 1: w.chunks} for w in instance.weights if w.first_use > 1}
    return make_plan(instance, streamed, {"strategy": "always-next"})


def same_type(instance: Instance) -> OverlapPlan:
    """Load each weight whole in the nearest layer before its first use of the consumer's operator class.

    The paper has one sentence on "Same-Op-Type Prefetching": it "preloads weights only from layers of the
    same type" and "partially considers loading capacity". Read here as always-next within each operator
    class: a reusable layer loads what the next reusable layer needs, and so on. So the loads of the layers
    that bear much do not fall on those that bear little, but no capacity is asked for. Weights of the first
    layer of a class are preloaded. The facts are those of `always_next`.
    """
    nearest: list[int | None] = [None]
    seen: dict[str, int] = {}
    for place, layer in enumerate(instance.layers, 1):
        nearest.append(seen.get(layer.load_class))
        seen[layer.load_class] = place
    streamed = {
        w.name: {source: w.chunks} for w in instance.weights if (source := nearest[w.first_use]) is not None
    }
    return make_plan(instance, streamed, {"strategy": "same-type"})


STRATEGIES: Mapping[str, Callable[[Instance], OverlapPlan]] = MappingProxyType(
    {"always-next": always_next, "same-type": same_type, "preload-all": preload_everything}
)
"""Strategies by name."""
