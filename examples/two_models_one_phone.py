"""Two models that run one after the other on a phone, under one memory limit, planned together.

    python examples/two_models_one_phone.py lanes.png --models depth-anything-large gpt-neo-small

What the second model needs first, which alone it would have to load before it starts, the last layers of the
first model load beside their own work. The plot needs matplotlib (`pip install 'torchedge[plots]'`), the
models need transformers (`pip install 'torchedge[dev]'`); nothing is downloaded, no weight takes memory.
"""

import argparse
import sys
from pathlib import Path

from torchedge.devices import find_device
from torchedge.errors import PlanError
from torchedge.lowering.inference import lower_model
from torchedge.storage.amounts import bytes_of
from torchedge.streaming.figures import draw_lanes
from torchedge.streaming.planning import plan_queue

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--models", nargs="+", default=["depth-anything-large", "gpt-neo-small"])
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--limit", default="300MiB", help="all that a run may allocate (default 300MiB)")
    arguments = parser.parse_args()

    device = find_device(arguments.device)
    programs = [lower_model(name, device) for name in arguments.models]
    try:
        queue = plan_queue(programs, device, memory_limit=arguments.limit)
    except PlanError as error:  # it names the smallest limit that works
        print(error, file=sys.stderr)
        sys.exit(3)

    print(f"{len(programs)} models on {arguments.device} within {arguments.limit}, loaded:")
    for program, share in zip(programs, queue.shares, strict=True):
        first, before, own = (nbytes / MIB for nbytes in (share.preloaded, share.carried, share.own))
        loaded = f"{first:,.1f} MiB first, {before:,.1f} MiB by the models before, {own:,.1f} MiB by itself"
        print(f"  {program.name}: {loaded}")
    for label, plans in (("one at a time", queue.alone), ("planned together", [queue.together])):
        latency = sum(plan.timeline.latency_ms for plan in plans)
        starting = sum(plan.timeline.initialisation_ms for plan in plans)
        most = max(plan.timeline.allocated_bytes for plan in plans) / MIB
        print(f"{label:<17}{latency:>7,.0f} ms, {starting:,.0f} of them loading first; {most:,.1f} MiB")
    print(f"planned together the queue takes {queue.alone_ms - queue.latency_ms:,.0f} ms less")

    draw_lanes(queue.lanes, limit_bytes=bytes_of(arguments.limit)).savefig(arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
