"""The peaks of a replayed step alone, at several batch sizes: what predictions need of `caching_allocator`.

The rules are the same and so are the results, to the byte; what makes it faster is known beforehand. The two
pools never touch each other, so that each is replayed for itself. What is there before the step stays, so
that only the gaps it leaves matter. In the small pool a block is as large as what was asked for, so that its
share of the allocated peak is that of the live tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchedge.prediction.memory.caching_allocator import (
    LARGE_SEGMENT,
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL,
    SMALL_SEGMENT,
)
from torchedge.prediction.memory.tape import ALIGNMENT, Tape

_SHIFT = 32
_ADDRESS = (1 << _SHIFT) - 1

Units = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class _Pool:
    """One pool: free blocks as sorted keys (width above address), and by each border the block beside it.

    Free neighbours are merged at once and segments lie one unit apart, so that at most one free block touches
    a border. A piece of at most `unsplit` units is not split off a block.
    """

    def __init__(self, unsplit: int) -> None:
        self.free: list[int] = []
        self.borders: dict[int, int] = {}
        self.top = self.reserved = 0
        self.splits = unsplit + 1 << _SHIFT

    def copy(self) -> _Pool:
        other = _Pool(0)
        other.free, other.borders = list(self.free), dict(self.borders)
        other.top, other.reserved, other.splits = self.top, self.reserved, self.splits
        return other

    def fill(self, sizes: Sequence[int], segments: Sequence[int]) -> int:
        """Allocate for good; `segments` are the widths of new ones. Return the units that no piece got."""
        free, splits, lost = self.free, self.splits, 0
        for size, segment in zip(sizes, segments, strict=True):
            wanted = size << _SHIFT
            index = bisect_left(free, wanted)
            if index < len(free):
                key = free.pop(index)
            else:
                key = segment << _SHIFT | self.top
                self.top += segment + 1
                self.reserved += segment
            key += size - wanted
            if key >= splits:
                insort(free, key, 0, index)
            else:
                lost += key >> _SHIFT
        for key in free:
            start = key & _ADDRESS
            self.borders[start] = self.borders[start + (key >> _SHIFT)] = key
        return lost

    def run(
        self, wanted: Sequence[int], storages: Sequence[int], segments: Sequence[int], blocks: list[int]
    ) -> None:
        """Run events: a storage allocated where `wanted` is its size, shifted; freed where that is zero.

        blocks: by storage, the key of the block in use. segments: by storage, the width of a new segment.
        """
        free, borders, splits = self.free, self.borders, self.splits
        for size, storage in zip(wanted, storages, strict=True):
            if size:
                index = bisect_left(free, size)
                if index < len(free):
                    key = free.pop(index)
                    start = key & _ADDRESS
                    del borders[start]
                else:
                    width, start = segments[storage], self.top
                    key = width << _SHIFT | start
                    self.top += width + 1
                    self.reserved += width
                rest = key - size
                if rest >= splits:
                    units = size >> _SHIFT
                    rest += units
                    insort(free, rest, 0, index)
                    borders[start + units] = borders[start + (key >> _SHIFT)] = rest
                    blocks[storage] = size | start
                else:
                    borders.pop(start + (key >> _SHIFT), None)
                    blocks[storage] = key
            else:
                key = blocks[storage]
                start = key & _ADDRESS
                end = start + (key >> _SHIFT)
                if start in borders:
                    key = borders.pop(start)
                    del free[bisect_left(free, key)]
                    start = key & _ADDRESS
                if end in borders:
                    key = borders.pop(end)
                    del free[bisect_left(free, key)]
                    end += key >> _SHIFT
                key = end - start << _SHIFT | start
                insort(free, key)
                borders[start] = borders[end] = key


def replay_peaks(tape: Tape, batch_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the allocated and reserved peaks of `replay(tape, b, steps=1)` in bytes, by batch size."""
    units = np.ascontiguousarray(tape.bytes_at(np.array(batch_sizes)).T) // ALIGNMENT
    return PoolReplay(tape.events, tape.persistent).peaks(units)


