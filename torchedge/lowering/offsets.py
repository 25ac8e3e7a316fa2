"""Offsets of buffers that share one allocation over their lifetimes: dynamic storage allocation.

The problem is NP-hard; training steps are kind to it, since activations nest like brackets. Buffers are
placed one by one in several orders; then the best orders are changed where the peak is, until it is the
largest set of bytes alive at once or the work is used up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

KEPT = 3
"""Orders that are worked on, of those that are tried."""

ROUNDS = 150
"""Changes to each of them, at most."""

WORK = 25_000
"""Buffers placed in all, at most (about 20 microseconds each)."""


@dataclass(slots=True)
class _Trial:
    """An order of placing, whether the tightest gap or the lowest one is taken, and what came of it."""

    order: Ints
    tightest: bool
    offsets: Ints
    height: int


def find_offsets(sizes: Ints, starts: Ints, ends: Ints, work: int = WORK) -> Ints:
    """Return the offset of each buffer, alive from start to end (half-open); deterministic.

    The offsets are sums of sizes: they keep the alignment that the sizes have.
    """
    if not len(sizes):
        return np.zeros(0, np.int64)
    beside = (starts[:, None] < ends[None, :]) & (starts[None, :] < ends[:, None])
    least = most_alive(sizes, starts, ends)
    trials = []
    for order, tightest in _orders(sizes, starts, ends):
        trials.append(_tried(order, tightest, sizes, beside))
        if trials[-1].height <= least:
            return trials[-1].offsets
    trials = sorted(trials, key=lambda trial: trial.height)[:KEPT]
    best = trials[0]
    chance = np.random.default_rng(0)
    for _ in range(min(ROUNDS, (work // len(sizes) - 6) // KEPT)):
        for position, trial in enumerate(trials):
            trials[position] = _tried(_changed(trial, sizes, chance), trial.tightest, sizes, beside)
            if trials[position].height < best.height:
                best = trials[position]
            if best.height <= least:
                return best.offsets
    return best.offsets


def most_alive(sizes: Ints, starts: Ints, ends: Ints) -> int:
    """Return the largest sum of sizes alive at once, which no allocation can be smaller than."""
    return int(_alive(sizes, starts, ends).max()) if len(sizes) else 0


def _alive(sizes: Ints, starts: Ints, ends: Ints) -> Ints:
    change = np.zeros(int(ends.max()) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.add.at(change, ends, -sizes)
    return np.cumsum(change)


def _orders(sizes: Ints, starts: Ints, ends: Ints) -> Iterable[tuple[Ints, bool]]:
    """Yield orders of placing, what is hard to place first: large ones, those alive when it is tight."""
    alive = _alive(sizes, starts, ends)
    tight = np.array([alive[a:b].max() for a, b in zip(starts, ends, strict=True)], np.int64)
    number, lives = np.arange(len(sizes)), ends - starts
    yield np.lexsort((number, -lives, -sizes)), False
    yield np.lexsort((number, starts, -ends, -tight)), True
    yield np.lexsort((number, -sizes, -lives, -tight)), True
    yield np.lexsort((number, -lives, -sizes, -tight)), True
    yield np.lexsort((number, -ends, starts, -tight)), True
    yield np.lexsort((number, -sizes * lives, -tight)), False


def _changed(trial: _Trial, sizes: Ints, chance: np.random.Generator) -> Ints:
    """Return the order with those at the peak in front; where they stand there, one moved at random."""
    order = trial.order
    at_peak = (trial.offsets + sizes)[order] == trial.height
    if not at_peak[: int(at_peak.sum())].all():
        return np.concatenate([order[at_peak], order[~at_peak]])
    source, target = chance.integers(0, len(order), 2)
    return np.insert(np.delete(order, source), target, order[source])


def _tried(order: Ints, tightest: bool, sizes: Ints, beside: npt.NDArray[np.bool_]) -> _Trial:
    """Place the buffers in an order, each where nothing placed before lies during its life."""
    count = len(order)
    offsets = np.zeros(count, np.int64)
    held, low, high = (np.empty(count, np.int64) for _ in range(3))  # what is placed, by offset
    for placed, (buffer, size) in enumerate(zip(order.tolist(), sizes[order].tolist(), strict=True)):
        others = beside[buffer].take(held[:placed]).nonzero()[0]
        at = _gap(low[others], high[others], size, tightest) if len(others) else 0
        rank = int(low[:placed].searchsorted(at))
        for column, value in ((held, buffer), (low, at), (high, at + size)):
            column[rank + 1 : placed + 1] = column[rank:placed]
            column[rank] = value
        offsets[buffer] = at
    return _Trial(order, tightest, offsets, int((offsets + sizes).max()))


def _gap(low: Ints, high: Ints, size: int, tightest: bool) -> int:
    """Return where `size` bytes lie between occupied ranges (by offset): the lowest gap or the tightest."""
    reach = np.maximum.accumulate(high)
    rooms = low.copy()
    rooms[1:] -= reach[:-1]
    fits = (rooms >= size).nonzero()[0]
    if not len(fits):
        return int(reach[-1])
    gap = int(fits[rooms[fits].argmin()] if tightest else fits[0])
    return int(reach[gap - 1]) if gap else 0
