"""A streaming plan as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchedge.streaming.instances import MEBIBYTE

if TYPE_CHECKING:
    from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["describe"]


def describe(found: StreamingPlan) -> str:
    """Return the lines that `print(plan)` shows: what is planned, proven, simulated, and on what grounds."""
    plan, run, whole = found.plan, found.timeline, found.preloading
    streamed = len({load.weight for load in plan.loads})
    graph = found.graph
    proven = (
        "proven optimal" if plan.status == "OPTIMAL" else f"within {100 * (plan.gap or 0):.2g} % of optimal"
    )
    lines = [
        f"{graph.name} on {found.device.name}: {len(found.instance.layers):,} kernels, "
        f"{graph.weight_bytes / MEBIBYTE:,.1f} MiB of weights ({graph.precision})",
        f"  streamed       {streamed:,} of {len(graph.weights):,} weights; "
        f"{found.preloaded_mib:,.1f} MiB preloaded; objective {plan.objective:,.6g}, {proven}",
        f"  memory         {_use(run.memory.peak.total)} at most, {_use(run.memory.average.total)} on "
        f"average; preloading everything: {_use(whole.memory.peak.total)}, "
        f"{_use(whole.memory.average.total)}",
        f"  latency        {run.latency_ms:,.1f} ms with initialisation ({run.initialisation_ms:,.1f} ms); "
        f"preloading everything: {whole.latency_ms:,.1f} ms",
        f"  stalls         {run.stalls.disk:,.1f} ms waiting for the disk, {run.stalls.transform:,.1f} ms "
        "slowed by loads",
    ]
    if found.memory_limit is not None:
        kept = f"  memory limit   {_use(found.memory_limit)}"
        if found.relaxation > 1:
            kept += f"; layers load up to {found.relaxation:g} times their capacity to keep it"
        lines.append(kept)
    lines.append(f"  simulated      ({run.provenance}); {'; '.join(found.sources())}")
    lines += [f"  note           {note}" for note in found.notes]
    return "\n".join(lines)


def _use(nbytes: float) -> str:
    return f"{nbytes / MEBIBYTE:,.1f} MiB"
