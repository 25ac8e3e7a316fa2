"""A plan played layer by layer and chunk by chunk: the rules as what happens, not as sums."""

from __future__ import annotations

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan

Chunk = tuple[str, int]


def play(instance: Instance, plan: OverlapPlan) -> int | None:
    """Run a plan whose names are known; return the most chunks in flight, or None where a rule is broken."""
    weights = {w.name: w for w in instance.weights}
    everything = {(w.name, chunk) for w in instance.weights for chunk in range(w.chunks)}
    memory = {chunk for chunk in everything if chunk[0] in plan.preload}
    kept, peak, arrived = len(memory), 0, set(memory)
    for number, layer in enumerate(instance.layers, 1):
        needed = {chunk for chunk in everything if weights[chunk[0]].first_use == number}
        loading = _loading(plan, number)
        twice = len(set(loading)) < len(loading) or arrived & set(loading)
        if needed - memory or twice or len(loading) > layer.capacity_chunks:
            return None
        arrived |= set(loading)
        memory |= set(loading)
        flying = {chunk for chunk in memory if chunk[0] not in plan.preload}
        names = {name for name, _ in flying}
        whole = {chunk for chunk in everything if chunk[0] in names}
        peak = max(peak, len(whole if instance.residency == "weights" else flying))
        memory -= {chunk for chunk in flying if weights[chunk[0]].last_use == number}
    for limit, amount in ((instance.m_peak_chunks, peak), (instance.memory_chunks, kept + peak)):
        if limit is not None and amount > limit:
            return None
    return peak if arrived == everything else None


def _loading(plan: OverlapPlan, number: int) -> list[Chunk]:
    return [
        (load.weight, chunk)
        for load in plan.loads
        if load.layer == number
        for chunk in range(load.first_chunk, load.first_chunk + load.chunks)
    ]
