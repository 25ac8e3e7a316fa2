"""An overlap plan: what is preloaded, which layer loads which chunks, what is proven; and making one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
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


PLANS = Codec(OverlapPlan, "Overlap plan", remedy="see docs/streaming.md", max_bytes=MAX_FILE_BYTES)


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
