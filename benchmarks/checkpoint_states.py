"""Time what a checkpoint costs the host, with and without the states of random generators.

    python benchmarks/checkpoint_states.py [--device cuda]

A checkpoint around one small layer runs forward and backward, on an idle device and behind a long queue of
work: a checkpoint that waited for the device would take as long as the queue. Prints µs of the host for each.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch.utils.checkpoint import checkpoint

RUNS = 300


def host_us(device: str, queue: bool, **options: bool) -> tuple[float, float]:
    """Return the median µs of the host of a forward call and of a backward call."""
    layer = torch.nn.Linear(64, 64, device=device)
    x = torch.randn(8, 64, device=device, requires_grad=True)
    load = torch.randn(4096 if queue and device == "cuda" else 8, 64, device=device)
    wide = torch.randn(64, 65536 if queue and device == "cuda" else 8, device=device)
    forward, backward = [], []
    for _ in range(RUNS):
        if queue:
            load @ wide
        begun = time.perf_counter()
        y = checkpoint(layer, x, **options) if options else layer(x)
        middle = time.perf_counter()
        y.sum().backward()
        end = time.perf_counter()
        forward.append(middle - begun)
        backward.append(end - middle)
        if device == "cuda":
            torch.cuda.synchronize()
    return 1e6 * sorted(forward)[RUNS // 2], 1e6 * sorted(backward)[RUNS // 2]


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    print(f"PyTorch {torch.__version__} on {device}; median µs of the host: forward, backward")
    rows: dict[str, dict[str, bool]] = {"no checkpoint": {}}
    for reentrant in (False, True):
        for keeps in (True, False):
            name = f"{'reentrant' if reentrant else 'not reentrant'}, preserve_rng_state={keeps}"
            rows[name] = {"use_reentrant": reentrant, "preserve_rng_state": keeps}
    for queue in (False, True):
        for name, options in rows.items():
            forward, backward = host_us(device, queue, **options)
            print(f"{'busy' if queue else 'idle':5} {name:44}{forward:9.1f}{backward:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
