"""What `torchedge plan MODEL` prints of layers, queues and sweeps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchedge.cli.console import number, table, width

if TYPE_CHECKING:
    from torchedge.streaming.planning import Tradeoff
    from torchedge.streaming.queues import QueueRun
    from torchedge.streaming.simulation import RunTimeline
    from torchedge.streaming.streaming_plans import StreamingPlan

__all__ = ["layer_lines", "queue_document", "queue_lines", "setting", "sweep_document", "sweep_lines"]

_MIB = 2**20
_NAME = 30


def layer_lines(found: StreamingPlan) -> list[str]:
    """Return a row for each layer, and below it what it loads: chunks of which weights."""
    head = ["layer", "name", "class", "capacity", "loads", "start ms", "takes ms"]
    rows = [
        [
            str(row.number),
            _short(row.name, _NAME),
            row.load_class,
            f"{row.capacity_chunks:,}",
            f"{row.loaded_chunks:,}",
            f"{row.start_ms:,.1f}",
            f"{row.end_ms - row.start_ms:.2f}",
        ]
        for row in found.layers
    ]
    first, *lines = table(head, rows, left=3, gap=1)
    out = [first]
    for line, row in zip(lines, found.layers, strict=True):
        out.append(line)
        if row.loads:
            loads = ", ".join(row.loads)
            indent = " " * 6
            out += textwrap.wrap(
                loads, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
    return out


def queue_lines(found: QueueRun, models: Sequence[StreamingPlan], limit: int) -> list[str]:
    """Return what each model of a queue loads when, and the queue's times beside one model at a time."""
    names = ", ".join(model.graph.name for model in models)
    title = f"{names} on {models[0].device.name}, one after the other within {number(limit / _MIB)} MiB"
    rows = []
    for place, (model, share) in enumerate(zip(models, found.plan.shares, strict=True), 1):
        size = model.instance.chunk_bytes / _MIB
        sizes = [number(chunks * size) for chunks in (share.preloaded, share.carried, share.own)]
        rows.append([f"{place}. {_short(model.graph.name, _NAME)}", *sizes])
    lines = textwrap.wrap(title, width(), break_on_hyphens=False)
    lines += ["", *table(["MiB of whole chunks", "preloaded", "by models before", "by its own layers"], rows)]
    runs = (found.together, found.apart)
    figures = [
        ("latency, ms", [f"{sum(t.latency_ms for t in run):,.1f}" for run in runs]),
        ("  initialisation", [f"{sum(t.initialisation_ms for t in run):,.1f}" for run in runs]),
        ("memory at most, MiB", [f"{_peak(run) / _MIB:,.1f}" for run in runs]),
    ]
    body = [[name, *cells] for name, cells in figures]
    lines += ["", *table(["simulated", "planned together", "one at a time"], body)]
    groups = [group for group in found.plan.groups if group.last > group.first]
    told = ", ".join(f"{group.first} to {group.last}" for group in groups)
    lines += ["", f"planned together: {told or 'none, the limit leaves no room for it'}"]
    for note in dict.fromkeys(note for model in models for note in model.notes):
        lines += textwrap.wrap(f"note: {note}", width(), subsequent_indent="  ", break_on_hyphens=False)
    return lines


def queue_document(found: QueueRun, models: Sequence[StreamingPlan], limit: int) -> dict[str, Any]:
    """Return a queue as plain data: bytes, ms, chunks."""
    return {
        "device": models[0].device.name,
        "memory_limit_bytes": limit,
        "groups": [[group.first, group.last] for group in found.plan.groups],
        "together": _run_document(found.together),
        "one_at_a_time": _run_document(found.apart),
        "models": [
            {
                **model.summary(),
                "chunk_bytes": model.instance.chunk_bytes,
                "preloaded_chunks": share.preloaded,
                "chunks_loaded_by_models_before": share.carried,
                "chunks_loaded_by_own_layers": share.own,
            }
            for model, share in zip(models, found.plan.shares, strict=True)
        ],
    }


def _run_document(runs: Sequence[RunTimeline]) -> dict[str, float]:
    return {
        "latency_ms": sum(run.latency_ms for run in runs),
        "initialisation_ms": sum(run.initialisation_ms for run in runs),
        "peak_bytes": _peak(runs),
    }


def _peak(runs: Sequence[RunTimeline]) -> int:
    return max(int(run.memory.peak.total) for run in runs)


def setting(point: Tradeoff) -> str:
    """Return what was set."""
    peak = "none" if point.m_peak is None else f"{number(point.m_peak / _MIB)} MiB"
    return f"lambda {point.lam:g}, M_peak {peak}"


def sweep_lines(points: Sequence[Tradeoff]) -> list[str]:
    """Return a row for each setting, least memory first, and one for preloading everything."""
    first = points[0].plan
    head = ["", "preloaded", "average", "peak", "integrated", "execution"]
    rows = [[setting(point), *_cells(point.plan.timeline)] for point in points]
    rows.append(["preloading everything", *_cells(first.preloading)])
    title = (
        f"{first.graph.name} on {first.device.name}: latency (ms) against memory (MiB), simulated from "
        f"{first.timeline.provenance} figures"
    )
    return [*textwrap.wrap(title, width(), break_on_hyphens=False), "", *table(head, rows)]


def _cells(run: RunTimeline) -> list[str]:
    sizes = (run.preloaded_bytes, run.memory.average.total, run.memory.peak.total)
    return [*(number(size / _MIB) for size in sizes), number(run.latency_ms), number(run.execution_ms)]


def sweep_document(points: Sequence[Tradeoff]) -> list[dict[str, Any]]:
    """Return a sweep as plain data."""
    return [{"lambda": point.lam, "m_peak_bytes": point.m_peak, **point.plan.summary()} for point in points]


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]
