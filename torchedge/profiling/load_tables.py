"""Reads what `hooks/load_probe.py` measured: kernels alone and under loads, and stand-alone copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.storage.documents import read_unpacked
from torchedge.streaming.capacities import KernelWork
from torchedge.streaming.instances import LoadClassName
from torchedge.streaming.rates import THRESHOLDS

__all__ = ["DISTURBED", "LoadCase", "LoadTable", "read_loads"]

DISTURBED = 1.5
"""A median over so many times the shortest run was disturbed by something else, and does not count."""

_MOST_BYTES, _MOST_LOADS, _MOST_SIZES = 32 * 2**20, 64, 8
_LEAST_SIZES = 4
_HIGHEST = 1e18
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
_ENVIRONMENT = ("device", "driver", "texture", "command", "date")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LoadCase:
    """One kernel of one size and launch shape: loads in bytes (n,), ascending from 0, and times (n,), ms."""

    kernel: str
    size: tuple[int, ...]
    load_class: LoadClassName
    work: KernelWork
    extra_bytes: FloatArray
    times_ms: FloatArray

    @property
    def increases(self) -> FloatArray:
        """By how much of its own latency the kernel slowed under each load, (n,)."""
        increases: FloatArray = self.times_ms / self.times_ms[0] - 1
        return increases


@dataclass(frozen=True)
class LoadTable:
    """What one device was measured to load: cases, and the rate of a copy to texture (GB/s, None: no copy).

    `environment` names the device, its driver, the texture's kind, the probe's command and the date. Of the
    `points` measured, `disturbed` are left out.
    """

    environment: Mapping[str, str]
    cases: tuple[LoadCase, ...]
    copy_gb_s: float | None
    points: int
    disturbed: int

    def of_class(self, load_class: LoadClassName) -> tuple[LoadCase, ...]:
        """The cases of one operator class."""
        return tuple(case for case in self.cases if case.load_class == load_class)


def read_loads(file: str | Path) -> LoadTable:
    """Read the probe's rows (also compressed).

    Raises:
        ProfileError: naming the line that is none of its rows; or there are too few, or of several devices.
    """
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    environment: dict[str, str] = {}
    cases: list[LoadCase] = []
    copies: list[tuple[float, float]] = []
    points = kept = 0
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
            if row.get("row") == "environment":
                found = {key: _text(row[key]) for key in _ENVIRONMENT}
                if environment.get("device", found["device"]) != found["device"]:
                    raise ValueError(f"another device, {found['device'][:40]!r}")
                environment = environment or found
            elif row["kernel"] == "copy":
                copies.append((_number(row["size"][0], 1), _number(row["ms"])))
            elif "reason" not in row:
                case = _case(row)
                points += len(row["loads"])
                if case is not None:
                    kept += len(case.times_ms)
                    cases.append(case)
        except _DAMAGE as error:
            raise ProfileError(
                f"{file} line {number}: not a row of measured loads ({_reason(error)}); "
                "expected what hooks/load_probe.py writes"
            ) from error
    _check(file, environment, cases)
    return LoadTable(environment, tuple(cases), _rate(copies), points, points - kept)


def _case(row: Mapping[str, Any]) -> LoadCase | None:
    """Return a row's case without disturbed points, None where it was disturbed alone or under every load."""
    if row["class"] not in THRESHOLDS:
        raise ValueError(f"class {str(row['class'])[:20]!r}")
    if len(row["loads"]) > _MOST_LOADS or len(row["size"]) > _MOST_SIZES:
        raise ValueError(f"{len(row['loads'])} loads of {len(row['size'])} sizes")
    loads = [(_number(extra, 0), _number(ms), _number(least)) for extra, ms, least in row["loads"]]
    extra, times, least = np.array(loads, np.float64).reshape(-1, 3).T
    if len(extra) < 2 or extra[0] != 0 or (np.diff(extra) <= 0).any():
        raise ValueError("loads that do not ascend from 0 bytes")
    items, group = (prod(int(_number(n, 1)) for n in row[key]) for key in ("global", "local"))
    flops, read, written = (_number(row[key], 1) for key in ("flops", "input_bytes", "output_bytes"))
    calm = times <= DISTURBED * least
    if not calm[0] or calm.sum() < 2:
        return None
    work = KernelWork(flops, read, written, _number(items, 1), _number(group, 1), float(times[0]))
    size = tuple(int(_number(n, 1)) for n in row["size"])
    return LoadCase(_text(row["kernel"]), size, row["class"], work, extra[calm], times[calm])


def _number(value: object, low: float = 1e-9) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= _HIGHEST:
        raise ValueError(f"the number {str(value)[:20]}")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ValueError(f"the text {str(value)[:20]!r}")
    return value


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:120]


def _check(file: str | Path, environment: Mapping[str, str], cases: list[LoadCase]) -> None:
    if not environment:
        raise ProfileError(f'{file}: does not say where it was measured, expected a row "environment" first')
    for load_class in THRESHOLDS:
        sizes = {(case.kernel, case.size) for case in cases if case.load_class == load_class}
        if len(sizes) < _LEAST_SIZES:
            raise ProfileError(
                f"{file}: {len(sizes)} {load_class} kernels of different sizes that nothing disturbed, "
                f"expected at least {_LEAST_SIZES}; measure again with hooks/load_probe.py"
            )


def _rate(copies: list[tuple[float, float]]) -> float | None:
    """Bytes copied over time, of the largest copies the faster, in GB/s."""
    largest = max((size for size, _ in copies), default=0.0)
    rate = max((size / ms / 1e6 for size, ms in copies if size == largest), default=None)
    return rate if rate is not None and isfinite(rate) else None
