"""Two models that run one after the other on a phone, under one memory limit, planned together.

    python examples/two_models_one_phone.py lanes.png --models depth-anything-large gpt-neo-small

What the second model needs first, which alone it would have to load before it starts, the last layers of the
first model load beside their own work. The plot needs matplotlib (`pip install 'torchedge[plots]'`), the
models need transformers (`pip install 'torchedge[dev]'`); nothing is downloaded, no weight takes memory.
"""

import argparse
import sys
from pathlib import Path

import torchedge
from torchedge.errors import PlanError
from torchedge.streaming.budgets import parse_bytes
from torchedge.streaming.figures import draw_lanes
from torchedge.streaming.queues import plan_queue_within
from torchedge.streaming.solving import solve

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--models", nargs="+", default=["depth-anything-large", "gpt-neo-small"])
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--limit", default="160MiB", help="all that may be in memory (default 160MiB)")
    arguments = parser.parse_args()

    try:
        alone = [
            torchedge.plan(name, device=arguments.device, memory_limit=arguments.limit)
            for name in arguments.models
        ]
    except PlanError as error:  # it names a limit that works
        print(error, file=sys.stderr)
        sys.exit(3)
    limit = parse_bytes(arguments.limit)
    found = plan_queue_within(alone, limit, solve)

    print(f"{len(alone)} models on {arguments.device} within {arguments.limit}, loaded:")
    for model, share in zip(alone, found.plan.shares, strict=True):
        chunk = model.instance.chunk_bytes / MIB
        first, before, own = (chunk * chunks for chunks in (share.preloaded, share.carried, share.own))
        loaded = f"{first:,.1f} MiB first, {before:,.1f} MiB by the models before, {own:,.1f} MiB by itself"
        print(f"  {model.graph.name}: {loaded}")
    for label, runs in (("one at a time", found.apart), ("planned together", found.together)):
        latency = sum(run.latency_ms for run in runs)
        starting = sum(run.initialisation_ms for run in runs)
        peak = max(run.memory.peak.total for run in runs) / MIB
        print(f"{label:<17}{latency:>7,.0f} ms, {starting:,.0f} of them loading first; peak {peak:,.1f} MiB")
    print(f"planned together the queue takes {found.apart_ms - found.latency_ms:,.0f} ms less")

    draw_lanes(found.lanes, limit_bytes=limit).savefig(arguments.plot)
    print(f"drawn to {arguments.plot}")


if __name__ == "__main__":
    main()
