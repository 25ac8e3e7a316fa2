"""The reads and copies of a streaming run, in numbers: what an executor does, and what waits for what.

Three things happen side by side, each in order: reads from the weights' file into staging memory, copies from
there to the device's memory, and launches. Counts join them. A read begins when the first `after` copies have
ended, which frees its place; a copy when its read is done and the first `after` launches have ended, which
frees the memory of its weight; a launch when the first `waits` copies have ended. Where a count is 0, a run
waits for the copies or launches of the run before.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torchedge.errors import InputError, LoweringError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.kernels.loading import VECTOR_BYTES, destination_of, with_slot
from torchedge.lowering.programs import Kernel, Program, StoredTensor
from torchedge.streaming.far_uses import whole_name
from torchedge.streaming.rates import REQUEST_BYTES
from torchedge.streaming.schedules import Copy, FileRead, Loads, StreamingSchedule, Transfer, weight_uses
from torchedge.textures.layouts import LANES, PAGE_BYTES

MOST_GAP_BYTES = 2**16
"""Bytes between two tensors of a file that are read along rather than skipped."""

PARTS = 3
"""Staging memory holds at least so many reads: two that are under way, and one that is copied."""


def resolve(
    schedule: StreamingSchedule, places: Mapping[str, tuple[int, int]], *, by_kernels: bool = False
) -> Loads:
    """Return the loads of a schedule whose packed weights lie at `places`, (offset, bytes) by name.

    Neighbours in the file are read together; those within one weight are then one copy, beside the first of
    their launches: the weight has its memory from there on. by_kernels: for kernels that load
    (`Executor(loading=)`): staging memory is PARTS buffers of a size, since no kernel may read a buffer that
    the host writes; a read belongs to one launch, which may carry its bytes.
    Raises InputError: a weight has no place, or a place of another size.
    """
    program, staging = schedule.program, schedule.staging_bytes
    part = staging // PARTS // PAGE_BYTES * PAGE_BYTES
    ring = staging - PAGE_BYTES  # the host's memory may begin within a page
    most = min(REQUEST_BYTES, part - PAGE_BYTES if by_kernels else ring // PARTS // PAGE_BYTES * PAGE_BYTES)

    def placed(groups: Iterable[tuple[int, Sequence[Transfer]]]) -> tuple[FileRead, ...]:
        reads = plan_reads(program, groups, places, most, join=not by_kernels)
        sizes = [whole_pages(read.nbytes) for read in reads]
        if by_kernels:
            rooms = [(n % PARTS * part, max(0, n + 1 - PARTS)) for n in range(len(reads))]
        else:
            rooms = ring_places(sizes, ring)
        ends = list(accumulate([len(read.copies) for read in reads], initial=0))
        return tuple(
            [
                replace(
                    read,
                    at=at,
                    after=ends[after],
                    copies=tuple([replace(copy, at=at + copy.at) for copy in read.copies]),
                )
                for read, (at, after) in zip(reads, rooms, strict=True)
            ]
        )

    preload = [Transfer(i, 0, packed_bytes(program.tensors[i])) for i in schedule.preload]
    run = placed(enumerate(schedule.transfers))
    uses, waits = weight_uses(program), [0] * len(program.launches)
    for number, copy in enumerate([copy for read in run for copy in read.copies], 1):
        waits[uses[copy.tensor][0]] = number
    return Loads(placed([(0, preload)]), run, tuple(waits))


def plan_reads(
    program: Program,
    groups: Iterable[tuple[int, Sequence[Transfer]]],
    places: Mapping[str, tuple[int, int]],
    most: int,
    *,
    join: bool,
) -> list[FileRead]:
    """Return the reads of transfers, each at most `most` bytes of whole pages, at byte 0 of staging memory.

    groups: transfers by the launch beside which they happen. join: neighbours of several launches are read
    together too. Raises InputError as `resolve` does.
    """
    reads: list[FileRead] = []
    for launch, transfers in groups:
        for transfer in transfers:
            tensor = program.tensors[transfer.tensor]
            own = tensor.name if tensor.name in places else whole_name(tensor.name)
            base, stored = places.get(own, (0, None))
            if stored != packed_bytes(tensor):
                size = "no place" if stored is None else f"{stored} bytes"
                raise InputError(
                    f"the source of weights has {size} for {tensor.name!r}, {program.name} takes "
                    f"{packed_bytes(tensor)} bytes; pack it with the layout of its tensor, or export it again"
                )
            start = transfer.start
            while start < transfer.stop:
                ahead = (base + start) % PAGE_BYTES
                stop, place = _piece(tensor, start, transfer.stop, most - ahead)
                copy = Copy(transfer.tensor, launch, ahead, stop - start, place)
                read = FileRead(base + start - ahead, ahead + stop - start, 0, 0, (copy,))
                near = bool(reads) and (join or reads[-1].copies[0].after == launch)
                joined = _joined(reads[-1], read, most) if near else None
                reads[-1:] = [joined] if joined else [*reads[-1:], read]
                start = stop
    return reads


def packed_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of a tensor in a source."""
    return tensor.layout.packed_bytes(tensor.shape, tensor.dtype)


