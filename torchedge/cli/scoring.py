"""`torchedge accuracy`: errors on rows the models have not seen, beside the published method's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import add_json
from torchedge.cli.console import Progress, print_json, print_table, print_wrapped
from torchedge.errors import InputError

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

Scores = Mapping[tuple[str, str], "Score"]
Row = tuple[str, dict[str, dict[str, float]]]

_LETTERS = {"gamma": "Γ, training memory", "phi": "Φ, training latency"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder as `torchedge fit` reads it")
    parser.add_argument("--device", "-d", help="measured device (default: the dataset folder's name)")
    parser.add_argument("--ablation", action="store_true", help="also score our method with parts left out")
    add_json(parser)


@dataclass(frozen=True)
class Report:
    """What is printed: scores by (target, protocol), ours and the published method's, and what follows."""

    dataset: str
    digest: str
    rows: int
    networks: int
    ours: Scores
    published: Scores
    fits: FitScore
    verdicts: list[Verdict]
    ablation: list[Row]
    problems: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Score and print."""
    report = score_dataset(arguments.dataset, arguments.device, ablation=arguments.ablation)
    if arguments.json:
        print_json(_document(report))
    else:
        _print(report)
    return 0


def score_dataset(folder: Path, device_name: str | None, *, ablation: bool) -> Report:
    """Score a dataset's folder in every protocol, with a progress bar."""
    from torchedge.prediction.results import CONFIDENCE
    from torchedge.profiling.accuracy import PROTOCOLS, score_fits
    from torchedge.profiling.comparisons import published_features, score_published
    from torchedge.profiling.datasets import read_dataset
    from torchedge.profiling.profile_folders import TARGETS, device_of, one_thread, score_all
    from torchedge.profiling.requirements import judge
    from torchedge.profiling.samples import prepare

    if not folder.is_dir():
        read_dataset(folder)  # says what it expects
    device = device_of(folder, device_name)
    with one_thread(), Progress(2 + 7 + 7 + 3 * ablation, "scoring") as progress:
        progress.doing("reading")
        dataset = read_dataset(folder)
        if dataset.probed:
            raise InputError(
                f"{folder} is a campaign's folder, expected the perf4sight measurements; "
                "`torchedge fit` prints its accuracy, `torchedge report` draws it"
            )
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
        parts = _ablate(samples, columns, progress, ours.scores, published) if ablation else []
    verdicts = judge(ours.scores, fits)
    counts = len(samples.batch), len(samples.networks)
    return Report(
        dataset.name, dataset.digest, *counts, ours.scores, published, fits, verdicts, parts, ours.problems
    )


# ablation ---------------------------------------------------------------------------------------------------


def _ablate(samples: Samples, columns: Any, progress: Progress, ours: Scores, published: Scores) -> list[Row]:  # noqa: ANN401
    """Return rows (what, target, protocol -> mean error), from the published method to ours."""
    from torchedge.profiling.accuracy import score
    from torchedge.profiling.comparisons import score_published, score_unfitted

    measures: list[tuple[str, Callable[[str, str], float]]] = [
        ("published method: forest on 56 features", lambda t, p: published[t, p].mean),
        ("device.toml's figures alone, no fit", lambda t, p: score_unfitted(samples, t, p).mean),
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


def _print(report: Report) -> None:
    size = f"{report.rows} rows of {report.networks} networks"
    print(f"{report.dataset}: {size}; sha256 {report.digest[:16]}")
    for target in _LETTERS:
        _print_target(target, report.ours, report.published)
    _print_allocated(report.ours["allocated", "simulated"])
    _print_fits(report.fits)
    _print_ablation(report.ablation)
    _print_verdicts(report.verdicts)
    for problem in report.problems:
        print_wrapped(problem, first="note: ", rest="  ")


def _print_target(target: str, ours: Scores, published: Scores) -> None:
    protocols = [p for t, p in published if t == target]
    if not protocols:
        return
    print(f"\n{_LETTERS[target]}: mean absolute error, %, the published method's (publ.),")
    print("and how many of the rows lie inside our 90 % intervals, % (cover)")
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
        f"of {fits.failed_runs} runs that ran out of memory {fits.missed:.2f} % are called fitting; "
        f"of {fits.passed_runs} that passed {fits.refused:.2f} % are refused"
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
    print("(device.toml and the priors were chosen knowing this device's data)")


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


def _document(report: Report) -> dict[str, Any]:
    def tables(scores: Scores) -> dict[str, dict[str, Any]]:
        out: dict[str, dict[str, Any]] = {}
        for (target, protocol), score in scores.items():
            found: dict[str, Any] = {"mean": score.mean, "networks": dict(score.error)}
            if score.coverage:
                found["coverage"] = {"mean": score.mean_coverage, "networks": dict(score.coverage)}
            out.setdefault(target, {})[protocol] = found
        return out

    return {
        "dataset": report.dataset,
        "dataset_sha256": report.digest,
        "ours": tables(report.ours),
        "published": tables(report.published),
        "fits": asdict(report.fits),
        "requirements": [{**asdict(verdict), "met": verdict.met} for verdict in report.verdicts],
        "ablation": [{"method": name, **table} for name, table in report.ablation],
        "problems": list(report.problems),
    }