class PoolReplay:
    """Replays one tape's events (E,) for storages of any sizes.

    persistent: storages there before the first event. counted_from: the event from which peaks count.
    """

    def __init__(self, events: Indices, persistent: Indices, counted_from: int = 0) -> None:
        self.counted_from = counted_from
        self.persistent = persistent
        self.storages = np.abs(events) - 1
        self.allocating = events > 0

    def peaks(self, units: Units) -> list[tuple[int, int]]:
        """Return both peaks in bytes for each row of units (B, S), sizes in units of 512 bytes.

        Rows that begin alike, as those of one graph at several batch sizes do, are faster together.
        """
        wanted = np.where(self.allocating, units[:, self.storages] << _SHIFT, 0)
        beside = self._small(units, (units <= SMALL) & (units > 0), wanted)
        return [
            self._large(sizes, sequence, reserved)
            for sizes, sequence, reserved in zip(units, wanted, beside, strict=True)
        ]

    def _small(self, units: Units, small: Mask, wanted: Units) -> list[int]:
        """Return the units that the small pool reserves, (B,)."""
        kept = [
            sizes[chosen]
            for sizes, chosen in zip(units[:, self.persistent], small[:, self.persistent], strict=True)
        ]
        sequences = [
            (sizes[chosen], self.storages[chosen])
            for sizes, chosen in zip(wanted, small[:, self.storages], strict=True)
        ]
        segments = [SMALL_SEGMENT] * units.shape[1]
        common = _common_prefix(sequences) if all(np.array_equal(kept[0], k) for k in kept[1:]) else -1
        shared, blocks = _Pool(0), [0] * units.shape[1]
        if common >= 0:
            shared.fill(kept[0].tolist(), segments[: len(kept[0])])
            sizes, slots = sequences[0]
            shared.run(sizes[:common].tolist(), slots[:common].tolist(), segments, blocks)
        found = []
        for filling, (sizes, slots) in zip(kept, sequences, strict=True):
            pool, used = shared.copy(), list(blocks)
            if common < 0:
                pool.fill(filling.tolist(), segments[: len(filling)])
            first = max(common, 0)
            pool.run(sizes[first:].tolist(), slots[first:].tolist(), segments, used)
            found.append(pool.reserved)
        return found

    def _large(self, sizes: Units, wanted: Units, beside: int) -> tuple[int, int]:
        """Return both peaks of both pools in bytes; beside: the units that the small pool reserves."""
        large = sizes > SMALL
        segments = np.where(sizes < OWN_SEGMENT, LARGE_SEGMENT, -(-sizes // SEGMENT_STEP) * SEGMENT_STEP)
        pool, blocks = _Pool(SMALL), [0] * len(sizes)
        kept = self.persistent[large[self.persistent]]
        lost = pool.fill(sizes[kept].tolist(), segments[kept].tolist())
        chosen = large[self.storages]
        pool.run(wanted[chosen].tolist(), self.storages[chosen].tolist(), segments.tolist(), blocks)
        widths = np.where(large, np.array(blocks, dtype=np.int64) >> _SHIFT, sizes)[self.storages]
        start = int(sizes[self.persistent].sum()) + lost
        held = np.concatenate([[0], np.cumsum(np.where(self.allocating, widths, -widths))])
        peak = start + int(held[self.counted_from :].max())
        return peak * ALIGNMENT, (pool.reserved + beside) * ALIGNMENT


def _common_prefix(sequences: Sequence[tuple[Units, Indices]]) -> int:
    """Return how many events all sequences begin with alike."""
    common = min(len(slots) for _, slots in sequences)
    sizes, slots = sequences[0]
    for other_sizes, other_slots in sequences[1:]:
        differs = (sizes[:common] != other_sizes[:common]) | (slots[:common] != other_slots[:common])
        if differs.any():
            common = int(differs.argmax())
    return common
