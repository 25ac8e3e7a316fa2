"""The slowdowns of FlashMem's Fig. 2 from the rows of a measurement; what a model's layers may load.

    python benchmarks/streaming_loads.py LOADS.jsonl [--device FOLDER --model gpt-neo-small]

The first table gives each kernel's median slowdown by the ratio of extra bytes to its input. With a device
whose profile `torchedge fit loads LOADS.jsonl` wrote, the second gives the chunks that a model's layers may
load, by the fitted model and by the thresholds alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from torchedge.devices import Device, find_device
from torchedge.lowering.inference import lower_model
from torchedge.profiling.load_fitting import LoadTable, read_loads
from torchedge.streaming.capacities import rate_capacities
from torchedge.streaming.rates import THRESHOLDS
from torchedge.streaming.schedules import works_of

RATIOS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def print_slowdowns(table: LoadTable) -> None:
    """Print the median increase of each kernel by extra bytes over its input, in %."""
    print(f"{table.environment['device']}, driver {table.environment['driver']}, {table.environment['date']}")
    print(f"{len(table.cases)} kernels, {table.points} points, {table.disturbed} disturbed\n")
    print("| kernel | class | " + " | ".join(f"{ratio:g}" for ratio in RATIOS) + " |")
    print("|---" * (2 + len(RATIOS)) + "|")
    for kernel in dict.fromkeys(case.kernel for case in table.cases):
        cases = [case for case in table.cases if case.kernel == kernel]
        found = []
        for ratio in RATIOS:
            near = [
                case.increases[np.isclose(case.extra_bytes, ratio * case.work.input_bytes, rtol=0.02, atol=8)]
                for case in cases
            ]
            increases = np.concatenate(near)
            found.append(f"{100 * np.median(increases):.0f}" if len(increases) >= len(cases) / 2 else "-")
        print(f"| {kernel} | {cases[0].load_class} | " + " | ".join(found) + " |")


def print_capacities(device: Device, name: str) -> None:
    """Print the chunks that a model's layers may load by class: measured, and by the thresholds."""
    program = lower_model(name, device)
    measured = rate_capacities(program, device)
    ruled = rate_capacities(program, replace(device, profile={}))
    print(f"\n{name} on {device.name}: {measured.source}")
    print("\n".join(measured.notes) + "\n")
    print(
        "| class | layers | latency, ms | chunks measured | chunks by the thresholds |\n|---|---|---|---|---|"
    )
    for load_class in THRESHOLDS:
        of_class = [place for place, work in enumerate(works_of(program)) if work.load_class == load_class]
        latency = sum(measured.latencies_ms[place] for place in of_class)
        sums = [sum(found.chunks[place] for place in of_class) for found in (measured, ruled)]
        print(f"| {load_class} | {len(of_class)} | {latency:.2f} | {sums[0]:,} | {sums[1]:,} |")


def main() -> None:
    """Read the table, print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", help="rows of `torchedge profile --streaming`")
    parser.add_argument("--device", help="profile folder that holds the model fitted to them")
    parser.add_argument("--model", default="gpt-neo-small")
    arguments = parser.parse_args()
    print_slowdowns(read_loads(arguments.loads))
    if arguments.device:
        print_capacities(find_device(arguments.device), arguments.model)


if __name__ == "__main__":
    main()
