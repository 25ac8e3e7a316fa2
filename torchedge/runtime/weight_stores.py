"""Where the weights of a running program come from: all of them loaded before, or streamed beside launches.

The thread that launches does all the enqueueing of a streaming run: between launches it starts the copies
whose bytes are in staging memory, on a queue of their own, each waiting for the event of the launch before
the one beside which the schedule puts it. A launch waits for the event of the last copy that it needs. Reader
threads only read (`staging.Readers`). What a run does, and in which order, is known before it: reads, their
places in staging memory, and how many copies each launch needs and allows. FlashMem, section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torchedge.errors import OpenCLError, ProfileError, TorchedgeError
from torchedge.opencl.contexts import clock_offset, translated
from torchedge.opencl.memory import upload_call
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.staging import READERS, Bytes, Readers, StagingPool, StagingRing
from torchedge.runtime.weight_reads import PRELOAD, Copy, WeightRead, copies_before, packed_bytes, plan_reads
from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.schedules import StreamingSchedule, Transfer, weight_uses
from torchedge.textures.layouts import PAGE_BYTES

MOST_READ_BYTES = 2**22
"""Largest single read: beyond it, disks are not faster."""


class WeightStore:
    """Called around each launch of a run; in this one all weights are there before the first run."""

    staging_bytes = 0
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


PRELOADED = WeightStore()


@dataclass(frozen=True, slots=True)
class Load:
    """A read that was done: when, by the host's clock (ns), and the events of its copies in order.

    after: it began when the first `after` reads were copied, whose place in staging memory it takes.
    """

    read: WeightRead
    start_ns: int
    end_ns: int
    events: list[Any]
    after: int = 0


@dataclass(slots=True)
class LoadLog:
    """What was loaded in the initialisation or in a run: its loads, its span by the host's clock (ns).

    offset_ns: the host's clock less the device's.
    """

    start_ns: int
    offset_ns: int = 0
    end_ns: int = 0
    loads: list[Load] = field(default_factory=list)


class Pass:
    """The loads of the initialisation or of a run, in order, and all that is known of them before.

    places: of the reads in staging memory. after: how many reads are copied before one begins. freed: for
    each read, those that may begin once it is copied. first: reads that may begin at once. copies: with the
    number of their read. ends: how many copies the reads up to one have. needed: how many copies precede a
    launch that is the first to use a weight, else 0. allowed: how many copies may be enqueued once a launch
    is.
    """

    def __init__(
        self, reads: Sequence[WeightRead], pool: StagingPool, needed: Mapping[int, int], launches: int
    ) -> None:
        self.reads = tuple(reads)
        places = pool.places([read.nbytes for read in reads])
        self.places = [place.at for place in places]
        self.after = [place.after for place in places]
        self.freed: list[list[int]] = [[] for _ in reads]
        for number, place in enumerate(places):
            if place.after:
                self.freed[place.after - 1].append(number)
        self.first = [number for number, place in enumerate(places) if not place.after]
        self.copies = [(copy, number) for number, read in enumerate(reads) for copy in read.copies]
        self.ends = list(accumulate(len(read.copies) for read in reads))
        self.needed = [needed.get(launch, 0) for launch in range(launches)]
        counts = [0] * max(launches, 1)
        for copy, _ in self.copies:
            counts[max(copy.launch - 1, 0)] += 1
        self.allowed = list(accumulate(counts))


@dataclass(frozen=True, slots=True, eq=False)
class WeightStream:
    """The weights of a schedule, where they come from, and the buffers and images that they go to by tensor.

    memory: allocates the staging pool; its queue is that of the launches. profile: measure copies.
    """

    schedule: StreamingSchedule
    source: WeightSource
    targets: Mapping[int, Any]
    memory: DeviceMemory
    profile: bool


class StreamingStore(WeightStore):
    """Loads weights: preloaded ones once, streamed ones in every run. Calls come from one thread at a time.

    Raises:
        InputError: the source lacks a weight or has it in another size.
        OpenCLError: the staging memory is too small for the device's alignment, or the driver fails.
    """

    _joins_launches = True
    """Whether neighbours in the source that belong to several launches are read together."""

    def __init__(self, stream: WeightStream) -> None:
        schedule, memory = stream.schedule, stream.memory
        self.schedule, self.staging_bytes = schedule, schedule.staging_bytes
        self._targets = dict(stream.targets)
        self._program, self._source, self._context = schedule.program, stream.source, memory.context
        self._profile = stream.profile
        self._queue, self._uploads = memory.queue, memory.context.new_queue(stream.profile, own=True)
        self._pool = self._new_pool(memory)
        whole = [Transfer(i, 0, packed_bytes(schedule.program.tensors[i])) for i in schedule.preload]
        self._preload = self._planned([(PRELOAD, whole)], {})
        self._stream = self._planned(enumerate(schedule.transfers), weight_uses(schedule.program))
        self._starts: list[Callable[..., Any]] = []  # the copies of a run, but for what they wait for
        self._awaited: list[Any] = []  # events of the pass before, after which its staging memory is free
        self._previous: Any = None  # the last launch of the run before
        self._readers: Readers | None = Readers(stream.source, self._pool)
        self._pass = self._preload
        self._reset()
        self.preload_log = self.log

    def _new_pool(self, memory: DeviceMemory) -> StagingPool:
        """Return the staging pool."""
        return StagingRing(memory.allocate_staging(self.staging_bytes, self._uploads))

    def _planned(
        self, groups: Iterable[tuple[int, Sequence[Transfer]]], uses: Mapping[int, tuple[int, int]]
    ) -> Pass:
        most = min(MOST_READ_BYTES, self._pool.nbytes // (READERS + 1) // PAGE_BYTES * PAGE_BYTES)
        reads = plan_reads(self._program, groups, self._source, most, join=self._joins_launches)
        return Pass(reads, self._pool, copies_before(uses, reads), len(self._program.launches))

    def _reset(self) -> None:
        self._cursor = 0  # copies that are enqueued
        self._waited = PRELOAD  # copies enqueued next begin no sooner than this launch
        self._copied: list[Any] = []  # events of copies, in order
        self._launched: list[Any] = []  # events of launches
        self._flushed = 0, 0
        self._times: list[tuple[int, int] | None] = [None] * len(self._pass.reads)
        offset = clock_offset(self._context, self._uploads) if self._profile else 0
        self.log = LoadLog(time.perf_counter_ns(), offset)

    def preload(self) -> None:
        """Load what stays from run to run, and wait for it."""
        self._begin(self._preload)
        self.preload_log = self.log
        with translated("preloading weights", device=self._context.device):
            self._advance(len(self._pass.copies), wait=True)
            self._uploads.finish()
        self.log.end_ns = time.perf_counter_ns()
        self._awaited = []

    # a run -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first reads."""
        self._begin(self._stream)

    def before(self, launch: int) -> list[Any] | None:
        """Return the event of the last copy that a launch needs; copies complete in order."""
        count = self._pass.needed[launch]
        if not count:
            return None
        if self._cursor < count:
            self._advance(count, wait=True)
        return [self._copied[count - 1]]

    def after(self, launch: int, event: Any) -> None:
        """Start the copies beside the next launch whose bytes are there."""
        self._launched.append(event)
        if self._cursor < self._pass.allowed[launch]:
            self._advance(self._pass.allowed[launch], wait=False)

    def end(self) -> None:
        """Check that the weights were the right ones."""
        self._awaited = self._copied[-1:]
        if self._launched:
            self._previous = self._launched[-1]
        self._source.check()

    def abort(self) -> None:
        """Stop the reader threads and wait for what is enqueued."""
        if self._readers is not None:
            with translated("ending a run", device=self._context.device):
                self._flush()
                self._readers.cancel()
                self._uploads.finish()
        self._pool.clear()
        self._awaited, self._previous = [], None

    def close(self) -> None:
        """Give staging memory and source back."""
        if self._readers is not None:
            self._flush()
            self._readers.close()
        self._readers = None
        self._launched, self._copied, self._awaited, self._previous = [], [], [], None
        self._starts, self._targets = [], {}
        self._pool.release()
        self._source.close()

    # reads and copies --------------------------------------------------------------------------------------

    def _begin(self, chosen: Pass) -> None:
        self._pass = chosen
        self._reset()
        self._submit(chosen.first, self._awaited)

    def _submit(self, numbers: Iterable[int], events: Sequence[Any]) -> None:
        """Have reads done once the events have completed that free their places."""
        assert self._readers is not None
        for number in numbers:
            self._readers.submit(number, self._pass.reads[number], self._pass.places[number], events)

    def _advance(self, count: int, *, wait: bool) -> None:
        """Enqueue the first `count` copies, as far as their bytes are there; with `wait`, all of them."""
        copies = self._pass.copies
        while self._cursor < count:
            number = copies[self._cursor][1]
            if self._times[number] is None and not self._is_read(number, wait):
                break
            self._copied.append(self._start(self._cursor))
            self._cursor += 1
            if self._cursor == self._pass.ends[number]:
                self._loaded(number)
        self._flush()

    def _is_read(self, number: int, wait: bool) -> bool:
        """Take what the readers have done; return whether a read is among it, or wait until it is."""
        assert self._readers is not None
        try:
            while self._times[number] is None:
                done = self._readers.next_done(wait=False)
                if done is None and wait:
                    self._flush()
                    done = self._readers.next_done(wait=True)
                if done is None:
                    return False
                self._times[done[0]] = done[1:]
        except (TorchedgeError, self._context.cl.Error):
            raise
        except Exception as error:
            raise OpenCLError(
                f"loading the weights of {self._program.name} failed: {type(error).__name__}: {error}; "
                "report it"
            ) from error
        return True

    def _flush(self) -> None:
        """Hand the driver what copies wait for, then the copies."""
        enqueued = len(self._launched), self._cursor
        if enqueued[0] != self._flushed[0]:
            self._queue.flush()
        if enqueued[1] != self._flushed[1]:
            self._uploads.flush()
        self._flushed = enqueued

    def _start(self, place: int) -> Any:
        """Enqueue a copy whose bytes are there, and return its event."""
        copy, number = self._pass.copies[place]
        if self._pass is not self._stream:
            start = self._upload(copy, self._pass.places[number])
        else:
            if not self._starts:
                self._starts = [self._upload(c, self._pass.places[n]) for c, n in self._pass.copies]
            start = self._starts[place]
        self._check(copy, self._pass.places[number])
        return start(wait_for=self._wait_for(copy.launch))

    def _upload(self, copy: Copy, at: int) -> Callable[..., Any]:
        content = self._pool.view(at, copy.at, copy.at + copy.nbytes)
        return upload_call(self._context, self._uploads, self._targets[copy.tensor], content, copy.place)

    def _check(self, copy: Copy, at: int) -> None:
        """Raise ProfileError for booleans that are none."""
        tensor = self._program.tensors[copy.tensor]
        if tensor.dtype != "bool":
            return
        content: Bytes = self._pool.view(at, copy.at, copy.at + copy.nbytes)
        if bool((content > 1).any()):
            raise ProfileError(
                f"{tensor.name} holds a byte that is no boolean, expected 0 or 1; export it again"
            )

    def _wait_for(self, launch: int) -> list[Any] | None:
        """Return the event before a copy beside a launch, None where an earlier copy waits for it."""
        if launch <= self._waited:
            return None
        self._waited = launch
        if launch == 0:
            return None if self._previous is None else [self._previous]
        return [self._launched[launch - 1]]

    def _loaded(self, number: int) -> None:
        """Note a read whose copies are all enqueued, and let the next one have its place."""
        read, times = self._pass.reads[number], self._times[number]
        assert times is not None
        stop = self._pass.ends[number]
        events = self._copied[stop - len(read.copies) : stop]
        self.log.loads.append(Load(read, *times, events, self._pass.after[number]))
        self._free(number, events)

    def _free(self, number: int, events: list[Any]) -> None:
        if self._pass.freed[number]:
            self._submit(self._pass.freed[number], events[-1:])
