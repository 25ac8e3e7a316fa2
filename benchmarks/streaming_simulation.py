"""Simulate overlap plans of FlashMem's models on an Adreno 750: `python benchmarks/streaming_simulation.py`.

Plans of `--strategy` beside preloading everything, always-next and same-type (its Tables 7 and 8, Fig. 9),
then what the assumptions do: the disk, reading ahead, what loads beyond a layer's capacity cost, weights that
lie prepared in the file, loads that are kernels of their own. Last, what the paper's own measurements say of
its rates. `--figures FOLDER` also draws. `--only NAME ...` takes some models. Needs torchvision,
transformers, diffusers and vit-pytorch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from overlap_strategies import STRATEGIES
from streaming_models import TABLE_6, TABLE_7, head, row

from torchedge.devices import find_device
from torchedge.streaming.capacities import make_instance
from torchedge.streaming.figures import draw_comparison, draw_gantt, draw_memory
from torchedge.streaming.instances import MEBIBYTE, Instance
from torchedge.streaming.layering import lay_out
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import Rates, Slowdown, derive_rates, framework_rates
from torchedge.streaming.simulation import RunTimeline, simulate_plan
from torchedge.streaming.solving import solve
from torchedge.tracing.capturing import capture
from torchedge.tracing.sources import load_model

DEVICE = "adreno-750"
NAIVE = ("always-next", "same-type")
PLANNERS: dict[str, Callable[[Instance], OverlapPlan]] = {"solver": solve, **STRATEGIES}
DRAWN = ("vit", "sd-unet", "whisper-medium")
OURS = {
    "gpt-neo-small": (577, 260),
    "gpt-neo-1.3b": (3086, 554),
    "gpt-neo-2.7b": (7567, 1132),
    "resnet-50": (473, 83),
    "sam-2": (1267, 150),
    "vit": (347, 83),
    "deepvit": (785, 165),
    "sd-unet": (3212, 838),
    "whisper-medium": (1565, 240),
    "depth-anything-small": (496, 86),
    "depth-anything-large": (1382, 246),
}
"""FlashMem's integrated latency (Table 7, ms) and average memory (Table 8, MB) on the OnePlus 12."""


@dataclass(frozen=True)
class Case:
    """A model: its instance, its activations, and plans by strategy."""

    instance: Instance
    activations: tuple[int, ...]
    plans: dict[str, OverlapPlan]

    def run(self, strategy: str, rates: Rates) -> RunTimeline:
        """Simulate one of its plans."""
        return simulate_plan(self.instance, self.plans[strategy], rates, self.activations)

    def bare(self) -> Case:
        """The same where no layer can load anything beside its work."""
        layers = tuple(replace(layer, capacity_chunks=0) for layer in self.instance.layers)
        return replace(self, instance=replace(self.instance, layers=layers))


def make_case(name: str, planner: Callable[[Instance], OverlapPlan]) -> Case:
    """Capture a model and plan it by every strategy of this comparison."""
    model, _ = load_model(name)
    graph = lay_out(capture(model, mode="infer", batch_size=1))
    instance = replace(make_instance(graph, find_device(DEVICE)), name=name)
    plans = {key: STRATEGIES[key](instance) for key in (*NAIVE, "preload-all")}
    return Case(instance, graph.activation_bytes, plans | {"ours": planner(instance)})


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(values)


def print_comparison(cases: list[Case], rates: Rates, framework: Rates) -> None:
    """Latency and memory of each model, and how many times more preloading everything takes."""
    head("model; latency, ms; of it initialisation; waiting for the disk; slowed by loads; "
         "FlashMem, ms; average memory, MiB; peak, MiB; FlashMem average, MB; preload-all, ms; "
         "its average memory, MiB; latency, times; average memory, times; peak, times")  # fmt: skip
    ratios = []
    for case in cases:
        ours, whole = case.run("ours", rates), case.run("preload-all", framework)
        a, b = ours.memory, whole.memory
        ratios.append(
            (
                whole.latency_ms / ours.latency_ms,
                b.average.total / a.average.total,
                b.peak.total / a.peak.total,
            )
        )
        theirs = OURS.get(case.instance.name, ("-", "-"))
        row(case.instance.name, round(ours.latency_ms), round(ours.initialisation_ms),
            round(ours.stalls.disk), round(ours.stalls.transform), theirs[0],
            round(a.average.total / MEBIBYTE), round(a.peak.total / MEBIBYTE), theirs[1],
            round(whole.latency_ms), round(b.average.total / MEBIBYTE), *ratios[-1])  # fmt: skip
    row("geometric mean", *[""] * 10, *(geomean(column) for column in zip(*ratios, strict=True)))


def slower(cases: list[Case], rates: Rates, naive: Rates) -> list[str]:
    """How many times the latency of ours the naive strategies take: geometric mean and the most."""
    told = []
    for strategy in NAIVE:
        found = {
            case.instance.name: case.run(strategy, naive).latency_ms / case.run("ours", rates).latency_ms
            for case in cases
        }
        told += spread(found)
    return told


