"""Fits a device's model of programs to the launches that a campaign with the native runner has timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from torchedge.devices import Device, Provenance
from torchedge.errors import ProfileError, needed
from torchedge.forests.trees import Forest
from torchedge.lowering.programs import LoadClassName
from torchedge.profiling.forest_fitting import fit_boosted
from torchedge.profiling.load_fitting import fit_rates
from torchedge.profiling.profile_folders import PartFit, describe
from torchedge.profiling.samples import DataSource
from torchedge.storage import file_sha256
from torchedge.storage.documents import present, read_unpacked, reading
from torchedge.storage.journals import parse_lines
from torchedge.streaming.program_costs import LAUNCH_FEATURES, ProgramCosts, StepCosts, launch_features
from torchedge.streaming.rates import THRESHOLDS, KernelRates
from torchedge.streaming.schedules import LaunchWork
from torchedge.texts import rounded

LAUNCHES = "launches.jsonl"
"""The timed launches of a campaign's points, a point a line."""

_MOST_BYTES = 256 * 2**20
_FEWEST_POINTS, _FEWEST_NETWORKS = 6, 3
_MOST_RATED = 40
_SETTINGS: Mapping[str, Any] = {
    "max_iter": 150,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 5,
    "learning_rate": 0.08,
}


_Positive = Annotated[float, Meta(gt=0, le=2**62)]
_Amount = Annotated[int, Meta(ge=0, le=2**62)]
_Count = Annotated[int, Meta(ge=1, le=2**62)]
_Group = Annotated[int, Meta(ge=1, le=2**20)] | None


@dataclass(frozen=True, slots=True)
class _Point:
    """The launches of a point as the campaign writes them: the fields of `LaunchWork`, and ms."""

    kernels: int
    latency_ms: _Positive
    memory_mib: _Positive
    allocated_mib: _Positive
    launches: Annotated[
        tuple[tuple[str, LoadClassName, _Amount, _Amount, _Amount, _Count, _Group, _Positive], ...],
        Meta(min_length=1),
    ]


