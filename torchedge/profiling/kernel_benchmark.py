"""How good the tuner's choices are: against exhaustive measurement, its ablations and other ways to choose.

TMModel, section 6.4, Fig. 9 and 10, and Table 5. Coefficients come from micro-benchmarks alone; the times of
the operators' own kernels only judge. Results are rows of a journal, one a case, which a second start
continues.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.lowering.kernels.nests import write_kernel
from torchedge.lowering.nodes import Stored
from torchedge.lowering.targets import Target
from torchedge.lowering.trials import Trials, known_of, search
from torchedge.lowering.tuning import KernelCandidate, Scores, layout_options, score
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.compiling import cache_for
from torchedge.opencl.contexts import DeviceContext
from torchedge.profiling.operator_cases import OperatorCase, OperatorKernel, operator_kernel
from torchedge.runtime.kernel_times import kernel_times
from torchedge.storage.journals import Journal
from torchedge.storage.replacing import make_folder
from torchedge.textures.coefficients import KernelCoefficients

PROBE = "torchedge bench kernels 2"
TOGETHER = 8
"""Cases whose candidates are compiled at once, by several processes where the driver needs them."""
PASSES = 2
"""Times that every candidate is measured, far apart; the least counts."""
AMONG = 50
"""Candidates of a case that are measured, unless there are fewer."""
CLOSE = 1.05
"""A choice is right where it takes at most so much of the best one's time (the paper's accuracy)."""

WAYS = (
    "tuner",
    "top 3 measured",
    "top 6 measured",
    "pure",
    "warp",
    "thread",
    "default",
    "work-group search",
    "reuse distance",
    "random",
)
"""Ways to choose a candidate. pure, warp, thread: eq. 7, eq. 3 and eq. 1 alone (Fig. 10). Measured: the
default and the first ones of the search that `tuner="measured"` makes (`lowering.trials`)."""


@dataclass(frozen=True, slots=True)
class WaySummary:
    """How one way to choose does over all cases.

    regret: mean time over the best measured one's, less 1; regret_95: its 95th percentile; accuracy: share of
    cases within 5 % of the best; speedup: geometric mean over the default; slowest: the least of these
    speed-ups.
    """

    way: str
    regret: float
    regret_95: float
    accuracy: float
    speedup: float
    slowest: float


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """All ways over all cases.

    cases: by operator. correlation: mean rank correlation of predicted and measured times. tuning_s: seconds
    to score all cases; stride_1_s: all convolutions of stride 1 (Table 5), on one core. measured: candidates.
    """

    ways: tuple[WaySummary, ...]
    cases: Mapping[str, int]
    correlation: float
    tuning_s: float
    stride_1_s: float
    measured: int
    exhaustive: int


def bench_kernels(
    cases: Sequence[OperatorCase],
    folder: Path,
    context: DeviceContext,
    target: Target,
    coefficients: KernelCoefficients,
    *,
    among: int = AMONG,
    seconds: float = float("inf"),
    step: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Return the rows of all cases that are measured; measure those that the folder's journal lacks.

    among: candidates that are measured for a case. seconds: no new case begins after so long. step: gets each
    case's name when it is measured.

    Raises:
        InputError: the journal in the folder is of another device, target or number of candidates.
        ProfileError: the journal is damaged.
    """
    make_folder(folder)
    environment = {
        "kind": "environment",
        "probe": PROBE,
        "device": context.device.name,
        "driver": context.device.driver,
        "target": target.name,
        "storage": target.storage,
        "among": among,
    }
    began = time.monotonic()
    with Journal(folder / "kernels.jsonl") as journal:
        rows = [row for _, row in journal.rows()]
        if not rows:
            journal.append(environment)
        elif rows[0] != environment:
            raise InputError(
                f"{journal.path}: is of {rows[0].get('device')}, {rows[0].get('storage')}s and "
                f"{rows[0].get('among')} candidates; expected the same as now: choose another folder"
            )
        known = {row.get("case"): row for row in rows[1:]}
        # the beginning has some of all operators and sizes
        order = sorted(range(len(cases)), key=lambda place: f"{place:032b}"[::-1])
        missing = [cases[place] for place in order if cases[place].name not in known]
        judged: list[Any] = known_of(target.errors.without({case.name for case in cases}))
        for begin in range(0, len(missing), TOGETHER):
            if time.monotonic() - began > seconds:
                break
            together = [_scored(c, target, coefficients) for c in missing[begin : begin + TOGETHER]]
            _measure(together, context, target, among, judged)
            judged += [one.trials.known() for one in together]
            for one in together:
                row = _described(one)
                step(row["case"])
                journal.append(row)
                known[row["case"]] = row
    return [known[case.name] for case in cases if case.name in known]


