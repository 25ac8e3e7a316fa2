"""Plan models that run one after the other under one limit: `python benchmarks/streaming_queue.py`.

Five of FlashMem's models in a row (its section 5.3, Fig. 6) on an Adreno 750, in half precision: planned
together as one program, and one at a time. `--limits` (MiB, all that a run allocates) and `--models` take
others; `--figure FILE` draws the queue within the first limit. Needs torchvision, transformers, diffusers and
vit-pytorch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from streaming_models import head, row

from torchedge.devices import find_device
from torchedge.errors import LimitError
from torchedge.lowering.inference import lower_model
from torchedge.streaming.figures import draw_lanes
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.planning import QueuePlan, plan_queue

DEVICE = "adreno-750"
MODELS = ("depth-anything-large", "gpt-neo-small", "vit", "sd-unet", "gpt-neo-1.3b")
LIMITS = (512, 1024, 1536)
"""MiB; the last is what FlashMem's authors chose."""


def print_models(queue: QueuePlan) -> None:
    """Print what each model takes alone, and from the end of the one before in the queue."""
    head("model; alone, ms; of it initialisation; in the queue, ms; preloaded, MiB; by the models before; "
         "by its own launches")  # fmt: skip
    for plan, (name, start, end), share in zip(queue.alone, queue.lanes[0].spans, queue.shares, strict=True):
        run = plan.timeline
        mib = [nbytes / MEBIBYTE for nbytes in (share.preloaded, share.carried, share.own)]
        row(name, round(run.latency_ms), round(run.initialisation_ms), round(end - start), *mib)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--limits", nargs="+", type=int, default=LIMITS, metavar="MIB")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    device = find_device(DEVICE)
    programs = [lower_model(name, device, precision="float16") for name in arguments.models]
    queues: dict[int, QueuePlan] = {}
    for limit in arguments.limits:
        try:
            queues[limit] = plan_queue(programs, device, memory_limit=limit)
        except LimitError as error:
            print(error)
    for limit, queue in queues.items():
        print(f"\nwithin {limit} MiB")
        print_models(queue)
    head("limit, MiB; together, ms; one at a time, ms; times; allocated together, MiB; one at a time")
    for limit, queue in queues.items():
        sizes = [round(lane.allocated_bytes / MEBIBYTE) for lane in queue.lanes]
        times = f"{queue.alone_ms / queue.latency_ms:.2f}"
        row(limit, round(queue.latency_ms), round(queue.alone_ms), times, *sizes)
    if arguments.figure and queues:
        limit, queue = next(iter(queues.items()))
        draw_lanes(queue.lanes, limit_bytes=limit * MEBIBYTE).savefig(arguments.figure)


if __name__ == "__main__":
    main()
