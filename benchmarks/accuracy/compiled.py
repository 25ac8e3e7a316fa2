"""Hold predictions of steps under torch.compile against those measured on an NVIDIA H100 or H200.

    python benchmarks/accuracy/compiled.py [--fresh] [--only WORD]

--fresh: twelve networks on an H200, measured after the model of compiled steps was fixed.

For each step: allocated memory compiled over eager, measured and predicted, the error of the predicted ratio,
and the errors of allocated memory as predicted for the compiled and for the eager step, in percent. Then the
ratios of every figure, and the half-widths in log within which nine of ten further steps lie (conformal):
around eager's figure, and around the median ratio of the other networks. The steps were measured with
transformers 5.17.0 and timm 1.0.29; other releases run other operators.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, find_device
from torchedge.errors import TorchedgeError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.training_steps import TrainingStep
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling.datasets import Dataset, read_dataset
from torchedge.profiling.topologies import build_network, example_inputs
from torchedge.tracing.capturing import CaptureRequest, use_graph
from torchedge.tracing.model_variants import request_of

FIGURES = ("allocated", "reserved", "memory", "latency")
MARK = "-compiled"
KNOWN, FRESH = ("nvidia-h100", "compiled"), ("nvidia-h200", "compiled-fresh")


def main() -> int:
    """Print the errors by step and the ratios by figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="steps whose name holds this word")
    parser.add_argument("--fresh", action="store_true", help="the networks that the model was not made with")
    given = parser.parse_args()
    only, folder = given.only, FRESH if given.fresh else KNOWN
    device = find_device(folder[0])
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    dataset = read_dataset(device.folder / "campaign" / folder[1])
    places = {str(name): place for place, name in enumerate(dataset.id) if dataset["fits"][place] == 1}
    pairs = {name: (place, places[name.replace(MARK, "")]) for name, place in places.items() if MARK in name}
    print(f"{'':34}measured predicted   error  | allocated as compiled  as eager")
    errors, off = [], list[tuple[float, ...]]()
    for name, (compiled, eager) in pairs.items():
        if only not in name:
            continue
        try:
            ours, theirs = predicted(dataset, device, name, int(dataset.batch[compiled]))
        except TorchedgeError as error:
            sys.stderr.write(f"{name}: {error}\n")
            continue
        measured = dataset["allocated"][compiled]
        ratios = measured / dataset["allocated"][eager], ours / theirs
        row = (ratios[1] / ratios[0] - 1, ours / measured - 1, theirs / measured - 1)
        errors.append(row)
        off.append(
            tuple(np.log(ours / theirs * dataset[n][eager] / dataset[n][compiled]) for n in FIGURES[:3])
        )
        cells = "".join(f"{100 * error:+14.1f}" for error in row)
        print(f"{name:34}{ratios[0]:8.3f}{ratios[1]:9.3f}{cells}")
    table = np.abs(np.array(errors))
    median, most = np.quantile(table, (0.5, 0.9), axis=0)
    for label, figures in (("mean", table.mean(axis=0)), ("median", median), ("nine of ten", most)):
        print(f"{label:51}" + "".join(f"{100 * e:14.1f}" for e in figures))
    widths = [
        f"{name} {half_width(column):.2f}" for name, column in zip(FIGURES, np.array(off).T, strict=False)
    ]
    print("half-width around the predicted ratio: " + ", ".join(widths))
    print(f"\n{len(pairs)} steps       least  median    most  nine of ten within  around the median")
    for figure in FIGURES:
        ratios = np.log([dataset[figure][c] / dataset[figure][e] for c, e in pairs.values()])
        least, median, most = np.exp(np.quantile(ratios, (0.0, 0.5, 1.0)))
        networks = np.array([name.partition(MARK)[0] for name in pairs])
        around = [r - np.median(ratios[networks != n]) for r, n in zip(ratios, networks, strict=True)]
        widths = f"{half_width(ratios):20.2f}{half_width(np.array(around)):19.2f}"
        print(f"{figure:14}{least:9.2f}{median:8.2f}{most:8.2f}{widths}")
    return 0


def predicted(dataset: Dataset, device: Device, name: str, batch_size: int) -> tuple[float, float]:
    """Return the allocated memory of a step, compiled and in eager PyTorch, in MiB."""
    network = dataset.networks[name]
    job = network.job
    assert job is not None
    example = example_inputs(job, batch_size) if "inputs" in job else None
    size = tuple(job["input_size"]) if "input_size" in job else None
    request = CaptureRequest(
        build_network(job["build"]), batch_size, "train", example, size, device=device, partitioned=True
    )
    step = TrainingStep(loss=job.get("loss", "default"), amp=job.get("amp"), compile=True)

    def both(graph: ForwardGraph) -> tuple[float, float]:
        if graph.partition is None:
            sys.stderr.write(f"{name}: PyTorch does not trace it as one graph; the figures are eager's\n")
        steps = [
            predict_graph(g, batch_size, device, network.settings)
            for g in (graph, replace(graph, partition=None))
        ]
        return steps[0].allocated.value, steps[1].allocated.value

    return use_graph(request_of(request, step), both)


def half_width(errors: npt.NDArray[np.float64]) -> float:
    """Return the half-width of an interval that holds nine of ten further errors (conformal)."""
    return float(np.quantile(np.abs(errors), min(0.9 * (1 + 1 / len(errors)), 1.0), method="higher"))


if __name__ == "__main__":
    sys.exit(main())