@dataclass(frozen=True, slots=True)
class _ScoredCase:
    """A case with the scores of its candidates, and what is timed of them, by place.

    options: the layouts of operands. row: its row in the journal.
    """

    kernel: OperatorKernel
    options: Mapping[Any, Any]
    scores: Scores
    trials: Trials
    row: dict[str, Any]


def _scored(case: OperatorCase, target: Target, coefficients: KernelCoefficients) -> _ScoredCase:
    """Return a case with what each way chooses."""
    kernel = operator_kernel(case, target)
    options = operand_layouts(kernel, target)
    begin = time.process_time()
    scores = score(kernel.nest, kernel.layouts, target, coefficients, options)
    best = scores.best()
    row = {
        "kind": "case",
        "case": case.name,
        "operator": case.operator,
        "flops": case.flops,
        "candidates": int(np.isfinite(scores.ms).sum()),
        "tuning_s": round(time.process_time() - begin, 5),
        "chosen": {
            "tuner": best,
            "default": 0,
            **{way: int(scores.order(cost)[0]) for way, cost in scores.others.items()},
        },
        "groups": _same_but_group(scores),
    }
    trials = scores.trials(np.arange(scores.ms.size), target, coefficients)
    return _ScoredCase(kernel, options, scores, trials, row)


def _measure(
    cases: Sequence[_ScoredCase], context: DeviceContext, target: Target, among: int, judged: Sequence[Any]
) -> None:
    """Time what the search tries, then the other candidates. judged: errors of earlier cases."""
    with tempfile.TemporaryDirectory() as binaries:
        cache = BinaryCache(Path(binaries)) if cache_for(context.device) else None

        def times_of(places: Sequence[Sequence[int]]) -> list[list[float]]:
            written = [
                [_candidate(one, place, target) for place in its]
                for one, its in zip(cases, places, strict=True)
            ]
            return kernel_times(context, written, cache, PASSES)

        search([one.trials for one in cases], times_of, judged)
        for one in cases:
            one.row["tried"] = list(one.trials.times)
        others = [_others(one, among) for one in cases]
        for one, places, ms in zip(cases, others, times_of(others), strict=True):
            one.trials.times.update(zip(places, ms, strict=True))


def _candidate(one: _ScoredCase, place: int, target: Target) -> KernelCandidate:
    choice = one.scores.choice(place)
    written = write_kernel(one.kernel.group, one.kernel.nest, choice.layouts, choice.schedule, target)
    return written, choice.layouts


def _others(one: _ScoredCase, among: int) -> list[int]:
    """Return the places that are measured besides those of the search: chosen ones, and some drawn."""
    tried, row = one.row["tried"], one.row
    places = _sampled(one.scores, [*tried, *row["chosen"].values(), *row["groups"]], row["case"], among)
    return [place for place in places if place not in one.trials.times]


def _described(one: _ScoredCase) -> dict[str, Any]:
    """Return the row of a case whose candidates are timed."""
    choices = [one.scores.choice(place) for place in one.trials.times]
    return {
        **one.row,
        "places": list(one.trials.times),
        "ms": [round(ms, 6) if np.isfinite(ms) else -1.0 for ms in one.trials.times.values()],
        "predicted": [round(choice.ms, 6) for choice in choices],
        "schedules": [describe_choice(choice.schedule, choice.layouts, one.options) for choice in choices],
    }


def operand_layouts(kernel: OperatorKernel, target: Target) -> dict[Any, Any]:
    """Return the layouts of the operands that may lie in images."""
    if target.storage == "buffer" and target.name == "cpu":
        return {}
    reads = [node for node in kernel.group.reads if isinstance(node, Stored)]
    large = sorted(reads, key=lambda node: -node.numel)[:2]
    return {node: layout_options(node, kernel.layouts[node], target) for node in large}


