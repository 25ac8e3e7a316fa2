"""Where the weights of a running program come from: all of them loaded before, or streamed beside launches.

A streaming run has three parties. Reader threads fill staging memory in the order of the schedule. The loader
thread starts a copy for each weight on a queue of its own, waiting for the event of the launch before the one
beside which the schedule puts it. The thread that launches waits until the copies of a weight are enqueued,
and its launch waits for their event. FlashMem, section 3.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.errors import OpenCLError, ProfileError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.opencl.contexts import clock_offset, translated
from torchedge.opencl.memory import PAGE_BYTES, StagingMemory, start_upload
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.schedules import StreamingSchedule, Transfer, weight_uses

__all__ = ["PRELOADED", "PreloadedStore", "StagingPool", "StagingRing", "StreamingStore", "WeightStore"]

Bytes = npt.NDArray[np.uint8]

MOST_READ_BYTES = 2**22
"""Largest single read: beyond it, disks are not faster."""

MOST_GAP_BYTES = 2**16
"""Bytes between two tensors of a file that are read along rather than skipped."""

READERS = 2
"""Reader threads: one waits for the disk while the other starts the next read."""

PRELOAD = -1
"""The place of a launch for copies before any launch."""


class WeightStore(Protocol):
    """What the executor asks around each launch of a run."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory."""

    def begin(self) -> None:
        """Start a run."""

    def before(self, launch: int) -> list[Any] | None:
        """Return the events for which a launch waits, None for none; raises what went wrong."""

    def after(self, launch: int, event: Any) -> None:
        """Take the event of a launch."""

    def end(self) -> None:
        """End a run whose launches are all enqueued; raises what went wrong."""

    def abort(self) -> None:
        """End a run after an error; the store can begin another one."""

    def close(self) -> None:
        """Give everything back; a second call does nothing."""


class PreloadedStore:
    """All weights are on the device before the first run."""

    staging_bytes = 0

    def begin(self) -> None:
        """Do nothing."""

    def before(self, launch: int) -> list[Any] | None:
        """Return None: a launch waits for nothing."""

    def after(self, launch: int, event: Any) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


PRELOADED = PreloadedStore()


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of part of a read to the device.

    launch: the launch beside which it begins, or PRELOAD. at: its first byte in the read. place: in the
    buffer or image, as `start_upload` takes it.
    """

    launch: int
    tensor: int
    at: int
    nbytes: int
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the source: `needed` bytes from `address` into `nbytes` bytes of staging memory."""

    address: int
    needed: int
    nbytes: int
    copies: tuple[Copy, ...]

    @property
    def launch(self) -> int:
        """The launch beside which the first copy begins, or PRELOAD."""
        return self.copies[0].launch


@dataclass(frozen=True, slots=True)
class Load:
    """A read that was done: when, by the host's clock (ns), and the events of its copies in order."""

    read: Read
    start_ns: int
    end_ns: int
    events: Sequence[Any]


@dataclass(slots=True)
class LoadLog:
    """What was loaded in the initialisation or in a run: its loads, its span by the host's clock (ns).

    offset_ns: the host's clock less the device's.
    """

    start_ns: int
    offset_ns: int = 0
    end_ns: int = 0
    loads: list[Load] = field(default_factory=list)


class StagingPool(Protocol):
    """Places in staging memory, taken and freed in the same order."""

    @property
    def nbytes(self) -> int:
        """Bytes of all places together."""

    def take(self, nbytes: int) -> int | None:
        """Return a free place of whole pages, None while there is none."""

    def view(self, place: int, start: int, stop: int) -> Bytes:
        """Return bytes of a place."""

    def retire(self, place: int, event: Any) -> None:
        """Free a place once an event has completed."""

    def wait_for_oldest(self) -> None:
        """Wait until the oldest place is free."""

    def clear(self) -> None:
        """Free all places."""

    def release(self) -> None:
        """Give the memory back."""


