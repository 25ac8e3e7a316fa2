"""Fits a device's latency under load to measured rows (FlashMem, section 4.2); see `load_measuring`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, isfinite, log, prod
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance
from torchedge.devices.device import measured_figure
from torchedge.errors import ProfileError
from torchedge.forests.trees import Forest
from torchedge.lowering.programs import LoadClassName
from torchedge.profiling.forest_fitting import fit_boosted
from torchedge.profiling.profile_folders import PartFit, describe
from torchedge.profiling.samples import DataSource
from torchedge.storage import file_sha256
from torchedge.storage.documents import read_unpacked, reading
from torchedge.storage.journals import parse_lines
from torchedge.streaming.capacities import (
    GROUP_ITEMS,
    LOAD_FEATURES,
    LOADING_WAYS,
    LOADS,
    WAY,
    FittedLoads,
    load_features,
)
from torchedge.streaming.rates import KERNELS, THRESHOLDS, KernelRates
from torchedge.streaming.schedules import LaunchWork
from torchedge.texts import rounded

DISTURBED = 1.5
"""A point whose median run takes over this multiple of its shortest run was disturbed and is omitted."""

_MOST_BYTES, _MOST_LOADS, _MOST_SIZES = 32 * 2**20, 64, 8
_LEAST_SIZES = 4
_HIGHEST = 1e18
_ENVIRONMENT = ("device", "driver", "texture", "command", "date")

FOLDS = 10
"""Parts of the cross-validation; all launch shapes of a kernel size are in one part."""

_SETTINGS: Mapping[str, Any] = {"max_iter": 100, "max_leaf_nodes": 15, "min_samples_leaf": 10}


@dataclass(frozen=True)
class LoadCase:
    """One kernel of one size and launch shape: loads in bytes (n,), ascending from 0, and times (n,), ms."""

    kernel: str
    size: tuple[int, ...]
    work: LaunchWork
    extra_bytes: FloatArray
    times_ms: FloatArray

    @property
    def alone_ms(self) -> float:
        """The kernel's latency alone."""
        return float(self.times_ms[0])

    @property
    def increases(self) -> FloatArray:
        """By how much of its own latency the kernel slowed under each load, (n,)."""
        increases: FloatArray = self.times_ms / self.times_ms[0] - 1
        return increases


@dataclass(frozen=True)
class LoadTable:
    """Measurements of one device: cases, the rates of copies and of the disk (GB/s), a launch (us).

    `environment` names the device, its driver, the texture's kind, the probe's command and the date. Of the
    `points` measured, `disturbed` are omitted. `ways`: by way of loading, the mean logarithm of the time of a
    kernel and a load together over the kernel's alone. `host_us`: the host's times of a launch and of a
    transfer. None, or empty: not measured.
    """

    environment: Mapping[str, str]
    cases: tuple[LoadCase, ...]
    copy_gb_s: float | None
    points: int
    disturbed: int
    disk_gb_s: float | None = None
    launch_us: float | None = None
    host_us: tuple[float, float] | None = None
    ways: Mapping[str, float] = field(default_factory=dict)

    def of_class(self, load_class: LoadClassName) -> tuple[LoadCase, ...]:
        """The cases of one operator class."""
        return tuple(case for case in self.cases if case.work.load_class == load_class)

    def rates_of(self, load_class: LoadClassName) -> KernelRates:
        """The rates of one operator class, from its kernels alone."""
        cases = self.of_class(load_class)
        return fit_rates([case.work for case in cases], [case.alone_ms for case in cases])


