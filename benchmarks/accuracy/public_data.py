"""The models against public measurements that others made: every figure of docs/public-data.md.

    python benchmarks/accuracy/public_data.py fit DATA/nasbench201-edge --device adreno-640 --out FOLDER
    python benchmarks/accuracy/public_data.py edge|one-hot|steps|memory|gpus DATA [--only NAME]

`fit` writes a profile from one public table and prints its accuracy on groups left out. For the others DATA
is the folder that holds nasbench201-edge, rtx3090-train, server-train-memory and pytorch-gpu-benchmark; NAME
is a device of nasbench201-edge or a layout of rtx3090-train. A device or layout takes minutes, `one-hot` and
`gpus` less.
"""

from __future__ import annotations

import csv
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from nasbench201 import OPERATIONS, cell_function, parse_architecture
from public_tables import EDGE_COLUMNS, MEMORY_SETTINGS, PublicSamples, read_public_samples
from tables import number, options_of, print_table, print_wrapped

from torchedge import capture, find_device
from torchedge.arrays import FloatArray
from torchedge.devices import Device
from torchedge.forests.trees import evaluate
from torchedge.prediction.analysis import analyse
from torchedge.prediction.feature_sets import INFERENCE
from torchedge.prediction.intervals import assumed_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import pack, prior_mean
from torchedge.prediction.profiles import FittedModels
from torchedge.profiling.accuracy import predict_rows
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.latency_fitting import (
    Steps,
    fit_candidates,
    fit_coefficients,
    fit_latency,
    one_thread,
)
from torchedge.profiling.memory_fitting import fit_memory
from torchedge.profiling.profile_folders import KEYS, ModeFit, check_target, describe, write_profile
from torchedge.profiling.samples import (
    NO_FOREST,
    OWN,
    Mask,
    Quantity,
    Samples,
    candidate_sets,
    columns_of,
    device_of,
    network_groups,
)
from torchedge.tracing.sources import load_model

GPUS = {
    "a100-sxm4-40gb": (19500, 1555),
    "gtx1080ti": (11340, 484),
    "rtx2080ti": (13450, 616),
    "titanrtx": (16312, 672),
    "titanv": (14900, 653),
    "titanxp": (12150, 548),
}
"""Published fp32 rate (GFLOP/s) and bandwidth (GB/s) of the cards of pytorch-gpu-benchmark."""

MOST_GROUPS = 100
"""More groups than this are left out in ten parts, not one at a time."""

PUBLISHED_TREES = 300

FOREST, ALONE, PAPER = "forest on our features", "without forest", "forest on the paper's columns"
PUBLISHED, FIGURES = "the paper's method", "nothing fitted"
METHODS = (FOREST, ALONE, PAPER, PUBLISHED, FIGURES)
"""What is scored: our model, its part without forest, its forest on the paper's 15 inference columns; for
comparison the paper's method (a forest from those to the figure itself) and the device's figures times one
factor (of memory: the estimate that the table carries)."""


