"""Plan FlashMem's models at its setting, and hold what comes out against what was asked for.

    python benchmarks/streaming_plans.py                                    # all models
    python benchmarks/streaming_plans.py --models gpt-neo-1.3b vit --ratio 1 --json plans.json

Each model is captured on the meta device, laid out for the Adreno 750 in half precision (chunks of 256 KiB,
lambda 0.9, unfused kernels), planned `--solves` times with M_peak of 500 MiB and as often without, and its
plans go through the verifier: all in a process of the model's own, whose peak memory is told. Seconds are
medians, of the clock and of the processor: the clock tells more on a machine that does other work. `--ratio`
takes the place of the device's `inference_time_ratio`: 1 is a device that reaches its nominal rate, whose
layers take less time and can load less. `--instances FOLDER` keeps what was planned with M_peak, for
`benchmarks/streaming_direct.py`. Needs torchvision, transformers, diffusers and vit-pytorch. The exit
status is 1 where a requirement is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from torchedge.devices import Device, find_device
from torchedge.storage import write_json

DEVICE = "adreno-750"
MODELS = (
    *("gpt-neo-small", "gpt-neo-1.3b", "gpt-neo-2.7b", "resnet-50", "sam-2", "vit", "deepvit", "sd-unet"),
    *("whisper-medium", "depth-anything-small", "depth-anything-large"),
    *("vit-8b", "llama-2-13b", "llama-2-70b"),
)
SMALL = 3e9
"""Parameters below which planning shall take 2 s at most."""
TITLES = (
    *("model", "layers", "weights", "chunks", "capture, s", "status", "objective", "lower bound", "gap, %"),
    *("preloaded, MiB", "peak in flight, MiB", "solve, s", "of the processor, s", "peak memory, MiB"),
)


@dataclass(frozen=True)
class Solved:
    """One instance planned: its size, its plan, what planning it took. Sizes in MiB, times in s."""

    model: str
    parameters: int
    m_peak_mib: int | None
    layers: int
    weights: int
    chunks: int
    capture_s: float
    status: str
    objective: float
    lower_bound: float
    gap: float
    preloaded_mib: float
    peak_mib: float
    solve_s: float
    processor_s: float
    repeatable: bool
    memory_mib: float = 0.0


def chosen_device(ratio: float | None) -> Device:
    """Return the device, with another ratio of its layers' latencies to the roofline where one is given."""
    device = find_device(DEVICE)
    if ratio is None:
        return device
    name = "inference_time_ratio"
    figure = replace(device.figure(name), value=ratio, source="benchmarks/streaming_plans.py --ratio")
    return replace(device, figures={**device.figures, name: figure})