def read_loads(file: str | Path) -> LoadTable:
    """Read the rows of `torchedge profile --streaming` or of its forerunner load_probe (also compressed).

    Raises ProfileError: a line is no such row; the rows are too few, or of several devices.
    """
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    environment: dict[str, str] = {}
    cases: list[LoadCase] = []
    copies: list[tuple[float, float]] = []
    rates: dict[str, float] = {}
    host: tuple[float, float] | None = None
    ways: dict[str, list[float]] = {}
    points = calm = 0
    expected = "what `torchedge profile --streaming` writes"
    for place, row in parse_lines(file, data):
        with reading(place, "a row of measured loads", expected):
            if row.get("row") == "environment":
                reported = {key: _text(row[key]) for key in _ENVIRONMENT}
                if environment.get("device", reported["device"]) != reported["device"]:
                    raise ValueError(f"another device, {reported['device'][:40]!r}")
                environment = environment or reported
            elif row.get("row") == "disk":
                rates["disk"] = _number(row["bytes"], 1) / _number(row["ms"]) / 1e6
            elif row.get("row") == "launch":
                rates["launch"] = _number(row["us"])
            elif row.get("row") == "host":
                host = _number(row["launch_us"]), _number(row["transfer_us"])
            elif row["kernel"] == "copy":
                copies.append((_number(row["size"][0], 1), _number(row["ms"])))
            elif "reason" not in row:
                case = _case(row)
                points += len(row["loads"])
                if case is not None:
                    calm += len(case.times_ms)
                    cases.append(case)
                if "ways" in row:
                    together = {way: _number(row["ways"][way]) for way in ("alone", *LOADING_WAYS)}
                    for way in LOADING_WAYS:
                        ways.setdefault(way, []).append(log(together[way] / together["alone"]))
    _check(file, environment, cases)
    means = {way: float(np.mean(logs)) for way, logs in ways.items()}
    return LoadTable(
        environment, tuple(cases), _rate(copies), points, points - calm, rates.get("disk"),
        rates.get("launch"), host, means,
    )  # fmt: skip


def _case(row: Mapping[str, Any]) -> LoadCase | None:
    """Return a row's case without disturbed points; None if only disturbed ones are left."""
    if row["class"] not in THRESHOLDS:
        raise ValueError(f"class {str(row['class'])[:20]!r}")
    if len(row["loads"]) > _MOST_LOADS or len(row["size"]) > _MOST_SIZES:
        raise ValueError(f"{len(row['loads'])} loads of {len(row['size'])} sizes")
    loads = [(_number(extra, 0), _number(ms), _number(least)) for extra, ms, least in row["loads"]]
    extra, times, least = np.array(loads, np.float64).reshape(-1, 3).T
    if len(extra) < 2 or extra[0] != 0 or (np.diff(extra) <= 0).any():
        raise ValueError("loads that do not ascend from 0 bytes")
    sizes = [[int(_number(n, 1)) for n in row[key]] for key in ("global", "local")]
    items, group = (int(_number(prod(several), 1)) for several in sizes)
    flops, read, written = (int(_number(row[key], 1)) for key in ("flops", "input_bytes", "output_bytes"))
    calm = times <= DISTURBED * least
    if not calm[0] or calm.sum() < 2:
        return None
    kernel, size = _text(row["kernel"]), tuple(int(_number(n, 1)) for n in row["size"])
    work = LaunchWork(kernel, row["class"], flops, read, written, items, group)
    return LoadCase(kernel, size, work, extra[calm], times[calm])


def _number(value: object, low: float = 1e-9) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= _HIGHEST:
        raise ValueError(f"the number {str(value)[:20]}")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ValueError(f"the text {str(value)[:20]!r}")
    return value


def _check(file: str | Path, environment: Mapping[str, str], cases: list[LoadCase]) -> None:
    if not environment:
        raise ProfileError(f'{file}: has no row "environment", expected it first')
    for load_class in THRESHOLDS:
        sizes = {(case.kernel, case.size) for case in cases if case.work.load_class == load_class}
        if len(sizes) < _LEAST_SIZES:
            raise ProfileError(
                f"{file}: {len(sizes)} {load_class} kernels of different sizes measured undisturbed, "
                f"expected at least {_LEAST_SIZES}; measure again with `torchedge profile --streaming`"
            )


