"""Predicted against measured: the numbers that a report shows, as tables and as figures draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import InputError, ProfileError
from torchedge.prediction.profiles import load_models
from torchedge.prediction.step_models import MODE_TABLES, Mode, StepModels
from torchedge.profiling.accuracy import predict_unseen
from torchedge.profiling.measured import Measured, Source
from torchedge.profiling.samples import Mask, Samples
from torchedge.profiling.training_fit import latency_of, latency_rows, memory_of, memory_rows

__all__ = [
    "PROTOCOLS",
    "Compared",
    "Report",
    "Summary",
    "Target",
    "compare_device",
    "compare_unseen",
    "figures_document",
    "summarise",
]

FloatArray = npt.NDArray[np.float64]
StringArray = npt.NDArray[np.str_]
Target = Literal["memory", "latency"]

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        "own": "predictions of pruning levels not trained on, each network by a model of its own "
        "(perf4sight, section 6.2)",
        "left-out": "predictions of networks not trained on, by models of the others "
        "(perf4sight, section 6.3)",
    }
)
"""How rows are kept unseen in place of asking a device's profile."""

_NAMES: Mapping[tuple[Mode, Target], tuple[str, str, str]] = MappingProxyType(
    {
        ("train", "memory"): ("Γ", "training memory", "MiB"),
        ("train", "latency"): ("Φ", "training latency", "ms"),
        ("infer", "memory"): ("γ", "inference memory", "MiB"),
        ("infer", "latency"): ("φ", "inference latency", "ms"),
    }
)
_TARGETS: tuple[Target, ...] = ("memory", "latency")
_WORST = 15


@dataclass(frozen=True)
class Compared:
    """One figure of one mode over R rows: labels, measured and predicted values, intervals (NaN: none)."""

    mode: Mode
    target: Target
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
    def symbol(self) -> str:
        """Γ, Φ, γ or φ."""
        return _NAMES[self.mode, self.target][0]

    @property
    def name(self) -> str:
        """The figure in words."""
        return _NAMES[self.mode, self.target][1]

    @property
    def unit(self) -> str:
        """MiB or ms."""
        return _NAMES[self.mode, self.target][2]

    @property
    def error(self) -> FloatArray:
        """(R,) relative errors of the predictions in %, signed."""
        return np.asarray(100 * (self.value / self.measured - 1))

    @property
    def inside(self) -> Mask:
        """(R,) whether the measurement lies in the interval."""
        return np.asarray((self.measured >= self.low) & (self.measured <= self.high))

    @property
    def has_intervals(self) -> bool:
        """Whether any row has one."""
        return bool(np.isfinite(self.low).any())

    def leading(self, most: int) -> list[str]:
        """Return at most so many networks: those with most pruning levels, then with most rows."""
        names, counts = np.unique(self.network, return_counts=True)
        levels = [len(set(self.level[self.network == name].tolist())) for name in names]
        order = sorted(range(len(names)), key=lambda i: (-levels[i], -counts[i], names[i]))
        return sorted(str(names[i]) for i in order[:most])


@dataclass(frozen=True)
class Report:
    """What was compared, how, and what is to be said about it.

    method: a sentence about where the predictions come from. seen: they were fitted to these very rows.
    """

    device: Device
    dataset: str
    digest: str
    method: str
    compared: tuple[Compared, ...]
    seen: bool = False
    notes: tuple[str, ...] = ()


def compare_device(measured: Measured, device: Device) -> Report:
    """Predict every measured row with a device's profile, or those that it was not adapted to."""
    found: list[Compared] = []
    notes: list[str] = []
    seen = []
    for mode, (samples, source) in measured.items():
        models = load_models(device, mode)
        notes += models.notes
        rows = _unused(device, mode, samples, source)
        seen.append(rows is None)
        chosen = np.ones(len(samples.batch), dtype=np.bool_) if rows is None else rows
        found += _compared(mode, samples, source.labels, models, chosen)
        if rows is not None and not rows.all():
            apart = f"{int(rows.sum())} of {len(rows)}"
            notes.append(
                f"{MODE_TABLES[mode]}: compared on the {apart} rows that the profile was not adapted to"
            )
    name, digest = next((s.name, s.digest) for _, s in measured.values())
    method = f"predictions of the profile {device.name}"
    if all(seen):
        method += ", which was fitted to these very measurements: errors on unseen networks are larger"
    elif any(seen):
        method += ", which was fitted to part of these very measurements"
    return Report(device, name, digest, method, tuple(found), any(seen), tuple(dict.fromkeys(notes)))


def _unused(device: Device, mode: Mode, samples: Samples, source: Source) -> Mask | None:
    """Return which rows (R,) a profile was not fitted to, None where it was fitted to all of them."""
    described = device.profile.get(MODE_TABLES[mode])
    if not isinstance(described, Mapping) or described.get("dataset_sha256") != source.digest:
        return np.ones(len(source.labels), dtype=np.bool_)
    used = described.get("used")
    if not isinstance(used, (tuple, list)):
        return None
    unused: Mask = ~np.isin(np.array(source.labels), [str(label) for label in used])
    measured = memory_rows(samples, unused) | latency_rows(samples, unused)
    return unused if measured.any() else None