@dataclass(frozen=True)
class TimedStep:
    """A measured point: its network, the work and time (ms) of each launch, its own time and memory (MiB)."""

    network: str
    works: tuple[LaunchWork, ...]
    times_ms: tuple[float, ...]
    kernels: int
    latency_ms: float
    memory_mib: float
    allocated_mib: float


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors in % on networks left out: of each point, its network, latency and memory."""

    networks: tuple[str, ...]
    latency: tuple[float, ...]
    memory: tuple[float, ...]

    def mean(self, figure: str) -> float:
        """Return the mean absolute error of "latency" or "memory"."""
        return float(np.mean(np.abs(getattr(self, figure))))


def read_steps(folder: Path) -> tuple[TimedStep, ...]:
    """Read the points of a campaign that were measured launch by launch; without any, ().

    Raises ProfileError for a line that is none.
    """
    file = present(folder / LAUNCHES)
    if not file.is_file():
        return ()
    steps = []
    for place, row in parse_lines(file, read_unpacked(file, max_bytes=_MOST_BYTES)):
        with reading(place, "a point with its launches", "what `torchedge campaign run --runner` writes"):
            point = msgspec.convert(row["launches"], _Point)
            works = tuple([LaunchWork(*launch[:-1]) for launch in point.launches])
            times = tuple([launch[-1] for launch in point.launches])
            figures = point.latency_ms, point.memory_mib, point.allocated_mib
            steps.append(TimedStep(str(row["id"]).split("@")[0], works, times, point.kernels, *figures))
    return tuple(steps)


def fit_steps(steps: Sequence[TimedStep]) -> tuple[ProgramCosts, StepErrors]:
    """Fit the model of programs to measured points; return it with its errors on networks left out.

    Raises:
        ProfileError: fewer than 6 points, or than 3 networks.
        MissingExtraError: scikit-learn or scipy is not installed.
    """
    networks = tuple(dict.fromkeys(step.network for step in steps))
    if len(steps) < _FEWEST_POINTS or len(networks) < _FEWEST_NETWORKS:
        raise ProfileError(
            f"{len(steps)} points of {len(networks)} networks were timed launch by launch; expected at least "
            f"{_FEWEST_POINTS} of {_FEWEST_NETWORKS}: measure a larger plan"
        )
    latency: dict[int, float] = {}
    memory: dict[int, float] = {}
    for network in networks:
        known = _fit([step for step in steps if step.network != network])
        for place, step in enumerate(steps):
            if step.network == network:
                predicted = known.step.latency_ms(float(known.launches_ms(step.works).sum()), len(step.works))
                latency[place] = predicted / step.latency_ms
                memory[place] = (
                    known.step.memory_mib(step.allocated_mib * 2**20, step.kernels) / step.memory_mib
                )
    places = range(len(steps))
    errors = StepErrors(
        tuple(step.network for step in steps),
        tuple([100 * (latency[place] - 1) for place in places]),
        tuple([100 * (memory[place] - 1) for place in places]),
    )
    tails = [
        float(np.quantile(np.abs(np.log([ratios[p] for p in places])), 0.9)) for ratios in (latency, memory)
    ]
    return _fit(steps, *tails), errors


def _fit(steps: Sequence[TimedStep], latency_error: float = 0.0, memory_error: float = 0.0) -> ProgramCosts:
    rates: dict[LoadClassName, KernelRates] = {}
    forests: dict[LoadClassName, Forest] = {}
    for name in THRESHOLDS:
        works, times, shares = [], [], []
        for step in steps:
            whole = sum(step.times_ms)
            for work, ms in zip(step.works, step.times_ms, strict=True):
                if work.load_class == name:
                    works.append(work)
                    times.append(ms)
                    shares.append(ms / whole)
        if not works:
            raise ProfileError(f"no {name} kernels were timed; expected some: measure other networks")
        order = np.argsort(times, kind="stable")[:: max(1, len(times) // _MOST_RATED)]
        rates[name] = fit_rates([works[k] for k in order], [times[k] for k in order])
        target = np.log(times) - np.log([rates[name].latency_ms(work) for work in works])
        weights = np.array(shares) / np.mean(shares)
        forests[name] = fit_boosted(
            launch_features(works), target, feature_names=LAUNCH_FEATURES, weights=weights, **_SETTINGS
        )
    costs = ProgramCosts(rates, forests, StepCosts(1, 0, 0, 0, 1, 0, 0))
    sums = np.array([costs.launches_ms(step.works).sum() for step in steps])
    counts, ones = np.array([len(step.works) for step in steps]) / 1e3, np.ones(len(steps))
    share, host, fixed = _nonnegative([sums, counts, ones], [step.latency_ms for step in steps])
    parts = [ones, [step.kernels for step in steps], [step.allocated_mib for step in steps]]
    base, kernel, memory = _nonnegative(parts, [step.memory_mib for step in steps])
    numbers = (share, host, base, kernel, memory, latency_error, memory_error, fixed)
    own = StepCosts(*[rounded(each, 5) for each in numbers])
    return ProgramCosts(rates, forests, own)


def _nonnegative(columns: Iterable[Any], target: Sequence[float]) -> list[float]:
    """Return the non-negative factors of columns whose sum has the least squares of relative errors."""
    with needed("scipy", extra="fit", purpose="fitting programs"):
        from scipy.optimize import nnls
    relative = np.column_stack(list(columns)) / np.asarray(target)[:, None]
    factors: list[float] = nnls(relative, np.ones(len(target)))[0].tolist()
    return factors


def fit_device_programs(folder: Path, device: Device) -> tuple[PartFit, StepErrors] | None:
    """Fit the model of programs to a campaign's folder; None where it has no timed launches."""
    steps = read_steps(folder)
    if not steps:
        return None
    costs, errors = fit_steps(steps)
    digest = file_sha256(present(folder / LAUNCHES), max_bytes=_MOST_BYTES)
    described = describe(
        DataSource(folder.resolve().name, digest, Provenance.MEASURED),
        f"torchedge fit all {folder.resolve().name} --device {device.name}",
        points=len(steps),
        networks=len(set(errors.networks)),
        launches=sum(len(step.works) for step in steps),
        errors={"latency": round(errors.mean("latency"), 1), "memory": round(errors.mean("memory"), 1)},
        step=asdict(costs.step),
        kernels={str(name): asdict(rates) for name, rates in costs.rates.items()},
    )
    return PartFit(costs.forests, described), errors
