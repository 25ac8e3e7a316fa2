"""Accuracy on the Jetson TX2 data of the perf4sight paper, beside the paper's own method: docs/accuracy.md.

    python benchmarks/accuracy/tx2.py DATA/jetson-tx2 [--ablation]

Fits on pruning levels 0, 30, 50, 70 and 90 and predicts the other levels, as perf4sight does: each network
from its own rows (own), all from resnet18, mobilenetv2 and squeezenet (basis), each from the other five
(left-out); and every level but the first and the last from all networks at all other levels (levels), as the
shipped profile is used between its levels. Beside it the published method on the same rows: 300 extremely
randomised trees on perf4sight's 56 features. Takes eight minutes on one core; --ablation seven more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tables import options_of, print_table, print_wrapped

from torchedge.arrays import FloatArray
from torchedge.devices import Device
from torchedge.errors import InputError
from torchedge.forests.trees import evaluate
from torchedge.prediction.feature_sets import feature_rows, find_feature_set
from torchedge.prediction.profiles import load_models
from torchedge.prediction.results import CONFIDENCE
from torchedge.profiling.accuracy import (
    PROTOCOLS,
    TRAINING_LEVELS,
    Score,
    compare,
    predict_rows,
    score,
    splits,
)
from torchedge.profiling.datasets import read_dataset
from torchedge.profiling.forest_fitting import fit_forest
from torchedge.profiling.latency_fitting import one_thread
from torchedge.profiling.memory_fitting import fit_memory
from torchedge.profiling.profile_folders import KEYS, score_all
from torchedge.profiling.samples import Mask, Quantity, Samples, device_of, prepare

Scores = Mapping[tuple[str, str], Score]

PUBLISHED_TREES = 300
"""perf4sight, section 4: extremely randomised trees on 56 features; the public code grows 300."""

MEANS = {
    ("gamma", "own"): 2.0,
    ("gamma", "basis"): 4.5,
    ("gamma", "left-out"): 5.0,
    ("gamma", "levels"): 2.5,
    ("phi", "own"): 3.5,
    ("phi", "basis"): 8.0,
    ("phi", "left-out"): 10.0,
    ("phi", "levels"): 4.0,
    ("allocated", "simulated"): 2.5,
}
"""Required: mean over networks of the absolute percentage error, at most."""

GOOGLENET = {("gamma", "basis"): 8.0, ("phi", "basis"): 12.0}
"""Required of GoogLeNet, the network furthest from the basis."""

COVERAGE = (85.0, 95.0)
MISSED, REFUSED = 1.0, 10.0


@dataclass(frozen=True)
class FitScore:
    """Share in % of failed runs predicted to fit, and of passed runs predicted not to fit, with counts."""

    confidence: float
    missed: float
    refused: float
    failed_runs: int
    passed_runs: int


@dataclass(frozen=True)
class Verdict:
    """One requirement in %: its name, its bounds, and the figure reached."""

    name: str
    low: float
    high: float
    reached: float

    @property
    def met(self) -> bool:
        """Whether the figure lies within the bounds; one that was not measured does not."""
        return math.isfinite(self.reached) and self.low <= self.reached <= self.high

    @property
    def required(self) -> str:
        """The bounds in words."""
        return f"≤ {self.high:g} %" if self.low <= 0 else f"{self.low:g} to {self.high:g} %"


# the published method and parts of ours ---------------------------------------------------------------------


class Reference:
    """Methods to compare with: the published one, and the device's figures without any fit."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.features = feature_rows(samples.graphs, samples.which, samples.batch, "perf4sight")
        models = load_models(replace(samples.device, profile={}, fingerprint=""))
        self.unfitted = {
            quantity: predict_rows(model, samples, samples.every).value
            for quantity, model in (("memory", models.memory), ("latency", models.latency))
        }

    def published(self, quantity: Quantity, protocol: str, *, ratio: bool = False) -> Score:
        """Score a forest from 56 features to the figure; ratio: to its log ratio to the unfitted figure."""
        measured = self.samples.measured(quantity)
        base = self.unfitted[quantity] if ratio else np.ones(len(measured))
        names = find_feature_set("perf4sight").names

        def predict(train: Mask, test: Mask) -> FloatArray:
            scaled = measured[train] / base[train]
            goal = np.log(scaled) if ratio else scaled
            forest = fit_forest(self.features[train], goal, feature_names=names, trees=PUBLISHED_TREES)
            predicted = np.asarray(evaluate(forest, self.features[test]), dtype=np.float64)
            return (np.exp(predicted) if ratio else predicted) * base[test]

        return self._score(quantity, protocol, predict)

    def figures(self, quantity: Quantity, protocol: str) -> Score:
        """Score the simulation and the time model under the device's figures, with nothing fitted."""
        return self._score(quantity, protocol, lambda _, test: self.unfitted[quantity][test])

    def _score(self, quantity: Quantity, protocol: str, predict: Callable[[Mask, Mask], FloatArray]) -> Score:
        usable = self.samples.usable(quantity)
        value = np.full(len(usable), np.nan)
        for train, test in splits(self.samples, protocol):
            value[test & usable] = predict(train & usable, test & usable)
        tested = np.isfinite(value)
        blank = np.full(int(tested.sum()), np.nan)
        return compare(self.samples, quantity, tested, value[tested], blank, blank).score


