"""Where the weights of a running program come from: all of them loaded before, or streamed beside launches.

The thread that launches does all the enqueueing of a streaming run: between launches it starts the copies
whose bytes are in staging memory, on a queue of their own. Reader threads only read (`staging.Readers`).
Reads, copies, their places and what waits for what are those of `Loads`: nothing is decided here. FlashMem,
section 3.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchedge.errors import OpenCLError, ProfileError, TorchedgeError
from torchedge.opencl.contexts import clock_offset, translated
from torchedge.opencl.memory import StagingMemory, upload_call
from torchedge.opencl.waiting import drain
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.staging import Readers, StagingPool
from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.schedules import Copy, FileRead, Loads, StreamingSchedule


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


@dataclass(slots=True)
class LoadLog:
    """What was loaded in the initialisation or in a run: its reads, its span by the host's clock (ns).

    offset_ns: the host's clock less the device's. times: start and end of each read that was done, by the
    host's clock. events: of the copies, in order.
    """

    reads: Sequence[FileRead]
    start_ns: int
    offset_ns: int = 0
    end_ns: int = 0
    times: list[tuple[int, int] | None] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class WeightStream:
    """The weights of a schedule, where they come from, and the buffers and images that they go to by tensor.

    memory: allocates the staging pool; its queue is that of the launches. profile: measure copies. turns:
    of another program that runs in the same arena, one at a time; they share its staging memory.
    """

    schedule: StreamingSchedule
    source: WeightSource
    targets: Mapping[int, Any]
    memory: DeviceMemory
    profile: bool
    turns: StreamTurns | None = None


@dataclass(slots=True, eq=False)
class StreamTurns:
    """What programs that run one at a time share: the queue of copies, staging memory, and when it is free.

    awaited: events of the last copies of the pass before. launched: of its last launch. shared: another
    program may have run since.
    """

    uploads: Any
    pool: StagingPool
    shared: bool = False
    awaited: list[Any] = field(default_factory=list)
    launched: Any = None


class StreamingStore(WeightStore):
    """Loads weights: preloaded ones once, streamed ones in every run. Calls come from one thread at a time.

    Raises OpenCLError: the driver fails.
    """

    def __init__(self, stream: WeightStream, loads: Loads) -> None:
        schedule, memory = stream.schedule, stream.memory
        self.schedule, self.staging_bytes = schedule, schedule.staging_bytes
        self._targets = dict(stream.targets)
        self._program, self._source, self._context = schedule.program, stream.source, memory.context
        self._profile = stream.profile
        self._queue, self.owns = memory.queue, stream.turns is None
        self.turns = stream.turns or self._new_turns(memory)
        self.turns.shared |= not self.owns
        self._uploads, self._pool = self.turns.uploads, self.turns.pool
        self._loads, self._waits = loads, loads.waits
        self._stream = _numbered(loads.run)
        begins = [max(copy.after - 1, 0) for copy, _ in self._stream]
        self._allowed = [bisect_right(begins, launch) for launch in range(len(loads.waits))]
        self._starts: list[Callable[..., Any]] = []  # the copies of a run, but for what they wait for
        self._readers: Readers | None = Readers(stream.source, self._pool)
        self._start_pass(running=False)
        self.preload_log = self.log

    def _new_turns(self, memory: DeviceMemory) -> StreamTurns:
        uploads = memory.context.new_queue(self._profile, own=True)
        return StreamTurns(uploads, self._new_pool(memory, uploads))

    def _new_pool(self, memory: DeviceMemory, uploads: Any) -> StagingPool:
        """Return the staging pool."""
        return StagingMemory(memory.context, uploads, self.staging_bytes, "staging pool")

    def _start_pass(self, *, running: bool) -> None:
        """Begin the loads of a run or of the initialisation; its reads are not submitted yet."""
        reads = self._loads.run if running else self._loads.preload
        self._reads, self._running = reads, running
        self._copies = self._stream if running else _numbered(reads)
        self._submitted = self._cursor = 0  # reads that were submitted, copies that are enqueued
        self._waited = -1 if running else 0  # copies with up to so many launches before them wait for none
        self._copied: list[Any] = []  # events on the second queue up to each copy
        self._launched: list[Any] = []  # events of launches
        self._flushed = 0, 0
        offset = clock_offset(self._context, self._uploads) if self._profile else 0
        self.log = LoadLog(reads, time.perf_counter_ns(), offset, times=[None] * len(reads))

    def preload(self) -> None:
        """Load what stays from run to run, and wait for it."""
        self._submit()
        with translated("preloading weights", device=self._context.device):
            self._advance(len(self._copies), wait=True)
            drain(self._context, self._uploads)
        self.log.end_ns = time.perf_counter_ns()
        self.turns.awaited = []

    # a run -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first reads."""
        if self.turns.shared:
            with translated("beginning a run", device=self._context.device):
                self.turns.launched = self._context.cl.enqueue_marker(self._queue)
        self._start_pass(running=True)
        self._submit()

    def before(self, launch: int) -> list[Any] | None:
        """Return the event of the last copy that a launch needs; copies complete in order."""
        count = self._waits[launch]
        if not count:
            return None
        if self._cursor < count:
            self._advance(count, wait=True)
        return [self._copied[count - 1]]

    def after(self, launch: int, event: Any) -> None:
        """Start the copies beside the next launch whose bytes are there."""
        self._launched.append(event)
        if self._cursor < self._allowed[launch]:
            self._advance(self._allowed[launch], wait=False)

    def end(self) -> None:
        """Check that the weights were the right ones."""
        self.turns.awaited = self._copied[-1:]
        if self._launched:
            self.turns.launched = self._launched[-1]
        self._source.check()

    def abort(self) -> None:
        """Stop the reader threads and wait for what is enqueued."""
        if self._readers is not None:
            with translated("ending a run", device=self._context.device):
                self._flush()
                self._readers.cancel()
                drain(self._context, self._uploads)
        self._pool.clear()
        self.turns.awaited, self.turns.launched = [], None

    def close(self) -> None:
        """Give staging memory and source back."""
        if self._readers is not None:
            self._flush()
            self._readers.close()
        self._readers = None
        self._launched, self._copied, self._starts, self._targets = [], [], [], {}
        if self.owns:
            self.turns.awaited, self.turns.launched = [], None
            self._pool.release()
        self._source.close()

    # reads and copies --------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Have the reads done whose places are free once copies have ended that are enqueued."""
        assert self._readers is not None
        while self._submitted < len(self._reads):
            read = self._reads[self._submitted]
            events = self._freeing(read.after)
            if events is None:
                break
            self._readers.submit(self._submitted, read, events)
            self._submitted += 1

    def _freeing(self, count: int) -> list[Any] | None:
        """Return the events after which the first `count` copies have ended; None: not all are enqueued."""
        if count == 0:
            return self.turns.awaited
        return self._copied[count - 1 : count] or None

    def _advance(self, count: int, *, wait: bool) -> None:
        """Enqueue the first `count` copies, as far as their bytes are there; with `wait`, all of them."""
        while self._cursor < count:
            number = self._copies[self._cursor][1]
            if self.log.times[number] is None and not self._is_read(number, wait):
                break
            event = self._start(self._cursor)
            self._copied.append(event)
            self.log.events.append(event)
            self._cursor += 1
            self._submit()
        self._flush()

    def _is_read(self, number: int, wait: bool) -> bool:
        """Take what the readers have done; return whether a read is among it, or wait until it is."""
        assert self._readers is not None
        try:
            while self.log.times[number] is None:
                done = self._readers.next_done(wait=False)
                if done is None and wait:
                    self._flush()
                    done = self._readers.next_done(wait=True)
                if done is None:
                    return False
                self.log.times[done[0]] = done[1:]
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

    def _start(self, number: int) -> Any:
        """Enqueue a copy whose bytes are there, and return its event."""
        copy = self._copies[number][0]
        if not self._running:
            start = self._upload(copy)
        else:
            if not self._starts:
                self._starts = [self._upload(each) for each, _ in self._stream]
            start = self._starts[number]
        self._check(copy)
        return start(wait_for=self._wait_for(copy))

    def _upload(self, copy: Copy) -> Callable[..., Any]:
        content = self._pool.view(copy.at, copy.nbytes)
        return upload_call(self._context, self._uploads, self._targets[copy.tensor], content, copy.place)

    def _check(self, copy: Copy) -> None:
        """Raise ProfileError for booleans that are none."""
        tensor = self._program.tensors[copy.tensor]
        if tensor.dtype == "bool" and bool((self._pool.view(copy.at, copy.nbytes) > 1).any()):
            raise ProfileError(
                f"{tensor.name} holds a byte that is no boolean, expected 0 or 1; export it again"
            )

    def _wait_for(self, copy: Copy) -> list[Any] | None:
        """Return the event before a copy of a run, None where an earlier copy waits for it."""
        if copy.after <= self._waited:
            return None
        self._waited = copy.after
        if copy.after == 0:
            return None if self.turns.launched is None else [self.turns.launched]
        return [self._launched[copy.after - 1]]


def _numbered(reads: Sequence[FileRead]) -> list[tuple[Copy, int]]:
    """Return the copies of reads in order, each with the number of its read."""
    return [(copy, number) for number, read in enumerate(reads) for copy in read.copies]