def _compared(
    mode: Mode, samples: Samples, labels: Sequence[str], models: StepModels, chosen: Mask
) -> list[Compared]:
    found = []
    rows = memory_rows(samples, chosen)
    if rows.any():
        memory = memory_of(models.memory, samples, rows)
        told = (memory.value, memory.low, memory.high)
        found.append(_table(mode, "memory", samples, labels, rows, told))
    rows = latency_rows(samples, chosen)
    if rows.any():
        times = latency_of(models.latency, samples, rows)
        told = (times.value, times.low, times.high)
        found.append(_table(mode, "latency", samples, labels, rows, told))
    return found


def _table(
    mode: Mode,
    target: Target,
    samples: Samples,
    labels: Sequence[str],
    rows: Mask,
    told: tuple[FloatArray, FloatArray, FloatArray],
) -> Compared:
    measured = samples.gamma if target == "memory" else samples.phi
    return Compared(
        mode,
        target,
        samples.network[rows],
        samples.level[rows],
        samples.strategy[rows],
        np.array([label.rpartition("@")[0] for label in labels])[rows],
        samples.batch[rows],
        measured[rows],
        *told,
    )


def compare_unseen(
    measured: Measured,
    device: Device,
    protocol: str,
    *,
    intervals: bool = False,
    tell: Callable[[], Any] = lambda: None,
) -> Report:
    """Predict rows with models fitted without them, as a protocol of `PROTOCOLS` says.

    intervals: cross-validate inside every fit for its intervals, which takes ten times as long. `tell` is
    called after each fit. Raises InputError for another protocol, ProfileError where too few rows are there.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"protocol is {protocol!r}, expected one of: {', '.join(PROTOCOLS)}")
    found: list[Compared] = []
    problems: dict[str, None] = {}
    for mode, (samples, source) in measured.items():
        for target in _TARGETS:
            told = predict_unseen(
                samples,
                "gamma" if target == "memory" else "phi",
                protocol,
                errors=intervals,
                tell=tell,
                failed=lambda error: problems.setdefault(str(error)),
            )
            rows = np.isfinite(told.value)
            if rows.any():
                unknown = np.full(int(rows.sum()), np.nan)
                low, high = (told.low[rows], told.high[rows]) if intervals else (unknown, unknown)
                found.append(
                    _table(mode, target, samples, source.labels, rows, (told.value[rows], low, high))
                )
    name, digest = next((s.name, s.digest) for _, s in measured.values())
    if not found:
        reason = next(iter(problems), "it has no rows to test")
        raise ProfileError(
            f"{name}: too small for protocol {protocol} ({reason}); measure more, or compare with a profile"
        )
    return Report(device, name, digest, PROTOCOLS[protocol], tuple(found), notes=tuple(problems))


# summaries --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Absolute errors in %, over rows and by network and pruning level; coverage of 90 % intervals in %.

    mean: over networks, each counting the same. worst: (label, batch, measured, predicted, signed error).
    """

    rows: int
    mean: float
    median: float
    tenth: float
    largest: float
    coverage: float
    networks: Mapping[str, tuple[int, float, float]]
    levels: Mapping[int, tuple[int, float]]
    worst: tuple[tuple[str, int, float, float, float], ...] = field(default=())


def summarise(compared: Compared) -> Summary:
    """Return the summary of one figure: by network (rows, mean error, coverage), by level (rows, error)."""
    size = np.abs(compared.error)
    inside = 100.0 * compared.inside
    networks = {}
    for name in sorted(set(compared.network.tolist())):
        rows = compared.network == name
        cover = float(inside[rows].mean()) if compared.has_intervals else float("nan")
        networks[name] = (int(rows.sum()), float(size[rows].mean()), cover)
    levels = {}
    for level in sorted(set(compared.level.tolist())):
        rows = compared.level == level
        levels[level] = (int(rows.sum()), float(size[rows].mean()))
    order = np.argsort(-size, kind="stable")[:_WORST]
    worst = tuple(
        (
            str(compared.label[i]),
            int(compared.batch[i]),
            float(compared.measured[i]),
            float(compared.value[i]),
            float(compared.error[i]),
        )
        for i in order
    )
    return Summary(
        len(size),
        float(np.mean([mean for _, mean, _ in networks.values()])),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(inside.mean()) if compared.has_intervals else float("nan"),
        networks,
        levels,
        worst,
    )


def figures_document(report: Report) -> list[dict[str, Any]]:
    """Return what a report says of each figure as plain data."""
    out = []
    for compared in report.compared:
        found = summarise(compared)
        out.append(
            {
                "mode": compared.mode,
                "figure": compared.name,
                "symbol": compared.symbol,
                "unit": compared.unit,
                "rows": found.rows,
                "error": {
                    "mean_over_networks": found.mean,
                    "median": found.median,
                    "90th_percentile": found.tenth,
                    "largest": found.largest,
                },
                "coverage": found.coverage,
                "networks": {
                    name: {"rows": rows, "error": error, "coverage": cover}
                    for name, (rows, error, cover) in found.networks.items()
                },
                "levels": {
                    str(level): {"rows": rows, "error": error}
                    for level, (rows, error) in found.levels.items()
                },
                "worst": [
                    dict(zip(("network", "batch_size", "measured", "predicted", "error"), row, strict=True))
                    for row in found.worst
                ],
            }
        )
    return out
