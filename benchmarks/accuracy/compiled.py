"""Hold predictions of steps under torch.compile against those measured on an NVIDIA H100 or H200.

    python benchmarks/accuracy/compiled.py [--steps known|fresh|blind|graphs] [--only WORD]

known: 14 networks on an H100, by which the model of compiled memory was made. fresh: 12 more on an H200,
measured after that. blind: 9 more, measured after the model of times was fixed; with CUDA graphs (mode
"reduce-overhead") on another host. graphs: 7 of the known ones on an H200, with CUDA graphs too; constants of
times are from their profiles.

For each step: allocated and reserved memory and the time, measured, and the errors of the predictions in
percent; beside them those of eager PyTorch's allocated memory. Times are predicted for the median host,
and for that of the row, by the time of its tiny steps (`operator_us`). Then, for both hosts: the error
of the eager step's own prediction, and of a flat 0.81 of it. The half-widths in log within which nine of ten
further steps lie are conformal. At the end, measured figures of compiled steps over those of eager ones;
where kernels were profiled (`kernels.jsonl.gz`), a last line has the errors of the number of generated ones.
The steps were measured with transformers 5.17.0 and timm 1.0.29; other releases run other operators.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, find_device
from torchedge.errors import TorchedgeError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.training_steps import TrainingStep
from torchedge.ops import COMPILED_PACE
from torchedge.prediction.analysis import analyse
from torchedge.prediction.latency.workload import FUSED_COLUMNS
from torchedge.prediction.predictor import device_settings, predict_graph
from torchedge.prediction.results import Prediction
from torchedge.profiling.datasets import Dataset, read_dataset
from torchedge.profiling.topologies import build_network, example_inputs
from torchedge.tracing.capturing import CaptureRequest, use_graph
from torchedge.tracing.model_variants import request_of

STEPS = {
    "known": ("nvidia-h100", "compiled"),
    "fresh": ("nvidia-h200", "compiled-fresh"),
    "blind": ("nvidia-h200", "compiled-blind"),
    "graphs": ("nvidia-h200", "compiled-graphs"),
}
HEAD = "allocated  off  eager's  reserved  off        ms   off  on host |  eager on host | 0.81 on host"


class Predicted(NamedTuple):
    """A step's predictions: compiled, and the same in eager PyTorch, for the profile's host and another.

    generated: kernels of Inductor.
    """

    compiled: Prediction
    eager: Prediction
    compiled_there: Prediction
    eager_there: Prediction
    generated: float


def main() -> int:
    """Print the errors by step, their means, and the half-widths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="steps whose name holds this word")
    parser.add_argument("--steps", default="known", choices=STEPS, help="which measured steps")
    given = parser.parse_args()
    device = find_device(STEPS[given.steps][0])
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    dataset = read_dataset(device.folder / "campaign" / STEPS[given.steps][1])
    places = {str(name): place for place, name in enumerate(dataset.id) if dataset["fits"][place] == 1}
    hosts = np.array([dataset.networks[str(name)].host for name in dataset.id])
    speeds = {host: float(np.nanmedian(dataset.launch_us[hosts == host])) for host in np.unique(hosts)}
    listed = " and ".join(f"{speed:.1f}" for speed in speeds.values())
    print(f"{len(places)} rows on {device.name}, whose hosts take {listed} us an operator")
    print(f"{'':38}{HEAD}")
    rows, names, generated = list[tuple[float, ...]](), list[str](), list[float]()
    profiled = generated_kernels(device.folder / "campaign" / STEPS[given.steps][1] / "kernels.jsonl.gz")
    for name, place in places.items():
        eager = name.replace("-compiled", "").replace("-graphs", "")
        if eager == name or given.only not in name:
            continue
        try:
            there = [device.on_host(speeds[dataset.networks[step].host]) for step in (name, eager)]
            predicted = predictions(dataset, device, there, name, int(dataset.batch[place]))
        except TorchedgeError as error:
            sys.stderr.write(f"{name}: {error}\n")
            continue
        rows.append(errors(dataset, place, places[eager], predicted))
        names.append(name)
        if name in profiled and "-compiled" in name:
            generated.append(predicted.generated / profiled[name] - 1)
        figures = [dataset[figure][place] for figure in ("allocated", "reserved", "latency")]
        print(line(name, figures, rows[-1]), flush=True)
    for word in ("-compiled", "-graphs"):
        some = np.array([row for row, name in zip(rows, names, strict=True) if word in name])
        if len(some):
            summarise(word[1:], some)
    print_ratios(dataset, places)
    if generated:
        off = 100 * np.abs(generated)
        print(f"\ngenerated kernels of {len(off)} steps: {off.mean():.1f} % off, {off.max():.1f} at most")
    return 0