def _same_but_group(scores: Scores) -> list[int]:
    """Return the places of the default with every work-group: what MNN and CLML search."""
    default, group = scores.choice(0).schedule, {"group": None}
    schedules = [scores.choice(place).schedule for place in range(len(scores.sets[0][0]))]
    alike = [{**asdict(schedule), **group} == {**asdict(default), **group} for schedule in schedules]
    return [place for place, same in enumerate(alike) if same]


def _sampled(scores: Scores, wanted: Sequence[int], name: str, among: int) -> list[int]:
    """Return the places to measure: all, or those wanted and some drawn; the case gives the seed."""
    places = scores.order()
    first = list(dict.fromkeys(wanted))
    if len(places) <= among:
        return sorted({*first, *map(int, places)})
    others = np.setdiff1d(places, first)
    seed = sum(ord(letter) * 31**k for k, letter in enumerate(name)) % 2**32
    drawn = np.random.default_rng(seed).permutation(others)[: max(0, among - len(first))]
    return [*first, *map(int, drawn)]


def describe_choice(schedule: Any, layouts: Mapping[Any, Any], options: Mapping[Any, Any]) -> str:  # noqa: ANN401
    """Return a candidate in one line; fields that are 0 by default are named where they are not."""
    named = [(f.default, f.name, getattr(schedule, f.name)) for f in fields(schedule)]
    values = [f"{name}={value}" for default, name, value in named if default != 0 or value]
    stored = [layouts[node] for node in options]
    kinds = [layout.storage if layout.storage == "buffer" else layout.pattern for layout in stored]
    return " ".join([*values, *kinds])


# results ----------------------------------------------------------------------------------------------------


def times_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of every way's choice in a case, and "best"; ms."""
    ms = {place: value for place, value in zip(row["places"], row["ms"], strict=True) if value > 0}
    worst = max(ms.values())

    def least(places: Sequence[int]) -> float:
        return float(min([ms.get(place, worst) for place in places]))

    times = {way: ms.get(place, worst) for way, place in row["chosen"].items()}
    drawn = [value for place, value in ms.items() if place not in row["groups"]] or list(ms.values())
    return {
        **times,
        "top 3 measured": least(row["tried"][:4]),
        "top 6 measured": least(row["tried"]),
        "work-group search": least(row["groups"]),
        "random": float(np.mean(drawn)),
        "best": min(ms.values()),
    }


def summarize(rows: Sequence[Mapping[str, Any]]) -> BenchSummary:
    """Return the summary of measured cases.

    Raises InputError: there are none.
    """
    if not rows:
        raise InputError("no case is measured yet; give the benchmark more time")
    table = [times_of(row) for row in rows]
    best, default = (np.array([times[way] for times in table]) for way in ("best", "default"))
    ways = []
    for way in WAYS:
        ms = np.array([times[way] for times in table])
        regret, speedup = ms / best - 1, default / ms
        ways.append(
            WaySummary(
                way,
                float(regret.mean()),
                float(np.percentile(regret, 95)),
                float((ms <= CLOSE * best).mean()),
                float(np.exp(np.log(speedup).mean())),
                float(speedup.min()),
            )
        )
    return BenchSummary(
        tuple(ways),
        dict(Counter(row["operator"] for row in rows)),
        float(np.mean([rank_correlation(row) for row in rows])),
        sum(row["tuning_s"] for row in rows),
        sum(row["tuning_s"] for row in rows if row["operator"] == "Conv2Ds1"),
        sum(len(row["places"]) for row in rows),
        sum(len(row["places"]) >= row["candidates"] for row in rows),
    )


def rank_correlation(row: Mapping[str, Any]) -> float:
    """Return Spearman's correlation of predicted and measured times of a case's candidates; 0 for one."""
    ms, predicted = np.array(row["ms"]), np.array(row["predicted"])
    valid = ms > 0
    if valid.sum() < 2:
        return 0.0
    x, y = _ranks(ms[valid]), _ranks(predicted[valid])
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place.reshape(-1)]
