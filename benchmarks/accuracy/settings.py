"""Hold predictions against the campaigns over settings: transformers and CNNs as people train them today.

    python benchmarks/accuracy/settings.py [--device nvidia-h100] [--fresh] [--narrow]
        [--hosts [point|median]] [--joined] [--only WORD] [--by setting|network|point]

Mean absolute and mean errors in percent of allocated and reserved memory, Γ and the time of a step, of all
micro-batches to an update. --narrow: networks of few narrow layers, whose steps are the host's alone.
The last column has the time without a word of
the host, on the median of those that were met. --joined: then those of steps that several hosts have run,
each predicted on its host, by the means over hosts.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import defaultdict
from math import isfinite
from statistics import mean

import numpy as np

from torchedge.devices import find_device
from torchedge.errors import TorchedgeError
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling.datasets import read_dataset

Row = list[list[float]]
"""Predicted figures of a point, then the measured ones."""
Figures = dict[tuple[str, str], list[list[Row]]]
"""Points that are judged together, by group and step."""
FIGURES = ("allocated", "reserved", "memory", "latency")


def main() -> int:
    """Print the errors by group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=("setting", "network", "point"), default="setting")
    parser.add_argument("--only", default="", help="settings whose name holds this word")
    parser.add_argument("--without", default=None, help="leave out networks whose name holds this word")
    parser.add_argument("--fresh", action="store_true", help="networks of families that no fit has seen")
    parser.add_argument(
        "--device",
        choices=("nvidia-h200", "nvidia-h100"),
        default="nvidia-h200",
        help="nothing was fitted to the H100",
    )
    parser.add_argument("--narrow", action="store_true", help="the narrow networks")
    parser.add_argument(
        "--hosts",
        choices=("point", "median"),
        nargs="?",
        const="point",
        help="predict on the host of the points: by the control before each, or by its host's median; rows "
        "of the campaign without a host are of two machines, and count by their own control",
    )
    parser.add_argument("--joined", action="store_true", help="then steps of several hosts, by their means")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    device = find_device(arguments.device)
    name = "settings-fresh" if arguments.fresh else "settings"
    folder = device.folder / "campaign" / ("fine-tuning" if arguments.device == "nvidia-h100" else name)
    dataset = read_dataset(folder)
    assert dataset.launch_us is not None
    hosts = np.array([dataset.networks[str(name)].host for name in dataset.id])
    medians = {host: float(np.nanmedian(dataset.launch_us[hosts == host])) for host in set(hosts.tolist())}
    figures: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for place in np.flatnonzero(dataset["fits"] == 1).tolist():
        label, batch_size = str(dataset.id[place]), int(dataset.batch[place])
        network = dataset.networks[label]
        if network.setting == "limit" or arguments.only not in network.setting:
            continue
        if label.startswith("narrow:") != arguments.narrow:
            continue
        if arguments.without is not None and arguments.without in label:
            continue
        try:
            graph = dataset.graph_of(label, "train" if dataset.mode[place] == "train" else "infer")
            control = float(dataset.launch_us[place])
            described = folder.name == "settings" and not network.host
            launch = control if described or arguments.hosts == "point" else medians[network.host]
            if described:  # the host of the profile, and another one
                launch *= (device.measured_operator_us or 1.0) / medians[""]
            host = device.on_host(launch) if arguments.hosts and isfinite(launch) else device
            prediction = predict_graph(graph, batch_size, host, network.settings)
            unknown = predict_graph(graph, batch_size, device, network.settings).latency.value
        except TorchedgeError as error:
            sys.stderr.write(f"{label}: {error}\n")
            continue
        assert network.job is not None
        mode = "" if dataset.mode[place] == "train" else ", inference"
        group = {"setting": network.setting + mode, "network": network.job["network"]}
        group["point"] = f"{label}@{batch_size}{mode}"
        measured = [float(dataset[name][place]) for name in (*FIGURES, "latency")]
        predicted = [*(getattr(prediction, name).value for name in FIGURES), unknown]
        same = {k: v for k, v in network.job.items() if k not in ("id", "host")}
        figures[group[arguments.by], f"{same}@{batch_size}{mode}"].append([predicted, measured])
    print_errors({key: [[row] for row in rows] for key, rows in figures.items()})
    if arguments.joined:
        print()
        print_errors({key: [rows] for key, rows in figures.items() if len(rows) > 1})
    return 0


def print_errors(figures: Figures) -> None:
    """Print the errors by group: of each point, or of the sums over some."""
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for (name, _), steps in figures.items():
        for rows in steps:
            totals = [[sum(column) for column in zip(*side, strict=True)] for side in zip(*rows, strict=True)]
            errors[name].append([100 * (p / m - 1) for p, m in zip(*totals, strict=True)])
    errors["all"] = [row for rows in errors.values() for row in rows]
    print(f"{'':44}points" + "".join(f"{name:>11} (mean)" for name in (*FIGURES, "unknown")))
    for name in sorted(errors):
        columns = [[e for e in c if isfinite(e)] for c in zip(*errors[name], strict=True)]
        cells = [f"{mean(map(abs, c)):>10.1f} {mean(c):>+6.1f} " if c else f"{'-':>18}" for c in columns]
        print(f"{name:44}{len(errors[name]):>6}" + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
