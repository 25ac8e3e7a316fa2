"""Prints the memory of each differentiable operator of PyTorch: simulated, and by two independent counts.

python benchmarks/operator_memory.py [--operators NAME ...] [--samples 2] [--size 64]

The operators and their samples are those of PyTorch's own tests (`op_db`), with sides of `--size` where they
have names there. One count runs the step in eager PyTorch on meta tensors and follows every storage; the
other runs it on the CPU and reads the allocations that PyTorch's profiler records
(tests/oracles/operator_memory.py). An error is that against the closer count, beyond 4 KiB.
"""

from __future__ import annotations

import gc
import resource
import warnings
from typing import Any

import numpy as np
import torch
from harness import options_of
from oracles.operator_memory import Comparison, compare, differentiable_operators, largest, samples_of

SIZES = (64, 16, 5)
"""Sides to try: some samples have five dimensions."""
ADDRESS_SPACE = 6 * 2**30


def main() -> None:
    """Print one line an operator beyond 2 %, and how many are within it."""
    parser = options_of(__doc__, samples=2, size=64)
    parser.add_argument("--operators", nargs="*", help="names of op_db; all differentiable ones by default")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, sides of {options.size}")
    print(f"{'operator':42s} {'MiB on meta':>11s} {'on the CPU':>10s} {'simulated':>10s} {'error %':>8s}")
    errors, failed = [], []
    for info in differentiable_operators(options.operators):
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        row = compared(info, options.size, options.samples)
        if row is None:
            failed.append(name)
            continue
        errors.append(100 * row.error)
        if abs(errors[-1]) > 2:
            cpu = "-" if row.allocated is None else f"{row.allocated / 2**20:.3f}"
            counts = f"{row.counted / 2**20:11.3f} {cpu:>10s} {row.simulated / 2**20:10.3f}"
            print(f"{name:42s} {counts} {errors[-1]:8.1f}", flush=True)
    if not errors:
        parser.error("no operator was compared; expected names of op_db, such as nn.functional.relu")
    off = np.abs(np.asarray(errors))
    print(f"{np.sum(off <= 2)} of {len(off)} operators within 2 %; largest error {off.max():.1f} %")
    print(f"{len(failed)} not compared (no sample runs on meta tensors as one training step)")


def compared(info: Any, size: int, samples: int) -> Comparison | None:  # noqa: ANN401 - of op_db
    """Return an operator's worst sample at the largest sides that memory allows; None: there is none."""
    for side in [size, *[s for s in SIZES if s < size]]:
        try:
            rows = [compare(info, sample) for sample in largest(samples_of(info, side), samples)]
        except Exception:  # no step, or out of memory
            gc.collect()
            continue
        found = [row for row in rows if row is not None]
        return max(found, key=lambda row: abs(row.error), default=None)
    return None


if __name__ == "__main__":
    main()