class StreamingStore:
    """Loads the weights of a schedule from a source: preloaded ones once, streamed ones in every run.

    memory: allocates the staging pool; its queue is that of the launches. targets: buffers and images of the
    preloaded weights, and of the streamed ones before the first run. Calls come from one thread at a time.

    Raises:
        InputError: the source lacks a weight or has it in another size.
        OpenCLError: the staging memory is too small for the device's alignment, or the driver fails.
    """

    _joins_launches = True
    """Whether neighbours in the source that belong to several launches are read together."""

    def __init__(
        self,
        schedule: StreamingSchedule,
        source: WeightSource,
        memory: DeviceMemory,
        profile: bool,
        targets: Mapping[int, Any],
    ) -> None:
        self.schedule, self.staging_bytes = schedule, schedule.staging_bytes
        self.targets = dict(targets)
        self._program, self._source, self._context = schedule.program, source, memory.context
        self._profile = profile
        self._queue, self._uploads = memory.queue, memory.context.new_queue(profile, own=True)
        self._pool = self._new_pool(memory)
        most = min(MOST_READ_BYTES, self._pool.nbytes // (READERS + 1) // PAGE_BYTES * PAGE_BYTES)
        whole = [Transfer(i, 0, _packed_bytes(schedule.program.tensors[i])) for i in schedule.preload]
        self._preload = tuple(plan_reads(schedule.program, [(PRELOAD, whole)], source, most))
        streamed = enumerate(schedule.transfers)
        self._reads = tuple(plan_reads(schedule.program, streamed, source, most, join=self._joins_launches))
        # Launches whose events copies wait for.
        self._flushed = {copy.launch - 1 for read in self._reads for copy in read.copies}
        self._copies_before = _copies_before(schedule.program, self._reads)
        self._changed = threading.Condition()
        self._launched: list[Any] = []  # events of this run's launches
        self._copied: list[Any] = []  # events of this run's copies, in order
        self._previous: Any = None  # the last launch of the run before
        self._error: BaseException | None = None
        self._stopped = False
        self._loader: threading.Thread | None = None
        self.log = self.preload_log = self._new_log()

    def _new_pool(self, memory: DeviceMemory) -> StagingPool:
        """Return the staging pool."""
        return StagingRing(memory.allocate_staging(self.staging_bytes, self._uploads))

    def preload(self) -> None:
        """Load what stays from run to run, and wait for it."""
        self.log = self.preload_log = self._new_log()
        self._run_loader(self._preload)
        with translated("preloading weights", device=self._context.device):
            self._uploads.finish()
        self.log.end_ns = time.perf_counter_ns()
        self._pool.clear()
        self._copied = []
        self._raise_error()

    # a run -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the reader threads."""
        self._launched, self._copied, self._error, self._stopped = [], [], None, False
        self.log = self._new_log()
        if self._reads:
            self._loader = threading.Thread(
                target=self._run_loader, args=(self._reads,), name="torchedge-loader", daemon=True
            )
            self._loader.start()

    def before(self, launch: int) -> list[Any] | None:
        """Return the event of the last copy that a launch needs; copies complete in order."""
        count = self._copies_before.get(launch)
        if count is None:
            return None
        if len(self._copied) < count:
            self._queue.flush()
        with self._changed:
            while len(self._copied) < count and self._error is None:
                self._changed.wait()
            if len(self._copied) < count:
                self._raise_error()
            return [self._copied[count - 1]]

    def after(self, launch: int, event: Any) -> None:
        """Let the copies beside the next launch wait for this one."""
        if launch in self._flushed:
            self._queue.flush()
        with self._changed:
            self._launched.append(event)
            self._changed.notify_all()

    def end(self) -> None:
        """Wait for the reader threads, which have nothing left to read."""
        self._join()
        if self._launched:
            self._previous = self._launched[-1]
        self._raise_error()
        self._source.check()

    def abort(self) -> None:
        """Stop the reader threads and wait for what is enqueued."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._join()
        with translated("ending a run", device=self._context.device):
            self._uploads.finish()
        self._pool.clear()
        self._previous = None

    def close(self) -> None:
        """Give staging memory and source back."""
        if self._loader is not None:
            self.abort()
        self._pool.clear()
        self._launched, self._copied, self._previous, self.targets = [], [], None, {}
        self._pool.release()
        self._source.close()

    def _join(self) -> None:
        if self._loader is not None:
            self._loader.join()
            self._loader = None

    def _raise_error(self) -> None:
        error = self._error
        if error is None:
            return
        if isinstance(error, (ProfileError, OpenCLError)):
            raise error
        raise OpenCLError(
            f"loading the weights of {self._program.name} failed: {type(error).__name__}: {error}; report it"
        ) from error

    # the loader --------------------------------------------------------------------------------------------

    def _run_loader(self, reads: Sequence[Read]) -> None:
        try:
            self._load(reads)
        except BaseException as error:  # it reaches the caller in `before` or `end`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _load(self, reads: Sequence[Read]) -> None:
        """Read ahead as far as the pool has room, and start the copies of each read in order."""
        waiting = deque(reads)
        reading: deque[tuple[Read, int, Future[tuple[int, int]]]] = deque()
        with ThreadPoolExecutor(READERS, "torchedge-reader") as readers:
            while (waiting or reading) and not self._stopped:
                at = self._pool.take(waiting[0].nbytes) if waiting and len(reading) < READERS else None
                if at is not None:
                    read = waiting.popleft()
                    reading.append((read, at, readers.submit(self._read, read, at)))
                elif reading:
                    read, at, future = reading.popleft()
                    times = future.result()
                    self.log.loads.append(Load(read, *times, self._upload(read, at)))
                else:
                    self._pool.wait_for_oldest()

    def _new_log(self) -> LoadLog:
        offset = clock_offset(self._context, self._uploads) if self._profile else 0
        return LoadLog(time.perf_counter_ns(), offset)

    def _read(self, read: Read, at: int) -> tuple[int, int]:
        """Read, and return start and end by the host's clock."""
        start = time.perf_counter_ns()
        self._source.read(read.address, read.needed, self._pool.view(at, 0, read.nbytes))
        return start, time.perf_counter_ns()

    def _upload(self, read: Read, at: int) -> list[Any]:
        """Start the copies of a read and return their events."""
        events: list[Any] = []
        for launch, copies in groupby(read.copies, attrgetter("launch")):
            wait_for = self._awaited(launch)
            if self._stopped:
                break
            begun = len(events)
            for copy in copies:
                content, target = self._checked(copy, at), self.targets[copy.tensor]
                events.append(
                    start_upload(self._context, self._uploads, target, content, copy.place, wait_for)
                )
            with translated("copying to the device", device=self._context.device):
                self._uploads.flush()
            with self._changed:
                self._copied += events[begun:]
                self._changed.notify_all()
        if events:
            self._pool.retire(at, events[-1])
        return events

    def _checked(self, copy: Copy, at: int) -> Bytes:
        """Return the bytes of a copy; raise ProfileError for booleans that are none."""
        content = self._pool.view(at, copy.at, copy.at + copy.nbytes)
        tensor = self._program.tensors[copy.tensor]
        if tensor.dtype == "bool" and bool((content > 1).any()):
            raise ProfileError(
                f"{tensor.name} holds a byte that is no boolean, expected 0 or 1; export it again"
            )
        return content

    def _awaited(self, launch: int) -> list[Any]:
        """Return the event of the launch before, once it is enqueued."""
        if launch <= 0:
            return [self._previous] if launch == 0 and self._previous is not None else []
        with self._changed:
            while len(self._launched) < launch and not self._stopped:
                self._changed.wait()
            return [self._launched[launch - 1]] if not self._stopped else []


class StagingRing:
    """One staging memory, always mapped, for copy commands; places of any size."""

    def __init__(self, memory: StagingMemory) -> None:
        self._memory, self.nbytes = memory, memory.bytes.size
        self._head = 0
        self._taken: deque[tuple[int, int]] = deque()  # (start, end), the oldest first
        self._events: dict[int, Any] = {}  # by start, once all copies from there are enqueued

    def take(self, nbytes: int) -> int | None:
        """Return the start of a free place, None while there is none."""
        while self._taken and self._completed(self._taken[0][0]):
            self.wait_for_oldest()
        start, end = 0, self.nbytes
        if self._taken:
            start, tail = self._head, self._taken[0][0]
            if start <= tail:
                end = tail
            elif start + nbytes > end:
                start, end = 0, tail
        if start + nbytes > end:
            return None
        self._taken.append((start, start + nbytes))
        self._head = start + nbytes
        return start

    def view(self, place: int, start: int, stop: int) -> Bytes:
        """Return bytes of a place."""
        return self._memory.bytes[place + start : place + stop]

    def _completed(self, start: int) -> bool:
        event = self._events.get(start)
        return event is not None and event.command_execution_status <= 0  # below 0: an error, raised by wait

    def retire(self, start: int, event: Any) -> None:
        """Free a place once an event has completed."""
        self._events[start] = event

    def wait_for_oldest(self) -> None:
        """Wait until the oldest place is free."""
        start, _ = self._taken.popleft()
        event = self._events.pop(start, None)
        if event is not None:
            with translated("copying weights to the device"):
                event.wait()

    def clear(self) -> None:
        """Free all places."""
        self._taken.clear()
        self._events.clear()

    def release(self) -> None:
        """Give the memory back."""
        self._memory.release()


# reads ------------------------------------------------------------------------------------------------------


def plan_reads(
    program: Program,
    groups: Iterable[tuple[int, Sequence[Transfer]]],
    source: WeightSource,
    most: int,
    *,
    join: bool = False,
) -> list[Read]:
    """Return the reads of transfers, each at most `most` bytes of staging memory, a multiple of a page.

    groups: transfers by the launch beside which they happen. Neighbours in the source that belong to one
    launch are read together. join: neighbours of several launches too. Neighbours within one weight are then
    one copy, beside the first of their launches: the weight has its memory from there on. Raises InputError
    where the source does not fit the program.
    """
    payload = most if source.alignment == 1 else most - 2 * source.alignment
    reads: list[Read] = []
    for launch, transfers in groups:
        for transfer in transfers:
            tensor = program.tensors[transfer.tensor]
            base = source.address(tensor.name, _packed_bytes(tensor))
            for start, stop in _pieces(tensor, transfer, payload):
                place = _place(tensor, start, stop)
                copy = Copy(launch, transfer.tensor, 0, stop - start, place)
                read = _read_of(base + start, copy, source.alignment)
                near = bool(reads) and (join or reads[-1].launch == launch)
                joined = _joined(reads[-1], read, most) if near else None
                reads[-1:] = [joined] if joined else [*reads[-1:], read]
    return reads


def _packed_bytes(tensor: StoredTensor) -> int:
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


def _read_of(address: int, copy: Copy, alignment: int) -> Read:
    begin = address - address % alignment
    needed = address + copy.nbytes - begin
    return Read(begin, needed, _whole_pages(needed), (replace(copy, at=address - begin),))


def _joined(first: Read, second: Read, most: int) -> Read | None:
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
    return Read(first.address, needed, _whole_pages(needed), tuple(copies))


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


def _copies_before(program: Program, reads: Sequence[Read]) -> dict[int, int]:
    """Return how many copies, in order, precede each launch that is the first to use a streamed weight."""
    uses = weight_uses(program)
    counts: dict[int, int] = {}
    for number, copy in enumerate([copy for read in reads for copy in read.copies]):
        counts[uses[copy.tensor][0]] = number + 1
    return counts
