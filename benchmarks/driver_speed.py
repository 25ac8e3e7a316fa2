"""Compare training steps on two OpenCL drivers of the same hardware, or by two versions on one driver.

    python benchmarks/driver_speed.py intel portable          # networks at sizes that suit a processor
    python benchmarks/driver_speed.py intel portable gpt unet --rounds 9
    python benchmarks/driver_speed.py skylake skylake --before ../before    # another commit's checkout

Devices are named as in TORCHEDGE_OPENCL_DEVICE. Each has a process of its own; `--before` gives the second
one the package of another checkout, and a cache of programs of its own. A network is lowered once for each
device, within its limits. After a step of each that is not timed, the devices step in turn. A line has the
ratios of the first one's steps to the second one's: of the medians and of the fastest, by the clock; the same
by the processor time of all threads ("busy", "least"), which other programs on the machine disturb less; and
how far the losses of the first steps are apart. The last lines have geometric means and the machine's load.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from harness import CHECKOUT, Worker, options_of
from lowering_steps import NETWORKS, cases


def train(pipe: Connection, checkout: Path, device: str, cache: str | None) -> None:
    """Answer a network's name with its first loss, and then each number but 0 with the seconds of a step.

    The seconds are those of the clock and of processors. cache: the folder of programs, if not the user's.
    """
    os.environ.update({"TORCHEDGE_CACHE": cache} if cache else {})
    sys.path.insert(0, str(checkout))
    import torchedge

    while True:
        name = pipe.recv()
        torch.manual_seed(0)
        case = cases(small=True)[name]()
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
        batch = case.batch[:1], case.batch[1]
        trainer = torchedge.Trainer(case.model, *batch, loss=case.loss, optimizer=optimizer, device=device)
        pipe.send(trainer.step(*batch))
        while pipe.recv():
            began, busy = time.perf_counter(), time.process_time()
            trainer.step(*batch)
            pipe.send((time.perf_counter() - began, time.process_time() - busy))
        trainer.close()
        pipe.send("closed")


def row(sides: list[Worker], name: str, rounds: int) -> tuple[tuple[float, ...], float]:
    """Return the ratios of median, fastest, busy and least time, and how far the first losses are apart."""
    loss, other = [side.answer(None, name) for side in sides]
    times = [[side.answer(None, 1) for side in sides] for _ in range(rounds)]
    for side in sides:
        side.answer(None, 0)
    mine, theirs = [list(zip(*device, strict=True)) for device in zip(*times, strict=True)]
    ratios = [figure(mine[k]) / figure(theirs[k]) for k in (0, 1) for figure in (statistics.median, min)]
    return tuple(ratios), abs(loss - other) / abs(other)


def main() -> None:
    """Print a line for each network."""
    parser = options_of(__doc__)
    parser.add_argument("devices", nargs=2, help="parts of names")
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="another checkout, whose package the second device runs")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        versions = [(CHECKOUT, None), (given.before.resolve(), cache) if given.before else (CHECKOUT, None)]
        pairs = zip(given.devices, versions, strict=True)
        sides = [Worker(train, checkout, device, folder) for device, (checkout, folder) in pairs]
        print(f"{'network':18} {'median':>7} {'fastest':>7} {'busy':>7} {'least':>7} {'losses apart':>13}")
        for name in given.networks:
            ratios, apart = row(sides, name, given.rounds)
            rows.append(ratios)
            print(f"{name:18} {' '.join(f'{ratio:7.2f}' for ratio in ratios)} {apart:13.1e}", flush=True)
    means = [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':18} {' '.join(f'{mean:7.2f}' for mean in means)}")
    print("load of the last minute, five and fifteen minutes:", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
