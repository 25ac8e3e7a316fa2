"""Allocator peaks at any batch size from a few replays: fast in loops, one result whatever was asked before.

The peak of live tensors is exact at every batch size and cheap; what blocks and segments add to it is
replayed at four batch sizes and interpolated between them over log2(N).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.tape import Tape

ANCHORS = (4, 16, 64, 256)
"""Batch sizes whose allocator is replayed. Chosen by cross-validation of Γ: four do as well as replaying
every row."""

_MIB = 2.0**20
FloatArray = npt.NDArray[np.float64]


def peaks_mib(tape: Tape, batch: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return the allocated and the reserved peak in MiB, (B,) each, at batch sizes (B,)."""
    live = tape.peak_bytes(batch) / _MIB
    position = np.log2(np.clip(batch, ANCHORS[0], ANCHORS[-1]))
    knots = np.log2(ANCHORS)
    needed = np.unique(
        np.concatenate(
            [np.searchsorted(knots, position, "left"), np.searchsorted(knots, position, "right") - 1]
        )
    )
    ratios = np.ones((len(ANCHORS), 2))
    for index in np.clip(needed, 0, len(ANCHORS) - 1):
        ratios[index] = _ratios(tape, ANCHORS[index])
    return (live * np.interp(position, knots, ratios[:, 0]), live * np.interp(position, knots, ratios[:, 1]))


def _ratios(tape: Tape, batch: int) -> tuple[float, float]:
    """Replayed peaks over the live peak at one anchor, remembered on the tape."""
    known: dict[int, tuple[float, float]] = tape.__dict__.setdefault("_anchor_ratios", {})
    found = known.get(batch)
    if found is None:
        live = float(tape.peak_bytes(np.array([batch]))[0])
        result = replay(tape, batch, steps=1)
        found = known[batch] = (result.allocated_bytes / live, result.reserved_bytes / live)
    return found
