"""A streaming plan as text for people, in lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.rates import STAGING_BYTES

if TYPE_CHECKING:
    from torchedge.streaming.streaming_plans import StreamingPlan
    from torchedge.streaming.timelines import RunTimeline

__all__ = ["describe"]

_WIDTH = 80
_INDENT = 15


def describe(found: StreamingPlan) -> str:
    """Return the lines that `print(plan)` shows: what is planned, proven, simulated, and on what grounds."""
    graph = found.graph
    head = (
        f"{graph.name} on {found.device.name}: {len(graph.operations):,} kernels, "
        f"{_weights(len(graph.weights), graph.weight_bytes)} ({graph.precision})"
    )
    lines = [
        *textwrap.wrap(head, _WIDTH, break_on_hyphens=False),
        "",
        *_comparison(found.timeline, found.preloading),
        "",
        *_loads(found),
        *_entry("objective", f"{found.plan.objective:,.6g}, {_proven(found)} ({_settings(found.instance)})"),
    ]
    if found.memory_limit is not None:
        lines += _entry("memory limit", _limit(found, found.memory_limit))
    lines += _entry("simulated", f"{found.timeline.provenance} figures. {'; '.join(found.sources())}")
    for note in found.notes:
        lines += _entry("note", note)
    return "\n".join(lines)


def _comparison(run: RunTimeline, whole: RunTimeline) -> list[str]:
    """Return a table of a run beside that of preloading everything."""
    rows: list[tuple[str, float, float, str]] = [
        ("latency", run.latency_ms, whole.latency_ms, "ms"),
        ("  initialisation", run.initialisation_ms, whole.initialisation_ms, "ms"),
        ("  layers alone", float(run.layers.alone_ms.sum()), float(whole.layers.alone_ms.sum()), "ms"),
        ("  waiting for the disk", run.stalls.disk, whole.stalls.disk, "ms"),
        ("  slowed by loads", run.stalls.transform, whole.stalls.transform, "ms"),
        ("memory at most", run.memory.peak.total, whole.memory.peak.total, "MiB"),
        ("memory on average", run.memory.average.total, whole.memory.average.total, "MiB"),
    ]
    lines = [f"{'':<24}{'this plan':>14}{'preloading everything':>26}"]
    for name, ours, theirs, unit in rows:
        scale = MEBIBYTE if unit == "MiB" else 1
        cells = [f"{value / scale:,.1f} {unit}" for value in (ours, theirs)]
        times = f"{theirs / ours:.1f} times" if ours > 0 and not name.startswith(" ") else ""
        lines.append(f"{name:<24}{cells[0]:>14}{cells[1]:>26}{times:>14}".rstrip())
    return lines


def _loads(found: StreamingPlan) -> list[str]:
    graph, before = found.graph, found.timeline.preloaded_bytes
    count = len(graph.weights) - found.streamed_weights
    streamed = _weights(found.streamed_weights, graph.weight_bytes - before)
    return [
        *_entry("preloaded", _weights(count, before)),
        *_entry("streamed", f"{streamed}, loaded while layers run" if found.streamed_weights else streamed),
    ]


def _weights(count: int, nbytes: int) -> str:
    if not count:
        return "no weights"
    return f"{count:,} {'weight' if count == 1 else 'weights'} of {_mib(nbytes)}"


def _proven(found: StreamingPlan) -> str:
    if found.plan.status == "OPTIMAL":
        return "proven optimal"
    if found.plan.gap is None:
        return "no bound is known"
    limited = " without a memory limit" if found.instance.memory_chunks is not None else ""
    return f"at most {100 * found.plan.gap / (1 - found.plan.gap):.2g} % above the optimum{limited}"


def _settings(instance: Instance) -> str:
    limit = "none" if instance.m_peak_chunks is None else _mib(instance.m_peak_chunks * instance.chunk_bytes)
    return f"lambda {instance.lam:g}, M_peak {limit}"


def _limit(found: StreamingPlan, limit: int) -> str:
    told = f"{_mib(limit)}, of which {_mib(limit - found.budgeted.peak_bytes)} stay free"
    if found.relaxation > 1:
        told += f"; to keep it, layers load up to {found.relaxation:g} times their capacity"
    staging = found.rates.staging_bytes
    if staging is not None and staging < STAGING_BYTES:
        told += f"; at most {_mib(staging)} are read ahead"
    return told


def _entry(name: str, text: str) -> list[str]:
    """Return a name and, beside it, a text."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=name.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )


def _mib(nbytes: float) -> str:
    mib = nbytes / MEBIBYTE
    return f"{mib:,.1f} MiB" if mib >= 1 or not mib else f"{mib:.2g} MiB"
