"""Two models that run one after the other on a phone, under one memory limit, planned together.

    python examples/two_models_one_phone.py lanes.png --models depth-anything-large gpt-neo-small

What the second model needs first, which alone it would have to load before it starts, the last layers of the
first model load beside their own work. The plot needs matplotlib (`pip install 'torchedge[plots]'`), the
models need transformers (`pip install 'torchedge[dev]'`); nothing is downloaded, no weight takes memory.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torchedge
from torchedge.devices import find_device
from torchedge.errors import TorchedgeError
from torchedge.streaming.budgets import parse_bytes
from torchedge.streaming.capacities import make_instance
from torchedge.streaming.figures import draw_lanes
from torchedge.streaming.fusion import fuse
from torchedge.streaming.layering import lay_out
from torchedge.streaming.queues import plan_queue, simulate_queue
from torchedge.streaming.rates import STAGING_BYTES, derive_rates
from torchedge.streaming.solving import solve
from torchedge.tracing.sources import load_model

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plot", type=Path, help="file to draw to: .png, .pdf or .svg")
    parser.add_argument("--models", nargs="+", default=["depth-anything-large", "gpt-neo-small"])
    parser.add_argument("--device", default="adreno-750")
    parser.add_argument("--limit", default="200MiB", help="all that may be in memory (default 200MiB)")
    arguments = parser.parse_args()

    device = find_device(arguments.device)
    graphs = []
    for name in arguments.models:
        model, _ = load_model(name)
        graphs.append(fuse(lay_out(torchedge.capture(model, mode="infer", batch_size=1))))
    instances = [
        replace(make_instance(graph, device), name=name)
        for graph, name in zip(graphs, arguments.models, strict=True)
    ]
    activations = [graph.activation_bytes for graph in graphs]

    # The limit of a queue is on weights; activations and what is read ahead come on top.
    limit = parse_bytes(arguments.limit, "--limit")
    weights = limit - max(max(held) for held in activations) - STAGING_BYTES
    try:
        queue = plan_queue(instances, max(0, weights), solve)
    except TorchedgeError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    found = simulate_queue(queue, derive_rates(device), activations)

    print(queue)
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
