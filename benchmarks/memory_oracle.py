"""Prints how far the memory simulation is from real eager steps on meta tensors, by network.

python benchmarks/memory_oracle.py [--networks NAME ...] [--batch-sizes 2 16] [--optimizer sgd-momentum]
"""

from __future__ import annotations

import time

import numpy as np
import torch
from harness import options_of
from oracles.checkpointed import CHECKPOINTED
from oracles.eager_memory import run_training
from oracles.fake_cpu import run_training_on_fake_cpu
from oracles.networks import NETWORKS, criterion
from oracles.optimizers import OPTIMIZERS

from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture

MIB = 2**20


def main() -> None:
    """Run the comparison and print one line a network and batch size."""
    parser = options_of(__doc__)
    parser.add_argument("--networks", nargs="*", default=[*NETWORKS, *CHECKPOINTED])
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[2, 16])
    parser.add_argument("--optimizer", default="sgd-momentum", choices=list(OPTIMIZERS))
    options = parser.parse_args()
    print(f"torch {torch.__version__}, optimizer {options.optimizer}")
    print(
        f"{'network':24s} {'batch':>5s} {'oracle MiB':>11s} {'simulated':>11s} {'error %':>8s}"
        f"  {'oracle s':>8s} {'tape ms':>8s}"
    )
    errors = []
    for name in options.networks:
        try:
            errors += compare(name, options.batch_sizes, options.optimizer)
        except Exception as error:
            print(f"{name:24s} FAILED {type(error).__name__}: {str(error)[:150]}", flush=True)
            errors.append(np.nan)
    found = np.abs(np.asarray(errors))
    print(f"{np.sum(found <= 1)} of {len(found)} rows within 1 %; largest error {np.nanmax(found):.2f} %")


def compare(name: str, batch_sizes: list[int], optimizer: str) -> list[float]:
    """Print and return the errors of one network in percent."""
    network = CHECKPOINTED[name] if name in CHECKPOINTED else NETWORKS[name]
    maker = OPTIMIZERS[optimizer]
    with torch.device("meta"):
        model = network.build().train()
    args, kwargs = network.feed(2)
    graph = capture(model, kwargs or args)
    amp = "amp" in maker.settings
    settings = StepSettings(backend="cpu", attention="fused" if amp else "math", **maker.settings)
    begin = time.perf_counter()
    tape = write_tape(graph, settings)
    tape_ms = 1000 * (time.perf_counter() - begin)
    errors = []
    for batch in batch_sizes:
        begin = time.perf_counter()
        model.zero_grad()
        oracle = (
            run_training_on_fake_cpu(model, network.feed(batch), criterion, maker.make, **maker.loop)
            if amp
            else run_training(model, lambda b=batch: network.feed(b), criterion, maker.make, **maker.loop)
        )
        seconds = time.perf_counter() - begin
        peak = int(tape.peak_bytes(np.array([batch]))[0])
        errors.append(100 * (peak / oracle.peak - 1))
        print(
            f"{name:24s} {batch:5d} {oracle.peak / MIB:11.2f} {peak / MIB:11.2f} {errors[-1]:8.3f}"
            f"  {seconds:8.1f} {tape_ms:8.1f}",
            flush=True,
        )
    return errors


if __name__ == "__main__":
    main()
