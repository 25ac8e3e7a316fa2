"""The constants of a process from few measurements: a search over what the measurements suggest, with priors.

Γ of a row is clip(reserved + beside, floor, ceiling), piecewise linear in few constants, so the best ones are
found among the breakpoints: differences measured, the figures measured themselves, and the priors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.prediction.memory.model import UNLIMITED, Process
from torchedge.prediction.memory.peaks import Peaks

__all__ = ["adapt_process"]

FloatArray = npt.NDArray[np.float64]

_NOISE = 0.05
"""Relative error at which the loss turns from squared to linear."""

_SPREAD_MIB, _LINEAR_SPREAD_MIB = 400.0, 100.0
"""How far a process's constants, and what linear layers add to them, lie from those of another device."""

_PRICE = 1.0
"""What a floor or a ceiling must gain, as a log likelihood, to be believed."""

_ROUNDS = 8
_SYSTEM_SHARE = 0.1
"""Share of a unified memory that is taken to stay with the system where the usable part is not known."""

BESIDE, BESIDE_LINEAR, FLOOR, FLOOR_LINEAR, CEILING = range(5)


def adapt_process(peaks: Peaks, measured: FloatArray, base: Process, device: Device) -> Process:
    """Return the constants that explain measured Γ (R,) in MiB best, near those of a base device.

    peaks: simulated figures of the same rows. Floor and ceiling, which only unified memory has, are taken up
    where the measurements show them. Deterministic.
    """
    unified = device.memory == "unified"
    price = _pricing(peaks, measured, base)
    starts = [np.array([*base.beside, 0.0, 0.0, UNLIMITED])]
    if unified:
        least = float(measured.min())
        starts.append(np.array([*base.beside, least, least, UNLIMITED]))
        starts.append(np.array([*base.beside, *base.floor, UNLIMITED]))
    found = [_search(start, price, peaks, measured, base, unified) for start in starts]
    best = min(found, key=lambda constants: float(price(constants[None])[0]))
    beside = (float(best[BESIDE]), float(best[BESIDE_LINEAR]))
    return Process(
        beside,
        (float(best[FLOOR]), float(best[FLOOR_LINEAR])),
        float(best[CEILING]),
        _capacity(float(peaks.reserved.max()), max(beside), device),
    )


def _capacity(largest: float, beside: float, device: Device) -> float:
    """Return the most that a run may reserve: what the device's figures leave, at least what was seen."""
    usable, total = device.figures.get("usable_memory_mib"), device.figures.get("memory_mib")
    if usable is not None:
        return max(largest, usable.value - beside)
    if total is None:
        return largest
    share = 1 - _SYSTEM_SHARE if device.memory == "unified" else 1.0
    return max(largest, share * total.value - beside)


def _pricing(peaks: Peaks, measured: FloatArray, base: Process) -> Callable[[FloatArray], FloatArray]:
    """Return the negative log posterior of candidates (C, 5)."""
    extra = base.beside[1] - base.beside[0]
    floored = base.floor[0] > 0

    def price(constants: FloatArray) -> FloatArray:
        beside = np.where(peaks.linear, constants[:, [BESIDE_LINEAR]], constants[:, [BESIDE]])
        floor = np.where(peaks.linear, constants[:, [FLOOR_LINEAR]], constants[:, [FLOOR]])
        value = np.minimum(np.maximum(peaks.reserved + beside, floor), constants[:, [CEILING]])
        error = np.log(np.maximum(value, 1e-3) / measured) / _NOISE
        misfit = (np.sqrt(1 + error * error) - 1).sum(axis=1)
        apart = ((constants[:, BESIDE] - base.beside[0]) / _SPREAD_MIB) ** 2
        apart += ((constants[:, BESIDE_LINEAR] - constants[:, BESIDE] - extra) / _LINEAR_SPREAD_MIB) ** 2
        active = constants[:, FLOOR] > 0
        step = ((constants[:, FLOOR_LINEAR] - constants[:, FLOOR] - extra) / _LINEAR_SPREAD_MIB) ** 2
        apart += np.where(active, step, 0.0)
        if floored:
            apart += ((constants[:, FLOOR] - base.floor[0]) / _SPREAD_MIB) ** 2
        believed = active.astype(float) * (not floored) + (constants[:, CEILING] < UNLIMITED)
        return np.asarray(misfit + apart / 2 + _PRICE * believed)

    return price


def _search(
    start: FloatArray,
    price: Callable[[FloatArray], FloatArray],
    peaks: Peaks,
    measured: FloatArray,
    base: Process,
    unified: bool,
) -> FloatArray:
    """Change one constant, or a pair of them, at a time as long as that helps."""
    extra = base.beside[1] - base.beside[0]
    beside = measured - peaks.reserved
    beside = np.concatenate([beside[beside > 0], np.array(base.beside)])
    moves: list[tuple[FloatArray, dict[int, float]]] = [
        (beside, {BESIDE: 0.0, BESIDE_LINEAR: extra}),
        (beside - extra, {BESIDE: 0.0, BESIDE_LINEAR: extra}),
        (beside, {BESIDE: 0.0}),
        (beside, {BESIDE_LINEAR: 0.0}),
    ]
    if unified:
        moves += [
            (measured, {FLOOR: 0.0, FLOOR_LINEAR: extra}),
            (measured - extra, {FLOOR: 0.0, FLOOR_LINEAR: extra}),
            (measured, {FLOOR: 0.0}),
            (measured, {FLOOR_LINEAR: 0.0}),
            (np.array([0.0]), {FLOOR: 0.0, FLOOR_LINEAR: 0.0}),
            (np.append(measured, UNLIMITED), {CEILING: 0.0}),
        ]
    best, least = start, float(price(start[None])[0])
    for _ in range(_ROUNDS):
        before = least
        for values, changed in moves:
            tried = np.repeat(best[None], len(values), axis=0)
            for place, added in changed.items():
                tried[:, place] = np.maximum(values + added, 0.0)
            prices = price(tried)
            if prices.min() < least - 1e-9:
                best, least = tried[int(prices.argmin())], float(prices.min())
        if least == before:
            break
    return best