def _rate(copies: list[tuple[float, float]]) -> float | None:
    """Return the rate of the fastest copy of the largest size in GB/s."""
    largest = max((size for size, _ in copies), default=0.0)
    rate = max((size / ms / 1e6 for size, ms in copies if size == largest), default=None)
    return rate if rate is not None and isfinite(rate) else None


# fits -------------------------------------------------------------------------------------------------------


def fit_device_loads(
    file: Path, device: Device, out: Path, step: Callable[[], Any] = lambda: None
) -> PartFit:
    """Fit a table of measured loads and score the fit; call `step` after each class.

    Raises:
        ProfileError: the table cannot be used.
        MissingExtraError: scikit-learn is not installed.
    """
    table = read_loads(file)
    forests = fit_loads(table)
    scores = {}
    for load_class in THRESHOLDS:
        scores[load_class] = score_loads(table, load_class)
        step()
    measured_on = table.environment
    source = DataSource(file.name, file_sha256(file, max_bytes=_MOST_BYTES), Provenance.MEASURED)
    described = describe(
        source,
        f"torchedge fit loads {file.name} --device {device.name} --out {out.resolve().name}",
        measured=measured_on["date"],
        probe=measured_on["command"],
        on="{device}, driver {driver}, {texture}".format(**measured_on),
        rows=len(table.cases),
        points=table.points,
        disturbed=table.disturbed,
    )
    described["accuracy"] = {
        name: {key: round(value, 1) for key, value in score.items()} for name, score in scores.items()
    }
    described[KERNELS] = {name: asdict(table.rates_of(name)) for name in THRESHOLDS}
    if table.ways:
        described[WAY] = min(table.ways, key=lambda way: table.ways[way])
        described["slowed_by"] = {way: round(100 * (exp(mean) - 1), 1) for way, mean in table.ways.items()}
    if table.launch_us is not None:
        described["launch_us"] = table.launch_us
    return PartFit(forests, described, _figures(table))


def _figures(table: LoadTable) -> dict[str, dict[str, Any]]:
    """Return the figures of a profile that a table measures."""
    launch, transfer = table.host_us or (None, None)
    measured = {
        "unified_to_texture_gb_s": (table.copy_gb_s, "stand-alone copy from a buffer to {texture}"),
        "disk_read_gb_s": (table.disk_gb_s, "a temporary file, read past the page cache"),
        "host_launch_us": (launch, "small products, all weights preloaded"),
        "host_transfer_us": (transfer, "small products, each weight streamed from main memory"),
    }
    source = "{{command}} on {{date}}: {}, {{device}}, driver {{driver}}"
    return {
        name: measured_figure(name, rounded(value), source.format(what).format(**table.environment))
        for name, (value, what) in measured.items()
        if value is not None
    }


def fit_loads(table: LoadTable) -> dict[LoadClassName, Forest]:
    """Grow the forest of each class, of log(latency under load / latency alone).

    Raises MissingExtraError: scikit-learn is not installed.
    """
    return {name: _grow(table.of_class(name)) for name in THRESHOLDS}


def _grow(cases: Sequence[LoadCase]) -> Forest:
    """Boosted trees over the cases' points, never falling with the load."""
    rows = np.concatenate([load_features(case.work, case.alone_ms, case.extra_bytes) for case in cases])
    targets = np.concatenate([np.log1p(case.increases) for case in cases])
    rising = [int(name in LOADS) for name in LOAD_FEATURES]
    metadata = {GROUP_ITEMS: str(_fastest_group(cases))}
    return fit_boosted(
        rows, targets, feature_names=LOAD_FEATURES, metadata=metadata, monotonic_cst=rising, **_SETTINGS
    )


_OVERHEADS_US = np.array([0.0, *np.geomspace(0.1, 100, 31)])
_RATES = np.geomspace(0.1, 1e6, 141)


