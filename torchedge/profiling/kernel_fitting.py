"""Fits the coefficients of the kernel cost model to rows of micro-benchmarks (TMModel, sections 3 and 4)."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance
from torchedge.devices.device import measured_figure
from torchedge.errors import ProfileError, needed
from torchedge.profiling.kernel_cases import UNITS, Case, DeviceTraits, stride_walk
from torchedge.profiling.profile_folders import PartFit, describe
from torchedge.profiling.samples import DataSource
from torchedge.storage import file_sha256
from torchedge.storage.documents import read_unpacked, reading
from torchedge.storage.journals import parse_rows
from torchedge.texts import rounded
from torchedge.textures.coefficients import (
    ARITHMETIC_WIDTHS,
    CODEC,
    DEFAULTS,
    KernelCoefficients,
    MemoryPath,
    Origin,
)
from torchedge.textures.strides import cross_block_strides

REUSE: Mapping[str, int] = {"column": 0, "row": 1, "block-2": 2, "block-4": 4, "block-8": 8}
"""Intra-thread reuse distance s of the patterns (TMModel, 3.2.1)."""

_MOST_BYTES = 32 * 2**20
_HIT_TOLERANCE = 1.10
"""A footprint fits a cache while its latency stays below so many times that of the smallest ones."""

_NO_LIMIT = 2**30
"""Register bytes of a device on which occupancy does not depend on registers."""


@dataclass(frozen=True)
class KernelTable:
    """Rows of micro-benchmarks of one device: the better result of the passes, by case.

    environment: of the first row. differences: relative difference of the passes of each case.
    """

    environment: Mapping[str, Any]
    traits: DeviceTraits
    passes: Mapping[int, Mapping[Case, float]]

    @property
    def results(self) -> dict[Case, float]:
        """The better result of the passes, by case: the shortest time, the highest rate."""
        best: dict[Case, float] = {}
        for measured in self.passes.values():
            for case, value in measured.items():
                better = max if UNITS[case.benchmark].startswith(("GB/s", "GFLOP/s")) else min
                best[case] = better(best.get(case, value), value)
        return best

    @property
    def differences(self) -> list[float]:
        """Relative differences of the two passes, of each case that both have."""
        first, second = (self.passes.get(number, {}) for number in (1, 2))
        return [abs(first[case] / second[case] - 1) for case in first if case in second]


def read_kernels(file: Path) -> KernelTable:
    """Read a journal of `torchedge profile --kernels`.

    Raises:
        ProfileError: the file is missing or too large, or a line is no such row.
    """
    environment: dict[str, Any] = {}
    passes: dict[int, dict[Case, float]] = {1: {}, 2: {}}
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    for number, (_, row) in enumerate(parse_rows(file, io.BytesIO(data)), start=1):
        with reading(f"{file} line {number}", "a row of micro-benchmarks", "a case with its result"):
            if row.get("row") == "environment":
                environment = dict(row)
                continue
            known: dict[str, Any] = dict(row)
            which, benchmark = known.pop("pass"), known.pop("benchmark")
            value = known.pop("value", None)
            for name in ("unit", "reason"):
                known.pop(name, None)
            if benchmark not in UNITS or which not in passes:
                raise ValueError(f"the benchmark {str(benchmark)[:20]!r}, pass {str(which)[:20]}")
            for name, parameter in known.items():
                if not isinstance(parameter, (int, str)) or isinstance(parameter, bool):
                    raise ValueError(f"{name} {str(parameter)[:20]!r}")
            case = Case(benchmark, tuple(known.items()))
            if value is None:  # the device does not run it
                continue
            if isinstance(value, (int, float)) and isfinite(value) and value > 0:
                passes[which][case] = float(value)
            else:
                raise ValueError(f"the result {str(value)[:20]}")
    with reading(str(file), "a table of micro-benchmarks", 'a row "environment" of a device'):
        traits = msgspec.convert({**environment, "name": environment["device"]}, DeviceTraits)
    return KernelTable(environment, traits, passes)


# parts of the fit -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrideFit:
    """Beta of eq. 1: intercept and `across`, ns; residual: median relative error, %."""

    hit_ns: float
    across: tuple[float, ...]
    residual: float


def fit_strides(histograms: FloatArray, latencies: FloatArray) -> StrideFit:
    """Fit eq. 1 by non-negative least squares of relative errors (TMModel, 3.1, step IV).

    histograms: (n, F) cross-block strides per access. latencies: (n,) ns per access. Features that many
    block shapes share are hard to tell apart: as long as the Bayesian information criterion improves, the
    feature is dropped that explains least.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    with needed("scipy", extra="fit", purpose="fitting micro-benchmarks"):
        from scipy.optimize import nnls
    count = len(latencies)
    columns = np.column_stack([np.ones(count), histograms]) / latencies[:, None]

    def fit(features: list[int]) -> tuple[float, FloatArray]:
        weights, error = nnls(columns[:, features], np.ones(count))
        return count * log(max(error**2 / count, 1e-12)) + len(features) * log(count), weights

    used = list(range(columns.shape[1]))
    criterion, weights = fit(used)
    used = [feature for feature, weight in zip(used, weights, strict=True) if weight > 0 or feature == 0]
    criterion, weights = fit(used)
    while len(used) > 1:
        trials = [(fit([f for f in used if f != left_out]), left_out) for left_out in used[1:]]
        (least, fewer), left_out = min(trials, key=lambda trial: trial[0][0])
        if least > criterion:
            break
        criterion, weights = least, fewer
        used.remove(left_out)
    solution = np.zeros(columns.shape[1])
    solution[used] = weights
    hit = max(float(solution[0]), 0.05 * float(latencies.min()))
    across = tuple([rounded(value) for value in solution[1:]])
    errors = np.abs((hit + histograms @ solution[1:]) / latencies - 1)
    return StrideFit(rounded(hit), across, _percent(float(np.median(errors))))


