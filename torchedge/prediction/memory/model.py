"""The memory model of a device: the allocator's reserve, plus a process constant, corrected by a forest.

Γ = clip(reserved + process, floor, ceiling) · exp(forest). The process constant holds context, libraries and
host side; a network without linear layers loads no BLAS library and takes less. Boards with unified memory
have a floor (the memory of any run) and a ceiling, above which the system takes pages back and Γ no longer
follows what the run asks for. The needed memory is Γ plus the part above the ceiling: limits are
compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.forests.trees import Forest, evaluate, features_outside, outside_hull
from torchedge.prediction.feature_sets import set_of_names
from torchedge.prediction.intervals import ErrorModel
from torchedge.prediction.memory.peaks import Peaks

MEMORY_FEATURES = ("batch", "base", "reserved_over_allocated", "allocated", "parameters", "has_linear")
"""Columns of the correction forest: batch size, clipped base (MiB), ratio, allocated peak (MiB), parameters
(MiB), 0 or 1."""

UNLIMITED = 1e9
"""A ceiling or capacity, MiB, that nothing reaches."""

_STRAIN = 0.08
_LEAST_DIFFICULTY = 0.015


@dataclass(frozen=True, slots=True)
class Process:
    """The memory of a training process beside its tensors, MiB, each without and with linear layers.

    beside: added to reserved memory; floor: the least any run takes; ceiling: the most Γ was seen at;
    capacity: the most a run may reserve.
    """

    beside: tuple[float, float]
    floor: tuple[float, float]
    ceiling: float
    capacity: float

    def total(self, reserved: FloatArray, linear: npt.NDArray[np.bool_]) -> FloatArray:
        """Return reserved memory plus the memory beside it, (R,) MiB."""
        return np.asarray(reserved + np.where(linear, self.beside[1], self.beside[0]))

    def base(self, reserved: FloatArray, linear: npt.NDArray[np.bool_]) -> FloatArray:
        """Return Γ as the constants alone give it, (R,) MiB."""
        floor = np.where(linear, self.floor[1], self.floor[0])
        return np.asarray(np.minimum(np.maximum(self.total(reserved, linear), floor), self.ceiling))

    def beyond(self, reserved: FloatArray, linear: npt.NDArray[np.bool_]) -> FloatArray:
        """Return what runs ask for above the ceiling, (R,) MiB; Γ alone does not show it."""
        return np.asarray(np.maximum(self.total(reserved, linear) - self.ceiling, 0.0))


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Γ of R rows in MiB with its interval; features: (R, F) read by the forest.

    beyond: (R,) MiB that a run asks for above the board's ceiling, which Γ does not show.
    """

    value: FloatArray
    low: FloatArray
    high: FloatArray
    beyond: FloatArray
    outside: npt.NDArray[np.bool_]
    features: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MemoryModel:
    """Γ (or γ) of one device. Without forest it is the simulation plus constants.

    forest: over `MEMORY_FEATURES`, or over a registered feature set, predicting log(measured / base).
    errors: of Γ, scaled by how far the base moves when reserved memory does; reserved_errors,
    allocated_errors: of the simulated peaks, unscaled.
    """

    process: Process
    errors: ErrorModel
    reserved_errors: ErrorModel
    allocated_errors: ErrorModel
    forest: Forest | None = None

    @property
    def feature_set(self) -> str | None:
        """The registered feature set that the forest reads; None: `MEMORY_FEATURES`, or no forest."""
        return None if self.forest is None else set_of_names(self.forest.feature_names)

    def features(self, peaks: Peaks) -> FloatArray:
        """Return (R, 6) in the order of `MEMORY_FEATURES`."""
        base = self.process.base(peaks.reserved, peaks.linear)
        ratio = peaks.reserved / peaks.allocated
        return np.stack(
            [peaks.batch, base, ratio, peaks.allocated, peaks.parameters, peaks.linear.astype(float)], axis=1
        )

    def difficulty(self, peaks: Peaks) -> FloatArray:
        """Return (R,): how much the base moves, relatively, when reserved memory moves by 8 %, plus 1.5 %."""
        up = self.process.base(peaks.reserved * (1 + _STRAIN), peaks.linear)
        down = self.process.base(peaks.reserved / (1 + _STRAIN), peaks.linear)
        return np.asarray(
            (up - down) / (2 * self.process.base(peaks.reserved, peaks.linear)) + _LEAST_DIFFICULTY
        )

    def predict(self, peaks: Peaks, columns: FloatArray | None = None) -> PredictedMemory:
        """Predict R rows; vectorised, numpy only. columns: (R, F) of `feature_set`, where there is one."""
        features = self.features(peaks)
        value = features[:, 1]
        features = features if columns is None else columns
        outside = np.zeros(len(value), dtype=np.bool_)
        if self.forest is not None:
            value = value * np.exp(evaluate(self.forest, features))
            outside = outside_hull(self.forest, features)
        half = self.errors.half_width(self.difficulty(peaks))
        beyond = self.process.beyond(peaks.reserved, peaks.linear)
        return PredictedMemory(value, value * np.exp(-half), value * np.exp(half), beyond, outside, features)

    def needed(self, peaks: Peaks, columns: FloatArray | None = None) -> FloatArray:
        """Return (R,) MiB that runs ask for: Γ, and on a board that saturates the part above its ceiling."""
        memory = self.predict(peaks, columns)
        return memory.value + memory.beyond

    def required(self, peaks: Peaks, confidence: float, columns: FloatArray | None = None) -> FloatArray:
        """Return (R,) MiB: upper bounds of the needed memory with this one-sided confidence.

        The larger of the allocator's and the process's need, and of the needed memory with Γ's margin.
        """
        memory = self.predict(peaks, columns)
        margin = np.exp(self.errors.margin(self.difficulty(peaks), confidence))
        return np.maximum(self.least(peaks, confidence), memory.value * margin + memory.beyond)

    def least(self, peaks: Peaks, confidence: float) -> FloatArray:
        """Return (R,) MiB below which `required` never lies: the need of the allocator and the process.

        It grows with `peaks.reserved` and reads nothing else of the simulation.
        """
        excess = np.exp(self.reserved_errors.margin(np.ones(len(peaks.reserved)), confidence))
        return self.process.total(peaks.reserved * excess, peaks.linear)

    def limits(self, linear: npt.NDArray[np.bool_]) -> FloatArray:
        """Return (R,) MiB: the largest memory of runs without or with linear layers on this device."""
        return self.process.total(np.full(len(linear), self.process.capacity), linear)

    def outside_names(self, features: FloatArray) -> tuple[str, ...]:
        """Name the features of rows (R, F), as `PredictedMemory.features`, that leave the training hull."""
        return () if self.forest is None else tuple(features_outside(self.forest, features))
