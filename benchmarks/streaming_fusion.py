"""What fusing and adaptive splitting do to the overlap plans of the paper's models.

`python benchmarks/streaming_fusion.py [--only NAME ...] [--strategy solve]`: for each model the graph with
every operation a kernel, the fused one and the adaptively split one: kernels, objective, what is preloaded,
the kernels' summed latency, and the simulated run. Then what was split. Needs what benchmarks/
streaming_models.py needs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from overlap_strategies import STRATEGIES

from torchedge.devices import Device, find_device
from torchedge.streaming.capacities import make_instance
from torchedge.streaming.fusion import (
    AdaptiveFusion,
    Groups,
    Outcome,
    assemble,
    find_groups,
    split_adaptively,
)
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.layering import InferenceGraph, lay_out
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import derive_rates
from torchedge.streaming.simulation import simulate_plan
from torchedge.streaming.solving import solve
from torchedge.streaming.verification import check_plan
from torchedge.tracing.capturing import capture
from torchedge.tracing.paper_models import PAPER_MODELS
from torchedge.tracing.sources import load_model


@dataclass(frozen=True)
class Stage:
    """One choice of kernels: what it comes to, and its simulated latency (ms) and memory (MiB)."""

    outcome: Outcome
    latency_ms: float
    average_mib: float
    peak_mib: float


@dataclass(frozen=True)
class Found:
    """The three choices for one model."""

    name: str
    stages: tuple[Stage, Stage, Stage]
    fusion: AdaptiveFusion
    solved: int
    seconds: float
    slowest: float


def study(
    name: str, device: Device, planner: Callable[[Instance], OverlapPlan], options: argparse.Namespace
) -> Found:
    """Capture one model, fuse and split it, check and simulate the three plans."""
    model, _ = load_model(name)
    graph = lay_out(capture(model, mode="infer", batch_size=1))
    solved: list[tuple[Instance, OverlapPlan]] = []
    times: list[float] = []

    def remember(instance: Instance) -> OverlapPlan:
        begun = time.perf_counter()
        plan = planner(instance)
        times.append(time.perf_counter() - begun)
        check_plan(instance, plan)
        solved.append((instance, plan))
        return plan

    start = time.perf_counter()
    fusion = split_adaptively(
        graph,
        lambda kernels: make_instance(kernels, device),
        remember,
        latency_price=options.latency_price,
        alpha=options.alpha,
        split_rows=options.split_rows,
        limit=options.limit,
    )
    seconds = time.perf_counter() - start
    single: Groups = tuple((p,) for p in range(len(graph.operations)))
    stages = (
        run(assemble(graph, single), fusion.unfused, *solved[0], device),
        run(assemble(graph, find_groups(graph)), fusion.fused, *solved[1], device),
        run(fusion.graph, fusion.chosen, fusion.instance, fusion.plan, device),
    )
    return Found(name, stages, fusion, len(solved), seconds, max(times))


def run(
    graph: InferenceGraph, outcome: Outcome, instance: Instance, plan: OverlapPlan, device: Device
) -> Stage:
    """Simulate one plan."""
    timeline = simulate_plan(instance, plan, derive_rates(device), graph.activation_bytes)
    memory = timeline.memory
    return Stage(outcome, timeline.latency_ms, memory.average.total / MEBIBYTE, memory.peak.total / MEBIBYTE)


def head(text: str) -> None:
    """Print the head of a table, its columns separated by semicolons."""
    names = [name.strip() for name in text.split(";")]
    print(f"\n| {' | '.join(names)} |\n{'|---' * len(names)}|")


def print_found(found: list[Found]) -> None:
    """One table of plans, one of simulated runs, one of what was split; three values a cell."""

    def three(stages: tuple[Stage, ...], value: Callable[[Stage], float | None], digits: int) -> str:
        values = [value(stage) for stage in stages]
        return " / ".join("-" if v is None else f"{v:,.{digits}f}" for v in values)

    print("\nThree values a cell: unfused / fused / adaptively split")
    head("model; kernels; objective; preloaded MiB; latency of kernels, ms; total; solved; s")
    for f in found:
        chunk = f.fusion.instance.chunk_bytes / MEBIBYTE
        cells = [
            three(f.stages, lambda s: s.outcome.kernels, 0),
            three(f.stages, lambda s: s.outcome.objective, 1),
            three(f.stages, lambda s, c=chunk: c * s.outcome.preloaded_chunks, 1),  # type: ignore[misc]
            three(f.stages, lambda s: s.outcome.latency_ms, 1),
            three(f.stages, lambda s: s.outcome.total, 1),
        ]
        print(f"| {f.name} | {' | '.join(cells)} | {f.solved} | {f.seconds:.1f} |")
    head("model; simulated integrated latency, ms; average memory, MiB; peak memory, MiB")
    for f in found:
        cells = [
            three(f.stages, lambda s: s.latency_ms, 0),
            three(f.stages, lambda s: s.average_mib, 0),
            three(f.stages, lambda s: s.peak_mib, 0),
        ]
        print(f"| {f.name} | {' | '.join(cells)} |")
    head("model; rounds accepted / tried; penalty of the fused kernels before, after; splits that stay")
    for f in found:
        rounds = f.fusion.rounds
        taken = [r for r in rounds if r.accepted]
        penalties = (taken[0].penalty_before, taken[-1].penalty_after) if taken else (0.0, 0.0)
        print(
            f"| {f.name} | {len(taken)} / {len(rounds)} | {penalties[0]:,.1f}, {penalties[1]:,.1f} "
            f"| {splits(f.fusion)} |"
        )


def splits(fusion: AdaptiveFusion) -> str:
    """The most frequent splits."""
    counts: Counter[str] = Counter()
    for taken in fusion.rounds:
        if taken.accepted:
            kinds = Counter(" \\| ".join(split.into) for split in taken.splits)
            counts.update(kinds) if taken.change == "split" else counts.subtract(kinds)
    common = [f"{count} × {kinds}" for kinds, count in counts.most_common(3) if count > 0]
    return "; ".join(common) or "none"


def main() -> None:
    """Study the models one after another and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PAPER_MODELS), default=list(PAPER_MODELS))
    parser.add_argument("--strategy", choices=["solve", *STRATEGIES], default="solve")
    parser.add_argument("--effort", type=float, default=1.0, help="of solve; less is faster")
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--latency-price", type=float, default=1.0)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument(
        "--split-rows", action="store_true", help="split kernels around norms, softmax, ... too"
    )
    parser.add_argument("--limit", type=int, default=24)
    options = parser.parse_args()
    strategies = {"solve": partial(solve, effort=options.effort), **STRATEGIES}
    device = find_device(options.device)
    found = []
    for name in options.only:
        found.append(study(name, device, strategies[options.strategy], options))
        last = found[-1]
        gained = f"{last.fusion.gain:,.1f} gained; {last.solved} solved, the slowest in {last.slowest:.1f} s"
        print(f"{name}: {gained}", flush=True)
    print_found(found)


if __name__ == "__main__":
    main()
