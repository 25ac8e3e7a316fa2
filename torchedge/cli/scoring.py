"""`torchedge accuracy`: errors on rows the models have not seen, beside the published method's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import add_json
from torchedge.cli.output import print_json, print_table, print_wrapped
from torchedge.cli.progress import Progress

if TYPE_CHECKING:
    from torchedge.profiling.accuracy import FitScore, Score
    from torchedge.profiling.requirements import Verdict
    from torchedge.profiling.samples import Samples

NAME = "accuracy"
SUMMARY = "accuracy on unseen rows of a dataset, beside the published method"
DESCRIPTION = """\
Fit on pruning levels 0, 30, 50, 70 and 90 of a dataset and predict its other
levels, as perf4sight does: each network from its own rows (own), all from
resnet18, mobilenetv2 and squeezenet (basis), each from the other five
(left-out). Beside it the published method on the same rows: 300 extremely
randomised trees on perf4sight's 56 features. Takes minutes. Needs
torchedge[fit]."""

_LETTERS = {"gamma": "Γ, training memory", "phi": "Φ, training latency"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder as `torchedge fit` reads it")
    parser.add_argument("--device", "-d", help="measured device (default: the dataset folder's name)")
    parser.add_argument("--ablation", action="store_true", help="also score our method with parts left out")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Score and print."""
    from torchedge.profiling.accuracy import PROTOCOLS, score_fits
    from torchedge.profiling.comparisons import published_features, score_published
    from torchedge.profiling.datasets import read_dataset
    from torchedge.profiling.profile_folders import TARGETS, device_of, score_all
    from torchedge.profiling.requirements import judge
    from torchedge.profiling.samples import prepare

    if not arguments.dataset.is_dir():
        read_dataset(arguments.dataset)  # says what it expects
    device = device_of(arguments.dataset, arguments.device)
    from torchedge.prediction.results import CONFIDENCE

    steps = 2 + 7 + 7 + (3 if arguments.ablation else 0)
    with Progress(steps, "scoring") as progress:
        progress.doing("reading")
        dataset = read_dataset(arguments.dataset)
        progress.step()
        progress.doing("simulating")
        samples = prepare(dataset, device)
        progress.step()
        progress.doing("our method")
        ours = score_all(samples, progress.step)
        fits = score_fits(samples, CONFIDENCE)
        progress.doing("the published method")
        columns = published_features(samples)
        progress.step()
        published = {}
        for target, protocol in [(t, p) for t in TARGETS for p in PROTOCOLS if (t, p) in ours.scores]:
            published[target, protocol] = score_published(samples, target, protocol, features=columns)
            progress.step()
        ablation = _ablate(samples, columns, progress, ours.scores, published) if arguments.ablation else []
    verdicts = judge(ours.scores, fits)
    if arguments.json:
        print_json(_document(dataset, ours.scores, published, fits, verdicts, ablation, ours.problems))
        return 0
    size = f"{len(samples.batch)} rows of {len(samples.networks)} networks"
    print(f"{dataset.name}: {size}; sha256 {dataset.digest[:16]}")
    for target in TARGETS:
        _print_target(target, ours.scores, published)
    _print_allocated(ours.scores["allocated", "simulated"])
    _print_fits(fits)
    _print_ablation(ablation)
    _print_verdicts(verdicts)
    for problem in ours.problems:
        print_wrapped(problem, first="note: ", rest="  ")
    return 0


# ablation ---------------------------------------------------------------------------------------------------

Scores = Mapping[tuple[str, str], "Score"]
Row = tuple[str, dict[str, dict[str, float]]]


def _ablate(samples: Samples, columns: Any, progress: Progress, ours: Scores, published: Scores) -> list[Row]:  # noqa: ANN401
    """Return rows (what, target, protocol -> mean error), from the published method to ours."""
    from torchedge.profiling.accuracy import score
    from torchedge.profiling.comparisons import score_published, score_unfitted

    measures: list[tuple[str, Callable[[str, str], float]]] = [
        ("published method: forest on 56 features", lambda t, p: published[t, p].mean),
        ("device's figures alone, nothing fitted", lambda t, p: score_unfitted(samples, t, p).mean),
        (
            "published forest of the ratio to that",
            lambda t, p: score_published(samples, t, p, features=columns, ratio=True).mean,
        ),
        ("ours without forest", lambda t, p: score(samples, t, p, errors=False, forest=False).mean),
        ("ours", lambda t, p: ours[t, p].mean),
    ]
    keys = list(published)
    rows: list[Row] = []
    for name, measure in measures:
        progress.doing(name)
        table: dict[str, dict[str, float]] = {}
        for target, protocol in keys:
            table.setdefault(target, {})[protocol] = measure(target, protocol)
        rows.append((name, table))
        if name != measures[0][0] and name != measures[-1][0]:
            progress.step()
    return rows


