"""Planning the arena: offsets for the buffers of a step and slots for its images, over their lifetimes.

Finding the offsets is dynamic storage allocation, an NP-hard problem; training steps are easy instances,
since activations nest like brackets. Buffers are placed one by one in several orders. The best orders are
then changed where the peak is, until the peak is the largest set of bytes alive at once or the work limit is
reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from operator import or_

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.programs import Arena, Program, StoredTensor

Lifetime = tuple[int, int]
"""Half-open: from the launch that first writes a tensor to the one behind the last that touches it."""

ImageSize = tuple[int, int, str]
"""Width and height in texels, and dtype, of an RGBA image."""

Ints = npt.NDArray[np.int64]

KEPT = 3
"""Number of orders that are improved."""

ROUNDS = 150
"""Largest number of changes to each."""

WORK = 25_000
"""Largest number of placements in all (about 20 microseconds each)."""


def planned(program: Program, alignment: int, streamed: Mapping[int, Lifetime] | None = None) -> Program:
    """Return the program with an arena for its intermediates; offsets are multiples of `alignment` bytes.

    No buffer or image of it is larger than the `allocation_bytes` of the program's arena, or than a tensor.
    streamed: lifetimes of weights that take memory of the arena, from the first launch beside which they are
    loaded to the one behind their last use.

    Raises:
        InputError: a launch reads an intermediate that none before it has written.
    """
    sizes, images, lifetimes, pairs = _requests(program, streamed or {})
    most = program.arena.allocation_bytes
    arena = plan_arena(sizes, lifetimes, alignment, in_place=pairs, images=images, allocation_bytes=most)
    return replace(program, arena=arena)


def live_bytes(program: Program, streamed: Mapping[int, Lifetime] | None = None) -> int:
    """Return the `Arena.live_bytes` that `planned` would find, without placing anything."""
    sizes, images, lifetimes, pairs = _requests(program, streamed or {})
    spans = _spans(_chains(sizes, lifetimes, pairs), sizes, lifetimes)
    return _live_bytes(spans, images, lifetimes)


def _requests(
    program: Program, streamed: Mapping[int, Lifetime]
) -> tuple[dict[int, int], dict[int, ImageSize], dict[int, Lifetime], list[tuple[int, int]]]:
    """Return sizes of buffers, sizes of images, lifetimes, and pairs that may share memory in place."""
    lifetimes = lifetimes_of(program)
    pairs = in_place_pairs(program, lifetimes)
    sizes: dict[int, int] = {}
    images: dict[int, ImageSize] = {}
    for index in (*lifetimes, *streamed):
        tensor = program.tensors[index]
        if tensor.layout.storage == "image":
            images[index] = (*tensor.layout.extent(tensor.shape), tensor.dtype)
        else:
            sizes[index] = tensor.nbytes
    return sizes, images, {**lifetimes, **streamed}, pairs


def plan_arena(
    sizes: Mapping[int, int],
    lifetimes: Mapping[int, Lifetime],
    alignment: int = 1,
    *,
    in_place: Iterable[tuple[int, int]] = (),
    images: Mapping[int, ImageSize] | None = None,
    allocation_bytes: int = 0,
) -> Arena:
    """Return where tensors lie: buffers of `sizes` bytes and `images`, alive over `lifetimes` (half-open).

    in_place: (dying, born) buffers of one size; `born` may take the place of `dying` in the launch where
    their lives meet. allocation_bytes: as in `Arena`. Deterministic; 2,000 buffers take under a second.
    """
    images = images or {}
    chains = _chains(sizes, lifetimes, in_place)
    spans = _spans(chains, sizes, lifetimes)
    nbytes, starts, ends = spans.T
    rounded = -(-np.maximum(nbytes, 1) // alignment) * alignment
    offsets = find_offsets(rounded, starts, ends)
    pieces: tuple[int, ...] = ()
    if allocation_bytes and len(chains) and int((offsets + nbytes).max()) > allocation_bytes:
        wall = max(allocation_bytes // alignment * alignment, int(rounded.max()))
        offsets, pieces = _in_pieces(find_offsets(rounded, starts, ends, wall), rounded, wall)
    slots, slot = find_slots(images, lifetimes, allocation_bytes)
    return Arena(
        nbytes=sum(pieces) or (int((offsets + nbytes).max()) if len(chains) else 0),
        offset={i: at for chain, at in zip(chains, offsets.tolist(), strict=True) for i in chain},
        slots=slots,
        slot=slot,
        live_bytes=_live_bytes(spans, images, lifetimes),
        allocation_bytes=allocation_bytes,
        pieces=pieces,
    )


def _in_pieces(offsets: Ints, sizes: Ints, wall: int) -> tuple[Ints, tuple[int, ...]]:
    """Return offsets through the pieces between walls, and the bytes of each piece that are in use."""
    number = offsets // wall
    used = np.zeros(int(number.max()) + 1, np.int64)
    np.maximum.at(used, number, offsets + sizes - number * wall)
    begins = np.cumsum(used) - used
    return offsets - number * wall + begins[number], tuple(used[used > 0].tolist())


def _spans(
    chains: Sequence[Sequence[int]], sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime]
) -> Ints:
    """Return (bytes, start, end) of each chain."""
    rows = [(sizes[chain[0]], lifetimes[chain[0]][0], lifetimes[chain[-1]][1]) for chain in chains]
    return np.array(rows, np.int64).reshape(-1, 3)


def _live_bytes(spans: Ints, images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime]) -> int:
    pictures = [(image_bytes(size), *lifetimes[index]) for index, size in images.items()]
    every = np.concatenate([spans, np.array(pictures, np.int64).reshape(-1, 3)])
    return most_alive(every[:, 0], every[:, 1], every[:, 2])


def allocations(arena: Arena) -> list[int]:
    """Return the bytes of each allocation of an arena: its buffers, and the images of its slots."""
    return [*arena.buffers, *map(image_bytes, arena.slots)]


def total_bytes(arena: Arena) -> int:
    """Return the bytes of an arena."""
    return sum(allocations(arena))


def common_arena(arenas: Sequence[Arena]) -> Arena:
    """Return an arena without tensors that serves each of several programs, of which one runs at a time."""
    pieces = [max(sizes) for sizes in zip_longest(*[arena.buffers for arena in arenas], fillvalue=0)]
    slots: Counter[tuple[int, int, str]] = reduce(or_, [Counter(arena.slots) for arena in arenas], Counter())
    return Arena(
        sum(pieces),
        slots=tuple(slots.elements()),
        live_bytes=max([arena.live_bytes for arena in arenas], default=0),
        pieces=tuple(pieces),
    )


def _chains(
    sizes: Mapping[int, int], lifetimes: Mapping[int, Lifetime], in_place: Iterable[tuple[int, int]]
) -> list[list[int]]:
    """Return chains of tensors that share memory one after the other, each at most with one successor."""
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


def lifetimes_of(program: Program) -> dict[int, Lifetime]:
    """Return the lifetime of each intermediate that a launch touches; outputs live to the end.

    Raises:
        InputError: a launch reads an intermediate that none before it has written.
    """
    tensors, lifetimes = program.tensors, dict[int, Lifetime]()
    for position, launch in enumerate(program.launches):
        kernel = program.kernels[launch.kernel]
        written = []
        for index, access in zip(launch.tensors, kernel.access, strict=True):
            if tensors[index].role != "intermediate":
                continue
            if index in lifetimes:
                lifetimes[index] = (lifetimes[index][0], position + 1)
            elif access == "write":
                written.append(index)
            else:
                raise InputError(
                    f"launch {position}, kernel {kernel.name}, reads {tensors[index].name} before any launch "
                    "writes it; order the launches by what they need"
                )
        lifetimes |= {index: (position, position + 1) for index in written}
    end = len(program.launches)
    return {i: (start, end if i in program.outputs else stop) for i, (start, stop) in lifetimes.items()}


def in_place_pairs(program: Program, lifetimes: Mapping[int, Lifetime]) -> list[tuple[int, int]]:
    """Return (input, output) of launches where the output may take the place of the input.

    That is: the kernel declares the pair of arguments for every use of the input, the input is last read
    there, the output is first written there, and both lie in buffers of the same size and item size.
    """
    pairs = []
    for position, launch in enumerate(program.launches):
        declared = set(program.kernels[launch.kernel].in_place)
        for read, written in sorted(declared):
            before, after = launch.tensors[read], launch.tensors[written]
            if before not in lifetimes or after not in lifetimes or before == after:
                continue
            places = [at for at, index in enumerate(launch.tensors) if index == before]
            if (
                lifetimes[before][1] == position + 1
                and lifetimes[after][0] == position
                and all((at, written) in declared for at in places)
                and _same_bytes(program.tensors[before], program.tensors[after])
                and (before, after) not in pairs
            ):
                pairs.append((before, after))
    return pairs


def _same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    return (
        first.layout.storage == second.layout.storage == "buffer"
        and first.nbytes == second.nbytes
        and ITEM_SIZES[first.dtype] == ITEM_SIZES[second.dtype]
    )


@dataclass(slots=True)
class _Trial:
    """An order of placing buffers, the choice of gaps (tightest or lowest), and the resulting offsets."""

    order: Ints
    tightest: bool
    offsets: Ints
    height: int


def find_offsets(sizes: Ints, starts: Ints, ends: Ints, wall: int = 0) -> Ints:
    """Return the offset of each buffer, alive from start to end (half-open); deterministic.

    The offsets are sums of sizes and walls, so they have their alignment. wall: no buffer lies across a
    multiple of it; 0: there are none.
    """
    if not len(sizes):
        return np.zeros(0, np.int64)
    beside = (starts[:, None] < ends[None, :]) & (starts[None, :] < ends[:, None])
    least = most_alive(sizes, starts, ends)
    trials = []
    for order, tightest in _orders(sizes, starts, ends):
        trials.append(_tried(order, tightest, sizes, beside, wall))
        if trials[-1].height <= least:
            return trials[-1].offsets
    trials = sorted(trials, key=lambda trial: trial.height)[:KEPT]
    best = trials[0]
    chance = np.random.default_rng(0)
    for _ in range(min(ROUNDS, (WORK // len(sizes) - 6) // KEPT)):
        for position, trial in enumerate(trials):
            order = _changed(trial, sizes, chance)
            trials[position] = _tried(order, trial.tightest, sizes, beside, wall)
            if trials[position].height < best.height:
                best = trials[position]
            if best.height <= least:
                return best.offsets
    return best.offsets


def most_alive(sizes: Ints, starts: Ints, ends: Ints) -> int:
    """Return the largest sum of sizes alive at once: the lower bound of any allocation."""
    return int(_alive(sizes, starts, ends).max()) if len(sizes) else 0


def _alive(sizes: Ints, starts: Ints, ends: Ints) -> Ints:
    change = np.zeros(int(ends.max()) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.add.at(change, ends, -sizes)
    return np.cumsum(change)


def _orders(sizes: Ints, starts: Ints, ends: Ints) -> Iterable[tuple[Ints, bool]]:
    """Yield orders of placing: hard buffers first, large ones or those alive near the peak."""
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
    """Return the order with the buffers at the peak in front; if they are in front, with a random move."""
    order = trial.order
    at_peak = (trial.offsets + sizes)[order] == trial.height
    if not at_peak[: int(at_peak.sum())].all():
        return np.concatenate([order[at_peak], order[~at_peak]])
    source, target = chance.integers(0, len(order), 2)
    return np.insert(np.delete(order, source), target, order[source])


def _tried(order: Ints, tightest: bool, sizes: Ints, beside: npt.NDArray[np.bool_], wall: int) -> _Trial:
    """Place the buffers in an order, each where no buffer placed before it is alive at the same time."""
    count = len(order)
    offsets = np.zeros(count, np.int64)
    held, low, high = (np.empty(count, np.int64) for _ in range(3))  # what is placed, by offset
    for placed, (buffer, size) in enumerate(zip(order.tolist(), sizes[order].tolist(), strict=True)):
        others = beside[buffer].take(held[:placed]).nonzero()[0]
        at = _gap(low[others], high[others], size, tightest, wall) if len(others) else 0
        rank = int(low[:placed].searchsorted(at))
        for column, value in ((held, buffer), (low, at), (high, at + size)):
            column[rank + 1 : placed + 1] = column[rank:placed]
            column[rank] = value
        offsets[buffer] = at
    return _Trial(order, tightest, offsets, int((offsets + sizes).max()))


def _gap(low: Ints, high: Ints, size: int, tightest: bool, wall: int) -> int:
    """Return the offset of the lowest or the tightest gap of `size` bytes between occupied ranges."""
    begins = np.concatenate([[0], np.maximum.accumulate(high)])
    if wall:
        begins = np.where(begins % wall + size > wall, -(-begins // wall) * wall, begins)
    rooms = low - begins[:-1]
    fits = (rooms >= size).nonzero()[0]
    if not len(fits):
        return int(begins[-1])
    return int(begins[fits[rooms[fits].argmin()] if tightest else fits[0]])


def image_bytes(size: ImageSize) -> int:
    """Return the bytes of an image, without the padding of a driver."""
    return size[0] * size[1] * 4 * ITEM_SIZES[size[2]]


def find_slots(
    images: Mapping[int, ImageSize], lifetimes: Mapping[int, Lifetime], allocation_bytes: int = 0
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Return slots, and the slot of each image; a slot may be larger than its images.

    Kernels address texels by number, so a larger image works as well. allocation_bytes: the largest slot of
    several images; 0: any.
    """
    end = max((lifetimes[i][1] for i in images), default=0)
    alive = [0] * end
    for index, size in images.items():
        for launch in range(*lifetimes[index]):
            alive[launch] += image_bytes(size)
    tight = {i: max(alive[slice(*lifetimes[i])]) for i in images}
    area = {i: image_bytes(size) for i, size in images.items()}
    orders = (
        sorted(images, key=lambda i: (-tight[i], -area[i], i)),
        sorted(images, key=lambda i: (-area[i], -tight[i], i)),
        sorted(images, key=lambda i: (-area[i], -lifetimes[i][1], i)),
        sorted(images, key=lambda i: (-images[i][0], -images[i][1], i)),
        sorted(images, key=lambda i: (-images[i][1], -images[i][0], i)),
    )
    return min(
        [_filled(order, images, lifetimes, allocation_bytes) for order in orders],
        key=lambda plan: sum(map(image_bytes, plan[0])),
    )


def _filled(
    order: Sequence[int],
    images: Mapping[int, ImageSize],
    lifetimes: Mapping[int, Lifetime],
    allocation_bytes: int,
) -> tuple[tuple[ImageSize, ...], dict[int, int]]:
    """Put each image where the slots grow least, or into a new slot where that costs less."""
    slots: list[ImageSize] = []
    busy: list[int] = []  # a bit for each launch
    slot: dict[int, int] = {}
    for index in order:
        width, height, dtype = images[index]
        life = (1 << lifetimes[index][1]) - (1 << lifetimes[index][0])
        best, cost = len(slots), (width * height, 0)
        for number, (wide, high, kind) in enumerate(slots):
            if busy[number] & life or kind != dtype:
                continue
            both = max(wide, width), max(high, height), kind
            if both != slots[number] and 0 < allocation_bytes < image_bytes(both):
                continue
            grown = both[0] * both[1] - wide * high
            if (grown, wide * high) < cost:
                best, cost = number, (grown, wide * high)
        if best == len(slots):
            slots.append(images[index])
            busy.append(0)
        slots[best] = (max(slots[best][0], width), max(slots[best][1], height), dtype)
        busy[best] |= life
        slot[index] = best
    return tuple(slots), slot