def plan_model(name: str, given: argparse.Namespace) -> list[Solved]:
    """Capture, lay out, plan with and without M_peak, verify."""
    from torchedge.streaming.capacities import M_PEAK_BYTES, make_instance
    from torchedge.streaming.instances import MEBIBYTE, write_instance
    from torchedge.streaming.layering import lay_out
    from torchedge.streaming.solving import solve
    from torchedge.streaming.verification import check_plan
    from torchedge.tracing.capturing import capture
    from torchedge.tracing.sources import load_model

    model, _ = load_model(name)
    start = time.perf_counter()
    graph = lay_out(capture(model, mode="infer", batch_size=1))
    captured = time.perf_counter() - start
    found = []
    for m_peak in (M_PEAK_BYTES, None):
        instance = replace(make_instance(graph, chosen_device(given.ratio), m_peak_bytes=m_peak), name=name)
        if given.instances and m_peak is not None:
            write_instance(given.instances / f"{name}.json", instance)
        plans, clock, processor = [], [], []
        for _ in range(given.solves):
            begin, used = time.perf_counter(), time.process_time()
            plans.append(solve(instance))
            clock.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        plan = plans[0]
        check_plan(instance, plan)
        assert plan.objective is not None and plan.lower_bound is not None and plan.gap is not None
        mib = instance.chunk_bytes / MEBIBYTE
        preloaded = set(plan.preload)
        found.append(
            Solved(
                model=name,
                parameters=sum(p.numel() for p in model.parameters()),
                m_peak_mib=None if m_peak is None else m_peak // MEBIBYTE,
                layers=len(instance.layers),
                weights=len(instance.weights),
                chunks=instance.total_chunks,
                capture_s=captured,
                status=plan.status,
                objective=plan.objective,
                lower_bound=plan.lower_bound,
                gap=100 * plan.gap,
                preloaded_mib=mib * sum(w.chunks for w in instance.weights if w.name in preloaded),
                peak_mib=mib * plan.peak_chunks,
                solve_s=statistics.median(clock),
                processor_s=statistics.median(processor),
                repeatable=all(other == plan for other in plans),
            )
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [replace(solved, memory_mib=peak) for solved in found]


def _report(sender: Connection, name: str, given: argparse.Namespace) -> None:
    sender.send(plan_model(name, given))


def apart(name: str, given: argparse.Namespace) -> list[Solved]:
    """Plan a model in a forked process: nothing heavy is imported before, so that the peak is its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, name, given))
    process.start()
    sender.close()
    try:
        found: list[Solved] = receiver.recv()
    except EOFError:
        sys.exit(f"planning {name} ended without a result")
    finally:
        process.join()
    return found


def print_table(found: Sequence[Solved]) -> None:
    """Print a row for each model."""
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for s in found:
        cells = (
            *(s.model, f"{s.layers:,}", f"{s.weights:,}", f"{s.chunks:,}", f"{s.capture_s:.1f}", s.status),
            *(f"{s.objective:,.1f}", f"{s.lower_bound:,.1f}", f"{s.gap:.3f}", f"{s.preloaded_mib:,.1f}"),
            *(f"{s.peak_mib:,.1f}", f"{s.solve_s:.3f}", f"{s.processor_s:.3f}", f"{s.memory_mib:,.0f}"),
        )
        print(f"| {' | '.join(cells)} |")


def judge(found: Sequence[Solved]) -> bool:
    """Print what was asked for and what came out; return whether all of it is met."""
    optimal = sum(s.status == "OPTIMAL" for s in found)
    worst = max(found, key=lambda s: s.gap)
    slowest = max(found, key=lambda s: s.solve_s)
    small = max((s for s in found if s.parameters < SMALL), key=lambda s: s.solve_s, default=None)
    largest = max(found, key=lambda s: s.parameters)
    needed = min(6, len(found))
    told = [
        (f"OPTIMAL: {optimal} of {len(found)}", f"at least {needed}", optimal >= needed),
        (f"worst gap: {worst.gap:.3f} % ({worst.model})", "at most 1 %", worst.gap <= 1),
        (f"slowest: {slowest.solve_s:.2f} s ({slowest.model})", "at most 10 s", slowest.solve_s <= 10),
        (f"peak memory of {largest.model}: {largest.memory_mib:,.0f} MiB", "at most 4,096 MiB",
         largest.memory_mib <= 4096),
        (f"every solve gave the same plan: {all(s.repeatable for s in found)}", "True",
         all(s.repeatable for s in found)),
    ]  # fmt: skip
    if small is not None:
        said = f"slowest under 3 billion parameters: {small.solve_s:.2f} s ({small.model})"
        told.insert(2, (said, "at most 2 s", small.solve_s <= 2))
    print()
    for said, asked, met in told:
        print(f"- {said}; asked for: {asked}: {'met' if met else 'MISSED'}")
    return all(met for _, _, met in told)


def main() -> None:
    """Plan, print the tables, judge them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--ratio", type=float, help=f"in place of the inference_time_ratio of {DEVICE}")
    parser.add_argument("--solves", type=int, default=3, help="of which medians are taken (default 3)")
    parser.add_argument("--instances", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    given = parser.parse_args()
    if given.instances:
        given.instances.mkdir(parents=True, exist_ok=True)
    found = []
    for place, name in enumerate(given.models, 1):
        print(f"\r{place} of {len(given.models)}: {name:<30}", end="", file=sys.stderr, flush=True)
        found += apart(name, given)
    print("\r" + " " * 50 + "\r", end="", file=sys.stderr, flush=True)
    met = []
    for m_peak in dict.fromkeys(solved.m_peak_mib for solved in found):
        print("\nwithout M_peak\n" if m_peak is None else f"\nM_peak {m_peak} MiB\n")
        own = [solved for solved in found if solved.m_peak_mib == m_peak]
        print_table(own)
        met.append(judge(own))
    if given.json:
        write_json(given.json, {"device": DEVICE, "ratio": given.ratio, "plans": [asdict(s) for s in found]})
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
