"""`torchedge.search`: check the arguments, run the evolution, summarize the result."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device
from torchedge.errors import InputError, described, did_you_mean
from torchedge.graphs import GraphFamily, Mode
from torchedge.graphs.sizes import Amounts
from torchedge.ops.specs import forward_flops
from torchedge.prediction.feature_sets import checked_batches
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.prediction.results import Prediction
from torchedge.searching.evaluation import FIGURES, Evaluator, Workers
from torchedge.searching.evolution import Evolution, Recipe, Score, SearchJournal
from torchedge.searching.spaces import SearchSpace
from torchedge.storage.amounts import mib_of
from torchedge.storage.codecs import thaw
from torchedge.storage.documents import plain
from torchedge.texts import number

if TYPE_CHECKING:
    from torch import nn


_EXHAUSTED = 3
"""Iterations without a single new candidate after which the search ends."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search: iteration (0: the initial population), best score, counts, seconds."""

    iteration: int
    iterations: int
    best: float | None
    evaluated: int
    valid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchTask:
    """A checked search: limits in the order of `FIGURES`, batch sizes by mode, settings."""

    space: SearchSpace
    device: Device
    limits: Mapping[str, float]
    batch_sizes: Mapping[Mode, int]
    settings: StepSettings
    confidence: float | None
    recipe: Recipe
    seed: int

    def header(self) -> dict[str, Any]:
        """Return the settings that a journal must have been written with to be continued."""
        choices = json.dumps([[k, list(map(repr, v))] for k, v in self.space.choices.items()])
        profile = json.dumps(thaw(self.device.profile), sort_keys=True, default=str)
        return {
            "space": self.space.name,
            "choices": hashlib.sha256(choices.encode()).hexdigest()[:16],
            "genes": len(self.space.counts),
            "device": self.device.name,
            "profile": hashlib.sha256(profile.encode()).hexdigest()[:16],
            "figures": list(self.limits),
            "limits": list(self.limits.values()),
            "batch_sizes": dict(sorted(self.batch_sizes.items())),
            "settings": asdict(self.settings),
            "confidence": self.confidence,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
        }


def run_search(
    task: SearchTask,
    score: Score,
    *,
    workers: int | None = 1,
    journal: Path | None = None,
    progress: Callable[[SearchProgress], object] | None = None,
) -> Search:
    """Run a search; see `torchedge.search`."""
    begun = time.perf_counter()
    header = task.header()
    token = hashlib.sha256(json.dumps(header, default=str).encode()).hexdigest() + str(time.time_ns())
    evaluator = Evaluator(
        task.space, task.device, list(task.limits), task.batch_sizes, task.settings, task.confidence
    )
    team = Workers(evaluator, token, workers)
    limits = np.array(list(task.limits.values()))
    with SearchJournal(journal, header) as records:
        evolution = Evolution(task.space, team, records, score, limits, task.recipe, task.seed)
        history = _evolve(evolution, progress, begun)
    return _summary(task, evolution, history, time.perf_counter() - begun)


def _evolve(
    evolution: Evolution, progress: Callable[[SearchProgress], object] | None, begun: float
) -> list[float]:
    """Run all iterations; return the best score after each."""
    iterations = evolution.recipe.iterations
    history: list[float] = []
    idle = 0

    def report(iteration: int) -> None:
        if len(evolution.parent_scores):
            history.append(float(evolution.parent_scores[0]))
        if progress is not None:
            scores = evolution.archive.scores
            progress(
                SearchProgress(
                    iteration,
                    iterations,
                    history[-1] if history else None,
                    sum(map(len, scores)),
                    int(sum((~np.isnan(s)).sum() for s in scores)),
                    time.perf_counter() - begun,
                )
            )

    feasible = evolution.start()
    report(0)
    for iteration in range(1, iterations + 1 if feasible else 1):
        idle = 0 if evolution.step(iteration) else idle + 1
        report(iteration)
        if idle == _EXHAUSTED:
            break
    return history