@dataclass(frozen=True, slots=True)
class ScanFit:
    """C and D of eq. 2; residual: median relative error of the predicted slowdown, %."""

    lines: int
    decay: float
    residual: float


def fit_scans(live: FloatArray, slowdowns: FloatArray, expected: float) -> ScanFit:
    """Fit eq. 2: log slowdown = ceil((live - C) / C) log D, by least squares over every C.

    live: (n,) |W| s, lines live at once. slowdowns: (n,) latency over the latency of one work-item.
    expected: C by the size of the cache, which decides among values of C that explain the rows alike.
    """
    most = int(max(live.max(), expected, 2))
    candidates = np.unique(np.concatenate([np.arange(1, min(most, 4096) + 1), np.geomspace(1, most, 256)]))
    candidates = np.unique(candidates.astype(int)).astype(float)
    steps = np.maximum(np.ceil((live - candidates[:, None]) / candidates[:, None]), 0)
    target = np.log(np.maximum(slowdowns, 1e-9))
    slopes = np.maximum(steps @ target / np.maximum((steps**2).sum(1), 1e-9), 0)
    errors = ((steps * slopes[:, None] - target) ** 2).mean(1)
    alike = np.flatnonzero(errors <= errors.min() * 1.02 + 1e-6)
    best = int(alike[np.argmin(np.abs(np.log(candidates[alike] / expected)))])
    if slopes[best] < 0.02:  # no contention: C does not show
        return ScanFit(max(1, round(expected)), 1.0, _percent(float(np.median(np.abs(np.expm1(target))))))
    predicted = np.exp(steps[best] * slopes[best])
    residual = float(np.median(np.abs(predicted / slowdowns - 1)))
    return ScanFit(int(candidates[best]), rounded(float(np.exp(slopes[best]))), _percent(residual))


@dataclass(frozen=True, slots=True)
class WavesFit:
    """Eq. 4: register bytes of a unit, bytes that a work-item needs beside its data, most waves of a unit."""

    register_bytes: int
    base: int
    max_waves: int
    residual: float


def count_waves(times: Mapping[int, float], warps: int) -> int | None:
    """Return the warps of a unit that run at once: times by work-groups a unit, which jump beyond them.

    None: the times do not jump. A jump is small where later rounds meet warm caches.
    """
    multiples = sorted(times)
    for place in range(1, len(multiples)):
        before = max(times[multiple] for multiple in multiples[:place])
        if min(times[multiple] for multiple in multiples[place:]) > 1.05 * before:
            return multiples[place - 1] * warps
    return None


