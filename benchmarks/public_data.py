"""Hold the models against public measurements that others made; print every figure of docs/public-data.md.

`python benchmarks/public_data.py edge|one-hot|steps|memory|gpus DATA [--only NAME]`, DATA the folder that
holds nasbench201-edge, rtx3090-train, server-train-memory and pytorch-gpu-benchmark; NAME a device of
nasbench201-edge or a layout of rtx3090-train. A device or layout takes minutes, `one-hot` and `gpus` less.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

GPUS = {
    "a100-sxm4-40gb": (19500, 1555),
    "gtx1080ti": (11340, 484),
    "rtx2080ti": (13450, 616),
    "titanrtx": (16312, 672),
    "titanv": (14900, 653),
    "titanxp": (12150, 548),
}
"""Published fp32 rate (GFLOP/s) and bandwidth (GB/s) of the cards of pytorch-gpu-benchmark."""


def main() -> None:
    """Print one benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("edge", "one-hot", "steps", "memory", "gpus"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", metavar="NAME")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    import torch

    torch.set_num_threads(1)
    if arguments.what in ("edge", "steps"):
        {"edge": edge, "steps": steps}[arguments.what](arguments.data, arguments.only)
    else:
        {"one-hot": one_hot, "memory": memory, "gpus": gpus}[arguments.what](arguments.data)


def table(scores: dict[str, Any]) -> None:
    """Print errors by method."""
    print(f"  {'method':<32}{'mean, %':>9}{'median, %':>11}{'90th, %':>9}{'bias, %':>9}{'rank':>8}")
    for name, score in scores.items():
        tail, bias = np.percentile(np.abs(score.errors), 90), np.median(score.errors)
        print(
            f"  {name:<32}{score.mean:>9.2f}{score.median:>11.2f}{tail:>9.1f}{bias:>+9.1f}{score.rank:>8.3f}"
        )


def edge(data: Path, only: str | None) -> None:
    """φ of NAS-Bench-201's networks; ten parts of the functions left out in turn."""
    from torchedge.devices import find_device
    from torchedge.profiling.public_data import EDGE_COLUMNS, read_public_samples
    from torchedge.profiling.public_fits import methods_for, score_left_out

    columns = {column: name for name, column in EDGE_COLUMNS.items()} | {"jetson-nano-fp16": "jetson-nano"}
    for column, name in columns.items():
        if only in (None, column):
            public = read_public_samples(data / "nasbench201-edge", find_device(name), column=column)
            groups = len(public.samples.networks)
            print(f"{column}: {len(public.labels)} networks of {groups} functions at batch 1")
            table(score_left_out(public, methods_for(public), strict=False))


def one_hot(data: Path) -> None:
    """The same with a linear regression on which operation is on which edge: knows this search space only."""
    from torchedge.profiling.nasbench201 import OPERATIONS, cell_function, parse_architecture
    from torchedge.profiling.public_fits import LeftOut
    from torchedge.profiling.training_fit import network_groups

    rows: dict[str, list[tuple[str, float]]] = {}
    with open(data / "nasbench201-edge" / "latency.csv") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["device"], []).append((row["arch"], float(row["latency_ms"])))
    scores = {}
    for device, pairs in rows.items():
        cells = [parse_architecture(text) for text, _ in pairs]
        functions = np.array([cell_function(cell) for cell in cells])
        edges = [[op for node in cell for op in node] for cell in cells]
        code = np.array([[1.0] + [float(op == k) for op in cell for k in OPERATIONS] for cell in edges])
        measured, found = np.array([ms for _, ms in pairs]), np.zeros(len(cells))
        groups = network_groups(sorted(set(functions.tolist())))
        for group in groups:
            test = np.isin(functions, group)
            weights, *_ = np.linalg.lstsq(code[~test], measured[~test], rcond=None)
            found[test] = code[test] @ weights
        scores[device] = LeftOut(found, measured, len(groups))
    print("regression on the 6 x 5 one-hot code")
    table(scores)


def steps(data: Path, only: str | None) -> None:
    """Φ of timm's networks on an RTX 3090 under autocast; each family (timm module) left out in turn."""
    from torchedge.devices import find_device
    from torchedge.profiling.public_data import read_public_samples
    from torchedge.profiling.public_fits import FOREST, methods_for, score_left_out

    for layout in [name for name in ("nchw", "nhwc") if only in (None, name)]:
        public = read_public_samples(data / "rtx3090-train", find_device("rtx-3090"), column=layout)
        report(layout, public)
        scores = score_left_out(public, methods_for(public))
        table(scores)
        worst(public, scores[FOREST])


