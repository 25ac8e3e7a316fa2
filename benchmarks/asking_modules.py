"""Compare predicted memory of modules that ask for batch and device with a real GPU's.

Run `python benchmarks/asking_modules.py --device nvidia-h200 --out rows.csv` on a machine with that GPU.
Each seed is a module with branches on batch size and device, nested autocast, casts, checkpoints, hooks and
operators that autocast runs in float32. One process a row takes four training steps; the script predicts the
same step first. Rows in the file are not measured again; the table comes last. Without CUDA the rows are
counts of a fake run on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
from pathlib import Path

import oracle_path  # noqa: F401 - for oracles
import torch
from oracles.asking_modules import Asking, drawn
from oracles.fake_cpu import run_training_on_fake_cpu

import torchedge

WIDTH = 256
FIELDS = ("seed", "batch", "source", "predicted_mib", "measured_mib", "operators")


def loss(output: torch.Tensor) -> torch.Tensor:
    """Return a scalar to differentiate."""
    return output.float().square().sum()


def measured_mib(seed: int, batch: int) -> float:
    """Return the peak of allocated memory of training steps on the GPU, after two steps."""
    model = Asking(drawn(seed, wide=True), WIDTH, asks=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(batch, WIDTH, device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def counted_mib(seed: int, batch: int) -> float:
    """Return the peak of live memory of the module as it runs on CUDA, counted on the CPU."""
    with torch.device("meta"):
        model = Asking(drawn(seed, wide=True), WIDTH, asks=False)
        x = torch.empty(batch, WIDTH)
    run = run_training_on_fake_cpu(
        model, ((x,), {}), loss, lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    )
    return run.peak / 2**20


def run_one(seed: int, batch: int, device: str, row: dict) -> None:
    """Predict and measure one module; fills `row`."""
    with torch.device("meta"):
        model = Asking(drawn(seed, wide=True), WIDTH, asks=True)
        x = torch.empty(batch, WIDTH)
    cuda = torch.cuda.is_available()  # without it: no workspaces of CUDA's libraries
    predicted = torchedge.simulate(
        model, batch, device if cuda else None, example=x, loss=loss, optimizer="sgd-momentum"
    )
    row.update(
        seed=seed,
        batch=batch,
        source="cuda" if cuda else "count",
        predicted_mib=predicted.allocated_mib if cuda else predicted.live_mib,
        measured_mib=measured_mib(seed, batch) if cuda else counted_mib(seed, batch),
        operators=len(predicted.tape.owners),
    )


def main() -> int:
    """Measure the rows that the file lacks, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="nvidia-h200", help="profile to predict for")
    parser.add_argument("--seeds", default="0:20", help="seeds of modules, FIRST:LAST+1")
    parser.add_argument("--batch-sizes", default="16,4096")
    parser.add_argument("--out", type=Path, default=Path("asking_modules.csv"))
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    batches = [int(batch) for batch in arguments.batch_sizes.split(",")]
    rows = list(csv.DictReader(arguments.out.open())) if arguments.out.exists() else []
    known = {(int(row["seed"]), int(row["batch"])) for row in rows}
    context = multiprocessing.get_context("spawn")
    failed = []
    with context.Manager() as manager:
        for seed, batch in [(s, b) for s in range(first, end) for b in batches if (s, b) not in known]:
            row = manager.dict()
            worker = context.Process(target=run_one, args=(seed, batch, arguments.device, row))
            worker.start()
            worker.join(timeout=180)
            if worker.is_alive():
                worker.kill()
            if not row:
                failed.append((seed, batch))
                continue
            rows.append({key: str(row[key]) for key in FIELDS})
            with arguments.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
    errors = []
    print("| seed | batch | predicted MiB | measured MiB | error |\n|---|---|---|---|---|")
    for row in rows:
        predicted, measured = float(row["predicted_mib"]), float(row["measured_mib"])
        errors.append(100 * (predicted / measured - 1))
        print(f"| {row['seed']} | {row['batch']} | {predicted:.1f} | {measured:.1f} | {errors[-1]:+.1f} % |")
    if errors:
        magnitudes = [abs(error) for error in errors]
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "count"
        print(
            f"{device}, torch {torch.__version__}: mean absolute error {statistics.mean(magnitudes):.2f} %, "
            f"median {statistics.median(magnitudes):.2f} %, worst {max(magnitudes):.2f} %, "
            f"within 2 %: {sum(m <= 2 for m in magnitudes)} of {len(errors)}; failed: {failed or 'none'}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
