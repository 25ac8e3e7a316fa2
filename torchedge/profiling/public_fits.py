"""Fits profiles to public tables and scores them on networks, or families of networks, left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchedge.devices import Provenance
from torchedge.prediction.feature_sets import INFERENCE
from torchedge.prediction.step_models import FittedModels
from torchedge.profiling.profile_folders import ModeFit, package_versions, today
from torchedge.profiling.public_data import PublicSamples
from torchedge.profiling.samples import Mask
from torchedge.profiling.training_fit import (
    OWN,
    columns_of,
    fit_latency,
    fit_memory,
    latency_of,
    memory_of,
    network_groups,
)

__all__ = ["LeftOut", "Target", "describe_public_fit", "fit_public", "score_left_out", "target_of"]

FloatArray = npt.NDArray[np.float64]
Target = Literal["memory", "latency"]
Tell = Callable[[], Any]

PUBLISHED_TREES = 300


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


def score_left_out(
    public: PublicSamples,
    feature_set: str | None = OWN,
    *,
    strict: bool = True,
    tell: Tell = lambda: None,
) -> LeftOut:
    """Predict every row with a model fitted without its group.

    feature_set: what the forest reads; None: no forest; "published": the paper's method, a forest from its 15
    columns to the figure itself. strict: one group at a time is left out, else ten parts of the groups.
    """
    samples, target = public.samples, target_of(public)
    measured = samples.phi if target == "latency" else samples.gamma
    groups = [[name] for name in samples.networks] if strict else network_groups(samples.networks)
    found = np.full(len(measured), np.nan)
    for group in groups:
        test = np.isin(samples.network, group)
        found[test] = _predict(public, target, feature_set, ~test, test)
        tell()
    return LeftOut(found, measured, len(groups))


def _predict(
    public: PublicSamples, target: Target, feature_set: str | None, train: Mask, test: Mask
) -> FloatArray:
    samples = public.samples
    if feature_set == "published":
        return _published(public, train, test)
    sets: Sequence[str] = () if feature_set is None else (feature_set,)
    if target == "latency":
        latency = fit_latency(samples, train, errors=False, forest=bool(sets), feature_sets=sets)
        return latency_of(latency, samples, test).value
    memory = fit_memory(samples, train, errors=False, forest=bool(sets), feature_sets=sets)
    return memory_of(memory, samples, test).value


def _published(public: PublicSamples, train: Mask, test: Mask) -> FloatArray:
    """perf4sight, section 4: extremely randomised trees from its inference columns to the figure itself."""
    from torchedge.prediction.forests import evaluate
    from torchedge.profiling.forest_fitting import fit_forest

    samples = public.samples
    columns = columns_of(samples, train | test, INFERENCE.name)
    assert columns is not None
    forest = fit_forest(
        columns[train[train | test]],
        samples.phi[train],
        feature_names=INFERENCE.names,
        trees=PUBLISHED_TREES,
    )
    return np.asarray(evaluate(forest, columns[test[train | test]]))


# profiles ---------------------------------------------------------------------------------------------------


def fit_public(public: PublicSamples) -> FittedModels:
    """Fit the figure that a table measures on all of its rows."""
    every = np.ones(len(public.samples.batch), dtype=np.bool_)
    if target_of(public) == "latency":
        return FittedModels(None, fit_latency(public.samples, every), Provenance.PUBLIC_DATA)
    return FittedModels(fit_memory(public.samples, every), None, Provenance.PUBLIC_DATA)


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
    if models.latency is not None:
        described["forest"] = models.latency.feature_set or OWN
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
