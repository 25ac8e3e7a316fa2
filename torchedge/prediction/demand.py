"""The memory that a run asks for at any batch size, and the largest batch size that a limit admits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchedge.arrays import FloatArray, IntArray
from torchedge.errors import CaptureError, InputError
from torchedge.graphs import ForwardGraph
from torchedge.prediction.feature_sets import feature_rows
from torchedge.prediction.memory.model import MemoryModel
from torchedge.prediction.memory.peaks import GraphTraits, Peaks, simulate_peaks
from torchedge.prediction.memory.tape import Tape

_MIB = 2.0**20
_MOST_ROWS = 512
"""Batch sizes evaluated together."""
_MOST_EVENTS = 200_000
"""Of a step that grows with the length: from here on capturing twice the length takes many seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """The memory of one graph's step on one device, as a function of the batch size.

    lengths: the demand at another sequence length, where the graph is of a family of lengths up to
    `longest_length`.
    """

    graph: ForwardGraph
    tape: Tape
    traits: GraphTraits
    model: MemoryModel
    lengths: Callable[[int], Demand] | None = None
    longest_length: int = 0

    def at_length(self, seq_len: int) -> Demand:
        """Return the demand at a sequence length; raises InputError for a graph of one length alone."""
        if self.lengths is None:
            raise InputError(
                "this prediction has no sequence length; expected one of a sequence: predict with seq_len= "
                "and an example first"
            )
        return self.lengths(seq_len)

    def longest(self, limit_mib: float, confidence: float, batch_size: int, largest: int | None) -> int:
        """Return a sequence length up to `largest` that fits where the next one does not; 0: none does.

        Raises InputError without `largest` for a graph that grows with the length and becomes too long.
        """
        most = self.longest_length if largest is None else min(largest, self.longest_length)

        @lru_cache
        def fits(seq_len: int) -> bool:
            try:
                demand = self.at_length(seq_len)
            except (CaptureError, InputError):  # no positions for it
                if seq_len <= 16:
                    raise
                return False
            return bool(demand.required(np.array([batch_size]), confidence)[0] <= limit_mib)

        low, high = 1, min(16, most)
        while high < most and fits(high):
            events = len(self.at_length(high).tape.events)
            if largest is None and events > max(_MOST_EVENTS, 2 * len(self.tape.events)):
                raise InputError(
                    f"a sequence of {high} fits, and the graph of {self.graph.name} grows with the length (a "
                    f"loop over the positions): {events:,} allocations and releases there; pass largest= to "
                    "try longer ones"
                )
            low, high = high, min(2 * high, most)
        if fits(high):
            return high
        low += bisect_left(range(low + 1, high), True, key=lambda length: not fits(length))
        return low if low > 1 else 0

    def required(self, batch_sizes: IntArray, confidence: float) -> FloatArray:
        """Return the MiB (B,) that runs at batch sizes (B,) stay below with a one-sided confidence."""
        self.graph.check_batch_sizes(batch_sizes.tolist())
        rows = np.zeros(len(batch_sizes), dtype=np.intp)
        peaks = simulate_peaks([self.tape], [self.traits], rows, batch_sizes.astype(np.float64))
        columns = None
        if self.model.feature_set is not None:
            columns = feature_rows([self.graph], rows, peaks.batch, self.model.feature_set)
        return self.model.required(peaks, confidence, columns)

    def largest(self, limit_mib: float, confidence: float, most: int) -> int:
        """Return the largest batch size up to `most` whose required MiB is within a limit; 0: none is.

        Required memory is not monotone in the batch size: workspaces leap. The bytes of live tensors bound it
        from below, so that all batch sizes from the last within that bound downwards are evaluated. Raises
        InputError for a graph that was captured for one batch size only.
        """
        self.graph.check_batch_sizes((1, 2))
        last = self._last_possible(limit_mib, confidence, most)
        rows = 8
        while last > 0:
            batch_sizes = np.arange(max(1, last - rows + 1), last + 1)
            possible = batch_sizes[self._least(self.tape, batch_sizes, confidence) <= limit_mib]
            fitting = (
                possible[self.required(possible, confidence) <= limit_mib] if len(possible) else possible
            )
            if len(fitting):
                return int(fitting[-1])
            last, rows = int(batch_sizes[0]) - 1, min(2 * rows, _MOST_ROWS)
        return 0

    def _last_possible(self, limit_mib: float, confidence: float, most: int) -> int:
        """Return the largest batch size up to `most` whose live tensors alone are within a limit."""
        tape = self.tape.without_scratch

        def possible(batch_size: int) -> bool:
            try:
                return bool(self._least(tape, np.array([batch_size]), confidence)[0] <= limit_mib)
            except InputError:  # more bytes than can be counted
                return False

        if not tape.rises or possible(most):
            return most
        return bisect_left(range(1, most), True, key=lambda batch_size: not possible(batch_size))

    def _least(self, tape: Tape, batch_sizes: IntArray, confidence: float) -> FloatArray:
        """Return MiB (B,) below which `required` never lies, from the live tensors of a tape alone."""
        live: FloatArray = tape.scales[1] * (tape.peak_bytes(batch_sizes) / _MIB)
        count = len(batch_sizes)
        linear = np.full(count, self.traits.multiplies)
        peaks = Peaks(
            batch_sizes.astype(float), live, live, np.full(count, self.traits.parameters_mib), linear
        )
        return self.model.least(peaks, confidence)