def spread(times: dict[str, float]) -> list[str]:
    """Tell the geometric mean and the most of a number for each model."""
    most = max(times, key=times.__getitem__)
    return [f"{geomean(list(times.values())):.2f}", f"{times[most]:.2f} ({most})"]


def print_naive(cases: list[Case], rates: Rates) -> None:
    """The naive strategies under the assumptions and under others (FlashMem, Fig. 9: up to 4.3 and 2.4)."""
    head("disk, GB/s; overloads, times; reading ahead; always-next; at most; same-type; at most")
    for disk in (rates.disk_read.value, 1.0):
        for times in (1, 4, 16):
            assumed = replace(
                rates,
                disk_read=replace(rates.disk_read, value=disk),
                slowdowns={k: replace(s, overload=s.overload * times) for k, s in rates.slowdowns.items()},
            )
            row(disk, times, "all alike", *slower(cases, assumed, assumed))
            row(disk, times, "naive: none", *slower(cases, assumed, replace(assumed, staging_bytes=0)))


def print_separate(cases: list[Case], rates: Rates) -> None:
    """The naive strategies where no kernel was rewritten to load: each load is a kernel of its own.

    Layers and transforms then run one after the other, and the loads of one layer are read when those before
    have moved. The first rate is that of existing frameworks' transforms. Told is how many times as long they
    take as our plans, simulated, and as FlashMem, measured.
    """
    head("separate transforms, GB/s; always-next; at most; same-type; at most; "
         "always-next, of FlashMem's; at most; same-type, of FlashMem's; at most")  # fmt: skip
    for gb_s in (rates.weight_transform.value, 0.5, 1.0, 2.0, rates.inline_load.value):
        kernels = replace(
            rates,
            inline_load=replace(rates.inline_load, value=gb_s),
            slowdowns=dict.fromkeys(rates.slowdowns, Slowdown(threshold=0, overload=1)),
            staging_bytes=0,
        )
        simulated, measured = [], []
        for strategy in NAIVE:
            taken = {case.instance.name: case.bare().run(strategy, kernels).latency_ms for case in cases}
            ours = {case.instance.name: case.run("ours", rates).latency_ms for case in cases}
            simulated += spread({name: ms / ours[name] for name, ms in taken.items()})
            measured += spread({name: ms / OURS[name][0] for name, ms in taken.items()})
        row(f"{gb_s:g}", *simulated, *measured)


def print_staging(cases: list[Case], rates: Rates, framework: Rates) -> None:
    """What reading ahead does: how many times preloading everything takes, over all models."""
    head("staging limit, MiB; prepared weights; latency, times; average memory, times; peak, times")
    for prepared in (False, True):
        for mib in (0, 4, 16, 64, 256, None):
            limited = derive_rates(
                find_device(DEVICE), staging_bytes=None if mib is None else mib * MEBIBYTE, prepared=prepared
            )
            runs = [(case.run("preload-all", framework), case.run("ours", limited)) for case in cases]
            row("none" if mib is None else mib, "yes" if prepared else "no",
                geomean([a.latency_ms / b.latency_ms for a, b in runs]),
                geomean([a.memory.average.total / b.memory.average.total for a, b in runs]),
                geomean([a.memory.peak.total / b.memory.peak.total for a, b in runs]))  # fmt: skip


def print_published() -> None:
    """What FlashMem's own time beyond SmartMem's inference says: a start and a rate (least squares)."""
    names = [name for name in OURS if name in TABLE_7]
    nbytes = np.array([2e6 * TABLE_6[name][0] for name in names])
    beyond = np.array([OURS[name][0] - TABLE_7[name] for name in names], float)
    start, per_byte = np.linalg.lstsq(np.stack([np.ones(len(names)), nbytes], 1), beyond, rcond=None)[0]
    print(f"\nFlashMem, Table 7, integrated latency less SmartMem's inference, {len(names)} models: "
          f"{start:.0f} ms and {1e-6 / per_byte:.2f} GB/s of weights")  # fmt: skip


def draw(cases: list[Case], rates: Rates, framework: Rates, folder: Path) -> None:
    """Write pictures of some models."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases if case.instance.name in DRAWN] or cases[:1]
    runs = []
    for case in chosen:
        ours = case.run("ours", rates)
        runs += [ours, *(case.run(key, rates) for key in NAIVE), case.run("preload-all", framework)]
        draw_memory(ours).savefig(folder / f"memory-{case.instance.name}.png")
        draw_gantt(ours).savefig(folder / f"gantt-{case.instance.name}.png")
    draw_comparison(runs).savefig(folder / "strategies.png")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--strategy", choices=list(PLANNERS), default="solver")
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()
    rates = derive_rates(find_device(DEVICE))
    framework = framework_rates(find_device(DEVICE))
    cases = [make_case(name, PLANNERS[given.strategy]) for name in given.only]
    print_comparison(cases, rates, framework)
    print_staging(cases, rates, framework)
    print_naive(cases, rates)
    print_separate(cases, rates)
    print_published()
    if given.figures:
        draw(cases, rates, framework, given.figures)


if __name__ == "__main__":
    main()
