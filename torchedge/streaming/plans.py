"""An overlap plan: what is preloaded, which layer loads which chunks, what is proven; and making one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from torchedge.storage.codecs import REQUIRED, Codec, Text
from torchedge.streaming.instances import Instance, Weight

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE"]
Digest = Annotated[
    str, Meta(pattern=r"^([0-9a-f]{64})?(?![\s\S])", description="64 hexadecimal digits, or none")
]

MAX_FILE_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """`chunks` chunks of a weight from `first_chunk` (from 0) on, loaded by layer number `layer` (from 1)."""

    weight: Text
    layer: int
    chunks: int
    first_chunk: int


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """An overlap plan (FlashMem, section 3): the preload set W and the chunks each layer loads, x_{w,l}.

    `objective` and `lower_bound` are in the units of `Instance`; OPTIMAL: they meet. `peak_chunks` is the
    most that is in flight at any layer, preloaded weights not counted. `solver` says how the plan was
    made (strategy, limits, counts, for INFEASIBLE the reason): free content, JSON only. `program` is the
    digest of the program whose launches are the layers; "": of none.
    """

    status: Status
    objective: float | None
    lower_bound: float | None
    preload: tuple[Text, ...]
    loads: tuple[ChunkLoad, ...]
    peak_chunks: int
    solver: Annotated[Mapping[str, object], REQUIRED] = field(default_factory=dict)
    program: Digest = ""

    @property
    def gap(self) -> float | None:
        """(objective - lower bound) / objective, from 0 to 1; None where either is not known."""
        if self.objective is None or self.lower_bound is None:
            return None
        bound = max(self.lower_bound, 0.0)  # no objective is negative
        return 0.0 if self.objective <= bound else (self.objective - bound) / self.objective


PLANS = Codec(OverlapPlan, "Overlap plan", remedy="see docs/streaming-files.md", max_bytes=MAX_FILE_BYTES)


read_plan, write_plan = PLANS.read, PLANS.write
"""Plan files are .json or .json.gz."""

Chunks = Mapping[str, Mapping[int, int]]
"""The chunks x_{w,l} of streamed weights by name and layer; any other weight is preloaded."""


def in_flight(instance: Instance, weights: Sequence[Weight], streamed: Chunks) -> list[int]:
    """Return the chunks in flight (C2) at layers 1..N (entry 0 is 0), as the residency counts them."""
    change = [0] * (len(instance.layers) + 2)
    for w in weights:
        loads = streamed.get(w.name)
        if not loads:
            continue
        if instance.residency == "weights":
            loads = {min(loads): w.chunks}
        for layer, chunks in loads.items():
            change[layer] += chunks
        change[w.last_use + 1] -= w.chunks
    return list(accumulate(change[:-1]))


def price(instance: Instance, weights: Iterable[Weight], streamed: Chunks) -> int:
    """Return what weights cost in whole prices: p * preloaded chunks + d * distances (`Instance.prices`)."""
    p, d, _ = instance.prices
    total = 0
    for w in weights:
        loads = streamed.get(w.name)
        if loads is None:
            total += p * w.chunks
        else:
            total += d * (w.first_use - min(loads)) * (w.chunks if instance.distance == "chunks" else 1)
    return total


def make_plan(
    instance: Instance,
    streamed: Chunks,
    solver: Mapping[str, object],
    *,
    optimal: bool = False,
    bound: int | None = None,
) -> OverlapPlan:
    """Build a plan from what is streamed; `bound` is the lower bound in whole prices (`Instance.prices`).

    The solver facts say which limits the plan keeps: naive strategies may keep none.
    """
    preload = [w for w in instance.weights if w.name not in streamed]
    preloaded = sum(w.chunks for w in preload)
    unit = instance.prices[2]
    loads = []
    sums = [0] * (len(instance.layers) + 1)
    for w in instance.weights:
        first = 0
        for layer, chunks in sorted(streamed.get(w.name, {}).items()):
            loads.append(ChunkLoad(w.name, layer, chunks, first))
            first += chunks
            sums[layer] += chunks
    loads.sort(key=lambda load: load.layer)
    peak = max(in_flight(instance, instance.weights, streamed))
    facts = {
        "respects_capacity": all(
            used <= layer.capacity_chunks for used, layer in zip(sums[1:], instance.layers, strict=True)
        ),
        "respects_m_peak": instance.m_peak_chunks is None or peak <= instance.m_peak_chunks,
        "respects_memory": instance.memory_chunks is None or peak + preloaded <= instance.memory_chunks,
    }
    return OverlapPlan(
        "OPTIMAL" if optimal else "FEASIBLE",
        float(Fraction(price(instance, instance.weights, streamed), unit)),
        None if bound is None else float(Fraction(bound, unit)),
        tuple(w.name for w in preload),
        tuple(loads),
        peak,
        {**solver, **facts},
    )


def infeasible_plan(solver: Mapping[str, object], reason: str) -> OverlapPlan:
    """Build the INFEASIBLE plan, with its reason."""
    status: Status = "INFEASIBLE"
    return OverlapPlan(status, None, None, (), (), 0, {**solver, "reason": reason})


# strategies to compare the solver with (FlashMem, section 5.4, figure 9): none asks for capacity ------------


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
