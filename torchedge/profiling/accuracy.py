"""How accurate predictions of measured rows are: a profile's own, or those of models fitted without the rows.

The protocols are perf4sight's: a network's other pruning levels from its own rows (section 6.2), networks
from a basis of three, and networks held out in turn (section 6.3). Pruning levels are held out in turn, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device
from torchedge.errors import ProfileError, check_choice
from torchedge.graphs import Mode
from torchedge.prediction.latency.model import LatencyModel, Times
from torchedge.prediction.memory.model import MemoryModel, PredictedMemory
from torchedge.prediction.profiles import MODE_TABLES, FittedModels, StepModels, load_models
from torchedge.profiling.latency_fitting import fit_latency, predict_latency
from torchedge.profiling.memory_fitting import fit_memory, predict_memory
from torchedge.profiling.samples import QUANTITIES, Mask, Quantity, Samples, network_groups, simulate_records

StringArray = npt.NDArray[np.str_]

TRAINING_LEVELS = (0, 30, 50, 70, 90)
"""perf4sight, section 6.1: the pruning levels models are trained on; all others test."""

BASIS = ("resnet18", "mobilenetv2", "squeezenet")
"""perf4sight, section 6.3: the networks a model for unseen networks is trained on."""

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        "own": "predictions of pruning levels not trained on, each network by a model of its own "
        "(perf4sight, section 6.2)",
        "basis": "predictions by one model of three networks (perf4sight, section 6.3)",
        "left-out": "predictions of networks not trained on, by models of the others "
        "(perf4sight, section 6.3)",
        "levels": "predictions of pruning levels not trained on, each level by one model of all networks at "
        "all other levels",
    }
)
"""How rows are predicted by models that were fitted without them."""

GROUPS = 20
"""Number of groups in which a campaign's networks are held out."""

NAMES: Mapping[tuple[Mode, Quantity], tuple[str, str, str]] = MappingProxyType(
    {
        ("train", "memory"): ("Γ", "training memory", "MiB"),
        ("train", "latency"): ("Φ", "training latency", "ms"),
        ("infer", "memory"): ("γ", "inference memory", "MiB"),
        ("infer", "latency"): ("φ", "inference latency", "ms"),
    }
)
_WORST = 15


# comparisons ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Mean absolute percentage error and interval coverage by network, in %."""

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


@dataclass(frozen=True)
class JudgedFigure:
    """A figure that is held against measurements: Γ or Φ of training, γ or φ of inference."""

    mode: Mode
    quantity: Quantity

    @property
    def symbol(self) -> str:
        """Γ, Φ, γ or φ."""
        return NAMES[self.mode, self.quantity][0]

    @property
    def name(self) -> str:
        """The figure in words, such as "training memory"."""
        return NAMES[self.mode, self.quantity][1]


@dataclass(frozen=True)
class Comparison(JudgedFigure):
    """One quantity of one mode over R rows: labels, measured and predicted values, intervals (NaN: none)."""

    network: StringArray
    level: npt.NDArray[np.int64]
    strategy: StringArray
    label: StringArray
    batch: FloatArray
    measured: FloatArray
    value: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def unit(self) -> str:
        """MiB or ms."""
        return NAMES[self.mode, self.quantity][2]

    @property
    def error(self) -> FloatArray:
        """(R,) relative errors of the predictions in %, signed."""
        return np.asarray(100 * (self.value / self.measured - 1))

    @property
    def size(self) -> FloatArray:
        """(R,) absolute percentage errors."""
        return np.asarray(np.abs(self.error))

    @property
    def inside(self) -> Mask:
        """(R,) whether the measurement lies in the interval."""
        return np.asarray((self.measured >= self.low) & (self.measured <= self.high))

    @property
    def has_intervals(self) -> bool:
        """Whether any row has one."""
        return bool(np.isfinite(self.low).any())

    @property
    def coverage(self) -> float:
        """Share of rows inside their intervals in %; NaN without intervals."""
        return 100 * float(self.inside.mean()) if self.has_intervals else float("nan")

    @property
    def score(self) -> Score:
        """Errors and coverage by network."""
        coverage = _means(self.network, np.asarray(100.0 * self.inside)) if self.has_intervals else {}
        return Score(_means(self.network, self.size), coverage)

    def worst(self) -> list[tuple[str, int, float, float, float]]:
        """Return label, batch size, measured and predicted value and error of the rows that err most."""
        columns = (self.label, self.batch.astype(np.int64), self.measured, self.value, self.error)
        order = np.argsort(-self.size, kind="stable")[:_WORST]
        return list(zip(*(column[order].tolist() for column in columns), strict=True))