@dataclass(frozen=True)
class LeftOut:
    """Predictions (R,) of rows by a model that had not seen their group, with the measured figures (R,)."""

    predicted: FloatArray
    measured: FloatArray
    groups: int

    @property
    def errors(self) -> FloatArray:
        """(R,) relative errors in %, signed."""
        return np.asarray(100 * (self.predicted / self.measured - 1))

    @property
    def mean(self) -> float:
        """Mean absolute percentage error."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def median(self) -> float:
        """Median absolute percentage error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def rank(self) -> float:
        """Spearman's rank correlation of predicted and measured figures."""
        return float(np.corrcoef(_ranks(self.predicted), _ranks(self.measured))[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    """Return ranks (R,), equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse])


def quantity_of(samples: Samples) -> Quantity:
    """Return the quantity that a table measures."""
    return "latency" if np.isfinite(samples.phi).any() else "memory"


def methods_for(public: PublicSamples) -> tuple[str, ...]:
    """Return which of `METHODS` a table allows: the paper's columns are of inference."""
    return METHODS if public.samples.mode == "infer" else (FOREST, ALONE, FIGURES)


def score_left_out(
    public: PublicSamples, methods: Sequence[str], *, strict: bool = True
) -> dict[str, LeftOut]:
    """Predict every row with models fitted without its group, by each of some `METHODS`.

    strict: one group at a time is left out, else ten parts of the groups.
    """
    samples, quantity = public.samples, quantity_of(public.samples)
    measured = samples.measured(quantity)
    groups = [[name] for name in samples.networks] if strict else network_groups(samples.networks)
    predictions = {method: np.full(len(measured), np.nan) for method in methods}
    for group in groups:
        test = np.isin(samples.network, group)
        predicted = (_latencies if quantity == "latency" else _memories)(public, methods, ~test, test)
        for method in methods:
            predictions[method][test] = predicted[method]
    return {method: LeftOut(values, measured, len(groups)) for method, values in predictions.items()}


def _latencies(
    public: PublicSamples, methods: Sequence[str], train: Mask, test: Mask
) -> dict[str, FloatArray]:
    samples = public.samples
    sets = [OWN, *([INFERENCE.name] if PAPER in methods else [])]
    models = dict(zip((FOREST, PAPER), fit_candidates(samples, train, sets), strict=False))
    models[ALONE] = replace(models[FOREST], forest=None)
    found = {name: predict_rows(models[name], samples, test).value for name in methods if name in models}
    if FIGURES in methods:
        prior = LatencyModel(prior_mean(samples.device, samples.settings.amp), assumed_errors(1.0))
        known, asked = (predict_rows(prior, samples, rows).value for rows in (train, test))
        found[FIGURES] = asked * np.exp(np.median(np.log(samples.phi[train] / known)))
    if PUBLISHED in methods:
        found[PUBLISHED] = _published(samples, train, test)
    return found


def _memories(
    public: PublicSamples, methods: Sequence[str], train: Mask, test: Mask
) -> dict[str, FloatArray]:
    samples, found = public.samples, {}
    for name in methods:
        if name == FIGURES:
            assert public.baseline is not None
            found[name] = public.baseline[test]
        else:
            model = fit_memory(samples, train, errors=False, forest=name == FOREST, feature_sets=(OWN,))
            found[name] = predict_rows(model, samples, test).value
    return found


def _published(samples: Samples, train: Mask, test: Mask) -> FloatArray:
    """perf4sight, section 4: extremely randomised trees from its inference columns to the figure itself."""
    known, asked = (columns_of(samples, rows, INFERENCE.name) for rows in (train, test))
    assert known is not None and asked is not None
    names = INFERENCE.names
    forest = fit_forest(known, samples.phi[train], feature_names=names, trees=PUBLISHED_TREES)
    return np.asarray(evaluate(forest, asked))


# profiles ---------------------------------------------------------------------------------------------------


def fit_public(samples: Samples) -> FittedModels:
    """Fit the quantity that a table measures on all rows; cross-validation decides about the forest."""
    sets = candidate_sets(samples, samples.every)
    if quantity_of(samples) == "latency":
        latency = fit_latency(samples, samples.every, feature_sets=sets)
        return FittedModels(None, latency, samples.source.provenance)
    memory = fit_memory(samples, samples.every, feature_sets=sets)
    return FittedModels(memory, None, samples.source.provenance)


def describe_public_fit(
    public: PublicSamples, models: FittedModels, command: str, scores: dict[str, LeftOut]
) -> ModeFit:
    """Return models with the table that the profile has of them; scores: by the name of the method."""
    samples, quantity = public.samples, quantity_of(public.samples)
    described = describe(
        samples.source,
        command,
        **{
            "rows": len(samples.batch),
            f"{quantity}_rows": len(samples.batch),
            "groups": len(samples.networks),
        },
    )
    if public.skipped:
        described["skipped"] = len(public.skipped)
    for model in (models.memory, models.latency):
        if model is not None:
            described["forest"] = NO_FOREST if model.forest is None else model.feature_set or OWN
    if models.latency is not None:
        described["precision"] = models.latency.amp or "float32"
    if scores:
        table = {
            f"left-out, {name}": {
                "mean": round(score.mean, 2),
                "median": round(score.median, 2),
                "rank": round(score.rank, 3),
            }
            for name, score in scores.items()
        }
        described["accuracy"] = {KEYS[quantity]: table}
    return ModeFit(models, described)


def fit(folder: Path, device: Device, out: Path, *, force: bool, accuracy: bool) -> None:
    """Fit a profile to a public table, write it, and print its accuracy on groups left out."""
    check_target(out, force=force)
    public = read_public_samples(folder, device)
    samples = public.samples
    models = fit_public(samples)
    scores = {}
    if accuracy:
        strict = len(samples.networks) <= MOST_GROUPS
        scores = score_left_out(public, methods_for(public), strict=strict)
    command = f"benchmarks/accuracy/public_data.py fit {samples.source.name} --device {device.name} --out"
    described = describe_public_fit(public, models, f"{command} {out.resolve().name}", scores)
    write_profile(out, device, {samples.mode: described})
    counts = f"{len(samples.batch)} rows of {len(samples.networks)} groups"
    print_wrapped(f"{device.name}: fitted on {counts} from {samples.source.name}")
    if scores:
        rows = [[n, number(s.mean), number(s.median), f"{s.rank:.3f}"] for n, s in scores.items()]
        print_table(["groups left out", "mean error, %", "median, %", "rank correlation"], rows)


# figures ----------------------------------------------------------------------------------------------------


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
    columns = {column: name for name, column in EDGE_COLUMNS.items()} | {"jetson-nano-fp16": "jetson-nano"}
    for column, name in columns.items():
        if only in (None, column):
            public = read_public_samples(data / "nasbench201-edge", find_device(name), column=column)
            groups = len(public.samples.networks)
            print(f"{column}: {len(public.samples.batch)} networks of {groups} functions at batch 1")
            table(score_left_out(public, methods_for(public), strict=False))


def one_hot(data: Path) -> None:
    """The same with a linear regression on which operation is on which edge: knows this search space only."""
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
    for layout in [name for name in ("nchw", "nhwc") if only in (None, name)]:
        public = read_public_samples(data / "rtx3090-train", find_device("rtx-3090"), column=layout)
        report(layout, public)
        scores = score_left_out(public, methods_for(public))
        table(scores)
        worst(public, scores[FOREST])


def memory(data: Path) -> None:
    """Γ of timm's networks as the peak of an A100: what simulation and constants miss, and where."""
    public = read_public_samples(data / "server-train-memory", find_device("nvidia-a100"))
    report(f"optimizer taken to be {MEMORY_SETTINGS.optimizer}", public)
    process = fit_memory(public.samples, public.samples.every, errors=False, forest=False).process
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


def report(what: str, public: PublicSamples) -> None:
    """Print what was read and what was left out."""
    names, families = len(set(public.samples.label.tolist())), len(public.samples.networks)
    counts = f"{len(public.samples.batch)} rows, {names} networks of {families} families"
    print(f"{public.samples.source.name}, {what}: {counts}")
    for why, count in Counter(public.skipped.values()).items():
        print(f"  skipped, {why}: {count}")


def worst(public: PublicSamples, score: LeftOut) -> None:
    """Print the families of five rows and more that are predicted worst."""
    rows_of = {name: public.samples.network == name for name in public.samples.networks}
    means = {name: np.mean(np.abs(score.errors[rows])) for name, rows in rows_of.items() if rows.sum() >= 5}
    chosen = sorted(means, key=means.__getitem__, reverse=True)[:8]
    parts = [f"{name} {means[name]:.0f} % ({int(rows_of[name].sum())})" for name in chosen]
    print(f"  worst families: {', '.join(parts)}")


def gpus(data: Path) -> None:
    """fp32 steps of torchvision networks at batch 12 on six GPUs; each network left out in turn."""
    measured: dict[tuple[str, str], list[float]] = {}
    with open(data / "pytorch-gpu-benchmark" / "train_ms.csv") as file:
        for row in csv.DictReader(file):
            if row["precision"] == "fp32":
                measured.setdefault((row["gpu"], row["model"]), []).append(float(row["ms_median"]))
    work = {}
    for name in sorted({model for _, model in measured}):
        model, _ = load_model(name)
        graph = capture(model, input_size=(3, 224, 224), mode="train", name=name)
        work[name] = analyse(graph).work
    base = find_device("rtx-2080ti")
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
            fitted = fit_coefficients(Steps(rows, times[kept], np.ones(kept.sum()), prior))
            one = LatencyModel(fitted, assumed_errors(1.0)).predict([works[left]], np.array([0]), batch[:1])
            found["fitted"][left] = one.value[0]
        cells = ""
        for name, values_found in found.items():
            error = 100 * float(np.mean(np.abs(values_found / times - 1)))
            errors[name].append(error)
            cells += f"{error:>20.1f}"
        print(f"{gpu:<16}{len(names):>9}{cells}{np.exp(np.median(np.log(times / analytic))):>8.2f}")
    print(f"{'mean':<25}" + "".join(f"{statistics.mean(e):>20.1f}" for e in errors.values()))


def main() -> None:
    """Run one of the commands."""
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("fit", "edge", "one-hot", "steps", "memory", "gpus"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--device", help="of fit: measured device (default: the folder's name)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of fit: profile folder to write")
    parser.add_argument("--force", action="store_true", help="of fit: overwrite an existing profile")
    parser.add_argument(
        "--no-accuracy", action="store_true", help="of fit: skip the accuracy table (minutes)"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    data, only = arguments.data, arguments.only
    with one_thread():
        if arguments.what == "fit":
            if arguments.out is None:
                parser.error("fit needs --out FOLDER")
            device = device_of(data, arguments.device)
            fit(data, device, arguments.out, force=arguments.force, accuracy=not arguments.no_accuracy)
        elif arguments.what in ("edge", "steps"):
            {"edge": edge, "steps": steps}[arguments.what](data, only)
        else:
            {"one-hot": one_hot, "memory": memory, "gpus": gpus}[arguments.what](data)


if __name__ == "__main__":
    main()
