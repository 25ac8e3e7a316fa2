"""Hold planned arenas against the largest set of bytes alive at once.

    python benchmarks/arena_quality.py                                # training steps of torchvision's models
    python benchmarks/arena_quality.py --networks resnet18 vit_b_16 --alignment 128

For each training step (cross entropy, SGD with momentum): launches, intermediates, the bytes of all of them,
the largest set alive at once, the planned arena, the ratio of both and the seconds that planning took. Every
plan passes the checker that shares nothing with the planner. The exit status is 1 where an arena is more than
5 % above its bound.
"""

from __future__ import annotations

import sys
import time

from harness import options_of

from torchedge.errors import TorchedgeError
from torchedge.lowering.arenas import planned, total_bytes
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


def main() -> None:
    """Plan, check, print."""
    parser = options_of(__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--target", default="cpu", help="cpu, gpu or mobile (default: %(default)s)")
    parser.add_argument("--alignment", type=int, default=512, help="bytes")
    given = parser.parse_args()
    sys.exit(not networks(given.networks, given.batch_size, given.target, given.alignment))


if __name__ == "__main__":
    main()
