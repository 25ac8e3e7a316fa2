"""Fits profiles to public tables and scores them on networks, or families of networks, left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchedge.devices import Provenance
from torchedge.prediction.feature_sets import INFERENCE
from torchedge.prediction.intervals import assumed_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import prior_mean
from torchedge.prediction.step_models import FittedModels
from torchedge.profiling.profile_folders import ModeFit, package_versions, today
from torchedge.profiling.public_data import PublicSamples
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import (
    NO_FOREST,
    OWN,
    candidate_sets,
    columns_of,
    fit_candidates,
    fit_latency,
    fit_memory,
    latency_of,
    memory_of,
    network_groups,
)

__all__ = [
    "METHODS",
    "LeftOut",
    "describe_public_fit",
    "fit_public",
    "methods_for",
    "score_left_out",
    "target_of",
]

FloatArray = npt.NDArray[np.float64]
Target = Literal["memory", "latency"]
Tell = Callable[[], Any]

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


def target_of(public: PublicSamples) -> Target:
    """Return which figure a table measures."""
    return "latency" if np.isfinite(public.samples.phi).any() else "memory"


def methods_for(public: PublicSamples) -> tuple[str, ...]:
    """Return which of `METHODS` a table allows: the paper's columns are of inference."""
    return METHODS if public.mode == "infer" else (FOREST, ALONE, FIGURES)


def score_left_out(
    public: PublicSamples, methods: Sequence[str], *, strict: bool = True, tell: Tell = lambda: None
) -> dict[str, LeftOut]:
    """Predict every row with models fitted without its group, by each of some `METHODS`.

    tell: called once a group. strict: one group at a time is left out, else ten parts of the groups.
    """
    samples, target = public.samples, target_of(public)
    measured = samples.phi if target == "latency" else samples.gamma
    groups = [[name] for name in samples.networks] if strict else network_groups(samples.networks)
    found = {method: np.full(len(measured), np.nan) for method in methods}
    for group in groups:
        test = np.isin(samples.network, group)
        predicted = (_latencies if target == "latency" else _memories)(public, methods, ~test, test)
        for method in methods:
            found[method][test] = predicted[method]
        tell()
    return {method: LeftOut(values, measured, len(groups)) for method, values in found.items()}


def _latencies(
    public: PublicSamples, methods: Sequence[str], train: Mask, test: Mask
) -> dict[str, FloatArray]:
    samples = public.samples
    sets = [OWN, *([INFERENCE.name] if PAPER in methods else [])]
    models = dict(zip((FOREST, PAPER), fit_candidates(samples, train, sets), strict=False))
    models[ALONE] = replace(models[FOREST], forest=None)
    found = {name: latency_of(models[name], samples, test).value for name in methods if name in models}
    if FIGURES in methods:
        prior = LatencyModel(prior_mean(samples.device, samples.settings.amp), assumed_errors(1.0))
        known, asked = (latency_of(prior, samples, rows).value for rows in (train, test))
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
            found[name] = memory_of(model, samples, test).value
    return found


def _published(samples: Samples, train: Mask, test: Mask) -> FloatArray:
    """perf4sight, section 4: extremely randomised trees from its inference columns to the figure itself."""
    from torchedge.forests.trees import evaluate
    from torchedge.profiling.forest_fitting import fit_forest

    known, asked = (columns_of(samples, rows, INFERENCE.name) for rows in (train, test))
    assert known is not None and asked is not None
    names = INFERENCE.names
    forest = fit_forest(known, samples.phi[train], feature_names=names, trees=PUBLISHED_TREES)
    return np.asarray(evaluate(forest, asked))


# profiles ---------------------------------------------------------------------------------------------------


def fit_public(public: PublicSamples) -> FittedModels:
    """Fit the figure that a table measures on all of its rows; cross-validation decides about the forest."""
    every = np.ones(len(public.samples.batch), dtype=np.bool_)
    sets = (NO_FOREST, *candidate_sets(public.samples))
    if target_of(public) == "latency":
        latency = fit_latency(public.samples, every, feature_sets=sets)
        return FittedModels(None, latency, Provenance.PUBLIC_DATA)
    return FittedModels(fit_memory(public.samples, every, feature_sets=sets), None, Provenance.PUBLIC_DATA)


def describe_public_fit(
    out: Path, public: PublicSamples, models: FittedModels, scores: dict[str, LeftOut] | None
) -> ModeFit:
    """Return models with what the profile says of them; scores: by the name of the method."""
    samples, target = public.samples, target_of(public)
    letter = {("latency", "train"): "phi", ("latency", "infer"): "phi", ("memory", "train"): "gamma"}
    described: dict[str, Any] = {
        "provenance": str(models.provenance),
        "dataset": public.name,
        "dataset_sha256": public.digest,
        "date": today(),
        "command": f"torchedge fit {public.name} --device {samples.device.name} --out {out.resolve().name}",
        "rows": len(samples.batch),
        f"{target}_rows": len(samples.batch),
        "groups": len(samples.networks),
        "versions": package_versions(),
    }
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
        described["accuracy"] = {letter.get((target, public.mode), target): table}
    return ModeFit(models, described)
