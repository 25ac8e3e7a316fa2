"""Planning the arena: byte offsets for the buffers of a step and slots for its images, over their lifetimes.

Dynamic storage allocation is NP-hard; training steps are kind: activations nest like brackets. Tensors are
placed in several orders, each at the lowest place that is free for its whole life; then those at the peak
are placed earlier, round after round, until the peak is the largest set of bytes alive at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.lifetimes import Lifetime, in_place_pairs, lifetimes_of
from torchedge.lowering.programs import Arena, Program

Ints = npt.NDArray[np.int64]
ImageSize = tuple[int, int, str]
"""Width, height and dtype of an image."""

ROUNDS = 40
"""Rounds of improvement for each order, at most."""

_WORK = 150_000
"""Tensors placed in all, at most: larger steps get fewer rounds."""


def planned(program: Program, alignment: int) -> Program:
    """Return the program with an arena for its intermediates; offsets are multiples of `alignment` bytes."""
    lifetimes = lifetimes_of(program.tensors, program.kernels, program.launches, program.outputs)
    pairs = in_place_pairs(program.tensors, program.kernels, program.launches, lifetimes)
    sizes, images = {}, {}
    for index in lifetimes:
        tensor = program.tensors[index]
        if tensor.layout.storage == "image":
            images[index] = (*tensor.layout.extent(tensor.shape), tensor.dtype)
        else:
            sizes[index] = tensor.nbytes
    return replace(program, arena=plan_arena(sizes, lifetimes, alignment, in_place=pairs, images=images))


def plan_arena(
    sizes: Mapping[int, int],
    lifetimes: Mapping[int, Lifetime],
    alignment: int = 1,
    *,
    in_place: Iterable[tuple[int, int]] = (),
    images: Mapping[int, ImageSize] | None = None,
) -> Arena:
    """Return where tensors lie: buffers of `sizes` bytes and `images`, alive over `lifetimes` (half-open).

    in_place: (dying, born) buffers of one size; `born` may take the place of `dying` in the launch where
    their lives meet. Deterministic.
    """
    chains = _chains(sizes, lifetimes, in_place)
    blocks = [
        _Block(
            sizes[chain[0]],
            min(lifetimes[i][0] for i in chain),
            max(lifetimes[i][1] for i in chain),
        )
        for chain in chains
    ]
    offsets, nbytes = _placed(blocks, alignment)
    images = images or {}
    slots, slot = _slotted(images, lifetimes)
    pictures = [_Block(_image_bytes(size), *lifetimes[index]) for index, size in images.items()]
    return Arena(
        nbytes=nbytes,
        offset={i: offset for chain, offset in zip(chains, offsets, strict=True) for i in chain},
        slots=slots,
        slot=slot,
        live_bytes=_live_bytes([*blocks, *pictures]),
    )


def total_bytes(arena: Arena) -> int:
    """Return the bytes of the buffer and of all images of an arena."""
    return arena.nbytes + sum(_image_bytes(size) for size in arena.slots)


@dataclass(frozen=True, slots=True)
class _Block:
    size: int
    start: int
    end: int


def _image_bytes(size: ImageSize) -> int:
    return size[0] * size[1] * 4 * ITEM_SIZES[size[2]]


def _chains(
    sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime], in_place: Iterable[tuple[int, int]]
) -> list[list[int]]:
    """Return tensors grouped by the memory that they hand on; each has at most one heir and one ancestor."""
    heir: dict[int, int] = {}
    ancestors: set[int] = set()
    for dying, born in in_place:
        meets = lifetimes[dying][1] == lifetimes[born][0] + 1 and sizes[dying] == sizes[born]
        if meets and dying not in heir and born not in ancestors:
            heir[dying] = born
            ancestors.add(born)
    chains = []
    for index in sizes:
        if index not in ancestors:
            chain = [index]
            while chain[-1] in heir:
                chain.append(heir[chain[-1]])
            chains.append(chain)
    return chains


def _live_bytes(blocks: Sequence[_Block]) -> int:
    """Return the largest sum of sizes alive at once."""
    if not blocks:
        return 0
    change = np.zeros(max(block.end for block in blocks) + 1, np.int64)
    for block in blocks:
        change[block.start] += block.size
        change[block.end] -= block.size
    return int(np.cumsum(change).max())


def _placed(blocks: Sequence[_Block], alignment: int) -> tuple[list[int], int]:
    """Return the offset of each block and the end of the last one."""
    if not blocks:
        return [], 0
    sizes = np.array([-(-max(b.size, 1) // alignment) * alignment for b in blocks], np.int64)
    starts = np.array([b.start for b in blocks], np.int64)
    ends = np.array([b.end for b in blocks], np.int64)
    least = _live_bytes([_Block(int(s), b.start, b.end) for s, b in zip(sizes, blocks, strict=True)])
    best: Ints | None = None
    peak = 0
    for order in _orders(sizes, starts, ends):
        rounds = max(1, min(ROUNDS, _WORK // (len(blocks) * 6)))
        found, height = _improved(order, sizes, starts, ends, least, rounds)
        if best is None or height < peak:
            best, peak = found, height
        if peak <= least:
            break
    assert best is not None
    used = np.array([b.size for b in blocks], np.int64)
    return best.tolist(), int((best + used).max())


def _orders(sizes: Ints, starts: Ints, ends: Ints) -> Iterable[Ints]:
    """Yield orders of placing: what is hard to place comes first, by several notions of hard."""
    lives = ends - starts
    number = np.arange(len(sizes))
    yield np.lexsort((number, -lives, -sizes))
    yield np.lexsort((number, -sizes, -lives))
    yield np.lexsort((number, -sizes * lives))
    yield np.lexsort((number, -lives, -_pressure(sizes, starts, ends), -sizes))
    yield np.lexsort((number, -sizes * lives, -_pressure(sizes, starts, ends)))
    yield np.lexsort((number, -lives, starts))


def _pressure(sizes: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return for each block the most bytes that are alive at once during its life."""
    change = np.zeros(int(ends.max()) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.add.at(change, ends, -sizes)
    alive = np.cumsum(change)
    return np.array([alive[a:b].max() for a, b in zip(starts, ends, strict=True)], np.int64)


def _improved(
    order: Ints, sizes: Ints, starts: Ints, ends: Ints, least: int, rounds: int
) -> tuple[Ints, int]:
    """Place in an order; then place the blocks at the peak earlier, as long as rounds are left."""
    best, peak = None, 0
    for _ in range(rounds):
        offsets = _first_fit(order, sizes, starts, ends)
        tops = offsets + sizes
        height = int(tops.max())
        if best is None or height < peak:
            best, peak = offsets, height
        if peak <= least:
            break
        at_peak = tops[order] == height
        if at_peak[: int(at_peak.sum())].all():
            break
        order = np.concatenate([order[at_peak], order[~at_peak]])
    assert best is not None
    return best, peak


def _first_fit(order: Ints, sizes: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return offsets: each block, in order, at the lowest place free of blocks placed before it."""
    count = len(order)
    offsets = np.zeros(count, np.int64)
    # What is placed, by offset: position in these arrays is rank by offset.
    low, high, begin, end = (np.empty(count, np.int64) for _ in range(4))
    for placed, block in enumerate(order):
        size = sizes[block]
        beside = np.flatnonzero((begin[:placed] < ends[block]) & (starts[block] < end[:placed]))
        at = 0
        if len(beside):
            reach = np.maximum.accumulate(high[beside])
            floors = np.concatenate([[0], reach])
            gaps = np.append(low[beside], np.iinfo(np.int64).max) - floors
            at = floors[int(np.argmax(gaps >= size))]
        rank = int(np.searchsorted(low[:placed], at))
        for column, value in ((low, at), (high, at + size), (begin, starts[block]), (end, ends[block])):
            column[rank + 1 : placed + 1] = column[rank:placed]
            column[rank] = value
        offsets[block] = at
    return offsets


def _slotted(
    images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime]
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Return slots and the slot of each image; a slot holds smaller images too, one at a time."""
    best: tuple[int, tuple[ImageSize, ...], dict[int, int]] | None = None
    orders = (
        lambda i: (-_image_bytes(images[i]), i),
        lambda i: (-images[i][0], -images[i][1], i),
        lambda i: (-images[i][1], -images[i][0], i),
        lambda i: (lifetimes[i][0] - lifetimes[i][1], -_image_bytes(images[i]), i),
        lambda i: (lifetimes[i][0], -_image_bytes(images[i]), i),
    )
    for order in orders:
        slots, slot = _filled(sorted(images, key=order), images, lifetimes)
        total = sum(map(_image_bytes, slots))
        if best is None or total < best[0]:
            best = (total, slots, slot)
    assert best is not None
    return best[1], best[2]


def _filled(
    order: Sequence[int], images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime]
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Put each image where the slots grow least, or into a new slot where that costs less."""
    slots: list[ImageSize] = []
    held: list[list[Lifetime]] = []
    slot: dict[int, int] = {}
    for index in order:
        width, height, dtype = images[index]
        start, end = lifetimes[index]
        best, cost = len(slots), (_image_bytes(images[index]), 0)
        for number, (w, h, kind) in enumerate(slots):
            if kind != dtype or any(a < end and start < b for a, b in held[number]):
                continue
            grown = _image_bytes((max(w, width), max(h, height), kind)) - _image_bytes((w, h, kind))
            if (grown, _image_bytes((w, h, kind))) < cost:
                best, cost = number, (grown, _image_bytes((w, h, kind)))
        if best == len(slots):
            slots.append(images[index])
            held.append([])
        w, h, kind = slots[best]
        slots[best] = (max(w, width), max(h, height), kind)
        held[best].append((start, end))
        slot[index] = best
    return tuple(slots), slot
