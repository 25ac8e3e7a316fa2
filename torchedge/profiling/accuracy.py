"""How accurate fitted models are on unseen rows: perf4sight's protocols, its own method beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.prediction.latency.model import Times
from torchedge.prediction.memory.model import Memory
from torchedge.profiling.samples import Mask, Samples, simulate_records
from torchedge.profiling.training_fit import (
    MOST_FOLDS,
    fit_latency,
    fit_memory,
    latency_of,
    latency_rows,
    memory_of,
    memory_rows,
    network_groups,
)

FloatArray = npt.NDArray[np.float64]

TRAINING_LEVELS = (0, 30, 50, 70, 90)
"""perf4sight, section 6.1: the pruning levels models are trained on; all others test."""

BASIS = ("resnet18", "mobilenetv2", "squeezenet")
"""perf4sight, section 6.3: the networks a model for unseen networks is trained on."""

PROTOCOLS = ("own", "basis", "left-out")


@dataclass(frozen=True)
class Score:
    """Mean absolute percentage error and interval coverage by network, in %."""

    target: str
    protocol: str
    error: Mapping[str, float]
    coverage: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean over networks of the error, %."""
        return float(np.mean(list(self.error.values())))

    @property
    def mean_coverage(self) -> float:
        """Mean over networks of the coverage, %; NaN where none was measured."""
        return float(np.mean(list(self.coverage.values()))) if self.coverage else float("nan")


def splits(samples: Samples, protocol: str) -> Iterator[tuple[Mask, Mask]]:
    """Yield (training rows, test rows): "own" network, "basis" of three, "left-out".

    Levels are disjoint, and training rows are pruned at random (perf4sight, section 6.2). Of a campaign,
    which need not have the paper's levels, networks are left out with all they have, in `GROUPS` groups.
    """
    training = np.isin(samples.level, TRAINING_LEVELS) & (samples.strategy != "l1")
    test = ~np.isin(samples.level, TRAINING_LEVELS)
    if protocol == "basis":
        if set(BASIS) <= set(samples.networks):
            yield training & np.isin(samples.network, BASIS), test
        return
    if protocol == "left-out" and samples.steady:
        for group in network_groups(samples.networks, GROUPS):
            out = np.isin(samples.network, group)
            yield ~out, out
        return
    for name in samples.networks:
        own = samples.network == name
        if (test & own).any():
            yield training & (own if protocol == "own" else ~own), test & own


GROUPS = 20
"""So many groups are left out where there are many networks."""


def grouped(samples: Samples) -> bool:
    """Whether networks are too many to be left out one by one."""
    return len(samples.networks) > MOST_FOLDS


def score(
    samples: Samples,
    target: str,
    protocol: str,
    *,
    forest: bool = True,
    errors: bool = True,
    tell: Callable[[], Any] = lambda: None,
) -> Score:
    """Fit on every split's training rows and score its test rows.

    `target` is "gamma" or "phi"; `tell` is called once a split.
    """
    measured = samples.gamma if target == "gamma" else samples.phi
    told = predict_unseen(samples, target, protocol, forest=forest, errors=errors, tell=tell)
    done = np.isfinite(told.value)
    if not done.any():
        raise ProfileError("the dataset has no rows to test on: its networks or pruning levels are too few")
    kept = Told(told.value[done], told.low[done], told.high[done])
    scored = compare(target, protocol, samples.network[done], measured[done], kept)
    return scored if errors else replace(scored, coverage={})


@dataclass(frozen=True, slots=True)
class Told:
    """What a model says of R rows: value and interval, (R,) each."""

    value: FloatArray
    low: FloatArray
    high: FloatArray


def predict_unseen(
    samples: Samples,
    target: str,
    protocol: str,
    *,
    forest: bool = True,
    errors: bool = True,
    tell: Callable[[], Any] = lambda: None,
    failed: Callable[[ProfileError], Any] | None = None,
) -> Told:
    """Return what models fitted on every split's training rows say of its test rows, NaN of rows untested.

    errors: cross-validate inside every fit for its intervals, else they mean nothing. failed: hears of fits
    that cannot be made; without it they raise.
    """
    every = np.ones(len(samples.batch), dtype=np.bool_)
    usable = (memory_rows if target == "gamma" else latency_rows)(samples, every)
    found = Told(*(np.full(len(every), np.nan) for _ in range(3)))
    for train, test in splits(samples, protocol):
        rows = test & usable
        if not rows.any():
            continue
        try:
            told: Memory | Times
            if target == "gamma":
                told = memory_of(fit_memory(samples, train, errors=errors, forest=forest), samples, rows)
            else:
                told = latency_of(fit_latency(samples, train, errors=errors, forest=forest), samples, rows)
        except ProfileError as error:
            if failed is None:
                raise
            failed(error)
        else:
            found.value[rows], found.low[rows], found.high[rows] = told.value, told.low, told.high
        tell()
    return found


def compare(
    target: str, protocol: str, network: npt.NDArray[np.str_], measured: FloatArray, told: Told
) -> Score:
    """Return the error and the interval coverage of rows by network; network, measured: (R,)."""
    inside = (measured >= told.low) & (measured <= told.high)
    error = 100 * np.abs(told.value / measured - 1)
    return Score(target, protocol, _by_network(error, network), _by_network(100.0 * inside, network))


def score_allocated(samples: Samples) -> Score:
    """Score the simulated allocated peak over all measured rows; ProfileError where none tells it."""
    rows = memory_rows(samples, np.ones(len(samples.gamma), dtype=np.bool_)) & np.isfinite(samples.allocated)
    if not rows.any():
        raise ProfileError("allocated memory was not measured")
    error = 100 * np.abs(simulate_records(samples, rows) / samples.allocated[rows] - 1)
    network = samples.network[rows]
    return Score("allocated", "simulated", _by_network(error, network))


def score_reserved(samples: Samples) -> Score:
    """Score the simulated reserved peak over all measured rows; ProfileError where none tells it."""
    rows = memory_rows(samples, np.ones(len(samples.gamma), dtype=np.bool_)) & np.isfinite(samples.reserved)
    if not rows.any():
        raise ProfileError("reserved memory was not measured")
    error = 100 * np.abs(samples.peaks.reserved[rows] / samples.reserved[rows] - 1)
    return Score("reserved", "simulated", _by_network(error, samples.network[rows]))


def _by_network(error: npt.NDArray[np.floating[Any]], network: npt.NDArray[np.str_]) -> dict[str, float]:
    return {n: float(error[network == n].mean()) for n in sorted(set(network.tolist()))}


@dataclass(frozen=True, slots=True)
class FitScore:
    """Share of runs out of memory called fitting, and of fitting runs refused; in %, with counts."""

    confidence: float
    missed: float
    refused: float
    failed_runs: int
    passed_runs: int


def score_fits(samples: Samples, confidence: float) -> FitScore:
    """Score `fits` for each network with a model fitted on the training levels of the others.

    All levels of the network are tested.
    """
    says = np.zeros(len(samples.gamma), dtype=np.bool_)
    training = np.isin(samples.level, TRAINING_LEVELS)
    for name in samples.networks:
        rows = samples.network == name
        model = fit_memory(samples, training & ~rows)
        peaks = samples.peaks_of(rows)
        says[rows] = model.required(peaks, confidence) <= model.limits(peaks.linear)
    passed, failed = samples.fits == 1, samples.fits == 0
    missed, refused = 100 * float(says[failed].mean()), 100 * float((~says[passed]).mean())
    return FitScore(confidence, missed, refused, int(failed.sum()), int(passed.sum()))
