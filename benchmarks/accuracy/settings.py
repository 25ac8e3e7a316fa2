"""Hold predictions against the campaigns over settings: transformers and CNNs as people train them today.

    python benchmarks/accuracy/settings.py [--device nvidia-h100] [--fresh|--eager] [--narrow]
        [--hosts [point|median]] [--joined] [--only WORD] [--by setting|network|point]

Mean absolute and mean errors in percent of allocated and reserved memory, Γ and the time of a step, of all
micro-batches to an update. --narrow: networks of few narrow layers, whose steps are the host's alone.
The last column has the time without a word of
the host, on the median of those that were met. --joined: steps that several hosts have run, each
predicted on its host; the means over hosts are compared.
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

FIGURES = ("allocated", "reserved", "memory", "latency")


def main() -> int:
    """Print the errors by group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=("setting", "network", "point"), default="setting")
    parser.add_argument("--only", default="", help="settings whose name holds this word")
    parser.add_argument("--without", default=None, help="leave out networks whose name holds this word")
    parser.add_argument("--fresh", action="store_true", help="networks of families that no fit has seen")
    parser.add_argument("--eager", action="store_true", help="transformers with eager attention in float32")
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
        help="predict on the host of the points: by the control before each, or by its host's median",
    )
    parser.add_argument("--joined", action="store_true", help="steps of several hosts, by their means")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    device = find_device(arguments.device)
    name = "eager" if arguments.eager else "settings-fresh" if arguments.fresh else "settings"
    folder = device.folder / "campaign" / ("fine-tuning" if arguments.device == "nvidia-h100" else name)
    dataset = read_dataset(folder)
    assert dataset.launch_us is not None
    hosts = np.array([dataset.networks[str(name)].host for name in dataset.id])
    medians = {host: float(np.nanmedian(dataset.launch_us[hosts == host])) for host in set(hosts.tolist())}
    figures: dict[tuple[str, str], list[list[list[float]]]] = defaultdict(list)
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
            launch = control if arguments.hosts == "point" else medians[network.host]
            if folder.name == "settings" and not network.host:  # the host that the profile describes
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
        step = f"{same}@{batch_size}" if arguments.joined else group["point"]
        figures[group[arguments.by], step].append([predicted, measured])
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for (name, _), hosts_figures in figures.items():
        if len(hosts_figures) > 1 or not arguments.joined:
            totals = [
                [sum(column) for column in zip(*side, strict=True)]
                for side in zip(*hosts_figures, strict=True)
            ]
            errors[name].append([100 * (p / m - 1) for p, m in zip(*totals, strict=True)])
    if arguments.joined:
        errors["all"] = [row for rows in errors.values() for row in rows]
    print(f"{'':44}points" + "".join(f"{name:>11} (mean)" for name in (*FIGURES, "unknown")))
    for name in sorted(errors):
        columns = [[e for e in c if isfinite(e)] for c in zip(*errors[name], strict=True)]
        cells = [f"{mean(map(abs, c)):>10.1f} {mean(c):>+6.1f} " if c else f"{'-':>18}" for c in columns]
        print(f"{name:44}{len(errors[name]):>6}" + "".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
