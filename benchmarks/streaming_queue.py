"""Plan models that run one after the other under one limit: `python benchmarks/streaming_queue.py`.

Five of FlashMem's models in a row (its section 5.3, Fig. 6) on an Adreno 750, in half precision: planned
together, and one at a time. Then the same for other limits, and for weights that lie prepared in the file, so
that what is preloaded is only copied. `--figure FILE` draws the queue within the first limit. `--models` and
`--limits` (MiB of weights: activations and what is read ahead come on top) take others. Needs torchvision,
transformers, diffusers and vit-pytorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streaming_models import head, row

from torchedge.devices import find_device
from torchedge.streaming.capacities import make_instance
from torchedge.streaming.figures import draw_lanes
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.layering import lay_out
from torchedge.streaming.queues import QueueRun, plan_queue, simulate_queue
from torchedge.streaming.rates import Rates, derive_rates
from torchedge.streaming.simulation import RunTimeline
from torchedge.streaming.solving import solve
from torchedge.tracing.capturing import capture
from torchedge.tracing.sources import load_model

DEVICE = "adreno-750"
MODELS = ("depth-anything-large", "gpt-neo-small", "vit", "sd-unet", "gpt-neo-1.3b")
LIMITS = (420, 230, 1536)
"""MiB; the last is what FlashMem's authors chose."""


@dataclass(frozen=True)
class Case:
    """A model: its instance and its activations."""

    instance: Instance
    activations: tuple[int, ...]


def make_case(name: str) -> Case:
    """Capture a model and lay it out."""
    model, _ = load_model(name)
    graph = lay_out(capture(model, mode="infer", batch_size=1))
    return Case(replace(make_instance(graph, find_device(DEVICE)), name=name), graph.activation_bytes)


def run_queue(cases: Sequence[Case], limit_mib: int, rates: Rates) -> QueueRun:
    """Plan and simulate all of them in a row."""
    queue = plan_queue([case.instance for case in cases], limit_mib * MEBIBYTE, solve)
    return simulate_queue(queue, rates, [case.activations for case in cases])


def print_models(run: QueueRun) -> None:
    """What each model takes alone, and from the end of the one before in the queue."""
    head("model; alone, ms; of it initialisation; in the queue, ms; preloaded, MiB; by the models before; "
         "by its own layers")  # fmt: skip
    spans = run.lanes[0].spans
    for alone, (name, start, end), share in zip(run.apart, spans, run.plan.shares, strict=True):
        mib = [
            chunks * alone.instance.chunk_bytes / MEBIBYTE
            for chunks in (share.preloaded, share.carried, share.own)
        ]
        row(name, round(alone.latency_ms), round(alone.initialisation_ms), round(end - start), *mib)


def peak_mib(runs: Sequence[RunTimeline]) -> int:
    """Return the most that is in memory during any of the runs."""
    return round(max(run.memory.peak.total for run in runs) / MEBIBYTE)


def print_queues(cases: Sequence[Case], limits: Sequence[int]) -> None:
    """The whole queue under each limit."""
    head("limit on weights, MiB; prepared weights; groups; together, ms; one at a time, ms; times; "
         "peak together, MiB; peak one at a time; average together; average one at a time")  # fmt: skip
    for prepared in (False, True):
        rates = derive_rates(find_device(DEVICE), prepared=prepared)
        for limit in limits:
            run = run_queue(cases, limit, rates)
            averages = [round(lane.memory.average.total / MEBIBYTE) for lane in run.lanes]
            row(limit, "yes" if prepared else "no", len(run.plan.groups), round(run.latency_ms),
                round(run.apart_ms), f"{run.apart_ms / run.latency_ms:.2f}", peak_mib(run.together),
                peak_mib(run.apart), *averages)  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--limits", nargs="+", type=int, default=LIMITS, metavar="MIB")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    cases = [make_case(name) for name in given.models]
    first = run_queue(cases, given.limits[0], derive_rates(find_device(DEVICE)))
    print(f"{len(cases)} models within {given.limits[0]} MiB of weights on {DEVICE}")
    print_models(first)
    print_queues(cases, given.limits)
    if given.figure:
        limit = given.limits[0] * MEBIBYTE
        draw_lanes(first.lanes, limit_bytes=limit).savefig(given.figure)


if __name__ == "__main__":
    main()
