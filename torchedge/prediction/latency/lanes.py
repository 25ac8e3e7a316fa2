"""A step on two lanes of time: the calls that the host enqueues, and the kernels that the device runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchedge.storage.documents import write_json

Phase = tuple[str, float, float]
"""A part of a step: its name, the ms of the host and the ms of the device."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A phase on one lane, in ms from the start of the step; the lane works for `busy_ms` of it."""

    lane: Literal["host", "device"]
    phase: str
    start_ms: float
    end_ms: float
    busy_ms: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The phases of a step on the lanes of host and device, as long as its predicted latency.

    waits: the share of the step in which the device has no kernel to run.
    """

    spans: tuple[TimeSpan, ...]
    waits: float

    def trace(self, path: str | Path) -> None:
        """Write a trace for Chrome (chrome://tracing) or Perfetto; raises ProfileError."""
        threads = {"host": 1, "device": 2}
        names = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for lane, tid in threads.items()
        ]
        spans = [
            {
                **{"ph": "X", "pid": 1, "tid": threads[span.lane], "name": span.phase},
                **{"ts": 1e3 * span.start_ms, "dur": 1e3 * (span.end_ms - span.start_ms)},
                "args": {"busy_ms": span.busy_ms},
            }
            for span in self.spans
        ]
        write_json(path, {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]})


def walk(phases: Iterable[Phase], latency_ms: float) -> StepTimeline:
    """Return the timeline of a step that begins with an empty queue, scaled to its latency.

    The host enqueues without a break. The device begins a phase when the host does and the earlier phase has
    ended, and ends it no earlier than the host has enqueued all of it.
    """
    spans: list[TimeSpan] = []
    enqueued = done = busy = 0.0
    for name, host, device in phases:
        begun, enqueued = enqueued, enqueued + host
        spans.append(TimeSpan("host", name, begun, enqueued, host))
        if device > 0:
            start, busy = max(done, begun), busy + device
            done = max(start + device, enqueued)
            spans.append(TimeSpan("device", name, start, done, device))
    end = max(done, enqueued)
    scale = latency_ms / end if end > 0 else 1.0
    scaled = [
        TimeSpan(s.lane, s.phase, scale * s.start_ms, scale * s.end_ms, scale * s.busy_ms) for s in spans
    ]
    return StepTimeline(tuple(scaled), 1 - busy / end if end > 0 else 0.0)
