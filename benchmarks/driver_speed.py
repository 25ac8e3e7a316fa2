"""Compare training steps on two OpenCL drivers of the same hardware, in one process.

    python benchmarks/driver_speed.py intel portable          # networks at sizes that suit a processor
    python benchmarks/driver_speed.py intel portable gpt unet --rounds 9

Devices are named as in TORCHEDGE_OPENCL_DEVICE. A network is lowered once for each device, within its limits.
After a step of each that is not timed, the devices step in turn; a line has the median over the rounds of the
first one's time over the second one's, the quartiles of that ratio, and how far the losses of the first steps
are apart. The last line has the geometric mean of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from lowering_steps import NETWORKS, Case, cases, copy_of

import torchedge


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def row(case: Case, devices: list[str], rounds: int) -> tuple[list[float], float]:
    """Return the quartiles of the ratio of two steps, and the relative distance of the first losses."""
    steps = []
    for device in devices:
        own = copy_of(case)
        optimizer = torch.optim.SGD(own.model.parameters(), lr=0.01, momentum=0.9)
        inputs, targets = own.batch[:1], own.batch[1]
        trainer = torchedge.Trainer(
            own.model, inputs, targets, loss=own.loss, optimizer=optimizer, device=device
        )
        steps.append(lambda trainer=trainer, inputs=inputs, targets=targets: trainer.step(inputs, targets))
    loss, other = [step() for step in steps]
    ratios = [seconds(steps[0]) / seconds(steps[1]) for _ in range(rounds)]
    return statistics.quantiles(ratios, method="inclusive"), abs(loss - other) / abs(other)


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("devices", nargs=2, help="parts of names")
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    known, medians = cases(small=True), []
    print(f"{'network':18} {'median':>6} {'quartiles':>13} {'losses apart':>13}")
    for name in given.networks:
        torch.manual_seed(0)
        (low, median, high), apart = row(known[name](), given.devices, given.rounds)
        medians.append(median)
        print(f"{name:18} {median:6.2f} {low:6.2f} {high:6.2f} {apart:13.1e}", flush=True)
    print(f"{'geometric mean':18} {statistics.geometric_mean(medians):6.2f}")


if __name__ == "__main__":
    main()