def fit_waves(waves: Mapping[int, int | None], most: int, warp: int, step: int = 1) -> WavesFit:
    """Fit eq. 4 to the waves observed at several register footprints.

    waves: by bytes of data in registers of a work-item; None: as many as were tried (`most`). step: waves
    were observed in multiples of it. The fit with the least relative errors is returned; of equal ones that
    with the smallest register file.
    """
    observed = np.array([most if count is None else count for count in waves.values()], float)
    cap = int(observed.max())
    if (observed == cap).all():
        return WavesFit(_NO_LIMIT, 0, cap, 0.0)
    footprints = np.array(list(waves), float)
    base, file_bytes = np.meshgrid(np.arange(0, 164, 4), np.arange(4, 1025, 4) * 1024, indexing="ij")
    fitting = file_bytes[..., None] // ((footprints + base[..., None]) * warp) // step * step
    predicted = np.clip(fitting, step, cap)
    errors = np.abs(predicted / observed - 1).mean(-1)
    place = np.unravel_index(np.argmin(errors), errors.shape)
    residual = _percent(float(errors[place]))
    return WavesFit(int(file_bytes[place]), int(base[place]), cap, residual)


# the whole fit ----------------------------------------------------------------------------------------------


def figures_of(part: PartFit, device: Device) -> PartFit:
    """Return fitted coefficients with the figures that follow from them and the device's profile lacks."""
    coefficients: KernelCoefficients = part.model
    measured = {
        "peak_fp32_gflops": (max(coefficients.gflops), "multiply-adds"),
        "bandwidth_gb_s": (coefficients.buffer.main_gb_s, "reads of a large buffer"),
        "measured_bandwidth_gb_s": (coefficients.buffer.main_gb_s, "reads of a large buffer"),
        "launch_overhead_us": (max(coefficients.launch_us, 1e-3), "one of many launches"),
    }
    source = coefficients.origins["arithmetic"].source
    figures = {
        name: measured_figure(name, rounded(value), f"{source}: {how}")
        for name, (value, how) in measured.items()
        if name not in device.figures or device.figures[name].provenance is not Provenance.MEASURED
    }
    return replace(part, figures=figures)


class _MeasuredCases:
    """Results of one device by benchmark and parameters."""

    def __init__(self, results: Mapping[Case, float]) -> None:
        self.results = results

    def of(self, benchmark: str, **parameters: object) -> Iterator[tuple[Case, float]]:
        """Yield the cases of a benchmark with these parameters, and their results."""
        for case, value in self.results.items():
            if case.benchmark == benchmark and parameters.items() <= dict(case.parameters).items():
                yield case, value

    def one(self, benchmark: str, default: float, **parameters: object) -> float:
        """Return the first such result, or a default."""
        return next((value for _, value in self.of(benchmark, **parameters)), default)

    def by(self, name: str, benchmark: str, **parameters: object) -> dict[int, float]:
        """Return results by one numeric parameter, ascending."""
        pairs = {case.number(name): value for case, value in self.of(benchmark, **parameters)}
        return dict(sorted(pairs.items()))


def fit_coefficients(table: KernelTable) -> KernelCoefficients:
    """Return the coefficients that a table of measurements gives; of parts not measured, the class's.

    Raises:
        ProfileError: too little was measured.
        MissingExtraError: scipy is not installed.
    """
    return _fit(table, table.results)


