"""Which candidates of kernels to time next: predictions, corrected by the times that are known already.

The error of a prediction, as a logarithm, is a Gaussian process: two errors are alike where the schedules
differ in few fields and the same terms of the cost decide, a little more so within one kernel. The candidate
comes next whose time, by what is known of it, may be the least; of those timed at once, each counts as known
for the next, so that they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchedge.arrays import Array
from torchedge.textures.coefficients import KernelErrors

REACH = 4.0
"""Fields in which two schedules differ until their errors have little in common."""
APART = 1.0
"""Sum of the differences of the terms' shares of the cost, with the same effect."""
COMMON, OWN = 0.12, 0.02
"""Variances of the part of an error that all kernels share, and of each kernel's own part: about those of the
greatest likelihood of the times of 88 operators on an H200 (docs/lowering.md)."""
NOISE = 0.001
"""Variance of a measurement."""
HOPE = 0.5
"""Standard deviations below its expected time that a candidate is hoped to reach."""
MORE = 5
"""Candidates of a kernel that are timed at once after the default and the best prediction. Compilers of GPUs
run in several processes, each of which opens the device: few rounds take less time than few candidates."""
MOST = 256
"""Candidates of a kernel among which the search chooses: those of the least predictions, and the default."""

Known = tuple[Array, Array, Array]
"""The schedules, shares of the terms, and logarithms of the errors of predictions that were timed."""


@dataclass(frozen=True, slots=True)
class Trials:
    """One kernel's candidates, and by number the ms of those that were timed; number 0 is the default.

    fields: (N, F) numbers of the schedule. shares: (N, T) shares of the terms of the cost. predicted: (N,)
    ms.
    """

    fields: Array
    shares: Array
    predicted: Array
    times: dict[int, float]

    def known(self) -> Known:
        """Return what is known of the errors of the predictions."""
        timed = [n for n, ms in self.times.items() if np.isfinite(ms) and np.isfinite(self.predicted[n])]
        ms = np.array([self.times[number] for number in timed])
        return self.fields[timed], self.shares[timed], np.log(ms / self.predicted[timed])


Timer = Callable[[list[list[int]]], list[list[float]]]
"""Returns the ms of candidates of each kernel, by their numbers."""


def known_of(errors: KernelErrors) -> list[Known]:
    """Return what a profile holds of the errors of predictions."""
    return [
        (np.array(kernel.schedules), np.array(kernel.shares) / 100, np.array(kernel.errors))
        for kernel in errors.kernels
    ]


def search(
    kernels: Sequence[Trials], timer: Timer, others: Sequence[Known] = (), many: int | None = None
) -> None:
    """Time the default (number 0) and the best prediction, then `MORE` candidates; the trials keep the order.

    others: what is known of further kernels. many: so many kernels are searched, the first ones; of the
    others only the default is timed. None: all.
    """
    searched = kernels[:many]
    best = [[n for n in numbers if n][:1] for numbers in next_trials(searched, 2, others)]
    wanted = [*[[0, *numbers] for numbers in best], *[[0] for _ in kernels[len(searched) :]]]
    for last in (False, True):
        if last:
            wanted = next_trials(searched, MORE, others)
        for kernel, numbers, times in zip(kernels, wanted, timer(wanted), strict=False):
            kernel.times.update(zip(numbers, times, strict=True))


def next_trials(kernels: Sequence[Trials], count: int, others: Sequence[Known] = ()) -> list[list[int]]:
    """Return the numbers of the candidates of each kernel that are to be timed next, at most so many.

    others: what is known of further kernels.
    """
    known = [*[kernel.known() for kernel in kernels], *others]
    owner = np.repeat(np.arange(len(known)), [len(errors) for *_, errors in known])
    if not len(owner) or count >= MOST:
        return [_first(kernel, count) for kernel in kernels]
    fields, shares, errors = (np.concatenate(parts) for parts in zip(*known, strict=True))
    judged = (fields, shares), owner
    inverse = np.linalg.inv(_alike(*judged, *judged) + NOISE * np.eye(len(owner)))
    chosen = []
    for number, kernel in enumerate(kernels):
        places = np.array(_first(kernel, MOST), int)
        own = (kernel.fields[places], kernel.shares[places]), np.full(len(places), number)
        alike = _alike(*own, *judged)
        weights = alike @ inverse
        expected = np.log(kernel.predicted[places]) + weights @ errors
        unknown = _alike(*own, *own) - weights @ alike.T
        numbers: list[int] = []
        for _ in range(min(count, len(places))):
            hoped = expected - HOPE * np.sqrt(np.maximum(unknown.diagonal(), 0.0))
            place = int(np.argmin(hoped))
            numbers.append(int(places[place]))
            expected[place] = np.inf
            unknown = unknown - np.outer(unknown[:, place], unknown[place]) / (unknown[place, place] + NOISE)
        chosen.append(numbers)
    return chosen


def _alike(first: tuple[Array, Array], owner: Array, second: tuple[Array, Array], owners: Array) -> Array:
    """Return (N, M) the covariances of errors."""
    apart = np.zeros((len(owner), len(owners)), np.float32)
    for column, other in zip(first[0].T, second[0].T, strict=True):
        if len(np.union1d(column, other)) > 1:
            apart += (column[:, None] != other) / np.float32(REACH)
    for column, other in zip(first[1].T, second[1].T, strict=True):
        apart += np.float32(1 / APART) * np.abs(column.astype(np.float32)[:, None] - other.astype(np.float32))
    alike: Array = np.exp(-apart) * (COMMON + OWN * (owner[:, None] == owners))
    return alike


def _first(kernel: Trials, count: int) -> list[int]:
    """Return the candidates of the least predictions that were not timed, and that can be written."""
    untried = np.isfinite(kernel.predicted)
    untried[list(kernel.times)] = False
    order = np.argsort(np.where(untried, kernel.predicted, np.inf), kind="stable")
    return [int(number) for number in order[: min(count, int(untried.sum()))]]
