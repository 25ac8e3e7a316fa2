"""Staging memory between a file and the device, and the threads that fill it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.runtime.weight_sources import WeightSource
from torchedge.streaming.commands import PARTS, whole_pages
from torchedge.streaming.schedules import FileRead

Bytes = npt.NDArray[np.uint8]

READERS = PARTS - 1
"""Reader threads: one waits for the disk while the other starts the next read."""


class StagingPool(Protocol):
    """Staging memory, in which the places of all reads are known before a run."""

    def open(self, at: int, events: Sequence[Any]) -> None:
        """Wait for the events after which a place is free, and let the host write there."""

    def view(self, at: int, nbytes: int) -> Bytes:
        """Return bytes of a place that is open."""

    def clear(self) -> None:
        """Free all places after a run that was given up."""

    def release(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    read: FileRead
    events: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Done:
    number: int
    start_ns: int
    end_ns: int
    error: BaseException | None = None


class Readers:
    """Threads that read into staging memory, the earliest job first.

    They and the thread that launches meet at two queues only: nothing is locked, and nobody wakes up but to
    read or to use what was read. Calls come from one thread.
    """

    def __init__(self, source: WeightSource, pool: StagingPool) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._busy = 0
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._jobs, self._done, source, pool),
                name=f"torchedge-reader-{number}",
                daemon=True,
            )
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, number: int, read: FileRead, events: Sequence[Any]) -> None:
        """Have a read done once events have completed, which must be flushed."""
        self._busy += 1
        self._jobs.put(_Job(number, read, events))

    def next_done(self, *, wait: bool) -> tuple[int, int, int] | None:
        """Return (number, start, end (ns)) of a read that is done; None if there is none yet, without `wait`.

        Raises what the source raises.
        """
        try:
            done = self._done.get(wait)
        except Empty:
            return None
        self._busy -= 1
        if done.error is not None:
            raise done.error
        return done.number, done.start_ns, done.end_ns

    def cancel(self) -> None:
        """Drop the jobs that wait, and wait for those that do not."""
        try:
            while True:
                self._jobs.get_nowait()
                self._busy -= 1
        except Empty:
            pass
        while self._busy:
            self._done.get()
            self._busy -= 1

    def close(self) -> None:
        """End the threads."""
        self.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # which may collect a store that nobody uses
                thread.join()
        self._threads = []


def _serve(
    jobs: SimpleQueue[_Job | None], done: SimpleQueue[_Done], source: WeightSource, pool: StagingPool
) -> None:
    while (job := jobs.get()) is not None:
        try:
            read = job.read
            pool.open(read.at, job.events)
            start = time.perf_counter_ns()
            source.read(read.offset, read.nbytes, pool.view(read.at, whole_pages(read.nbytes)))
            done.put(_Done(job.number, start, time.perf_counter_ns()))
        except BaseException as error:  # it reaches the caller in `next_done`
            done.put(_Done(job.number, 0, 0, error))
        del job