def whole_pages(nbytes: int) -> int:
    """Return bytes rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _piece(tensor: StoredTensor, start: int, stop: int, most: int) -> tuple[int, tuple[int, ...]]:
    """Return the end and the place of a copy of at most `most` bytes: whole units, or a part of one row."""
    unit = tensor.layout.unit_bytes(tensor.shape, tensor.dtype)
    if tensor.layout.storage == "buffer":
        return min(start + most // unit * unit, stop), (start,)
    texel, x = LANES * ITEM_SIZES[tensor.dtype], start % unit
    if x or unit > most:
        end = min(start + most // texel * texel, start - x + unit)
        return end, (x // texel, start // unit, (end - start) // texel, 1)
    end = min(start + most // unit * unit, stop)
    return end, (0, start // unit, unit // texel, (end - start) // unit)


def _joined(first: FileRead, second: FileRead, most: int) -> FileRead | None:
    """Return two reads as one; None where they are far apart, or too large together."""
    end, ahead = first.offset + first.nbytes, second.offset - first.offset
    start = second.offset + second.copies[0].at
    if not end <= start <= end + MOST_GAP_BYTES or whole_pages(ahead + second.nbytes) > most:
        return None
    copies = list(first.copies)
    for copy in second.copies:
        moved = replace(copy, at=copy.at + ahead)
        one = _one_copy(copies[-1], moved)
        copies[-1:] = [one] if one else [copies[-1], moved]
    return replace(first, nbytes=ahead + second.nbytes, copies=tuple(copies))


def _one_copy(first: Copy, second: Copy) -> Copy | None:
    """Return two copies as one; None unless the second continues the first."""
    if first.tensor != second.tensor or first.at + first.nbytes != second.at:
        return None
    nbytes = first.nbytes + second.nbytes
    if len(first.place) == 1:
        return replace(first, nbytes=nbytes) if first.place[0] + first.nbytes == second.place[0] else None
    (x, y, width, height), (other_x, other_y, other_width, other_height) = first.place, second.place
    if (x, width, y + height) != (other_x, other_width, other_y) or x:
        return None
    return replace(first, nbytes=nbytes, place=(x, y, width, height + other_height))


def ring_places(sizes: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """Place reads in memory one behind the other, and at its start again where the end is too near.

    Return (byte, number of the first reads whose copies free the place) of each.
    """
    places: list[tuple[int, int]] = []
    taken: deque[tuple[int, int, int]] = deque()  # (start, stop, number of the next read), in order
    head = after = 0
    for number, size in enumerate(sizes, 1):
        start = head if head + size <= nbytes else 0
        head = start + size
        while any(begin < head and start < stop for begin, stop, _ in taken):
            after = taken.popleft()[2]
        taken.append((start, head, number))
        places.append((start, after))
    return places


# loading by kernels -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A launch that loads beside its work: the number of the copy, and the launch's kernel with a slot."""

    copy: int
    kernel: Kernel


def slots_of(program: Program, loads: Loads) -> dict[int, Slot]:
    """Return the slots of the launches that carry the largest of their copies themselves.

    Launches without a copy that kernels can load have none, nor have kernels of another package's text.
    """
    largest: dict[int, tuple[int, Copy]] = {}
    for number, copy in enumerate([copy for read in loads.run for copy in read.copies]):
        if is_loadable(program.tensors[copy.tensor], copy):
            best = largest.setdefault(copy.after, (number, copy))
            if copy.nbytes > best[1].nbytes:
                largest[copy.after] = number, copy
    slots = {}
    for launch, (number, copy) in largest.items():
        kernel = program.kernels[program.launches[launch].kernel]
        with contextlib.suppress(LoweringError):
            destination = destination_of(program.tensors[copy.tensor])
            slots[launch] = Slot(number, with_slot(kernel, destination, program.target))
    return slots


def is_loadable(tensor: StoredTensor, copy: Copy) -> bool:
    """Whether kernels can load a copy: vectors of 16 bytes, or whole rows of texels."""
    try:
        destination_of(tensor)
    except LoweringError:
        return False
    if copy.at % VECTOR_BYTES:
        return False
    if tensor.layout.storage == "buffer":
        return copy.place[0] % VECTOR_BYTES == 0
    return copy.place[0] == 0 and copy.place[2] == tensor.layout.extent(tensor.shape)[0]