def _fit(table: KernelTable, results: Mapping[Case, float]) -> KernelCoefficients:
    measured, traits = _MeasuredCases(results), table.traits
    base = DEFAULTS[traits.kind]
    environment = table.environment
    source = "{command} on {date}, {device}, driver {driver}".format(**environment)
    origins = dict(base.origins)
    missing = [name for name in ("walk", "loop", "bandwidth", "arithmetic") if not any(measured.of(name))]
    if missing:
        raise ProfileError(
            f"the rows of {traits.name} hold no {', '.join(missing)}; expected every benchmark: continue "
            "with the same `torchedge profile --kernels`"
        )
    l2_bytes = _second_level(measured, base.l2_bytes)
    paths: dict[str, MemoryPath] = {}
    for storage in ("image", "buffer"):
        paths[storage] = getattr(base, storage)
        if any(measured.of("walk", storage=storage)):
            paths[storage], residual = _fit_path(measured, storage, paths[storage], traits, l2_bytes)
            origins[storage] = Origin(Provenance.MEASURED, source, residual)
    waves, residual = _fit_occupancy(measured, traits)
    arithmetic = {width: 0.0 for width in ARITHMETIC_WIDTHS}
    for case, value in measured.of("arithmetic"):
        arithmetic[case.number("width")] = max(arithmetic[case.number("width")], value)
    origins["occupancy"] = Origin(Provenance.MEASURED, source, residual)
    for part in ("arithmetic", "local", "launches", "copies"):
        origins[part] = Origin(Provenance.MEASURED, source)
    return replace(
        base,
        warp=traits.warp,
        compute_units=traits.units,
        register_bytes=waves.register_bytes,
        register_base=waves.base,
        max_waves=waves.max_waves,
        max_group=traits.max_group,
        local_bytes=_local_bytes(measured, traits),
        l2_bytes=l2_bytes,
        gflops=tuple([rounded(arithmetic[width] or base.gflops[0]) for width in ARITHMETIC_WIDTHS]),
        arithmetic_ns=rounded(measured.one("chain", base.arithmetic_ns)),
        local_gb_s=rounded(measured.one("bandwidth", base.local_gb_s, storage="local")),
        constant_gb_s=rounded(measured.one("bandwidth", base.constant_gb_s, storage="constant")),
        tile_gb_s=rounded(measured.one("tile", base.tile_gb_s)),
        barrier_ns=rounded(measured.one("barrier", base.barrier_ns)),
        group_ns=_group_ns(measured.by("groups", "start", warps=1)),
        launch_us=rounded(measured.one("launch", base.launch_us)),
        to_image_gb_s=rounded(measured.one("copy", base.to_image_gb_s, way="buffer-image")),
        from_image_gb_s=rounded(measured.one("copy", base.from_image_gb_s, way="image-buffer")),
        copy_gb_s=rounded(measured.one("copy", base.copy_gb_s, way="buffer-buffer")),
        origins=origins,
        **paths,
    )


def _fit_path(
    measured: _MeasuredCases, storage: str, base: MemoryPath, traits: DeviceTraits, l2_bytes: int
) -> tuple[MemoryPath, float]:
    """Return the coefficients of images or of buffers, and the residual of eq. 1 in %."""
    walks = list(measured.of("walk", storage=storage))
    histograms = np.stack([cross_block_strides(*stride_walk(case.number("seed"))) for case, _ in walks])
    strides = fit_strides(histograms, np.array([value for _, value in walks]))
    line_bytes = base.line_bytes
    if traits.kind != "cpu":  # a processor loads the next lines ahead
        line_bytes = _line_bytes(measured.by("stride", "line", storage=storage), line_bytes)
    cache_bytes = _first_level(measured.by("bytes", "loop", storage=storage))
    scans = _fit_path_scans(measured, storage, traits, cache_bytes / line_bytes)
    waiting = measured.one("loop", 1.0, storage=storage, bytes=2**22, stride=64)
    overlap = waiting / measured.one("flight", waiting, storage=storage)
    rates = {
        case.number("bytes"): value
        for case, value in measured.of("bandwidth", storage=storage)
        if case["width"] != 1
    }
    sizes = sorted(rates)
    second = [size for size in sizes if cache_bytes < size <= l2_bytes] or sizes[-1:]
    narrow = measured.one("bandwidth", rates[sizes[0]], storage=storage, width=1)
    issue_bytes = traits.warp * (4 if storage == "buffer" else 16)
    issue_ns = issue_bytes * traits.units / narrow
    return MemoryPath(
        hit_ns=strides.hit_ns,
        across=strides.across,
        lines=scans.lines,
        line_bytes=line_bytes,
        decay=scans.decay,
        overlap=rounded(max(overlap, 1.0)),
        issue_ns=rounded(issue_ns),
        cache_gb_s=rounded(rates[sizes[0]]),
        l2_gb_s=rounded(rates[second[-1]]),
        main_gb_s=rounded(rates[sizes[-1]]),
        write_gb_s=rounded(measured.one("write", base.write_gb_s, storage=storage)),
        line_ns=_line_ns({name: times for name, times in _scans(measured, storage).items() if REUSE[name]}),
        column_share=_column_share(_scans(measured, storage), traits.warp, issue_ns)
        if storage == "image" and traits.kind != "cpu"
        else 1.0,
    ), strides.residual


