"""Fits a device's latency under load to what `hooks/load_probe.py` measured there (FlashMem, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, Provenance
from torchedge.errors import MissingExtraError
from torchedge.forests.trees import Forest
from torchedge.profiling.forest_fitting import convert_model
from torchedge.profiling.load_tables import LoadCase, LoadTable, read_loads
from torchedge.profiling.profile_folders import LoadingFit, package_versions, today
from torchedge.storage import file_sha256
from torchedge.streaming.capacities import (
    GROUP_ITEMS,
    LOAD_FEATURES,
    LOADS,
    THRESHOLDS,
    FittedLoads,
    load_features,
)
from torchedge.streaming.instances import LoadClassName

__all__ = ["FOLDS", "LoadScore", "fit_device_loads", "fit_loads", "score_loads"]

FOLDS = 10
"""Parts in which kernel sizes are left out, every launch shape of a size together."""

_SETTINGS: Mapping[str, Any] = {"max_iter": 100, "max_leaf_nodes": 15, "min_samples_leaf": 10}
_RATE = "unified_to_texture_gb_s"
_MOST_BYTES = 32 * 2**20

FloatArray = npt.NDArray[np.float64]
Tell = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class LoadScore:
    """How far a model is off on kernel sizes that it has not seen, of one operator class.

    `mean` and `median`: absolute error of the latency under load, %. For classes that load: by how much (%)
    left-out kernels slowed, as measured, at the capacity that the model gives (`at_capacity`, and the 90th
    percentile `at_capacity_p90`), at the one that the threshold alone gives (`at_threshold`,
    `at_threshold_p90`), and the model's capacity over the measured one (`share`, a median, %).
    """

    sizes: int
    mean: float
    median: float
    at_capacity: float | None = None
    at_capacity_p90: float | None = None
    at_threshold: float | None = None
    at_threshold_p90: float | None = None
    share: float | None = None


def fit_device_loads(file: Path, device: Device, out: Path, tell: Tell = lambda: None) -> LoadingFit:
    """Fit a table of measured loads and score the fit; `tell` is called after each class.

    Raises:
        ProfileError: the table cannot be used.
        MissingExtraError: scikit-learn is not installed.
    """
    table = read_loads(file)
    forests = fit_loads(table)
    scores = {}
    for load_class in THRESHOLDS:
        scores[load_class] = score_loads(table, load_class)
        tell()
    told = table.environment
    described: dict[str, Any] = {
        "provenance": str(Provenance.MEASURED),
        "dataset": file.name,
        "dataset_sha256": file_sha256(file, max_bytes=_MOST_BYTES),
        "measured": told["date"],
        "probe": told["command"],
        "on": f"{told['device']}, driver {told['driver']}, {told['texture']}",
        "date": today(),
        "command": f"torchedge fit {file.name} --device {device.name} --out {out.resolve().name}",
        "rows": len(table.cases),
        "points": table.points,
        "disturbed": table.disturbed,
        "versions": package_versions(),
        "accuracy": {name: _rounded(score) for name, score in scores.items()},
    }
    figures = {}
    if table.copy_gb_s is not None:
        source = f"{told['command']} on {told['date']}: stand-alone copy from buffer to {told['texture']}, "
        figures[_RATE] = {
            "value": float(f"{table.copy_gb_s:.4g}"),
            "unit": "GB/s",
            "provenance": str(Provenance.MEASURED),
            "source": source + f"{told['device']}, driver {told['driver']}",
        }
    return LoadingFit(forests, described, figures)


def fit_loads(table: LoadTable) -> dict[LoadClassName, Forest]:
    """Grow the forest of each class, of log(latency under load / latency alone).

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    return {name: _grow(table.of_class(name)) for name in THRESHOLDS}