def fit_rates(works: Sequence[LaunchWork], alone_ms: Sequence[float]) -> KernelRates:
    """Return the rates that give the latencies alone of a class with the least squares of logarithms."""
    flops = np.array([work.flops for work in works])[:, None, None]
    moved = np.array([work.bytes_moved for work in works])[:, None, None]
    target = np.log(alone_ms)[:, None, None]
    busy_ms = np.maximum(flops / _RATES[:, None], moved / _RATES) / 1e6
    errors = [((np.log(us / 1e3 + busy_ms) - target) ** 2).mean(0) for us in _OVERHEADS_US]
    overhead, by_flops, by_bytes = np.unravel_index(np.argmin(errors), np.shape(errors))
    return KernelRates(*map(rounded, (_RATES[by_flops], _RATES[by_bytes], _OVERHEADS_US[overhead])))


def _fastest_group(cases: Sequence[LoadCase]) -> int:
    """Return the work-group size whose kernels were fastest without load, over all kernel sizes."""
    best: dict[object, float] = {}
    for case in cases:
        key = case.kernel, case.size
        best[key] = min(best.get(key, np.inf), case.alone_ms)
    behind: dict[int, list[float]] = {}
    for case in cases:
        slower = np.log(case.alone_ms / best[case.kernel, case.size])
        behind.setdefault(case.work.group_items or 1, []).append(float(slower))
    return min(sorted(behind), key=lambda items: np.mean(behind[items]))


def score_loads(table: LoadTable, load_class: LoadClassName) -> dict[str, float]:
    """Score the fit of one class on kernel sizes held out in `FOLDS` parts.

    Returns the number of `sizes`; `mean` and `median` of the absolute error of the latency under load, %. For
    classes that load also the measured slowdown of held-out kernels (%, median and "_p90", the 90th
    percentile) at the model's capacity (`at_capacity`) and at the capacity by the threshold alone
    (`at_threshold`), and the model's capacity over the measured one (`share`, a median, %).
    """
    cases = table.of_class(load_class)
    sizes = sorted({(case.kernel, case.size) for case in cases})
    parts = min(FOLDS, len(sizes))
    order = np.random.default_rng(0).permutation(len(sizes))
    part = {size: int(order[place]) % parts for place, size in enumerate(sizes)}
    errors: list[float] = []
    reached: list[tuple[float, float, float]] = []
    for number in range(parts):
        left_out = [case for case in cases if part[case.kernel, case.size] == number]
        training = [case for case in cases if part[case.kernel, case.size] != number]
        model = FittedLoads({load_class: _grow(training)}, "")
        for case in left_out:
            predicted = model.increase(case.work, case.alone_ms, case.extra_bytes[1:])
            errors += np.abs((1 + predicted) / (1 + case.increases[1:]) - 1).tolist()
            if THRESHOLDS[load_class] > 0:
                reached.append(_reached(model, case, table.copy_gb_s))
    scores = {"mean": 100 * np.mean(errors), "median": 100 * np.median(errors)}
    if reached:
        model_at, rule_at, share = 100 * np.array(reached).T
        for name, slowed in (("at_capacity", model_at), ("at_threshold", rule_at)):
            scores |= {name: np.median(slowed), f"{name}_p90": np.percentile(slowed, 90)}
        scores["share"] = np.median(share)
    return {"sizes": len(sizes)} | {name: float(score) for name, score in scores.items()}


def _reached(model: FittedLoads, case: LoadCase, copy_gb_s: float | None) -> tuple[float, float, float]:
    """Return the increase at the model's and the threshold's capacity, and model over true capacity."""
    threshold = THRESHOLDS[case.work.load_class]
    most = float(case.extra_bytes[-1])
    rising = np.maximum.accumulate(case.increases)
    predicted = min(float(model.most_within(case.work, case.alone_ms, threshold)), most)
    ruled = min(threshold * case.alone_ms * (copy_gb_s or np.inf) * 1e6, most)
    at_predicted, at_ruled = np.interp([predicted, ruled], case.extra_bytes, rising)
    true = float(np.interp(threshold, rising, case.extra_bytes))
    return float(at_predicted), float(at_ruled), predicted / max(true, 1.0)