def _fit_path_scans(measured: _MeasuredCases, storage: str, traits: DeviceTraits, expected: float) -> ScanFit:
    """Return C and D: slowdowns beyond those of column-major work-items, and beyond `line_ns`.

    Column-major work-items use each line at once, so that they contend for bandwidth alone. On a processor
    work-items take turns, without contention.
    """
    expected = max(1.0, expected)
    by_pattern = _scans(measured, storage)
    columns = by_pattern.pop("column")
    if traits.kind == "cpu" or not columns:
        return ScanFit(round(expected), 1.0, 0.0)
    line_ns = _line_ns(by_pattern)
    live, slowdowns = [], []
    for name, times in by_pattern.items():
        for threads, ns in times.items():
            if threads in columns:
                growth = max(1.0, columns[threads] / columns[min(columns)])
                live.append(threads * REUSE[name])
                slowdowns.append(ns / max(times[min(times)] * growth, threads * line_ns))
    return fit_scans(np.array(live, float), np.array(slowdowns), expected)


def _scans(measured: _MeasuredCases, storage: str) -> dict[str, dict[int, float]]:
    """Return the times of the patterns by work-items."""
    return {name: measured.by("threads", "scan", storage=storage, pattern=name) for name in REUSE}


def _line_ns(by_pattern: Mapping[str, Mapping[int, float]]) -> float:
    """Return the time of a unit for each line, of patterns whose work-items read a line each.

    It shows where all of them take the same time at the most work-items, and more than few take; otherwise
    they contend for the cache, and 0 is returned.
    """
    last = [(times[min(times)], times[max(times)], max(times)) for times in by_pattern.values() if times]
    if not last or max(end for _, end, _ in last) > 1.3 * min(end for _, end, _ in last):
        return 0.0
    begin, end, threads = min(last, key=lambda entry: entry[1])
    return rounded(end / threads) if end > 2 * begin else 0.0


def _column_share(by_pattern: Mapping[str, Mapping[int, float]], warp: int, issue_ns: float) -> float:
    """Return the time of an access whose neighbours read down a column over `issue_ns`, at most 1.

    Work-items of the block patterns read below each other; the fastest pattern at the most work-items bounds
    the time from above, since its latency counts, too.
    """
    ends = [(times[max(times)], max(times)) for name, times in by_pattern.items() if times and REUSE[name]]
    return rounded(min([1.0, *[ns * warp / threads / issue_ns for ns, threads in ends]]))


def _first_level(latencies: Mapping[int, float]) -> int:
    """Return the largest footprint in bytes whose latency is that of the smallest ones.

    A footprint counts as fast if any larger one is: interruptions make times longer, never shorter.
    """
    sizes = sorted(latencies)
    hit = statistics.median([latencies[size] for size in sizes[:8]])
    fast = [size for size in sizes if latencies[size] <= _HIT_TOLERANCE * hit]
    return max(fast, default=sizes[0])


def _second_level(measured: _MeasuredCases, default: int) -> int:
    """Return the footprint in bytes before the largest step of latency beyond 16 times the first cache."""
    steps: list[tuple[float, int]] = []
    for storage in ("buffer", "image"):
        latencies = measured.by("bytes", "loop", storage=storage)
        if not latencies:
            continue
        first = _first_level(latencies)
        later = [size for size in latencies if size >= 4 * first]
        steps += [(latencies[after] / latencies[before], before) for before, after in pairwise(later)]
        if steps:
            break
    ratio, size = max(steps, default=(1.0, default))
    return size if ratio > 1.15 else default


def _line_bytes(latencies: Mapping[int, float], default: int) -> int:
    """Return the line size that explains latencies by stride: a + b min(1, stride / line).

    Larger blocks (pages, DRAM rows) may cost more on top: the smallest size with a good part of it all.
    """
    if len(latencies) < 3:
        return default
    from scipy.optimize import nnls

    sizes = (16, 32, 64, 128, 256, 512)
    strides, ns = np.array(list(latencies), float), np.array(list(latencies.values()))
    columns = np.column_stack([np.ones(len(ns)), *(np.minimum(1, strides / size) for size in sizes)])
    weights, _ = nnls(columns / ns[:, None], np.ones(len(ns)))
    steps = weights[1:]
    if steps.sum() < 0.1 * weights[0]:
        return default
    return next(size for size, step in zip(sizes, steps, strict=True) if step >= 0.3 * steps.sum())