def score_fits(samples: Samples, confidence: float) -> FitScore:
    """Score `fits` for all levels of each network with a model of the others' training levels."""
    fits = np.zeros(len(samples.gamma), dtype=np.bool_)
    training = np.isin(samples.level, TRAINING_LEVELS)
    for name in samples.networks:
        rows = samples.network == name
        model = fit_memory(samples, training & ~rows)
        peaks = samples.peaks.some(rows)
        fits[rows] = model.required(peaks, confidence) <= model.limits(peaks.linear)
    passed, failed = samples.fits == 1, samples.fits == 0
    missed, refused = 100 * float(fits[failed].mean()), 100 * float((~fits[passed]).mean())
    return FitScore(confidence, missed, refused, int(failed.sum()), int(passed.sum()))


def judge(scores: Scores, fits: FitScore) -> list[Verdict]:
    """Return every requirement with the figure reached, in a fixed order; without a score there is none."""
    verdicts = []
    for key, bound in MEANS.items():
        reached = scores.get(key)
        if reached is None:
            continue
        name = f"{key[0]} {key[1]}"
        verdicts.append(Verdict(f"{name}: error, mean over networks", 0.0, bound, reached.mean))
        if key in GOOGLENET and "googlenet" in reached.error:
            error = reached.error["googlenet"]
            verdicts.append(Verdict(f"{name}: error of googlenet", 0.0, GOOGLENET[key], error))
        if reached.coverage:
            verdicts.append(Verdict(f"{name}: coverage of 90 % intervals", *COVERAGE, reached.mean_coverage))
    verdicts.append(Verdict("fits left-out: failed runs called fitting", 0.0, MISSED, fits.missed))
    verdicts.append(Verdict("fits left-out: passed runs refused", 0.0, REFUSED, fits.refused))
    return verdicts


# the report -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Scores by (figure, protocol), ours and the published method's, and what is derived from them."""

    dataset: str
    digest: str
    rows: int
    networks: int
    ours: Scores
    published: Scores
    fits: FitScore
    verdicts: list[Verdict]
    ablation: list[tuple[str, dict[str, dict[str, float]]]]
    problems: tuple[str, ...]


def score_dataset(folder: Path, device: Device, *, ablation: bool) -> Report:
    """Score a dataset's folder in every protocol."""
    dataset = read_dataset(folder)
    if dataset.probed:
        raise InputError(
            f"{folder} is a campaign's folder, expected the perf4sight measurements; use `torchedge accuracy`"
        )
    with one_thread():
        samples = prepare(dataset, device)
        ours = score_all(samples)
        fits = score_fits(samples, CONFIDENCE)
        reference = Reference(samples)
        keys = [(q, p) for q in KEYS for p in PROTOCOLS if (KEYS[q], p) in ours.scores]
        published = {(KEYS[q], p): reference.published(q, p) for q, p in keys}
        methods: list[tuple[str, Callable[[Quantity, str], Score]]] = [
            ("published method: forest on 56 features", lambda q, p: published[KEYS[q], p]),
            ("device.toml's figures alone, no fit", reference.figures),
            ("published forest of the ratio to that", lambda q, p: reference.published(q, p, ratio=True)),
            ("ours without forest", lambda q, p: score(samples, q, p, intervals=False, forest=False)),
            ("ours", lambda q, p: ours.scores[KEYS[q], p]),
        ]
        table = []
        for name, measure in methods if ablation else ():
            means: dict[str, dict[str, float]] = {}
            for quantity, protocol in (key for key in keys if key[1] != "levels"):
                means.setdefault(KEYS[quantity], {})[protocol] = measure(quantity, protocol).mean
            table.append((name, means))
    counts = len(samples.batch), len(samples.networks)
    return Report(
        dataset.name, dataset.digest, *counts, ours.scores, published, fits, judge(ours.scores, fits), table,
        ours.problems,
    )  # fmt: skip


