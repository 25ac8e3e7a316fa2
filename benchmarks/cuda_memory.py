"""Compare simulated allocated and reserved memory with a real GPU's.

Run `python benchmarks/cuda_memory.py --out table.csv`.
For each network a fresh process runs four training steps (forward, cross entropy, zero_grad, backward, SGD
with momentum) on the GPU and records the peaks of the last two; the library simulates the same step. Needs
CUDA, torchvision and timm.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from harness import apart, options_of

if TYPE_CHECKING:
    import torch

NETWORKS = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mnasnet1_0",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "googlenet",
    "vgg11_bn",
    "alexnet",
    "regnet_y_800mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "maxvit_t",
    "timm:deit_small_patch16_224",
    "timm:mixer_s32_224",
    "timm:poolformer_s12",
    "timm:ghostnet_100",
    "timm:resnetv2_50",
)
FIELDS = (
    "network",
    "batch",
    "allocated_mib",
    "simulated_allocated_mib",
    "reserved_mib",
    "simulated_reserved_mib",
    "step_ms",
)


def build(name: str) -> torch.nn.Module:
    """Return the network on the CPU."""
    from torchedge.tracing.vision import import_torchvision

    models = import_torchvision().models
    if name.startswith("timm:"):
        import timm

        return timm.create_model(name.removeprefix("timm:"))
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, **options)


def run_one(name: str, batch: int, profile: str | None) -> dict[str, float]:
    """Measure and simulate one network."""
    import torch

    import torchedge

    warnings.filterwarnings("ignore")
    model = build(name)
    simulated = torchedge.simulate(model, batch, input_size=(3, 224, 224), device=profile)
    device = torch.device("cuda")
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(batch, 3, 224, 224, device=device)
    y = torch.randint(0, 1000, (batch,), device=device)
    times = []
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.zero_grad()
        out = model(x)
        outs = [out] if isinstance(out, torch.Tensor) else [o for o in out if o is not None]
        del out
        loss = sum(torch.nn.functional.cross_entropy(o, y) for o in outs)
        del outs
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        "simulated_allocated_mib": simulated.allocated_mib,
        "simulated_reserved_mib": simulated.reserved_mib,
        "step_ms": statistics.median(times[2:]),
    }


def main() -> int:
    """Run every network that is not in the table yet, then print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("cuda_memory.csv"))
    parser.add_argument("--batch-sizes", default="8,32")
    parser.add_argument(
        "--device", help="profile whose constants (such as BLAS workspaces) are simulated too"
    )
    arguments = parser.parse_args()
    batches = [int(b) for b in arguments.batch_sizes.split(",")]
    done = list(csv.DictReader(arguments.out.open())) if arguments.out.exists() else []
    known = {(r["network"], int(r["batch"])) for r in done}
    for name, batch in itertools.product(NETWORKS, batches):
        if (name, batch) in known:
            continue
        row = apart(run_one, name, batch, arguments.device, seconds=120)
        if isinstance(row, str):
            print(f"{name} at {batch}: {row}", file=sys.stderr)
            continue
        done.append({"network": name, "batch": batch, **row})
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(done)
    report(done)
    return 0


def report(rows: list[dict]) -> None:
    """Print every row and the mean absolute percentage errors."""
    print(
        f"{'network':<28}{'batch':>6}{'allocated':>11}{'simulated':>11}{'%':>7}{'reserved':>10}{'simulated':>11}{'%':>7}{'ms':>9}"
    )
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for row in rows:
        line = f"{row['network']:<28}{row['batch']:>6}"
        for kind in errors:
            measured, simulated = float(row[f"{kind}_mib"]), float(row[f"simulated_{kind}_mib"])
            errors[kind].append(100 * (simulated / measured - 1))
            line += f"{measured:>11.0f}{simulated:>11.0f}{errors[kind][-1]:>7.1f}"
        print(line + f"{float(row['step_ms']):>9.1f}")
    for kind, values in errors.items():
        if values:
            mean, median = statistics.mean(map(abs, values)), statistics.median(map(abs, values))
            print(f"{kind}: mean absolute error {mean:.2f} %, median {median:.2f} %")


if __name__ == "__main__":
    sys.exit(main())
