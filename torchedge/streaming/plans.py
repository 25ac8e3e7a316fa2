"""An overlap plan: what is preloaded, which layer loads which chunks, what is proven; and making one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from torchedge.errors import InputError
from torchedge.storage import Document, write_json
from torchedge.storage.documents import parse_json, read_unpacked
from torchedge.streaming.instances import Instance, Weight

__all__ = [
    "ChunkLoad",
    "Chunks",
    "OverlapPlan",
    "Status",
    "in_flight",
    "make_plan",
    "parse_plan",
    "plan_document",
    "price",
    "read_plan",
    "refuse",
    "used_chunks",
    "write_plan",
]

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE"]

MAX_FILE_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """`chunks` chunks of a weight from `first_chunk` (from 0) on, loaded by layer number `layer` (from 1)."""

    weight: str
    layer: int
    chunks: int
    first_chunk: int


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """An overlap plan (FlashMem, section 3): the preload set W and the chunks each layer loads, x_{w,l}.

    `objective` and `lower_bound` are in the units of `Instance`; OPTIMAL: they meet. `peak_chunks` is the
    most that is in flight at any layer, preloaded weights not counted. `solver` tells how the plan came
    about (strategy, limits, counts, for INFEASIBLE the reason): free content, JSON only.
    """

    status: Status
    objective: float | None
    lower_bound: float | None
    preload: tuple[str, ...]
    loads: tuple[ChunkLoad, ...]
    peak_chunks: int
    solver: Mapping[str, object] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        """(objective - lower bound) / objective, from 0 to 1; None where either is not known."""
        if self.objective is None or self.lower_bound is None:
            return None
        bound = max(self.lower_bound, 0.0)  # no objective is negative
        return 0.0 if self.objective <= bound else (self.objective - bound) / self.objective


def plan_document(plan: OverlapPlan) -> Document:
    """Return the JSON document of a plan."""
    return {
        "status": plan.status,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "preload": list(plan.preload),
        "loads": [
            {"weight": x.weight, "layer": x.layer, "chunks": x.chunks, "first_chunk": x.first_chunk}
            for x in plan.loads
        ],
        "peak_chunks": plan.peak_chunks,
        "solver": dict(plan.solver),
    }


def parse_plan(source: str | Path, document: Mapping[str, object]) -> OverlapPlan:
    """Build a plan from its JSON document; its sense is `verification`'s to check, its types are ours.

    Raises:
        InputError: a key is missing, unknown or holds something of another type.
    """
    wanted: dict[str, type | tuple[type, ...]] = {
        "status": str,
        "objective": (int, float, type(None)),
        "lower_bound": (int, float, type(None)),
        "preload": list,
        "loads": list,
        "peak_chunks": int,
        "solver": Mapping,
    }
    _check(source, "the plan", document, wanted)
    status = str(document["status"])
    if status not in get_args(Status):
        known = ", ".join(get_args(Status))
        raise InputError(f"{source}: status is {status[:60]!r}; expected one of {known}")
    preload: list[object] = document["preload"]  # type: ignore[assignment]
    if not all(isinstance(name, str) for name in preload):
        raise InputError(f"{source}: preload holds something that is no text; expected names of weights")
    loads = []
    entries: list[object] = document["loads"]  # type: ignore[assignment]
    for place, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise InputError(f"{source}: loads[{place}] is no object; expected one")
        _check(
            source,
            f"loads[{place}]",
            entry,
            {"weight": str, "layer": int, "chunks": int, "first_chunk": int},
        )
        loads.append(ChunkLoad(entry["weight"], entry["layer"], entry["chunks"], entry["first_chunk"]))
    return OverlapPlan(
        status,  # type: ignore[arg-type]
        document["objective"],  # type: ignore[arg-type]
        document["lower_bound"],  # type: ignore[arg-type]
        tuple(preload),  # type: ignore[arg-type]
        tuple(loads),
        document["peak_chunks"],  # type: ignore[arg-type]
        document["solver"],  # type: ignore[arg-type]
    )


def _check(
    source: str | Path,
    what: str,
    entry: Mapping[str, object],
    wanted: Mapping[str, type | tuple[type, ...]],
) -> None:
    unknown = [key for key in entry if key not in wanted]
    if unknown:
        raise InputError(
            f"{source}: {what} has the unknown key {unknown[0][:60]!r}; expected only {', '.join(wanted)}"
        )
    for key, kind in wanted.items():
        if key not in entry:
            raise InputError(f"{source}: {what} has no {key!r}; expected {', '.join(wanted)}")
        value = entry[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise InputError(f"{source}: {what}: {key} is a {type(value).__name__}; expected {names}")


def read_plan(path: str | Path) -> OverlapPlan:
    """Read a plan file (.json, or .json.gz).

    Raises:
        InputError: an entry is missing, unknown or of another type.
        ProfileError: the file cannot be read, is too large or is no JSON.
    """
    return parse_plan(path, parse_json(path, read_unpacked(path, max_bytes=MAX_FILE_BYTES)))


def write_plan(path: str | Path, plan: OverlapPlan) -> None:
    """Write a plan file atomically; raises ProfileError where it cannot be written."""
    write_json(path, plan_document(plan))


Chunks = Mapping[str, Mapping[int, int]]
"""The chunks x_{w,l} of streamed weights by name and layer; a weight that is not in it is preloaded."""


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

    The solver facts tell which limits the plan keeps, as naive strategies keep none.
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


def refuse(solver: Mapping[str, object], reason: str) -> OverlapPlan:
    """Build the plan that says that there is none, and why."""
    status: Status = "INFEASIBLE"
    return OverlapPlan(status, None, None, (), (), 0, {**solver, "reason": reason})


def used_chunks(instance: Instance, plan: OverlapPlan) -> int:
    """Return the chunks that a plan preloads and, at most, has in flight together."""
    chosen = set(plan.preload)
    return plan.peak_chunks + sum(w.chunks for w in instance.weights if w.name in chosen)
