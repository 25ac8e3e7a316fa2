"""Reads of packed weights: which bytes of a source are read together, and where they are copied to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.schedules import Transfer
from torchedge.textures.layouts import PAGE_BYTES

MOST_GAP_BYTES = 2**16
"""Bytes between two tensors of a file that are read along rather than skipped."""

PRELOAD = -1
"""The place of a launch for copies before any launch."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of part of a read to the device.

    launch: the launch beside which it begins, or PRELOAD. at: its first byte in the read. place: in the
    buffer or image, as `upload_call` takes it.
    """

    launch: int
    tensor: int
    at: int
    nbytes: int
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightRead:
    """One read of the source: `needed` bytes from `address` into `nbytes` bytes of staging memory."""

    address: int
    needed: int
    nbytes: int
    copies: tuple[Copy, ...]

    @property
    def launch(self) -> int:
        """The launch beside which the first copy begins, or PRELOAD."""
        return self.copies[0].launch


def plan_reads(
    program: Program,
    groups: Iterable[tuple[int, Sequence[Transfer]]],
    source: WeightSource,
    most: int,
    *,
    join: bool = False,
) -> list[WeightRead]:
    """Return the reads of transfers, each at most `most` bytes of staging memory, a multiple of a page.

    groups: transfers by the launch beside which they happen. Neighbours in the source that belong to one
    launch are read together. join: neighbours of several launches too. Neighbours within one weight are then
    one copy, beside the first of their launches: the weight has its memory from there on. Raises InputError
    where the source does not fit the program.
    """
    payload = most if source.alignment == 1 else most - 2 * source.alignment
    reads: list[WeightRead] = []
    for launch, transfers in groups:
        for transfer in transfers:
            tensor = program.tensors[transfer.tensor]
            base = source.address(tensor.name, packed_bytes(tensor))
            for start, stop in _pieces(tensor, transfer, payload):
                place = _place(tensor, start, stop)
                copy = Copy(launch, transfer.tensor, 0, stop - start, place)
                read = _read_of(base + start, copy, source.alignment)
                near = bool(reads) and (join or reads[-1].launch == launch)
                joined = _joined(reads[-1], read, most) if near else None
                reads[-1:] = [joined] if joined else [*reads[-1:], read]
    return reads


def packed_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of a tensor in a source."""
    return tensor.layout.packed_bytes(tensor.shape, tensor.dtype)


def _pieces(tensor: StoredTensor, transfer: Transfer, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `most` bytes: whole units, or parts of one row of texels."""
    unit = tensor.layout.unit_bytes(tensor.shape, tensor.dtype)
    if unit <= most:
        spans, step = [(transfer.start, transfer.stop)], most // unit * unit
    else:
        rows = range(transfer.start, transfer.stop, unit)
        spans, step = [(row, row + unit) for row in rows], most // PAGE_BYTES * PAGE_BYTES
    for first, last in spans:
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _place(tensor: StoredTensor, start: int, stop: int) -> tuple[int, ...]:
    """Return where bytes of a packed tensor lie: (offset,), or (x, y, width, height) in texels."""
    if tensor.layout.storage == "buffer":
        return (start,)
    row, texel = tensor.layout.unit_bytes(tensor.shape, tensor.dtype), 4 * ITEM_SIZES[tensor.dtype]
    if (stop - start) % row == 0:
        return 0, start // row, row // texel, (stop - start) // row
    return start % row // texel, start // row, (stop - start) // texel, 1


def _read_of(address: int, copy: Copy, alignment: int) -> WeightRead:
    begin = address - address % alignment
    needed = address + copy.nbytes - begin
    return WeightRead(begin, needed, _whole_pages(needed), (replace(copy, at=address - begin),))


def _joined(first: WeightRead, second: WeightRead, most: int) -> WeightRead | None:
    """Return two reads as one; None where they are far apart, or too large together."""
    end = first.address + first.needed
    needed = second.address + second.needed - first.address
    start = second.address + second.copies[0].at
    if not end <= start <= end + MOST_GAP_BYTES or _whole_pages(needed) > most:
        return None
    ahead = second.address - first.address
    copies = list(first.copies)
    for copy in second.copies:
        moved = replace(copy, at=copy.at + ahead)
        one = _one_copy(copies[-1], moved)
        copies[-1:] = [one] if one else [copies[-1], moved]
    return WeightRead(first.address, needed, _whole_pages(needed), tuple(copies))


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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def copies_before(uses: Mapping[int, tuple[int, int]], reads: Sequence[WeightRead]) -> dict[int, int]:
    """Return how many copies, in order, precede each launch that is the first to use a weight.

    uses: first and last launch of weights, as `weight_uses` returns; others precede none.
    """
    counts: dict[int, int] = {}
    for number, copy in enumerate([copy for read in reads for copy in read.copies], 1):
        if copy.tensor in uses:
            counts[uses[copy.tensor][0]] = number
    return counts