# tables -----------------------------------------------------------------------------------------------------


def _print_target(target: str, ours: Scores, published: Scores) -> None:
    protocols = [p for t, p in published if t == target]
    if not protocols:
        return
    print(f"\n{_LETTERS[target]}: absolute error, %, and the published method's; cover: of the")
    print("rows inside our 90 % intervals, %")
    head = ["network"] + [word for p in protocols for word in (p, "publ.", "cover")]
    names = list(ours[target, protocols[0]].error)
    rows = []
    for name in names:
        rows.append([name, *_cells(target, protocols, ours, published, name)])
    means = ["mean"]
    for p in protocols:
        mine = ours[target, p]
        means += [f"{mine.mean:.1f}", f"{published[target, p].mean:.1f}", _percent(mine.mean_coverage)]
    print_table(head, [*rows, means])


def _cells(target: str, protocols: list[str], ours: Scores, published: Scores, name: str) -> list[str]:
    cells = []
    for p in protocols:
        mine, theirs = ours[target, p], published[target, p]
        cells += [
            _tenth(mine.error.get(name)),
            _tenth(theirs.error.get(name)),
            _percent(mine.coverage.get(name)),
        ]
    return cells


def _print_allocated(score: Score) -> None:
    print("\nallocated memory by simulation alone, nothing fitted: absolute error, %")
    print_table(
        ["network", "error"],
        [*([n, _tenth(e)] for n, e in score.error.items()), ["mean", _tenth(score.mean)]],
    )


def _print_fits(fits: FitScore) -> None:
    text = (
        f"fits, each network from the others, at {100 * fits.confidence:g} % confidence: "
        f"of {fits.failed_runs} runs that ran out of memory {fits.missed:.2f} % are called fitting; of {fits.passed_runs} that passed "
        f"{fits.refused:.2f} % are refused"
    )
    print()
    print_wrapped(text)


def _print_ablation(rows: list[Row]) -> None:
    if not rows:
        return
    print("\nwhat each part contributes: mean absolute error, %")
    short = {"gamma": "Γ", "phi": "Φ"}
    keys = [(t, p) for t, by_protocol in rows[0][1].items() for p in by_protocol]
    head = ["method", *(f"{short[t]} {p.replace('left-out', 'left')}" for t, p in keys)]
    print_table(head, [[name, *(_tenth(table[t][p]) for t, p in keys)] for name, table in rows], gap=1)


def _print_verdicts(verdicts: list[Verdict]) -> None:
    print("\nrequirements (Jetson TX2)")
    head = ["figure", "reached", "required", ""]
    rows = [[v.name, f"{v.reached:.2f} %", v.required, "met" if v.met else "missed"] for v in verdicts]
    print_table(head, rows)
    print(f"{sum(v.met for v in verdicts)} of {len(verdicts)} met")


def _tenth(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.0f}"


def _document(
    dataset: Any,  # noqa: ANN401
    ours: Scores,
    published: Scores,
    fits: FitScore,
    verdicts: list[Verdict],
    ablation: list[Row],
    problems: tuple[str, ...],
) -> dict[str, Any]:
    def tables(scores: Scores) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {}
        for (target, protocol), score in scores.items():
            found: dict[str, Any] = {"mean": score.mean, "networks": dict(score.error)}
            if score.coverage:
                found["coverage"] = {"mean": score.mean_coverage, "networks": dict(score.coverage)}
            out.setdefault(target, {})[protocol] = found
        return out

    return {
        "dataset": dataset.name,
        "dataset_sha256": dataset.digest,
        "ours": tables(ours),
        "published": tables(published),
        "fits": {
            "confidence": fits.confidence,
            "missed": fits.missed,
            "refused": fits.refused,
            "failed_runs": fits.failed_runs,
            "passed_runs": fits.passed_runs,
        },
        "requirements": [
            {"name": v.name, "low": v.low, "high": v.high, "reached": v.reached, "met": v.met}
            for v in verdicts
        ],
        "ablation": [{"method": name, **table} for name, table in ablation],
        "problems": list(problems),
    }