def _means(keys: npt.NDArray[Any], values: FloatArray) -> dict[Any, float]:
    return {key: float(values[keys == key].mean()) for key in sorted(set(keys.tolist()))}


def predict_rows(model: MemoryModel | LatencyModel, samples: Samples, rows: Mask) -> PredictedMemory | Times:
    """Return the predictions of a model of either quantity for some rows."""
    if isinstance(model, MemoryModel):
        return predict_memory(model, samples, rows)
    return predict_latency(model, samples, rows)


def compare(
    samples: Samples, quantity: Quantity, rows: Mask, value: FloatArray, low: FloatArray, high: FloatArray
) -> Comparison:
    """Return predictions (R,) of some rows beside their measurements."""
    return Comparison(
        samples.mode,
        quantity,
        samples.network[rows],
        samples.level[rows],
        samples.strategy[rows],
        samples.label[rows],
        samples.batch[rows],
        samples.measured(quantity)[rows],
        value,
        low,
        high,
    )


# predictions of rows that a model has not seen --------------------------------------------------------------


def splits(samples: Samples, protocol: str) -> Iterator[tuple[Mask, Mask]]:
    """Yield (training rows, test rows) of a protocol of `PROTOCOLS`.

    Levels are disjoint, and training rows are pruned at random (perf4sight, section 6.2). In a campaign,
    which need not have the paper's levels, networks are held out with all their rows, in `GROUPS` groups.
    Of all levels those between the smallest and the largest are held out in turn, each in all networks.
    """
    if protocol == "levels":
        for level in sorted(set(samples.level.tolist()))[1:-1]:
            yield samples.level != level, samples.level == level
        return
    training = np.isin(samples.level, TRAINING_LEVELS) & (samples.strategy != "l1")
    test = ~np.isin(samples.level, TRAINING_LEVELS)
    if protocol == "basis":
        if set(BASIS) <= set(samples.networks) and test.any():
            yield training & np.isin(samples.network, BASIS), test
    elif protocol == "left-out" and samples.steady:
        for group in network_groups(samples.networks, GROUPS):
            left_out = np.isin(samples.network, group)
            yield ~left_out, left_out
    else:
        for name in samples.networks:
            own = samples.network == name
            if (test & own).any():
                yield training & (own if protocol == "own" else ~own), test & own


def predict_unseen(
    samples: Samples,
    quantity: Quantity,
    protocol: str,
    *,
    forest: bool = True,
    intervals: bool = True,
    step: Callable[[], Any] = lambda: None,
    failed: Callable[[ProfileError], Any] | None = None,
) -> Comparison | None:
    """Predict every split's test rows with a model fitted on its training rows; call `step` after each split.

    intervals: cross-validate inside every fit for its intervals, which takes ten times as long. failed:
    receives the error of a fit that cannot be made; without it the error is raised. None: no row is tested.
    """
    fit = fit_memory if quantity == "memory" else fit_latency
    usable = samples.usable(quantity)
    value, low, high = (np.full(len(samples.batch), np.nan) for _ in range(3))
    for train, test in splits(samples, protocol):
        rows = test & usable
        if not rows.any():
            continue
        try:
            model = fit(samples, train, errors=intervals, forest=forest)
        except ProfileError as error:
            if failed is None:
                raise
            failed(error)
        else:
            predicted = predict_rows(model, samples, rows)
            value[rows] = predicted.value
            if intervals:
                low[rows], high[rows] = predicted.low, predicted.high
        step()
    tested = np.isfinite(value)
    if not tested.any():
        return None
    return compare(samples, quantity, tested, value[tested], low[tested], high[tested])


def score(
    samples: Samples, quantity: Quantity, protocol: str, *, forest: bool = True, intervals: bool = True
) -> Score:
    """Fit on every split's training rows and score its test rows; ProfileError where there are too few."""
    unseen = predict_unseen(samples, quantity, protocol, forest=forest, intervals=intervals)
    if unseen is None:
        raise ProfileError("the dataset has no rows to test on: its networks or pruning levels are too few")
    return unseen.score


def score_simulation(samples: Samples, peak: str) -> Score:
    """Score the simulated "allocated" or "reserved" peak over all measured rows; nothing is fitted.

    Raises ProfileError where the peak was not measured.
    """
    measured: FloatArray = getattr(samples, peak)
    rows = samples.usable("memory") & np.isfinite(measured)
    if not rows.any():
        raise ProfileError(f"{peak} memory was not measured")
    simulated = simulate_records(samples, rows) if peak == "allocated" else samples.peaks.reserved[rows]
    return Score(_means(samples.network[rows], 100 * np.abs(simulated / measured[rows] - 1)))


