"""Hold the points of the H200 campaign over settings against repeats of them.

    python benchmarks/accuracy/repeats.py [--write profiles/nvidia-h200]

First the hosts of all campaigns: the median time of a launch and of a step of tiny layers on each, as
`measure_operator_us` counts it where the probe ran one, and the median host, which `--write` puts into a
profile. Then mean absolute differences of the time of a step in percent: as measured, and divided by one of
the probe's controls just before the point, the time of a launch or of a step of tiny layers. First on another
host, then on one host within two minutes, of narrow networks whose steps are the host's alone, and of steps
in two rounds that lie a minute apart.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

import numpy as np
import numpy.typing as npt

from torchedge.devices import DEVICE_FILE, HOSTS_TABLE, find_device, write_device
from torchedge.profiling.hosts import STEP_LAUNCHES
from torchedge.storage import read_toml

HOST_BOUND = 0.9
"""The host sets the pace where launching a step takes this share of its time."""


def read(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Return the numbers of each (network, batch size) whose time was measured."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["latency_ms"]]
    names = ("latency_ms", "latency_p10_ms", "latency_p90_ms", "launch_us", "step_us", "host_ms")
    return {(r["id"], r["batch_size"]): {n: float(r[n]) for n in names if r.get(n)} for r in rows}


def hosts() -> tuple[float, float, int]:
    """Print the hosts of the campaigns; return the control of the median one, its spread, their number.

    The host of the campaign over settings is the one that the profile describes. The spread is the
    half-width in log of the interval around the median that holds nine of ten hosts.
    """
    controls, ratios = [], []
    print(f"{'host':44}{'us a launch':>12}{'step / launch':>15}{'control':>9}")
    for device in map(find_device, ("nvidia-h100", "nvidia-h200")):
        for folder in sorted((device.folder / "campaign").glob("*/")):
            if folder.name == "limits":
                continue  # other processes ran beside
            with gzip.open(folder / "networks.jsonl.gz", "rt") as lines:
                named = {job["id"]: job.get("host", "") for job in map(json.loads, lines)}
            by_host: dict[str, list[dict[str, float]]] = defaultdict(list)
            for (network, _), row in read(folder / "measurements.csv.gz").items():
                by_host[named[network]].append(row)
            for host, rows in sorted(by_host.items()):
                launch = median(row["launch_us"] for row in rows)
                steps = [row["step_us"] for row in rows if "step_us" in row]
                control, ratio = launch, None
                if steps:
                    ratio, control = median(steps) / launch, median(steps) / STEP_LAUNCHES
                    ratios.append(ratio)
                elif folder.name == "settings" and not host:
                    control = device.measured_operator_us or launch
                controls.append(control)
                shown = "" if ratio is None else f"{ratio:.0f}"
                name = f"{device.name} {folder.name} {host}"
                print(f"{name:44}{launch:12.2f}{shown:>15}{control:9.2f}")
    usual = median(controls)
    spread = float(np.quantile(np.abs(np.log(np.array(controls) / usual)), 0.9))
    print(f"{'median':44}{'':12}{median(ratios):15.0f}{usual:9.2f}   nine of ten within e^{spread:.2f}\n")
    return usual, spread, len(controls)


def main() -> int:
    """Print the hosts, and the differences by what sets the pace of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", type=Path, metavar="PROFILE", help="write the median host into this profile"
    )
    write = parser.parse_args().write
    met = hosts()
    if write is not None:
        command = "benchmarks/accuracy/repeats.py --write"
        table = {
            "operator_us": round(met[0], 2),
            "spread": round(met[1], 2),
            "hosts": met[2],
            "command": command,
        }
        document = dict(read_toml(write / DEVICE_FILE))
        document["profile"] = dict(document["profile"]) | {HOSTS_TABLE: table}
        write_device(document, write)
    folder = find_device("nvidia-h200").folder / "campaign" / "settings"
    measured, again = read(folder / "measurements.csv.gz"), read(folder / "repeats.csv.gz")
    first = {key: row for key, row in measured.items() if "host_ms" not in row}
    for name, rows in (("campaign", first), ("repeats", again)):
        spread = median(row["latency_p90_ms"] / row["latency_p10_ms"] for row in rows.values())
        launch = median(row["launch_us"] for row in rows.values())
        print(f"{name:10}{len(rows):4} points, median {launch:.1f} us a launch, 90th / 10th {spread:.2f}")
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key in again.keys() & first.keys():
        here, there = again[key], first[key]
        ratio = here["latency_ms"] / there["latency_ms"]
        slower = here["launch_us"] / there["launch_us"]
        of_host = here["host_ms"] > HOST_BOUND * here["latency_ms"]
        difference = abs(ratio - 1), abs(ratio / slower - 1)
        groups["the host sets the pace" if of_host else "the device, or both"].append(difference)
    print(f"\n{'':26}points  as measured, %  by launches, %")
    for name, differences in sorted(groups.items()):
        plain, scaled = (100 * mean(column) for column in zip(*differences, strict=True))
        print(f"{name:26}{len(differences):6}{plain:16.1f}{scaled:16.1f}")
    pairs = [
        (row, measured[key])
        for (name, batch), row in measured.items()
        if name.endswith("-c") and (key := (name.removesuffix("-c") + "-again", batch)) in measured
    ]
    ratios = {n: np.array([b[n] / a[n] for a, b in pairs]) for n in ("latency_ms", "launch_us", "step_us")}
    latency = ratios.pop("latency_ms")
    print(f"\none host, within minutes: {len(pairs)} narrow networks, {percent(latency):.1f} % as measured")
    for name, ratio in ratios.items():
        correlation = np.corrcoef(np.log(latency), np.log(ratio))[0, 1]
        print(f"divided by {name:10}{percent(latency / ratio):6.1f} %, correlation {correlation:.2f}")
    print_rounds(folder.with_name("settings-fresh"))
    return 0


def print_rounds(folder: Path) -> None:
    """Print by setting how the steps of one host differ between two rounds, and either from their mean."""
    with gzip.open(folder / "networks.jsonl.gz", "rt") as lines:
        settings = {job["id"]: job["setting"] for job in map(json.loads, lines)}
    rounds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with gzip.open(folder / "rounds.jsonl.gz", "rt") as lines:
        for row in map(json.loads, lines):
            rounds[row["job"]].append((row["latency_ms"], row["step_us"]))
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for job, ((time, control), *others) in rounds.items():
        for again, other in others:
            ratios[settings[job]].append((again / time, again / time / (other / control)))
    print(f"\n{'one host, in rounds':36}points  twice, %  by step_us, %  one from the mean, %")
    for setting, pairs in sorted(ratios.items()):
        plain, scaled = map(np.array, zip(*pairs, strict=True))
        single = percent(plain) / np.sqrt(2)
        print(f"{setting:36}{len(pairs):6}{percent(plain):10.1f}{percent(scaled):15.1f}{single:22.1f}")


def percent(ratios: npt.NDArray[np.float64]) -> float:
    """Return the mean absolute difference of ratios from one, in percent."""
    return float(100 * np.abs(np.log(ratios)).mean())


if __name__ == "__main__":
    sys.exit(main())