def print_ratios(dataset: Dataset, places: Mapping[str, int]) -> None:
    """Print figures of compiled steps over eager ones, and half-widths around one and the median ratio."""
    compiled = {name: place for name, place in places.items() if "-compiled" in name}
    pairs = {name: (place, places[name.replace("-compiled", "")]) for name, place in compiled.items()}
    networks = np.array([name.partition("-compiled")[0] for name in pairs])
    print("\ncompiled over eager    least  median    most  nine of ten within  around the median")
    for figure in ("allocated", "reserved", "memory", "latency"):
        ratios = np.log([dataset[figure][c] / dataset[figure][e] for c, e in pairs.values()])
        least, median, most = np.exp(np.quantile(ratios, (0.0, 0.5, 1.0)))
        around = [r - np.median(ratios[networks != n]) for r, n in zip(ratios, networks, strict=True)]
        widths = f"{half_width(ratios):20.2f}{half_width(np.array(around)):19.2f}"
        print(f"{figure:18}{least:10.2f}{median:8.2f}{most:8.2f}{widths}")


def generated_kernels(path: Path) -> dict[str, float]:
    """Return the number of generated kernels of each profiled step."""
    if not path.exists():
        return {}
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {
        row["id"]: sum(count for name, count, _ in row["kernels"] if name.startswith("triton_"))
        for row in rows
    }


def predictions(
    dataset: Dataset, device: Device, there: list[Device], name: str, batch_size: int
) -> Predicted:
    """Return the predictions of a step on the profile's host and on those of its row and of its eager one."""
    network = dataset.networks[name]
    job = network.job
    assert job is not None
    example = example_inputs(job, batch_size) if "inputs" in job else None
    size = tuple(job["input_size"]) if "input_size" in job else None
    model = build_network(job["build"])
    request = CaptureRequest(model, batch_size, "train", example, size, device=device, partitioned=True)
    step = TrainingStep(loss=job.get("loss", "default"), amp=job.get("amp"), compile=job["compile"])

    def both(graph: ForwardGraph) -> Predicted:
        if graph.partition is None:
            sys.stderr.write(f"{name}: PyTorch does not trace it as one graph; the figures are eager's\n")
        plain = replace(graph, partition=None, compiled=False)
        pairs = zip((device, device, *there), (graph, plain) * 2, strict=True)
        figures = [predict_graph(g, batch_size, d, network.settings) for d, g in pairs]
        fused = analyse(graph).work_under(device_settings(device, network.settings)).fused
        column = FUSED_COLUMNS.index("generated")
        return Predicted(*figures, generated=0.0 if fused is None else float(fused[:, column].sum()))

    return use_graph(request_of(request, step), both)


def errors(dataset: Dataset, place: int, eager: int, predicted: Predicted) -> tuple[float, ...]:
    """Return the relative errors of a step's predictions, as `HEAD` lists them."""
    measured = {name: dataset[name][place] for name in ("allocated", "reserved", "latency")}
    own = dataset["latency"][eager]
    p = predicted
    return (
        p.compiled.allocated.value / measured["allocated"] - 1,
        p.eager.allocated.value / measured["allocated"] - 1,
        p.compiled.reserved.value / measured["reserved"] - 1,
        p.compiled.latency.value / measured["latency"] - 1,
        p.compiled_there.latency.value / measured["latency"] - 1,
        p.eager.latency.value / own - 1,
        p.eager_there.latency.value / own - 1,
        COMPILED_PACE * p.eager.latency.value / measured["latency"] - 1,
        COMPILED_PACE * p.eager_there.latency.value / measured["latency"] - 1,
    )


def line(name: str, figures: list[float], row: tuple[float, ...]) -> str:
    """Return a line of the table: MiB and ms as measured, errors in percent."""
    off = [f"{100 * error:+.1f}" for error in row]
    memory = f"{figures[0]:9.0f}{off[0]:>7}{off[1]:>7}{figures[1]:10.0f}{off[2]:>7}"
    return f"{name:38}{memory}{figures[2]:9.1f}" + "".join(f"{text:>8}" for text in off[3:])


def summarise(word: str, rows: npt.NDArray[np.float64]) -> None:
    """Print means and medians of absolute errors, and half-widths in log."""
    print(f"\n{len(rows)} steps, {word}")
    table = np.abs(rows)
    for label, figures in (("mean", table.mean(axis=0)), ("median", np.median(table, axis=0))):
        cells = [f"{100 * figure:.1f}" for figure in figures]
        memory = f"{'':9}{cells[0]:>7}{cells[1]:>7}{'':10}{cells[2]:>7}"
        print(f"{label:38}{memory}{'':9}" + "".join(f"{text:>8}" for text in cells[3:]))
    named = {"allocated": 0, "reserved": 2, "latency": 3, "latency on its host": 4}
    widths = [f"{name} {half_width(np.log1p(rows[:, column])):.2f}" for name, column in named.items()]
    print("half-width around the prediction: " + ", ".join(widths))


def half_width(errors: npt.NDArray[np.float64]) -> float:
    """Return the half-width of an interval that holds nine of ten further errors (conformal)."""
    return float(np.quantile(np.abs(errors), min(0.9 * (1 + 1 / len(errors)), 1.0), method="higher"))


if __name__ == "__main__":
    sys.exit(main())
