"""Print the models of FlashMem's evaluation as torchedge sees them: `python benchmarks/streaming_models.py`.

Parameters, multiply-adds and layers beside its Table 6, what capturing them takes, and how the figures of an
Adreno 750 follow from its Tables 1 and 7. `--only NAME ...` takes some models. Needs torchvision,
transformers, diffusers and vit-pytorch; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass, replace

from torchedge.devices import find_device
from torchedge.streaming.capacities import make_instance
from torchedge.streaming.layering import lay_out
from torchedge.streaming.rates import estimate_latencies, roofline_of
from torchedge.tracing.capturing import capture
from torchedge.tracing.paper_models import PAPER_MODELS
from torchedge.tracing.sources import load_model

DEVICE = "adreno-750"
TABLE_6: dict[str, tuple[float, float, int]] = {
    "gpt-neo-small": (164, 16, 606),
    "gpt-neo-1.3b": (1419, 170, 1110),
    "gpt-neo-2.7b": (2781, 342, 1446),
    "resnet-50": (25.6, 4.1, 141),
    "sam-2": (215, 218, 1668),
    "vit": (103, 21, 819),
    "deepvit": (204, 42, 1395),
    "sd-unet": (860, 78, 1271),
    "whisper-medium": (356, 55, 2026),
    "depth-anything-small": (24.3, 14, 1108),
    "depth-anything-large": (333, 180, 2007),
}
"""Parameters (millions), multiply-adds (10^9) and operator nodes."""
TABLE_7 = {
    "gpt-neo-small": 59,
    "gpt-neo-1.3b": 501,
    "resnet-50": 33,
    "sam-2": 826,
    "vit": 73,
    "deepvit": 190,
    "sd-unet": 312,
    "whisper-medium": 336,
    "depth-anything-small": 71,
    "depth-anything-large": 807,
}
"""Inference of SmartMem on the OnePlus 12 (Adreno 750), half precision, ms; "SMem Exec"."""
TABLE_1 = {
    "whisper-medium": (356, 2702, 3441),
    "gpt-neo-small": (164, 631, 2898),
    "sd-unet": (860, 4159, 17588),
}
"""Parameters (millions), load and transformation of MNN on the OnePlus 12, ms."""


@dataclass(frozen=True)
class Found:
    """What one model is: parameters (a tied one once, and at each place), MACs, nodes, layers, weights.

    MACs are those of all products, of those with weights, and of those with a weight and a bias.
    """

    name: str
    parameters: int
    untied: int
    macs: float
    weight_macs: float
    biased_macs: float
    nodes: int
    layers: int
    weights: int
    weight_bytes: int
    chunks: int
    capacity: int
    roofline_ms: float
    capture_s: float
    peak_mib: float


def inspect_model(name: str) -> Found:
    """Build, capture and lay out one model; run in a process of its own, whose peak memory counts."""
    model, _ = load_model(name)
    start = time.perf_counter()
    recorded = capture(model, mode="infer", batch_size=1)
    captured = time.perf_counter() - start
    graph, device = lay_out(recorded), find_device(DEVICE)
    instance = make_instance(graph, device)
    bare = replace(roofline_of(device), ratio=1.0)
    products = [op for op in graph.operations if op.load_class == "reusable"]
    return Found(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        untied=sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)),
        macs=sum(op.flops for op in products) / 2,
        weight_macs=sum(op.flops for op in products if op.weights) / 2,
        biased_macs=sum(op.flops for op in products if len(op.weights) > 1) / 2,
        nodes=len(recorded.ops),
        layers=len(graph.operations),
        weights=len(graph.weights),
        weight_bytes=graph.weight_bytes,
        chunks=instance.total_chunks,
        capacity=sum(layer.capacity_chunks for layer in instance.layers),
        roofline_ms=sum(estimate_latencies(graph.operations, bare)),
        capture_s=captured,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def row(*cells: object) -> None:
    """Print one row of a table: numbers with separators, one digit behind the point at most."""
    texts = [
        f"{c:,.1f}" if isinstance(c, float) else f"{c:,}" if isinstance(c, int) else str(c) for c in cells
    ]
    print(f"| {' | '.join(texts)} |")


def head(text: str) -> None:
    """Print the head of a table, its columns separated by semicolons."""
    names = [name.strip() for name in text.split(";")]
    print(f"\n| {' | '.join(names)} |\n{'|---' * len(names)}|")


def print_models(found: list[Found]) -> None:
    """Parameters, MACs and layers, each beside Table 6's."""
    head("model; M parameters; tied counted twice; Table 6; G MACs; with weights; with a bias; Table 6; "
         "nodes captured; layers; Table 6")  # fmt: skip
    for f in found:
        size, macs, layers = TABLE_6.get(f.name, ("-",) * 3)
        counted = [amount / 1e9 for amount in (f.macs, f.weight_macs, f.biased_macs)]
        row(f.name, f.parameters / 1e6, f.untied / 1e6, size, *counted, macs, f.nodes, f.layers, layers)


def print_costs(found: list[Found]) -> None:
    """What capture takes, and the size of the problem that the planner is given."""
    head("model; capture, s; peak memory, MiB; weights; MiB in half precision; chunks; capacity, chunks; "
         "latency, ms")  # fmt: skip
    ratio = roofline_of(find_device(DEVICE)).ratio
    for f in found:
        row(f.name, f.capture_s, round(f.peak_mib), f.weights, round(f.weight_bytes / 2**20), f.chunks,
            f.capacity, round(f.roofline_ms * ratio))  # fmt: skip


def print_ratio(found: list[Found]) -> None:
    """How inference_time_ratio follows from Table 7."""
    head(f"model; roofline of {DEVICE}, ms; SmartMem in Table 7, ms; ratio")
    ratios = []
    for f in found:
        if f.name in TABLE_7:
            ratios.append(TABLE_7[f.name] / f.roofline_ms)
            row(f.name, f.roofline_ms, TABLE_7[f.name], f"{ratios[-1]:.2f}")
    if ratios:
        print(f"\ninference_time_ratio: median {statistics.median(ratios):.2f}, "
              f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


def print_rates() -> None:
    """How the rates of a preloading framework follow from Table 1, with two bytes a parameter."""
    loads = [2e6 * count / (1e6 * load) for count, load, _ in TABLE_1.values()]
    transforms = [2e6 * count / (1e6 * transform) for count, _, transform in TABLE_1.values()]
    head("model; MNN's load, GB/s; its transformation, GB/s")
    for name, load, transform in zip(TABLE_1, loads, transforms, strict=True):
        row(name, f"{load:.3f}", f"{transform:.3f}")
    print(f"\nweight_load_gb_s: median {statistics.median(loads):.3f}; "
          f"weight_transform_gb_s: median {statistics.median(transforms):.3f}")  # fmt: skip


def main() -> None:
    """Look at every model in a fresh process and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PAPER_MODELS), default=list(PAPER_MODELS))
    names = parser.parse_args().only
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(inspect_model, names, chunksize=1)
    print_models(found)
    print_costs(found)
    print_ratio(found)
    print_rates()


if __name__ == "__main__":
    main()