# results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate: its encoding, its figures by name (MiB, ms) and its score (None where it is not valid)."""

    encoding: Any
    figures: Mapping[str, float]
    score: float | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that no candidate meets together with the others.

    limit: the constraint; nearest: the nearest candidate's figure; smallest: the smallest figure of any
    candidate. If `smallest` is above `limit`, the constraint cannot be met even alone.
    """

    name: str
    limit: float
    nearest: float
    smallest: float

    @property
    def excess(self) -> float:
        """Excess of the nearest candidate over the limit, in the figure's unit; 0 where it is within."""
        return max(self.nearest - self.limit, 0.0)

    def __str__(self) -> str:
        figure = FIGURES[self.name]
        name = f"{self.name} {figure.letter}"
        if self.excess == 0:
            return f"{name}: met, {number(self.nearest)} of {number(self.limit)} {figure.unit}"
        reach = (
            "cannot be met at all" if self.smallest > self.limit else "can be met, but not with the others"
        )
        return (
            f"{name}: {number(self.nearest)} {figure.unit} against a limit of {number(self.limit)} "
            f"(+{100 * self.excess / self.limit:.1f} %); {reach}, the least seen is {number(self.smallest)}"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of candidates of a search.

    drawn: all draws; known: repeated draws; evaluated: different candidates evaluated; valid: those of them
    within all constraints; rejected: the others, by the first violated constraint (the cheapest figure is
    computed first).
    """

    drawn: int
    known: int
    evaluated: int
    valid: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Search:
    """The result of `torchedge.search`.

    best: the valid candidate with the highest score; None where no candidate is within the constraints, and
    then `violations` lists the constraints that `nearest`, the candidate with the least excess, does not
    meet, and by how much. fronts: by constrained figure, the valid candidates that no other beats in both
    score and figure, cheapest first. history: the best score after each iteration, the initial population
    first. predictions: of best (or nearest), by mode, in full.
    """

    best: Candidate | None
    nearest: Candidate | None
    violations: tuple[Violation, ...]
    fronts: Mapping[str, tuple[Candidate, ...]]
    history: tuple[float, ...]
    counts: Counts
    predictions: Mapping[str, Prediction]
    constraints: Mapping[str, float]
    device: str
    seed: int
    seconds: float
    space: SearchSpace = field(repr=False)

    @property
    def feasible(self) -> bool:
        """Whether a candidate is within all constraints."""
        return self.best is not None

    def build(self) -> nn.Module:
        """Build the winner's module; raises InputError where there is none."""
        if self.best is None:
            why = "; ".join(str(v) for v in self.violations if v.excess > 0)
            raise InputError(f"no candidate is within the constraints: {why}; raise a limit")
        return self.space.build(self.best.encoding)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        return {"space": self.space.name, "feasible": self.feasible, **plain(self)}

    def __str__(self) -> str:
        counts, chosen = self.counts, self.best or self.nearest
        assert chosen is not None
        lines = [
            f"{self.space.name} on {self.device}: {counts.evaluated:,} candidates in {self.seconds:.1f} s, "
            f"{counts.valid:,} within the limits"
        ]
        rejected = ", ".join(f"{name} {count:,}" for name, count in counts.rejected.items() if count)
        lines += [f"  rejected by: {rejected}"] if rejected else []
        if self.best is None:
            lines += ["  no candidate is within the limits", *(f"  {v}" for v in self.violations)]
        else:
            lines.append(f"  best score {self.best.score:.6g}")
            for name, value in chosen.figures.items():
                figure, front = FIGURES[name], self.fronts[name]
                least = number(front[0].figures[name])
                lines.append(
                    f"  {name} {figure.letter}: {number(value)} of {number(self.constraints[name])} "
                    f"{figure.unit}; front of {len(front)} from {least}"
                )
        encoding = chosen.encoding
        if isinstance(encoding, Mapping):
            encoding = ", ".join(f"{name} {choice}" for name, choice in encoding.items())
        return "\n".join([*lines, f"  {'nearest' if self.best is None else 'best'}: {encoding}"])


def pareto(scores: npt.NDArray[np.float64], costs: npt.NDArray[np.float64]) -> list[int]:
    """Return the rows (C,) that no other row beats in both score (higher) and cost (lower); cheapest first.

    Of equal rows the first is returned.
    """
    best = -np.inf
    front: list[int] = []
    for row in np.lexsort((np.arange(len(scores)), -scores, costs)).tolist():
        if scores[row] > best:
            best = scores[row]
            front.append(row)
    return front


def _summary(task: SearchTask, evolution: Evolution, history: Sequence[float], seconds: float) -> Search:
    genes, figures, scores = evolution.archive.table()
    names = list(task.limits)

    def candidate(row: int) -> Candidate:
        score = None if np.isnan(scores[row]) else float(scores[row])
        by_name = {n: float(v) for n, v in zip(names, figures[row], strict=True)}
        return Candidate(task.space.decode(genes[row].tolist()), by_name, score)

    valid = np.flatnonzero(~np.isnan(scores))
    best = nearest = None
    violations: tuple[Violation, ...] = ()
    if len(valid):
        best = candidate(int(valid[np.argmax(scores[valid])]))
    else:
        row = int(np.argmin(evolution.excess(figures)))
        nearest = candidate(row)
        violations = tuple(
            Violation(name, limit, float(figures[row, k]), float(figures[:, k].min()))
            for k, (name, limit) in enumerate(task.limits.items())
        )
    fronts = {
        name: tuple(candidate(int(valid[k])) for k in pareto(scores[valid], figures[valid, column]))
        for column, name in enumerate(names)
    }
    chosen = best or nearest
    assert chosen is not None
    return Search(
        best=best,
        nearest=nearest,
        violations=violations,
        fronts=fronts,
        history=tuple(history),
        counts=_counts(task, evolution, figures, scores),
        predictions=_predictions(task, chosen),
        constraints=dict(task.limits),
        device=task.device.name,
        seed=task.seed,
        seconds=seconds,
        space=task.space,
    )


def _counts(task: SearchTask, evolution: Evolution, figures: FloatArray, scores: FloatArray) -> Counts:
    above = figures > evolution.limits
    first = np.where(above.any(axis=1), above.argmax(axis=1), -1)
    rejected = {name: int((first == column).sum()) for column, name in enumerate(task.limits)}
    valid = int((~np.isnan(scores)).sum())
    return Counts(evolution.archive.drawn, evolution.archive.known, len(scores), valid, rejected)


def _predictions(task: SearchTask, chosen: Candidate) -> dict[str, Prediction]:
    """Predict the chosen candidate in full, one by one as `torchedge.predict` does."""
    modes = sorted({FIGURES[name].mode for name in task.limits}, reverse=True)
    return {
        mode: predict_graph(
            task.space.graph(chosen.encoding, mode), task.batch_sizes[mode], task.device, task.settings
        )
        for mode in modes
    }


# checks of arguments --------------------------------------------------------------------------------------


def check_limits(constraints: object) -> dict[str, float]:
    """Return the limits in the order of `FIGURES`; raises InputError for a wrong name or number."""
    if not isinstance(constraints, Mapping) or not constraints:
        raise InputError(
            f"constraints is {constraints!r}; expected a dict with some of {', '.join(sorted(FIGURES))}"
        )
    for name, limit in constraints.items():
        if name not in FIGURES:
            hint = did_you_mean(name, FIGURES, f"expected some of {', '.join(sorted(FIGURES))}")
            raise InputError(f"there is no constraint {name!r}; {hint}")
        if FIGURES[name].unit == "MiB":
            mib_of(limit, f"constraints[{name!r}]")
            continue
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if not number or not 0 < limit < float("inf"):
            raise InputError(
                f"constraints[{name!r}] is {limit!r}; expected a positive number of {FIGURES[name].unit}"
            )
    return {
        name: mib_of(constraints[name]) if FIGURES[name].unit == "MiB" else float(constraints[name])
        for name in FIGURES
        if name in constraints
    }


def check_score(score: object, batched: bool) -> Score:
    """Return the score as a function of a list of encodings."""
    if not callable(score):
        raise InputError(
            f"score is {described(score)}; expected a function of a list of encodings, higher is better"
        )
    if batched:
        return score
    return lambda encodings: [score(encoding) for encoding in encodings]


def check_batch_size(mode: Mode, size: object) -> int:
    """Return the batch size of a mode; raises InputError unless it is one whole number."""
    checked = checked_batches(size)
    if checked.ndim:
        raise InputError(f"the batch size of mode {mode!r} is {size!r}; expected one whole number")
    return int(checked)


def gflops_score(space: SearchSpace) -> Score:
    """Return a score: the logarithm of forward GFLOPs per sample (a multiply-add counts as two).

    A stand-in for accuracy that uses no data: larger networks of one family tend to be more accurate.
    """
    flops: WeakKeyDictionary[GraphFamily, Amounts] = WeakKeyDictionary()

    def score(encodings: Sequence[Any]) -> npt.NDArray[np.float64]:
        genes = np.array([space.encode(encoding) for encoding in encodings], dtype=np.int16)
        counts = np.empty(len(genes))
        for family, values, rows in space.sketch(genes, "infer"):
            if family not in flops:
                sample_flops = sum(forward_flops(family.template), start=0)
                flops[family] = Amounts([sample_flops], family.symbols, float)
            counts[rows] = flops[family].at(values)[0]
        return np.log10(np.maximum(counts, 1.0) / 1e9)

    return score
