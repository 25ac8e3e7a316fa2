"""Hold planned arenas against the largest set of bytes alive at once.

    python benchmarks/arena_quality.py                                # training steps of torchvision's models
    python benchmarks/arena_quality.py --networks resnet18 vit_b_16 --alignment 128
    python benchmarks/arena_quality.py --made-up                      # instances without networks

For each training step (cross entropy, SGD with momentum): launches, intermediates, the bytes of all of them,
the largest set alive at once, the planned arena, the ratio of both and the seconds that planning took. Every
plan passes the checker that shares nothing with the planner. Made-up instances: training steps with random
sizes, random lifetimes, and rectangles cut into pieces, for which an arena without a gap exists. The exit
status is 1 where an arena of a training step is more than 5 % above its bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import oracle_path  # noqa: F401 - for oracles
from oracles.arena_plans import cut_rectangle, training_lifetimes

from torchedge.errors import TorchedgeError
from torchedge.lowering.arenas import Lifetime, plan_arena, planned, total_bytes
from torchedge.lowering.programs import Program

NETWORKS = ("resnet18", "mobilenet_v2", "resnet50", "densenet121", "efficientnet_b0", "googlenet",
            "inception_v3", "convnext_tiny", "vit_b_16")  # fmt: skip
MOST = 1.05
MIB = 2**20


def lowered(name: str, batch: int, target: str = "cpu") -> Program:
    """Return the Program of a training step of one of torchvision's models for a device class."""
    import torch

    from torchedge.lowering.assembly import lower
    from torchedge.tracing.steps import capture_step
    from torchedge.tracing.vision import import_torchvision

    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(import_torchvision().models, name)(weights=None, **options)
    step = capture_step(
        model,
        torch.zeros(batch, 3, 224, 224),
        targets=torch.zeros(batch, dtype=torch.long),
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    return lower(step.step, target)


def networks(names: list[str], batch: int, target: str, alignment: int) -> bool:
    """Print a line for each network; return whether all stay within the limit."""
    from torchedge.lowering.arena_checks import check_arena

    print("training step    launches tensors  all MiB alive MiB arena MiB  ratio     s")
    fine = True
    for name in names:
        try:
            program = lowered(name, batch, target)
        except TorchedgeError as error:
            print(f"{name:16} {error}")
            continue
        began = time.perf_counter()
        program = planned(program, alignment)
        seconds = time.perf_counter() - began
        check_arena(program, alignment)
        arena = program.arena
        placed = {*arena.offset, *arena.slot}
        every = sum(program.tensors[i].nbytes for i in placed)
        ratio = total_bytes(arena) / max(1, arena.live_bytes)
        fine &= ratio <= MOST
        sizes = [size / MIB for size in (every, arena.live_bytes, total_bytes(arena))]
        counts = f"{len(program.launches):8} {len(placed):7}"
        amounts = "{:8.1f} {:9.1f} {:9.1f}".format(*sizes)
        print(f"{name:16} {counts} {amounts} {ratio:6.4f} {seconds:5.2f}", flush=True)
    return fine


def random_lifetimes(count: int, seed: int) -> tuple[dict[int, int], dict[int, Lifetime]]:
    """Return sizes over four orders of magnitude, and lifetimes of which about eight meet."""
    chance = np.random.default_rng(seed)
    starts, lives = chance.integers(0, count, count), chance.geometric(8 / count, count)
    sizes = dict(enumerate((2 ** chance.uniform(4, 20, count)).astype(int).tolist()))
    return sizes, {i: (int(a), int(a + n)) for i, (a, n) in enumerate(zip(starts, lives, strict=True))}


def made_up(alignment: int) -> bool:
    """Print a line for each kind and size of instance; return whether training steps stay in the limit."""
    kinds = {
        "training step": (training_lifetimes, (20, 100, 400, 900)),
        "random": (random_lifetimes, (100, 500, 2000)),
        "cut rectangle": (lambda n, seed: cut_rectangle(n, seed)[:2], (20, 50, 100, 500, 2000)),
    }
    print(f"{'instance':16} {'tensors':>7} {'mean ratio':>10} {'worst':>6} {'longest s':>9}")
    fine = True
    for kind, (make, counts) in kinds.items():
        for count in counts:
            ratios, times, tensors = [], [], 0
            for seed in range(5):
                sizes, lifetimes = make(count, seed)
                began = time.perf_counter()
                arena = plan_arena(sizes, lifetimes, alignment)
                times.append(time.perf_counter() - began)
                ratios.append(arena.nbytes / arena.live_bytes)
                tensors = len(sizes)
            fine &= kind != "training step" or max(ratios) <= MOST
            print(
                f"{kind:16} {tensors:7} {statistics.mean(ratios):10.4f} {max(ratios):6.3f} {max(times):9.2f}"
            )
    return fine


def main() -> None:
    """Plan, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--target", default="cpu", help="cpu, gpu or mobile (default: %(default)s)")
    parser.add_argument("--alignment", type=int, default=512, help="bytes")
    parser.add_argument("--made-up", action="store_true", help="instances that are no networks")
    given = parser.parse_args()
    if given.made_up:
        fine = made_up(1)
    else:
        fine = networks(given.networks, given.batch_size, given.target, given.alignment)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