def _grow(cases: Sequence[LoadCase]) -> Forest:
    """Boosted trees over the cases' points, never falling with the load."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError.of("scikit-learn", extra="fit", purpose="fitting loads") from error
    rows = np.concatenate([load_features(case.work, case.extra_bytes) for case in cases])
    targets = np.concatenate([np.log1p(case.increases) for case in cases])
    rising = [int(name in LOADS) for name in LOAD_FEATURES]
    model = HistGradientBoostingRegressor(
        early_stopping=False, monotonic_cst=rising, random_state=0, **_SETTINGS
    )
    with threadpool_limits(1):  # so little data is fitted fastest, and alike everywhere, by one thread
        model.fit(rows, targets)
    told = {GROUP_ITEMS: str(_fastest_group(cases))}
    return convert_model(model, rows, feature_names=LOAD_FEATURES, learner="gradient boosting", metadata=told)


def _fastest_group(cases: Sequence[LoadCase]) -> int:
    """The work-group whose kernels were fastest without load, over the sizes measured with several."""
    best: dict[object, float] = {}
    for case in cases:
        key = case.kernel, case.size
        best[key] = min(best.get(key, np.inf), case.work.latency_ms)
    behind: dict[float, list[float]] = {}
    for case in cases:
        slower = np.log(case.work.latency_ms / best[case.kernel, case.size])
        behind.setdefault(case.work.group_items, []).append(float(slower))
    return int(min(sorted(behind), key=lambda items: np.mean(behind[items])))


def score_loads(table: LoadTable, load_class: LoadClassName) -> LoadScore:
    """Score the fit of one class on kernel sizes left out in `FOLDS` parts."""
    cases = table.of_class(load_class)
    sizes = sorted({(case.kernel, case.size) for case in cases})
    parts = min(FOLDS, len(sizes))
    order = np.random.default_rng(0).permutation(len(sizes))
    part = {size: int(order[place]) % parts for place, size in enumerate(sizes)}
    errors: list[float] = []
    reached: list[tuple[float, float, float]] = []
    for number in range(parts):
        left_out = [case for case in cases if part[case.kernel, case.size] == number]
        kept = [case for case in cases if part[case.kernel, case.size] != number]
        model = FittedLoads({load_class: _grow(kept)}, "")
        for case in left_out:
            predicted = model.increase(load_class, case.work, case.extra_bytes[1:])
            errors += np.abs((1 + predicted) / (1 + case.increases[1:]) - 1).tolist()
            if THRESHOLDS[load_class] > 0:
                reached.append(_reached(model, case, table.copy_gb_s))
    score = LoadScore(len(sizes), 100 * float(np.mean(errors)), 100 * float(np.median(errors)))
    if not reached:
        return score
    model_at, rule_at, share = 100 * np.array(reached).T
    return LoadScore(
        score.sizes, score.mean, score.median,
        float(np.median(model_at)), float(np.percentile(model_at, 90)),
        float(np.median(rule_at)), float(np.percentile(rule_at, 90)), float(np.median(share)),
    )  # fmt: skip


def _reached(model: FittedLoads, case: LoadCase, copy_gb_s: float | None) -> tuple[float, float, float]:
    """Measured increase at the model's capacity and at the threshold's, and the former over the true one."""
    threshold = THRESHOLDS[case.load_class]
    most = float(case.extra_bytes[-1])
    rising = np.maximum.accumulate(case.increases)
    given = min(float(model.most_within(case.load_class, case.work, threshold)), most)
    ruled = min(threshold * case.work.latency_ms * (copy_gb_s or np.inf) * 1e6, most)
    at_given, at_ruled = np.interp([given, ruled], case.extra_bytes, rising)
    true = most if rising[-1] <= threshold else _crossing(case.extra_bytes, rising, threshold)
    return float(at_given), float(at_ruled), given / max(true, 1.0)


def _crossing(extra: FloatArray, rising: FloatArray, threshold: float) -> float:
    """Where a measured curve passes the threshold, between its points in a straight line."""
    after = int(np.argmax(rising > threshold))
    step = (threshold - rising[after - 1]) / (rising[after] - rising[after - 1])
    return float(extra[after - 1] + step * (extra[after] - extra[after - 1]))


def _rounded(score: LoadScore) -> dict[str, Any]:
    return {key: round(value, 1) for key, value in asdict(score).items() if value is not None}
