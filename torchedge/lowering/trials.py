"""Which candidates of kernels to time next: predictions, corrected by the times that are known already.

The error of a prediction, as a logarithm, is a Gaussian process over schedules: two errors are alike where
the schedules differ in few fields, more so within one kernel. The candidate comes next whose time, by what is
known of it, may be the least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

REACH = 4.0
"""Fields in which two schedules differ until their errors have little in common."""
COMMON, OWN = 0.08, 0.16
"""Variances of the part of an error that all kernels share, and of the part of each kernel."""
NOISE = 0.003
"""Variance of a measurement."""
HOPE = 0.5
"""Standard deviations below its expected time that a candidate is hoped to reach."""
MORE = 5
"""Candidates of a kernel that are timed at once after the default and the best prediction. Compilers of GPUs
run in several processes, each of which opens the device: few rounds take less time than few candidates."""


@dataclass(frozen=True, slots=True)
class Trials:
    """One kernel's candidates: fields (N, F), predicted ms (N,), and the ms of those that were timed."""

    fields: Array
    predicted: Array
    times: dict[int, float]

    def known(self) -> tuple[Array, Array]:
        """Return the fields, and the logarithms of the errors, of the predictions that times judge."""
        timed = [n for n, ms in self.times.items() if np.isfinite(ms) and np.isfinite(self.predicted[n])]
        ms = np.array([self.times[number] for number in timed])
        return self.fields[timed], np.log(ms / self.predicted[timed])


Timer = Callable[[list[list[int]]], list[list[float]]]
"""Returns the ms of candidates of each kernel, by their numbers."""


def search(
    kernels: Sequence[Trials],
    timer: Timer,
    others: Sequence[tuple[Array, Array]] = (),
    many: int | None = None,
) -> None:
    """Time the default (number 0) and the best prediction, then `MORE` candidates; the trials keep the order.

    others: what is known of further kernels (`Trials.known`). many: so many kernels are searched, the first
    ones; of the others only the default is timed. None: all.
    """
    searched = kernels[:many]
    best = [[n for n in _best(kernel, kernel.predicted, 2) if n][:1] for kernel in searched]
    wanted = [*[[0, *numbers] for numbers in best], *[[0] for _ in kernels[len(searched) :]]]
    for _ in range(2):
        for kernel, numbers, times in zip(kernels, wanted, timer(wanted), strict=False):
            kernel.times.update(zip(numbers, times, strict=True))
        wanted = next_trials(searched, MORE, others)


def next_trials(
    kernels: Sequence[Trials], count: int, others: Sequence[tuple[Array, Array]] = ()
) -> list[list[int]]:
    """Return the numbers of the candidates of each kernel that are to be timed next, at most so many.

    others: what is known of further kernels (`Trials.known`).
    """
    known = [*[kernel.known() for kernel in kernels], *others]
    owner = np.repeat(np.arange(len(known)), [len(errors) for _, errors in known])
    if not len(owner):
        return [_best(kernel, kernel.predicted, count) for kernel in kernels]
    fields, errors = (np.concatenate(parts) for parts in zip(*known, strict=True))
    inverse = np.linalg.inv(_alike(fields, owner[:, None], fields, owner) + NOISE * np.eye(len(owner)))
    chosen = []
    for number, kernel in enumerate(kernels):
        alike = _alike(kernel.fields, number, fields, owner)
        weights = alike @ inverse
        variance = COMMON + OWN - (weights * alike).sum(axis=1)
        least = weights @ errors - HOPE * np.sqrt(np.maximum(variance, 0.0))
        chosen.append(_best(kernel, kernel.predicted * np.exp(least), count))
    return chosen


def _alike(fields: Array, owner: Any, others: Array, owners: Array) -> Array:  # noqa: ANN401 - numbers
    """Return (N, M) the covariances of errors."""
    differing = np.zeros((len(fields), len(others)), np.float32)
    for column, other in zip(fields.T, others.T, strict=True):
        differing += column[:, None] != other
    alike: Array = np.exp(-differing / REACH) * (COMMON + OWN * (owner == owners))
    return alike


def _best(kernel: Trials, ms: Array, count: int) -> list[int]:
    """Return the candidates of the least times that were not timed, and that can be written."""
    untried = np.isfinite(ms)
    untried[list(kernel.times)] = False
    order = np.argsort(np.where(untried, ms, np.inf), kind="stable")
    return [int(number) for number in order[: min(count, int(untried.sum()))]]
