"""Programs built in several processes at once, for drivers whose compiler runs in one thread at a time.

Each process (`opencl/build_worker.py`) opens the device, reads its share as JSON from its standard input,
builds it and leaves binaries in the cache, from which the caller takes them. `start_ahead` starts processes
while the texts are still written, since opening a GPU takes about as long as compiling a share. For a driver
that compiles a kernel when it first runs and has a cache of its own (PoCL), a process also runs one
work-group of each kernel on memory without content. A process that fails leaves less: the caller then
compiles itself. `TORCHEDGE_BUILD_PROCESSES` limits their number, 0 or 1: none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.platforms import ClDevice, place_of
from torchedge.storage.locks import PROCESS
from torchedge.storage.processes import child_environment

PROCESSES_VARIABLE = "TORCHEDGE_BUILD_PROCESSES"
MOST_PROCESSES = 8
"""A context on a GPU takes seconds of a core and hundreds of MiB: more processes gain little."""
LEAST_CHARACTERS = 1 << 17
"""Text for which starting processes pays: it compiles for longer than they take to start."""
SHARE_CHARACTERS = 1 << 15
"""Text of one process at least."""
CHARACTERS_PER_OP = 500
"""Text that an operator of a step becomes, about: by it the processes that start ahead are counted."""
PATIENCE_S = 10
"""Seconds for each kernel that a process runs, after which the processes are ended."""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A run of one work-group, for which the driver compiles a kernel.

    buffers: bytes of the kernel's first arguments. numbers: its other arguments, int32.
    """

    kernel: str
    local_size: tuple[int, ...]
    buffers: tuple[int, ...]
    numbers: tuple[int, ...]


def process_count(characters: int) -> int:
    """Return the number of processes for so much text; 0: build in this one."""
    limit = os.environ.get(PROCESSES_VARIABLE, "")
    most = int(limit) if limit.isdecimal() else min(MOST_PROCESSES, os.cpu_count() or 1)
    count = min(most, characters // SHARE_CHARACTERS) if characters >= LEAST_CHARACTERS else 0
    return count if count > 1 and sys.executable else 0


_waiting: list[tuple[int, subprocess.Popen[bytes]]] = []
"""Processes without a share yet, and the index of their device."""


def start_ahead(device: ClDevice, ops: int) -> None:
    """Start the processes that will build the kernels of a step of `ops` operators."""
    with PROCESS:
        for _ in range(process_count(ops * CHARACTERS_PER_OP) - len(_waiting)):
            with contextlib.suppress(OSError):
                _waiting.append((device.index, _start(device)))


def end_waiting() -> None:
    """End the processes that were started ahead and got no share."""
    with PROCESS:
        while _waiting:
            _, process = _waiting.pop()
            process.kill()
            with contextlib.suppress(OSError):  # it ended by itself
                process.communicate()


def _start(device: ClDevice) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "torchedge.opencl.build_worker", place_of(device)],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _taken(device: ClDevice, count: int) -> list[subprocess.Popen[bytes]]:
    """Return `count` processes, those first that wait; fewer where no more can be started."""
    with PROCESS:
        processes = [process for index, process in _waiting if index == device.index][:count]
        _waiting[:] = [item for item in _waiting if item[1] not in processes]
    with contextlib.suppress(OSError):
        while len(processes) < count:
            processes.append(_start(device))
    return processes


def build_in_processes(
    device: ClDevice,
    texts: Sequence[str],
    cache: BinaryCache | None,
    count: int,
    trials: Mapping[str, Sequence[TrialRun]] | None = None,
    waiting: Callable[[], object] = lambda: None,
) -> None:
    """Build texts in `count` processes, which leave binaries in the cache; return when all have ended.

    trials: runs by text, for a driver that has a cache of its own. waiting: called every second.
    """
    order, runs = sorted(texts, key=len, reverse=True), trials or {}
    end = time.monotonic() + (PATIENCE_S * sum(map(len, runs.values())) if runs else math.inf)
    folder = None if cache is None else {"folder": str(cache.folder), "max_bytes": cache.max_bytes}
    processes = _taken(device, count)
    try:
        for number, process in enumerate(processes):
            own = order[number :: len(processes)]
            share = [(text, [asdict(run) for run in runs.get(text, ())]) for text in own]
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended already
                process.stdin.write(json.dumps({"cache": folder, "share": share}).encode())
                process.stdin.close()
        for process in processes:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                waiting()
    finally:
        for process in processes:
            process.kill()
