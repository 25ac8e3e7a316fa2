"""Predictions: figures with intervals, their parts, their source, and operators they do not cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray, IntArray
from torchedge.devices import DeviceKind, Provenance
from torchedge.errors import InputError, check_whole, checked_call
from torchedge.graphs.sizes import LARGEST_BATCH
from torchedge.ops import unsupported_remark
from torchedge.prediction.demand import Demand
from torchedge.prediction.latency.lanes import StepTimeline
from torchedge.prediction.range_remarks import range_remark
from torchedge.storage.amounts import Amount, mib_of
from torchedge.storage.documents import plain
from torchedge.texts import number

CONFIDENCE = 0.95
"""Default one-sided confidence that a run stays below its required memory."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 90 % interval; as a number, and with a format such as ``.1f``, it is its value."""

    value: float
    low: float
    high: float
    unit: str

    def __str__(self) -> str:
        return f"{number(self.value)} {self.unit} ({number(self.low)} to {number(self.high)})"

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form) if form else str(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory and time of one training step (or inference) of a model on a device.

    memory: Γ (train) or γ (infer) in MiB: the memory that the whole run occupies on the device, context and
    libraries included. needed: the memory that the run asks for, MiB. Both are equal except on a board that
    takes pages back when memory runs short: Γ stops at a ceiling there, and only `needed` says that a run
    does not fit.
    latency: Φ or φ in ms: one step, an update with all its micro-batches. allocated, reserved: peaks of
    PyTorch's caching allocator in MiB, never the same number; on a CPU, which has no such allocator, memory
    is the resident memory of the process.
    breakdown: MiB by category, adding up to `needed.value`. unsupported: operators without an entry in
    `torchedge.ops`; `unsupported_remarks` says how they are counted. out_of_range: features outside the range
    that the profile was fitted on: the figures are extrapolated.
    provenance: the weakest source among all that went in. notes: assumptions made on the way.
    timeline: the step on the lanes of host and device; None if the prediction was read from a file.
    """

    model: str
    device: str
    mode: str
    batch_size: int
    memory: Estimate
    needed: Estimate
    latency: Estimate
    allocated: Estimate
    reserved: Estimate
    breakdown: Mapping[str, float]
    device_memory_mib: float | None
    unsupported: tuple[str, ...] = ()
    out_of_range: tuple[str, ...] = ()
    provenance: Provenance = Provenance.ASSUMED
    notes: tuple[str, ...] = ()
    device_kind: DeviceKind = "gpu"
    demand: Demand | None = field(default=None, repr=False, compare=False)
    timeline: StepTimeline | None = field(default=None, repr=False, compare=False)

    @property
    def unsupported_remarks(self) -> tuple[str, ...]:
        """For each operator of `unsupported` one sentence that says how the figures count it."""
        return tuple([unsupported_remark(kind) for kind in self.unsupported])

    @property
    def saturates(self) -> bool:
        """Whether the run asks for more than the board ever shows as occupied: Γ stays at its ceiling."""
        return self.needed.value > self.memory.value

    def needed_mib(self, confidence: float = CONFIDENCE) -> float:
        """Return an upper bound of the needed MiB that holds with this confidence (0.5 ≤ confidence < 1)."""
        checked = checked_confidence(confidence)
        return float(self._demand().required(np.array([self.batch_size]), checked)[0])

    @checked_call()
    def fits(self, memory_limit: Amount | None = None, *, confidence: float = CONFIDENCE) -> bool:
        """Return whether the run fits into a limit with this confidence.

        memory_limit: a number of MiB, or a text such as "4GiB"; by default the device's memory. Raises
        InputError for another one, or where neither a limit nor the device's memory is known.
        """
        return self.needed_mib(confidence) <= self._limit(memory_limit)

    @checked_call()
    def max_batch_size(
        self,
        memory_limit: Amount | None = None,
        *,
        confidence: float = CONFIDENCE,
        largest: int = 1 << 16,
        seq_len: int | None = None,
    ) -> int:
        """Return the largest batch size up to `largest` that fits, 0 where none does. See `fits`.

        seq_len: at another sequence length than the prediction's.

        Required memory is not monotone in the batch size where workspaces leap: a smaller batch size may not
        fit.
        """
        limit, checked = self._limit(memory_limit), checked_confidence(confidence)
        check_whole("largest", largest, most=LARGEST_BATCH)
        demand = self._demand() if seq_len is None else self._demand().at_length(seq_len)
        return demand.largest(limit, checked, largest)

    @checked_call()
    def max_seq_len(
        self,
        memory_limit: Amount | None = None,
        *,
        confidence: float = CONFIDENCE,
        largest: int | None = None,
    ) -> int:
        """Return the longest sequence that fits at the prediction's batch size, 0 where none does.

        The next longer one does not fit, or the model has no positions for it, or `largest` is reached.
        Raises InputError for a prediction without seq_len.
        """
        limit, checked = self._limit(memory_limit), checked_confidence(confidence)
        if largest is not None:
            check_whole("largest", largest, 2)
        return self._demand().longest(limit, checked, self.batch_size, largest)

    def _demand(self) -> Demand:
        if self.demand is None:
            raise InputError("this prediction was read from a file, without its model; predict again")
        return self.demand

    def _limit(self, memory_limit: Amount | None) -> float:
        limit = self.device_memory_mib if memory_limit is None else memory_limit
        if limit is None:
            raise InputError(
                f"the memory of {self.device} is not known; pass memory_limit, for example fits(4096)"
            )
        return mib_of(limit, "memory_limit")

    @property
    def figures(self) -> tuple[tuple[str, Estimate, str], ...]:
        """Each figure with its name and meaning, as tables show them: a CPU has no caching allocator."""
        gamma, phi = ("Γ", "Φ") if self.mode == "train" else ("γ", "φ")
        cached = self.device_kind == "gpu"
        everything = "all that the run takes from the device" if cached else "resident memory of the process"
        shown = "the most that the board shows as taken"
        asked = ("needed", self.needed, "all that the run asks for; decides whether it fits")
        return (
            (f"memory {gamma}", self.memory, shown if self.saturates else everything),
            *([asked] if self.saturates else []),
            *([("reserved", self.reserved, "of that by PyTorch's allocator")] if cached else []),
            ("allocated", self.allocated, "of that by tensors"),
            (f"latency {phi}", self.latency, "a step" if self.mode == "train" else "a batch"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as plain data, ready for JSON."""
        data: dict[str, Any] = plain(self)
        return data

    def __str__(self) -> str:
        what = "training step" if self.mode == "train" else "inference"
        gamma, phi = ("Γ", "Φ") if self.mode == "train" else ("γ", "φ")
        lines = [
            f"{self.model}, batch {self.batch_size}, {what} on {self.device} ({self.provenance})",
            f"  memory  {gamma}   {self.memory}",
            *([f"  needed     {self.needed}"] if self.saturates else []),
            f"  latency {phi}   {self.latency}",
            f"  allocated  {self.allocated}",
            *([f"  reserved   {self.reserved}"] if self.device_kind == "gpu" else []),
        ]
        lines += [f"    {name:<20} {number(part):>8} MiB" for name, part in self.breakdown.items()]
        if self.device_memory_mib is not None and self.demand is not None:
            verdict = "fits" if self.fits() else "does not fit"
            lines.append(
                f"  {verdict} into {number(self.device_memory_mib)} MiB at {CONFIDENCE:.0%} confidence"
            )
        lines += [f"  {remark}" for remark in self.unsupported_remarks]
        if self.out_of_range:
            lines.append(f"  out of range: {range_remark(self.out_of_range)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of G graphs at B batch sizes: every array is (G, B); memory in MiB, latency in ms.

    With S sequence lengths `seq_lens`, every array is (G, B, S).
    memory: Γ; needed: the memory that the runs ask for (see `Prediction`). unsupported, notes: of each graph.
    """

    batch_sizes: IntArray
    memory: FloatArray
    memory_low: FloatArray
    memory_high: FloatArray
    needed: FloatArray
    latency: FloatArray
    latency_low: FloatArray
    latency_high: FloatArray
    allocated: FloatArray
    reserved: FloatArray
    out_of_range: npt.NDArray[np.bool_]
    device: str
    provenance: Provenance
    unsupported: tuple[tuple[str, ...], ...] = ()
    notes: tuple[tuple[str, ...], ...] = ()
    seq_lens: IntArray | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions as plain data, ready for JSON."""
        data: dict[str, Any] = plain(self)
        return data


def checked_confidence(confidence: object) -> float:
    """Return a one-sided confidence; raises InputError unless it is a number from 0.5 up to 1."""
    if not isinstance(confidence, (int, float, np.integer, np.floating)) or not 0.5 <= confidence < 1:
        raise InputError(
            f"confidence is {confidence!r}; expected a number from 0.5 up to, but not including, 1"
        )
    return float(confidence)
