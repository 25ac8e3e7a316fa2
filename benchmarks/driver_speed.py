"""Compare training steps on two OpenCL drivers of the same hardware, in one process.

    python benchmarks/driver_speed.py intel portable          # networks at sizes that suit a processor
    python benchmarks/driver_speed.py intel portable gpt unet --rounds 9

Devices are named as in TORCHEDGE_OPENCL_DEVICE. A network is lowered once for each device, within its limits.
After a step of each that is not timed, the devices step in turn. A line has the ratios of the first one's
steps to the second one's: of the medians, of the fastest, and of the medians of the processor time of all
threads, which other programs on the machine disturb least; and how far the losses of the first steps are
apart. The last line has the geometric means.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from harness import options_of
from lowering_steps import NETWORKS, Case, cases, copy_of

import torchedge


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the processor time of a call."""
    began, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - busy


def row(case: Case, devices: list[str], rounds: int) -> tuple[tuple[float, ...], float]:
    """Return the ratios of median, fastest and busy time, and how far the first losses are apart."""
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
    times = [[seconds(step) for step in steps] for _ in range(rounds)]
    mine, theirs = [list(zip(*device, strict=True)) for device in zip(*times, strict=True)]
    figures = ((statistics.median, 0), (min, 0), (statistics.median, 1))
    ratios = tuple([figure(mine[k]) / figure(theirs[k]) for figure, k in figures])
    return ratios, abs(loss - other) / abs(other)


def main() -> None:
    """Print a line for each network."""
    parser = options_of(__doc__)
    parser.add_argument("devices", nargs=2, help="parts of names")
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    known, rows = cases(small=True), []
    print(f"{'network':18} {'median':>7} {'fastest':>7} {'busy':>7} {'losses apart':>13}")
    for name in given.networks:
        torch.manual_seed(0)
        ratios, apart = row(known[name](), given.devices, given.rounds)
        rows.append(ratios)
        print(f"{name:18} {' '.join(f'{ratio:7.2f}' for ratio in ratios)} {apart:13.1e}", flush=True)
    means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':18} {' '.join(f'{mean:7.2f}' for mean in means)}")


if __name__ == "__main__":
    main()
