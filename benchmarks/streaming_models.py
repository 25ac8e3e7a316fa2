"""Print FlashMem's models as torchedge lowers them: `python benchmarks/streaming_models.py`.

Parameters, multiply-adds and launches beside its Table 6, and how the figures of an Adreno 750 follow from
its Tables 1 and 7. `--only NAME ...` takes some models. Needs torchvision, transformers, diffusers and
vit-pytorch; nothing is downloaded.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from harness import apart, options_of

from torchedge.devices import find_device
from torchedge.lowering.inference import lower_model
from torchedge.streaming.rates import estimate_latencies, roofline_of
from torchedge.streaming.schedules import weights_of, works_of
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
class Lowered:
    """One model: parameters (a tied one once, and at each place), MACs, launches, weights, roofline (ms)."""

    name: str
    parameters: int
    untied: int
    macs: float
    launches: int
    kernels: int
    weights: int
    weight_bytes: int
    roofline_ms: float


def inspect_model(name: str) -> Lowered:
    """Build and lower one model, stored in half precision; kernels compute in single precision."""
    model, _ = load_model(name)
    device = find_device(DEVICE)
    program = lower_model(model, device, precision="float16")
    works, weights = works_of(program), weights_of(program, 1)
    bare = replace(roofline_of(device), ratio=1.0)
    return Lowered(
        name,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)),
        sum(work.flops for work in works if work.load_class == "reusable") / 2,
        len(program.launches),
        len(program.kernels),
        len(weights),
        sum(weight.nbytes for weight in weights),
        sum(estimate_latencies(works, bare)),
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


def print_models(models: list[Lowered]) -> None:
    """Print parameters, MACs and launches, each beside Table 6's."""
    head("model; M parameters; tied counted twice; Table 6; G MACs; Table 6; launches; operators in Table 6; "
         "kernels; weights; MiB in half precision")  # fmt: skip
    for m in models:
        size, macs, nodes = TABLE_6.get(m.name, ("-",) * 3)
        row(m.name, m.parameters / 1e6, m.untied / 1e6, size, m.macs / 1e9, macs, m.launches, nodes,
            m.kernels, m.weights, round(m.weight_bytes / 2**20))  # fmt: skip


def print_ratio(models: list[Lowered]) -> None:
    """Print how inference_time_ratio follows from Table 7."""
    head(f"model; roofline of {DEVICE}, ms; SmartMem in Table 7, ms; ratio")
    ratios = []
    for m in models:
        if m.name in TABLE_7:
            ratios.append(TABLE_7[m.name] / m.roofline_ms)
            row(m.name, m.roofline_ms, TABLE_7[m.name], f"{ratios[-1]:.2f}")
    if ratios:
        print(f"\ninference_time_ratio: median {statistics.median(ratios):.2f}, "
              f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


def print_rates() -> None:
    """Print how the rates of a preloading framework follow from Table 1, with two bytes a parameter."""
    loads = [2e6 * count / (1e6 * load) for count, load, _ in TABLE_1.values()]
    transforms = [2e6 * count / (1e6 * transform) for count, _, transform in TABLE_1.values()]
    head("model; MNN's load, GB/s; its transformation, GB/s")
    for name, load, transform in zip(TABLE_1, loads, transforms, strict=True):
        row(name, f"{load:.3f}", f"{transform:.3f}")
    print(f"\nweight_load_gb_s: median {statistics.median(loads):.3f}; "
          f"weight_transform_gb_s: median {statistics.median(transforms):.3f}")  # fmt: skip


def main() -> None:
    """Look at every model in a fresh process and print the tables."""
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PAPER_MODELS), default=list(PAPER_MODELS))
    names = parser.parse_args().only
    models = [apart(inspect_model, name) for name in names]
    print_models(models)
    print_ratio(models)
    print_rates()


if __name__ == "__main__":
    main()
