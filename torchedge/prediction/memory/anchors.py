"""Allocator peaks at any batch size from a few replays: fast in loops, one result whatever was asked before.

The peak of live tensors is exact at every batch size and cheap; what blocks and segments add to it is
replayed at four batch sizes and interpolated between them over log2(N). Where the workspaces of the device's
library are known, every batch size is replayed, from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.pools import replay_peaks
from torchedge.prediction.memory.tape import Tape

ANCHORS = (4, 16, 64, 256)
"""Batch sizes whose allocator is replayed. Chosen by cross-validation of Γ: four do as well as replaying
every row."""

_MIB = 2.0**20
FloatArray = npt.NDArray[np.float64]


def peaks_mib(tape: Tape, batch: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return the allocated and the reserved peak in MiB, (B,) each, at batch sizes (B,)."""
    if tape.scratch is not None:  # workspaces change with the batch size in leaps
        pairs = np.array([_replayed(tape, size) for size in batch.tolist()]) / _MIB
        return pairs[:, 0], pairs[:, 1]
    live = tape.peak_bytes(batch) / _MIB
    needed, weights = anchor_weights(batch)
    ratios = _ratios(tape, [ANCHORS[index] for index in needed])
    allocated, reserved = (
        live * sum(weights[:, place] * pair[which] for place, pair in enumerate(ratios)) for which in (0, 1)
    )
    return allocated, reserved


def anchor_weights(batch: npt.NDArray[np.int64]) -> tuple[list[int], FloatArray]:
    """Return the A anchors that batch sizes (B,) lie on or between, as indices, and their weights (B, A)."""
    position = np.log2(np.clip(batch, ANCHORS[0], ANCHORS[-1]))
    knots = np.log2(ANCHORS)
    weights = np.stack([np.interp(position, knots, row) for row in np.eye(len(ANCHORS))], axis=1)
    needed: list[int] = np.flatnonzero(weights.any(axis=0)).tolist()
    return needed, weights[:, needed]


def _replayed(tape: Tape, batch: int) -> tuple[int, int]:
    """Replayed peaks in bytes, remembered on the tape."""
    known: dict[int, tuple[int, int]] = tape.__dict__.setdefault("_replayed", {})
    if batch not in known:
        found = replay(tape, batch, first=tape.first, steps=1)
        known[batch] = found.allocated_bytes, found.reserved_bytes
    return known[batch]


def _ratios(tape: Tape, batches: Sequence[int]) -> list[tuple[float, float]]:
    """Replayed peaks over the live peak at anchors, remembered on the tape."""
    known: dict[int, tuple[float, float]] = tape.__dict__.setdefault("_anchor_ratios", {})
    missing = [batch for batch in batches if batch not in known]
    if missing:
        live = tape.peak_bytes(np.array(missing)).tolist()
        for batch, alone, (allocated, reserved) in zip(
            missing, live, replay_peaks(tape, missing), strict=True
        ):
            known[batch] = (allocated / alone, reserved / alone)
    return [known[batch] for batch in batches]
