"""Prints the memory of each differentiable operator of PyTorch: simulated, and by an independent count.

python benchmarks/operator_memory.py [--operators NAME ...] [--samples 3] [--size 64] [--all]

The operators and their samples are those of PyTorch's own tests (`op_db`), with sides of `--size`. The count
runs the step in eager PyTorch on meta tensors and follows every storage (tests/oracles/eager_memory.py).
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import oracle_path  # noqa: F401 - for oracles
import torch
from oracles.operator_memory import compare, differentiable_operators, largest, samples_of


def main() -> None:
    """Print one line an operator (all, or those beyond 2 %), and how many are within 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--operators", nargs="*", help="names of op_db; all differentiable ones by default")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--all", action="store_true", help="print every operator")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, sides of {options.size}")
    print(f"{'operator':44s} {'count MiB':>10s} {'simulated':>10s} {'error %':>8s}")
    worst, failed = [], []
    for info in differentiable_operators(options.operators):
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        try:
            rows = [
                compare(info, sample) for sample in largest(samples_of(info, options.size), options.samples)
            ]
        except Exception as error:
            failed.append(name)
            if options.all:
                print(f"{name:44s} {type(error).__name__}: {str(error)[:80]}".replace("\n", " "), flush=True)
            continue
        rows = [row for row in rows if row is not None]
        if not rows:
            failed.append(name)
            continue
        count, simulated = max(rows, key=lambda row: abs(row[1] / row[0] - 1))
        worst.append(100 * (simulated / count - 1))
        if options.all or abs(worst[-1]) > 2:
            print(f"{name:44s} {count / 2**20:10.3f} {simulated / 2**20:10.3f} {worst[-1]:8.1f}", flush=True)
    errors = np.abs(np.asarray(worst))
    print(f"{np.sum(errors <= 2)} of {len(errors)} operators within 2 %; largest error {errors.max():.1f} %")
    print(f"{len(failed)} not compared (no sample runs on meta tensors as one training step)")


if __name__ == "__main__":
    main()