def memory(data: Path) -> None:
    """Γ of timm's networks as the peak of an A100: what simulation and constants miss, and where."""
    from torchedge.devices import find_device
    from torchedge.profiling.public_data import MEMORY_SETTINGS, read_public_samples
    from torchedge.profiling.public_fits import ALONE, FIGURES, score_left_out
    from torchedge.profiling.training_fit import fit_memory

    public = read_public_samples(data / "server-train-memory", find_device("nvidia-a100"))
    report(f"optimizer taken to be {MEMORY_SETTINGS.optimizer}", public)
    every = np.ones(len(public.labels), dtype=bool)
    process = fit_memory(public.samples, every, errors=False, forest=False).process
    alone, linear = process.beside
    print(f"constants of all rows: {alone:.0f} MiB, with linear layers {linear:.0f} MiB")
    scores = score_left_out(public, (ALONE, FIGURES))
    table(scores)
    errors, batch = scores[ALONE].errors, public.samples.batch
    for low, high in ((-100, -30), (-30, -15), (-15, -5), (-5, 5), (5, 15), (15, 1000)):
        rows = (errors > low) & (errors <= high)
        share, small = 100 * rows.mean(), 100 * np.mean(batch[rows] <= 16)
        print(f"  error {low} to {high} %: {share:.1f} % of rows, {small:.0f} % of these at batch 8 or 16")
    lacking = (scores[ALONE].measured - scores[ALONE].predicted)[errors <= -15]
    print(f"  rows 15 % and more too low lack {np.median(lacking) / 1024:.1f} GiB in the median")
    transformers = np.isin(public.samples.network, "vision_transformer") & (batch == 8)
    print(f"  vision_transformer at batch 8: {np.median(errors[transformers]):+.1f} % in the median")
    worst(public, scores[ALONE])


def report(what: str, public: Any) -> None:  # noqa: ANN401
    """Print what was read and what was left out."""
    names, families = len(set(public.labels.tolist())), len(public.samples.networks)
    print(f"{public.name}, {what}: {len(public.labels)} rows, {names} networks of {families} families")
    for why, count in Counter(public.skipped.values()).items():
        print(f"  skipped, {why}: {count}")


def worst(public: Any, score: Any) -> None:  # noqa: ANN401
    """Print the families of five rows and more that are predicted worst."""
    rows_of = {name: public.samples.network == name for name in public.samples.networks}
    means = {name: np.mean(np.abs(score.errors[rows])) for name, rows in rows_of.items() if rows.sum() >= 5}
    chosen = sorted(means, key=means.__getitem__, reverse=True)[:8]
    parts = [f"{name} {means[name]:.0f} % ({int(rows_of[name].sum())})" for name in chosen]
    print(f"  worst families: {', '.join(parts)}")


def gpus(data: Path) -> None:
    """fp32 steps of torchvision networks at batch 12 on six GPUs; each network left out in turn."""
    import torchedge
    from torchedge.prediction.analysis import analyse
    from torchedge.prediction.intervals import assumed_errors
    from torchedge.prediction.latency.model import LatencyModel
    from torchedge.prediction.latency.roofline import pack, prior_mean
    from torchedge.profiling.latency_fitting import fit_coefficients
    from torchedge.tracing.sources import load_model

    measured: dict[tuple[str, str], list[float]] = {}
    with open(data / "pytorch-gpu-benchmark" / "train_ms.csv") as file:
        for row in csv.DictReader(file):
            if row["precision"] == "fp32":
                measured.setdefault((row["gpu"], row["model"]), []).append(float(row["ms_median"]))
    work = {}
    for name in sorted({model for _, model in measured}):
        model, _ = load_model(name)
        graph = torchedge.capture(model, input_size=(3, 224, 224), mode="train", name=name)
        work[name] = analyse(graph).work
    base = torchedge.find_device("rtx-2080ti")
    errors: dict[str, list[float]] = {"as published": [], "times one factor": [], "fitted": []}
    print(
        f"{'GPU':<16}{'networks':>9}" + "".join(f"{name + ', %':>20}" for name in errors) + f"{'factor':>8}"
    )
    for gpu, (rate, bandwidth) in GPUS.items():
        names = [name for name in work if (gpu, name) in measured]
        times = np.array([statistics.median(measured[gpu, name]) for name in names])
        values = {"peak_fp32_gflops": rate, "bandwidth_gb_s": bandwidth}
        figures = {**base.figures, **{k: replace(base.figures[k], value=v) for k, v in values.items()}}
        prior = prior_mean(replace(base, figures=figures))
        works, batch = [work[name] for name in names], np.full(len(names), 12.0)
        analytic = LatencyModel(prior, assumed_errors(1.0)).predict(works, np.arange(len(names)), batch).value
        found = {name: np.zeros(len(names)) for name in errors}
        found["as published"] = analytic
        for left in range(len(names)):
            kept = np.arange(len(names)) != left
            factor = np.exp(np.median(np.log(times[kept] / analytic[kept])))
            found["times one factor"][left] = factor * analytic[left]
            rows = pack(works, np.flatnonzero(kept), batch[kept])
            fitted = fit_coefficients(rows, times[kept], np.ones(kept.sum()), prior)
            one = LatencyModel(fitted, assumed_errors(1.0)).predict([works[left]], np.array([0]), batch[:1])
            found["fitted"][left] = one.value[0]
        cells = ""
        for name, values_found in found.items():
            error = 100 * float(np.mean(np.abs(values_found / times - 1)))
            errors[name].append(error)
            cells += f"{error:>20.1f}"
        print(f"{gpu:<16}{len(names):>9}{cells}{np.exp(np.median(np.log(times / analytic))):>8.2f}")
    print(f"{'mean':<25}" + "".join(f"{statistics.mean(e):>20.1f}" for e in errors.values()))


if __name__ == "__main__":
    main()