# reports ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Predictions beside measurements of a dataset.

    method: where the predictions come from. seen: the models were fitted to these very rows.
    """

    device: Device
    dataset: str
    digest: str
    method: str
    comparisons: tuple[Comparison, ...]
    seen: bool = False
    notes: tuple[str, ...] = ()


def compare_profile(measured: Mapping[Mode, Samples], device: Device) -> Report:
    """Predict every measured row with a device's profile; only rows that it was not adapted to, if any."""
    comparisons: list[Comparison] = []
    notes: list[str] = []
    seen = []
    for mode, samples in measured.items():
        models = load_models(device, mode)
        notes += models.notes
        unused = _unused(device, mode, samples)
        seen.append(unused is None)
        rows = samples.every if unused is None else unused
        comparisons += compare_models(samples, models, rows)
        if not rows.all():
            notes.append(
                f"{MODE_TABLES[mode]}: compared on the {int(rows.sum())} of {len(rows)} rows that the "
                "profile was not adapted to"
            )
    method = f"predictions of the profile {device.name}"
    if any(seen):
        method += f", which was fitted to {'' if all(seen) else 'part of '}these very measurements"
        method += ": errors on unseen networks are larger" if all(seen) else ""
    source = next(iter(measured.values())).source
    notes = list(dict.fromkeys(notes))
    return Report(device, source.name, source.digest, method, tuple(comparisons), any(seen), tuple(notes))


def _unused(device: Device, mode: Mode, samples: Samples) -> Mask | None:
    """Return which rows (R,) a profile was not fitted to, None where it was fitted to all of them."""
    described = device.profile.get(MODE_TABLES[mode])
    if not isinstance(described, Mapping) or described.get("dataset_sha256") != samples.source.digest:
        return samples.every
    used = described.get("used")
    if not isinstance(used, (tuple, list)):
        return None
    unused: Mask = ~np.isin(np.array(samples.points(samples.every)), [str(point) for point in used])
    return unused if any(samples.usable(q, unused).any() for q in QUANTITIES) else None


def compare_models(samples: Samples, models: StepModels | FittedModels, rows: Mask) -> Iterator[Comparison]:
    """Yield the predictions of models for some rows beside their measurements, by quantity."""
    for quantity, model in zip(QUANTITIES, (models.memory, models.latency), strict=True):
        usable = samples.usable(quantity, rows)
        if model is not None and usable.any():
            p = predict_rows(model, samples, usable)
            yield compare(samples, quantity, usable, p.value, p.low, p.high)


def compare_unseen(
    measured: Mapping[Mode, Samples],
    device: Device,
    protocol: str,
    *,
    intervals: bool = False,
    step: Callable[[], Any] = lambda: None,
) -> Report:
    """Predict rows with models fitted without them, by a protocol of `PROTOCOLS`; see `predict_unseen`.

    Raises InputError for another protocol and ProfileError where there are too few rows.
    """
    check_choice("protocol", protocol, PROTOCOLS)
    problems: dict[str, None] = {}
    unseen = [
        predict_unseen(
            samples, quantity, protocol, intervals=intervals, step=step,
            failed=lambda error: problems.setdefault(str(error)),
        )
        for samples in measured.values() for quantity in QUANTITIES
    ]  # fmt: skip
    comparisons = tuple(comparison for comparison in unseen if comparison is not None)
    source = next(iter(measured.values())).source
    if not comparisons:
        reason = next(iter(problems), "it has no rows to test")
        raise ProfileError(
            f"{source.name}: too small for protocol {protocol} ({reason}); measure more, or compare with a "
            "profile"
        )
    return Report(device, source.name, source.digest, PROTOCOLS[protocol], comparisons, notes=tuple(problems))


def comparison_document(compared: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison as plain data."""
    counts = {n: int((compared.network == n).sum()) for n in compared.score.error}
    levels = _means(compared.level, compared.size)
    columns = ("network", "batch_size", "measured", "predicted", "error")
    return {
        "mode": compared.mode,
        "figure": compared.name,
        "symbol": compared.symbol,
        "unit": compared.unit,
        "rows": len(compared.batch),
        "error": {
            "mean_over_networks": compared.score.mean,
            "median": float(np.median(compared.size)),
            "90th_percentile": float(np.quantile(compared.size, 0.9)),
            "largest": float(compared.size.max()),
        },
        "coverage": compared.coverage,
        "networks": {
            name: {"rows": counts[name], "error": error, "coverage": compared.score.coverage.get(name)}
            for name, error in compared.score.error.items()
        },
        "levels": {
            str(level): {"rows": int((compared.level == level).sum()), "error": error}
            for level, error in levels.items()
        },
        "worst": [dict(zip(columns, row, strict=True)) for row in compared.worst()],
    }