def print_report(report: Report) -> None:
    """Print every table of docs/accuracy.md."""
    size = f"{report.rows} rows of {report.networks} networks"
    print(f"{report.dataset}: {size}; sha256 {report.digest[:16]}")
    for figure, words in (("gamma", "Γ, training memory"), ("phi", "Φ, training latency")):
        print_figure(figure, words, report.ours, report.published)
    print_levels(report.ours, report.published)
    allocated = report.ours["allocated", "simulated"]
    print("\nallocated memory by simulation alone, nothing fitted: absolute error, %")
    rows = [*([n, tenth(e)] for n, e in allocated.error.items()), ["mean", tenth(allocated.mean)]]
    print_table(["network", "error"], rows)
    fits = report.fits
    print()
    print_wrapped(
        f"fits, each network from the others, at {100 * fits.confidence:g} % confidence: "
        f"of {fits.failed_runs} runs that ran out of memory {fits.missed:.2f} % are called fitting; "
        f"of {fits.passed_runs} that passed {fits.refused:.2f} % are refused"
    )
    if report.ablation:
        print("\nwhat each part contributes: mean absolute error, %")
        keys = [(t, p) for t, by_protocol in report.ablation[0][1].items() for p in by_protocol]
        symbols = {"gamma": "Γ", "phi": "Φ"}
        head = ["method", *(f"{symbols[t]} {p.replace('left-out', 'left')}" for t, p in keys)]
        rows = [[name, *(tenth(table[t][p]) for t, p in keys)] for name, table in report.ablation]
        print_table(head, rows, gap=1)
        print("(device.toml and the priors were chosen knowing this device's data)")
    print("\nrequirements (Jetson TX2)")
    rows = [[v.name, f"{v.reached:.2f} %", v.required, "met" if v.met else "missed"] for v in report.verdicts]
    print_table(["figure", "reached", "required", ""], rows)
    print(f"{sum(v.met for v in report.verdicts)} of {len(report.verdicts)} met")
    for problem in report.problems:
        print_wrapped(f"note: {problem}", rest="  ")


def print_figure(figure: str, words: str, ours: Scores, published: Scores) -> None:
    """Print errors and coverage of one figure by network and protocol."""
    protocols = [p for t, p in published if t == figure and p != "levels"]
    if not protocols:
        return
    print(f"\n{words}: mean absolute error, %, the published method's (publ.),")
    print("and how many of the rows lie inside our 90 % intervals, % (cover)")
    head = ["network"] + [word for p in protocols for word in (p, "publ.", "cover")]
    rows = []
    for name in ours[figure, protocols[0]].error:
        cells = [name]
        for p in protocols:
            mine, theirs = ours[figure, p], published[figure, p]
            cells += [tenth(mine.error.get(name)), tenth(theirs.error.get(name))]
            cells.append(percent(mine.coverage.get(name)))
        rows.append(cells)
    means = ["mean"]
    for p in protocols:
        mine = ours[figure, p]
        means += [tenth(mine.mean), tenth(published[figure, p].mean), percent(mine.mean_coverage)]
    print_table(head, [*rows, means])


def print_levels(ours: Scores, published: Scores) -> None:
    """Print errors between the levels of models of all networks."""
    keys = [key for key in published if key[1] == "levels"]
    if not keys:
        return
    print("\nbetween the pruning levels, as the shipped profile is used: mean absolute")
    print("error, %, of each level predicted from all networks at all other levels, the")
    print("published method's (publ.) on the same rows")
    symbols = {"gamma": "Γ", "phi": "Φ"}
    rows = []
    for name in ours[keys[0]].error:
        cells = [tenth(scores[key].error.get(name)) for key in keys for scores in (ours, published)]
        rows.append([name, *cells])
    means = [tenth(scores[key].mean) for key in keys for scores in (ours, published)]
    head = [word for figure, _ in keys for word in (symbols[figure], "publ.")]
    print_table(["network", *head], [*rows, ["mean", *means]])


def tenth(value: float | None) -> str:
    """Return a figure with one decimal."""
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    """Return a whole percentage."""
    return "-" if value is None or math.isnan(value) else f"{value:.0f}"


def main() -> None:
    """Score and print."""
    parser = options_of(__doc__)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--device", default=None, help="measured device (default: the folder's name)")
    parser.add_argument("--ablation", action="store_true", help="also score our method with parts left out")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = device_of(arguments.dataset, arguments.device)
    print_report(score_dataset(arguments.dataset, device, ablation=arguments.ablation))


if __name__ == "__main__":
    main()