def _fit_occupancy(measured: _MeasuredCases, traits: DeviceTraits) -> tuple[WavesFit, float]:
    seen: dict[int, int | None] = {}
    most = warps = 1
    for case, _ in list(measured.of("waves")):
        registers, warps = case.number("registers"), case.number("warps")
        times = measured.by("groups", "waves", registers=registers)
        per_unit = {groups // traits.units: ns for groups, ns in times.items()}
        seen[16 * registers] = count_waves(per_unit, warps)
        most = max(most, max(per_unit) * warps)
    if traits.kind == "cpu" or not seen:  # work-groups take turns on a core
        return WavesFit(_NO_LIMIT, 0, 1, 0.0), 0.0
    fit = fit_waves(seen, most, traits.warp, warps)
    return fit, fit.residual


def _group_ns(times: Mapping[int, float]) -> float:
    """Return the ns in which the device starts a work-group, of times by groups; 0: not measured."""
    if len(times) < 2:
        return 0.0
    few, many = min(times), max(times)
    return rounded(max(0.0, times[many] - times[few]) / (many - few))


def _local_bytes(measured: _MeasuredCases, traits: DeviceTraits) -> int:
    """Return the local memory of a compute unit: of all groups that it holds at once, one at least."""
    most = traits.local_bytes
    if traits.kind == "cpu":  # work-groups take turns on a core
        return most
    for nbytes in {case.number("bytes") for case, _ in measured.of("share")}:
        times = measured.by("groups", "share", bytes=nbytes)
        per_unit = {groups // traits.units: ns for groups, ns in times.items()}
        most = max(most, nbytes * (count_waves(per_unit, 1) or max(per_unit)))
    return most


# profiles ---------------------------------------------------------------------------------------------------


def fit_kernels(file: Path, device: Device, out: Path) -> PartFit:
    """Fit a table of micro-benchmarks; return the coefficients with what the profile has to say of them.

    Raises:
        ProfileError: the table cannot be used.
        MissingExtraError: scipy is not installed.
    """
    table = read_kernels(file)
    coefficients = fit_coefficients(table)
    CODEC.check(coefficients)
    environment = table.environment
    described = describe(
        DataSource(file.name, file_sha256(file, max_bytes=_MOST_BYTES), Provenance.MEASURED),
        f"torchedge fit kernels {file.name} --device {device.name} --out {out.resolve().name}",
        measured=environment["date"],
        probe=environment["command"],
        on="{device}, driver {driver}".format(**environment),
        rows=sum(len(measured) for measured in table.passes.values()),
    )
    described["repeatability"] = repeatability(table)
    described["residuals"] = {
        part: origin.residual for part, origin in coefficients.origins.items() if origin.residual is not None
    }
    return PartFit(coefficients, described)


def repeatability(table: KernelTable) -> dict[str, float]:
    """Return by how many % the two passes differ: over the cases, and over the coefficients fitted to each.

    cases, cases_p90: median and 90th percentile; coefficients: median. Empty for a single pass.
    """
    if len(table.differences) < 2:
        return {}
    fits = [_numbers(_fit(table, table.passes[number])) for number in (1, 2)]
    pairs = [(a, b) for a, b in zip(*fits, strict=True) if a and b]
    return {
        "cases": _percent(statistics.median(table.differences)),
        "cases_p90": _percent(float(np.percentile(table.differences, 90))),
        "coefficients": _percent(statistics.median([abs(a / b - 1) for a, b in pairs])),
    }


def _numbers(coefficients: KernelCoefficients) -> list[float]:
    """Return all coefficients but the single entries of beta, of which others may stand for each other."""

    def numbers(value: Any) -> Iterator[float]:  # noqa: ANN401
        for item in fields(value):
            entry = getattr(value, item.name)
            if isinstance(entry, MemoryPath):
                yield from numbers(entry)
            elif isinstance(entry, (int, float)):
                yield float(entry)
            elif isinstance(entry, tuple):
                yield float(sum(entry))

    return list(numbers(coefficients))


def _percent(share: float) -> float:
    return rounded(100 * share, 3)
