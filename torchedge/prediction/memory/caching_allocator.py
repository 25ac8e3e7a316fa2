"""Replay of PyTorch's CUDA caching allocator over a tape, at one batch size.

The rules (c10/cuda/CUDACachingAllocator.cpp, unchanged from 1.6 to today in their defaults): requests are
rounded up to 512 bytes; up to 1 MiB they come from a small pool of 2 MiB segments, larger ones from a large
pool of 20 MiB segments, or of their own size rounded up to 2 MiB from 10 MiB on; the smallest free block that
is large enough is taken, the lowest address among equals; its remainder is split off if it is at least
512 bytes (small pool) or more than 1 MiB (large pool); a freed block merges with its free neighbours in the
segment. Running out of memory is not replayed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchedge.prediction.memory.tape import ALIGNMENT, CATEGORIES, Tape

_MIB = (1 << 20) // ALIGNMENT
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT, SEGMENT_STEP = (
    _MIB,
    2 * _MIB,
    20 * _MIB,
    10 * _MIB,
    2 * _MIB,
)
"""In units: the largest request of the small pool; the segments of both pools; the smallest request with a
segment of its own, and the multiple that such segments are rounded up to."""

_SHIFT = 48
_ADDRESS = (1 << _SHIFT) - 1
_INPUTS = CATEGORIES.index("inputs")
Places = list[tuple[int, int]]
"""Address and block of storages."""


@dataclass(frozen=True, slots=True)
class RunStage:
    """A part of a run: peaks of allocated and reserved memory, and what is reserved at its end, MiB.

    Allocated are blocks in use, whole blocks as `torch.cuda.max_memory_allocated` counts them.
    """

    name: str
    allocated_mib: float
    reserved_mib: float
    left_mib: float


class CachingAllocator:
    """The allocator's state in units of 512 bytes: free blocks by size and by both their ends.

    Segments lie one unit apart, so that blocks of different segments never touch.
    """

    def __init__(self) -> None:
        self.small: list[int] = []
        self.large: list[int] = []
        self.free_from: dict[int, int] = {}
        self.free_to: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.top = self.reserved = self.allocated = 0
        self.peak = self.peak_reserved = 0

    def run(self, events: Iterable[int], sizes: Sequence[int], address: list[int], block: list[int]) -> None:
        """Run events (+s allocates storage s - 1, -s frees it).

        `address` and `block` hold where each storage lies.
        """
        small, large, free_from, free_to = self.small, self.large, self.free_from, self.free_to
        allocated, peak = self.allocated, self.peak
        for event in events:
            if event > 0:
                storage = event - 1
                size = sizes[storage]
                if not size:
                    continue
                pool = small if size <= SMALL else large
                index = bisect_left(pool, size << _SHIFT)
                if index < len(pool):
                    key = pool.pop(index)
                    start, width = key & _ADDRESS, key >> _SHIFT
                    del free_from[start], free_to[start + width]
                else:
                    start, width = self._segment(size)
                rest = width - size
                if rest > SMALL or (rest and pool is small):
                    end = start + width
                    first = end - rest
                    insort(pool, rest << _SHIFT | first)
                    free_from[first] = rest
                    free_to[end] = first
                    width = size
                address[storage] = start
                block[storage] = width
                allocated += width
                if allocated > peak:
                    peak = allocated
            else:
                storage = -1 - event
                size = sizes[storage]
                if not size:
                    continue
                pool = small if size <= SMALL else large
                start = address[storage]
                width = block[storage]
                allocated -= width
                end = start + width
                if start in free_to:
                    before = free_to.pop(start)
                    del pool[bisect_left(pool, free_from[before] << _SHIFT | before)]
                    start = before
                if end in free_from:
                    after = free_from.pop(end)
                    del pool[bisect_left(pool, after << _SHIFT | end)]
                    end += after
                width = end - start
                free_from[start] = width
                free_to[end] = start
                insort(pool, width << _SHIFT | start)
        self.allocated, self.peak = allocated, peak

    def copy(self) -> CachingAllocator:
        """Return an allocator in the same state."""
        other = copy(self)
        for name in ("small", "large", "free_from", "free_to", "segments"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def _segment(self, size: int) -> tuple[int, int]:
        if size <= SMALL:
            width = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            width = LARGE_SEGMENT
        else:
            width = -(-size // SEGMENT_STEP) * SEGMENT_STEP
        start = self.top
        self.top += width + 1
        self.segments[start] = width
        self.reserved += width
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return start, width

    def empty_cache(self) -> None:
        """Return every wholly free segment to the device."""
        for start, width in list(self.segments.items()):
            if self.free_from.get(start) == width:
                pool = (
                    self.small
                    if width == SMALL_SEGMENT and width << _SHIFT | start in self.small
                    else self.large
                )
                pool.remove(width << _SHIFT | start)
                del self.segments[start], self.free_from[start], self.free_to[start + width]
                self.reserved -= width

    def reset_peaks(self) -> None:
        """Start new peaks from the present state (`torch.cuda.reset_peak_memory_stats`)."""
        self.peak, self.peak_reserved = self.allocated, self.reserved


def replay(
    tape: Tape, batch_size: int, *, first: Tape | None = None, steps: int = 2, empty_cache: bool = False
) -> list[RunStage]:
    """Replay `steps` steady-state steps of a tape; return each step's peaks, the steady state's last.

    first: tape of the very first step (`write_tape(..., first=True)`), replayed before them; without it the
    allocator starts with everything persistent in place. empty_cache: empty the cache before each step, after
    its peaks were reset, as a profiler may do.
    """
    run = _ReplayedRun()
    places: Places = []
    for current in [tape] * steps if first is None else [first] + [tape] * steps:
        places = run.step("step", current, batch_size, places, empty_cache)
    return run.stages


def run_stages(
    first: Tape, steady: Tape, batch_size: int, evaluation: Tape, evaluated: int, empty_cache: bool
) -> tuple[RunStage, ...]:
    """Replay a first step, two later ones, an evaluation and a step after it.

    The evaluation, an inference at a batch size of its own, reads the run's own weights and allocates its
    inputs. empty_cache: the cache is emptied around it.
    """
    run = _ReplayedRun()
    remaining = run.step("first step", first, batch_size, [])
    for name in ("second step", "later steps"):
        remaining = run.step(name, steady, batch_size, remaining)
    own = [(steady.labels[k], steady.category[k]) for k in steady.persistent.tolist()]
    places = {label: place for (label, kind), place in zip(own, remaining, strict=True) if kind != _INPUTS}
    persistent, labels = evaluation.persistent.tolist(), evaluation.labels
    shared = {k: places[labels[k]] for k in persistent if labels[k] in places}
    if empty_cache:
        run.allocator.empty_cache()
    state = run.stage("evaluation", evaluation, evaluated, shared)
    run.allocator.run([-k - 1 for k in persistent if k not in shared], *state)
    if empty_cache:
        run.allocator.empty_cache()
    run.step("step after it", steady, batch_size, remaining)
    return tuple(run.stages)


class _ReplayedRun:
    """Steps in one allocator."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.stages: list[RunStage] = []

    def step(
        self, name: str, tape: Tape, batch_size: int, remaining: Places, empty_cache: bool = False
    ) -> Places:
        """Replay a later step, whose storages lie at `remaining`; return where the next one's lie."""
        places = dict(zip(tape.persistent.tolist(), remaining, strict=bool(remaining)))
        _, address, block = self.stage(name, tape, batch_size, places, empty_cache)
        return [(address[k], block[k]) for k in tape.remaining.tolist()]

    def stage(
        self,
        name: str,
        tape: Tape,
        batch_size: int,
        places: Mapping[int, tuple[int, int]],
        empty_cache: bool = False,
    ) -> tuple[list[int], list[int], list[int]]:
        """Replay a tape; persistent storages without a place are allocated.

        Returns the units, address and block of each storage.
        """
        allocator = self.allocator
        sizes: list[int] = (tape.bytes_at(np.array([batch_size]))[:, 0] // ALIGNMENT).tolist()
        address, block = [0] * len(sizes), [0] * len(sizes)
        for storage, place in places.items():
            address[storage], block[storage] = place
        allocator.reset_peaks()
        allocator.run([k + 1 for k in tape.persistent.tolist() if k not in places], sizes, address, block)
        if empty_cache:
            allocator.empty_cache()
        allocator.run(tape.event_list, sizes, address, block)
        peaks = [allocator.peak, allocator.peak_reserved, allocator.reserved]
        self.stages.append(RunStage(name, *[units * ALIGNMENT / 2.0**20 for units in peaks]))
        return sizes, address, block


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """One order of events (E,) for R rows of sizes: units (R, S), in units of 512 bytes.

    persistent: storages (P,) that are allocated before the first event. counted_from: the event from which on
    allocated peaks count.
    """

    events: npt.NDArray[np.int32]
    persistent: npt.NDArray[np.int32]
    units: npt.NDArray[np.int64]
    counted_from: int = 0


def replay_rows(rows: ReplayRows, which: slice = slice(None)) -> npt.NDArray[np.int64]:
    """Return the allocated and the reserved peak of each row in bytes, (R, 2)."""
    events, count = rows.events.tolist(), rows.units.shape[1]
    peaks = []
    for units in rows.units[which]:
        placed, where = _placed(units[rows.persistent].tobytes())
        allocator, places = placed.copy(), np.zeros((2, count), dtype=np.int64)
        places[:, rows.persistent] = where
        (address, block), sizes = places.tolist(), units.tolist()
        if rows.counted_from:
            allocator.run(events[: rows.counted_from], sizes, address, block)
        allocator.reset_peaks()
        allocator.run(events[rows.counted_from :], sizes, address, block)
        peaks.append((allocator.peak, allocator.peak_reserved))
    return np.array(peaks, dtype=np.int64).reshape(-1, 2) * ALIGNMENT


@lru_cache(maxsize=32)
def _placed(sizes: bytes) -> tuple[CachingAllocator, npt.NDArray[np.int64]]:
    """Return an allocator after requests of some sizes (int64 units), and their addresses and blocks (2, P).

    What outlives a step is the same for every batch size and sequence length.
    """
    units = np.frombuffer(sizes, dtype=np.int64).tolist()
    allocator, address, block = CachingAllocator(), [0] * len(units), [0] * len(units)
    allocator.run(range(1, len(units) + 1), units, address, block)
    return allocator, np.array([address, block], dtype=np.int64)
