"""Lower and plan FlashMem's models, predict their runs, and print time, memory and proof beside the targets.

    python benchmarks/streaming_plans.py                                    # all models
    python benchmarks/streaming_plans.py --models gpt-neo-2.7b llama-2-70b --precision float16
    python benchmarks/streaming_plans.py --models vit --memory-limit 100MiB --json plans.json
    python benchmarks/streaming_plans.py --harder --models gpt-neo-2.7b sd-unet whisper-medium llama-2-70b

Each model is built on the meta device, lowered for the device (default: Adreno 750) and planned (chunks of
256 KiB, lambda 0.9, M_peak 500 MiB), in a process of its own, whose peak memory is printed. The second table
compares the predicted run with preloading everything and with the naive strategies of the paper's Fig. 9.
`--harder` takes a device on which launches leave less room for loads. `--instances FOLDER` keeps the overlap
problems. Needs torchvision, transformers, diffusers and vit-pytorch.
The exit status is 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import apart, options_of, print_rows

from torchedge.devices import find_device
from torchedge.storage import write_json

MODELS = (
    *("gpt-neo-small", "gpt-neo-1.3b", "gpt-neo-2.7b", "resnet-50", "sam-2", "vit", "deepvit", "sd-unet"),
    *("whisper-medium", "depth-anything-small", "depth-anything-large"),
    *("vit-8b", "llama-2-13b", "llama-2-70b"),
)
SECONDS = {"gpt-neo-2.7b": 15.0, "llama-2-70b": 60.0}
"""From the module on the meta device to the plan, on two cores."""
MOST_MIB = 6144
MIB = 2**20
NAIVE = ("always-next", "same-type")
HARDER = {
    "peak_fp32_gflops": 600.0,
    "bandwidth_gb_s": 40.0,
    "unified_to_texture_gb_s": 20.0,
    "launch_overhead_us": 15.0,
    "inference_time_ratio": 1.0,
}
"""Figures of a device on which capacities are harder to fill well."""


@dataclass(frozen=True)
class Planned:
    """One model: sizes, seconds, its plan, and runs predicted (ms, bytes) by strategy, "plan" among them."""

    model: str
    launches: int
    weights: int
    weight_bytes: int
    chunks: int
    lower_s: float
    plan_s: float
    processor_s: float
    status: str
    gap: float | None
    relaxation: float
    memory_mib: float
    latency_ms: dict[str, float]
    allocated: dict[str, int]
    initialisation_ms: float
    waiting_ms: float


def plan_model(name: str, arguments: argparse.Namespace) -> Planned:
    """Lower and plan a model, then predict it by every strategy."""
    from torchedge.lowering.inference import lower_model
    from torchedge.streaming.instances import write_instance
    from torchedge.streaming.planning import plan_program
    from torchedge.streaming.plans import STRATEGIES
    from torchedge.streaming.schedules import make_schedule
    from torchedge.tracing.sources import load_model

    device = find_device(arguments.device)
    if arguments.harder:
        harder = {key: replace(device.figures[key], value=value) for key, value in HARDER.items()}
        device = replace(device, figures={**device.figures, **harder})
    model, _ = load_model(name)
    start, processor = time.perf_counter(), time.process_time()
    program = lower_model(model, device, precision=arguments.precision, name=name)
    lowered = time.perf_counter()
    plan = plan_program(program, device, memory_limit=arguments.memory_limit)
    planned, processor = time.perf_counter(), time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    runs = {"plan": plan.timeline, "preload-all": plan.preloading}
    for strategy in NAIVE:
        naive = STRATEGIES[strategy](plan.problem)
        schedule = make_schedule(program, plan.problem, naive, plan.rates.staging_bytes)
        runs[strategy] = plan.predict(naive, schedule)
    if arguments.instances:
        write_instance(arguments.instances / f"{name}.json", plan.problem)
    return Planned(
        model=name,
        launches=len(program.launches),
        weights=len(plan.problem.weights),
        weight_bytes=plan.weight_bytes,
        chunks=plan.problem.total_chunks,
        lower_s=lowered - start,
        plan_s=planned - lowered,
        processor_s=processor,
        status=plan.status,
        gap=plan.plan.gap,
        relaxation=plan.relaxation,
        memory_mib=peak,
        latency_ms={key: run.latency_ms for key, run in runs.items()},
        allocated={key: run.allocated_bytes for key, run in runs.items()},
        initialisation_ms=plan.timeline.initialisation_ms,
        waiting_ms=plan.timeline.stalls.waiting,
    )


def print_plans(plans: Sequence[Planned]) -> None:
    """Print what planning took, and what it proved."""
    titles = ("model", "launches", "weights", "MiB", "chunks", "lower, s", "plan, s")
    titles += ("of the processor, s", "status", "gap, %", "relaxed", "peak memory, MiB")
    rows = [
        (
            *(p.model, f"{p.launches:,}", f"{p.weights:,}", f"{p.weight_bytes / MIB:,.0f}", f"{p.chunks:,}"),
            *(f"{p.lower_s:.1f}", f"{p.plan_s:.1f}", f"{p.processor_s:.1f}", p.status),
            *("-" if p.gap is None else f"{100 * p.gap:.2f}", f"{p.relaxation:.3g}", f"{p.memory_mib:,.0f}"),
        )
        for p in plans
    ]
    print_rows(titles, rows)


def print_runs(plans: Sequence[Planned]) -> None:
    """Print predicted latency and memory, and how many times more the other strategies take."""
    titles = ("model", "latency, ms", "initialisation", "waiting", "allocated, MiB")
    others = ("preload-all", *NAIVE)
    titles += tuple(f"{key}: {what}, times" for key in others for what in ("latency", "memory"))
    rows = []
    times: dict[str, list[float]] = {}
    for p in plans:
        cells = [p.model, f"{p.latency_ms['plan']:,.0f}", f"{p.initialisation_ms:,.0f}"]
        cells += [f"{p.waiting_ms:,.0f}", f"{p.allocated['plan'] / MIB:,.0f}"]
        for key in others:
            for what in (p.latency_ms, p.allocated):
                times.setdefault(f"{key} {what is p.allocated}", []).append(what[key] / what["plan"])
                cells.append(f"{what[key] / what['plan']:.2f}")
        rows.append(cells)
    means = [f"{statistics.geometric_mean(column):.2f}" for column in times.values()]
    print()
    print_rows(titles, [*rows, ["geometric mean", "", "", "", "", *means]])


def judge(plans: Sequence[Planned]) -> bool:
    """Print the targets and whether they are met."""
    checks = []
    for p in plans:
        if p.model in SECONDS:
            took = p.lower_s + p.plan_s
            text = f"{p.model} from the module to the plan: {took:.1f} s "
            text += f"({p.processor_s:.1f} s of the processor); target {SECONDS[p.model]:g} s"
            checks.append((text, took <= SECONDS[p.model]))
    largest = max(plans, key=lambda p: p.memory_mib)
    text = f"peak memory: {largest.memory_mib:,.0f} MiB ({largest.model}); target {MOST_MIB:,} MiB"
    checks.append((text, largest.memory_mib <= MOST_MIB))
    print()
    for text, met in checks:
        print(f"- {text}: {'met' if met else 'MISSED'}")
    return all(met for _, met in checks)


def main() -> None:
    """Plan, print the tables, judge them."""
    parser = options_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--harder", action="store_true", help="take a device of lower capacities")
    parser.add_argument("--precision", choices=["float32", "float16"], default="float16")
    parser.add_argument("--memory-limit", metavar="SIZE", help="all that a run allocates")
    parser.add_argument("--instances", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    if arguments.instances:
        arguments.instances.mkdir(parents=True, exist_ok=True)
    plans = []
    for place, name in enumerate(arguments.models, 1):
        print(f"{place} of {len(arguments.models)}: {name}", file=sys.stderr, flush=True)
        # Forked: nothing heavy is imported before, so that the peak is its own.
        planned = apart(plan_model, name, arguments, method="fork")
        if isinstance(planned, str):
            print(f"{name}: {planned}", file=sys.stderr)
        else:
            plans.append(planned)
    if not plans:
        sys.exit(1)
    print_plans(plans)
    print_runs(plans)
    if arguments.json:
        write_json(arguments.json, {"plans": [asdict(planned) for planned in plans]})
    sys.exit(not judge(plans) or len(plans) < len(arguments.models))


if __name__ == "__main__":
    main()
