"""What a streaming run did: times of launches, copies and reads on one clock, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.lowering.programs import Program
from torchedge.runtime.weight_stores import LoadLog
from torchedge.storage.documents import Document, write_json
from torchedge.streaming.figures import draw_memory
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.schedules import Copy, StreamingSchedule, activations_of, weight_uses
from torchedge.streaming.simulation import MemoryCurve, memory_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """One launch: when it ran (ms), and how long nothing ran because its weights were not there."""

    launch: int
    kernel: str
    kind: str
    scope: str
    start_ms: float
    end_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """One read of the source, into staging memory. launch: the one beside which its bytes are copied."""

    launch: int | None
    address: int
    nbytes: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredCopy:
    """One copy to the device, of bytes of the read in place `read`; launch: None where preloaded."""

    weight: str
    read: int
    launch: int | None
    nbytes: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """The driver's figure of the memory in use (`opencl.memory_gauges`): before an executor, and after a run.

    It counts in the driver's own pages, and what the driver and the process take besides.
    """

    source: str
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """What came since the executor was made."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class MeasuredRun:
    """The initialisation of an executor and its last run, one directly after the other (ms).

    allocated: bytes by kind ("buffers", "images", "staging"), constant. memory: bytes in use over time, of
    staging memory from the read to the copy, of weights from the first copy to the last use, of other tensors
    from the first launch that touches them to the one after the last. driver: None where it has no figure.
    """

    program: str
    device: str
    initialisation_ms: float
    launches: tuple[MeasuredLaunch, ...]
    copies: tuple[MeasuredCopy, ...]
    reads: tuple[MeasuredRead, ...]
    allocated: Mapping[str, int]
    memory: MemoryCurve
    driver: DriverMemory | None = None

    @property
    def latency_ms(self) -> float:
        """Initialisation and execution: the paper's integrated latency."""
        return self.launches[-1].end_ms if self.launches else self.initialisation_ms

    @property
    def execution_ms(self) -> float:
        """Time of the run alone."""
        return self.latency_ms - self.initialisation_ms

    @property
    def stall_ms(self) -> float:
        """Time in which launches waited for weights."""
        return sum(launch.stall_ms for launch in self.launches)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the source."""
        return sum(read.nbytes for read in self.reads)

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated: the peak as well as the average."""
        return sum(self.allocated.values())

    def __str__(self) -> str:
        mib = {kind: nbytes / MEBIBYTE for kind, nbytes in self.allocated.items()}
        peak, average = self.memory.peak.total / MEBIBYTE, self.memory.average.total / MEBIBYTE
        parts = ", ".join(f"{size:.1f} {kind}" for kind, size in mib.items() if size)
        driver = ""
        if self.driver is not None:
            grown = self.driver.grown_bytes / MEBIBYTE
            driver = f"driver: {grown:.1f} MiB more in use than before ({self.driver.source})\n"
        return (
            f"{self.program} on {self.device}: {self.latency_ms:.1f} ms, of these "
            f"{self.initialisation_ms:.1f} initialisation, {self.stall_ms:.1f} waiting for weights\n"
            f"memory: {sum(mib.values()):.1f} MiB allocated ({parts}); in use {peak:.1f} MiB at most, "
            f"{average:.1f} on average\n{driver}"
            f"read: {self.read_bytes / MEBIBYTE:.1f} MiB in {len(self.reads)} reads and {len(self.copies)} "
            "copies"
        )

    @property
    def title(self) -> str:
        """The program and its device."""
        return f"{self.program} on {self.device} (measured)"

    def plot(self, limit_bytes: int | None = None) -> Figure:
        """Draw the memory in use over time (FlashMem, Fig. 6).

        Raises MissingExtraError: matplotlib is not installed.
        """
        return draw_memory(self, limit_bytes=limit_bytes)

    # files -------------------------------------------------------------------------------------------------

    def document(self) -> Document:
        """Return the figures of the run as plain data: ms and bytes."""
        peak, average = self.memory.peak, self.memory.average
        return {
            "program": self.program,
            "device": self.device,
            "initialisation_ms": self.initialisation_ms,
            "execution_ms": self.execution_ms,
            "stall_ms": self.stall_ms,
            "read_bytes": self.read_bytes,
            "allocated_bytes": self.allocated_bytes,
            "allocated": dict(self.allocated),
            "in_use_bytes": {"peak": int(peak.total), "average": round(average.total)},
            "driver": None if self.driver is None else asdict(self.driver),
        }

    def to_json(self, path: str | Path) -> None:
        """Write everything to a file; raises ProfileError where it cannot be written."""
        memory = self.memory
        write_json(
            path,
            {
                **self.document(),
                "memory": {
                    "times_ms": memory.times_ms.tolist(),
                    **{f"{kind}_bytes": getattr(memory, kind).tolist() for kind in KINDS},
                },
                "launches": [asdict(launch) for launch in self.launches],
                "copies": [asdict(copy) for copy in self.copies],
                "reads": [asdict(read) for read in self.reads],
            },
        )

    def trace(self, path: str | Path) -> None:
        """Write a trace for Chrome (chrome://tracing) or Perfetto; raises ProfileError."""
        write_json(path, {"displayTimeUnit": "ms", "traceEvents": _trace_events(self)})


KINDS = tuple([field.name for field in fields(MemoryCurve)])[1:]
"""Names of the curves of staging memory, weights, and other tensors."""


def measured_run(
    schedule: StreamingSchedule,
    device: str,
    preload: LoadLog,
    run: LoadLog,
    launch_times: Sequence[tuple[int, int]],
    allocated: Mapping[str, int],
    driver: DriverMemory | None = None,
) -> MeasuredRun:
    """Return the measured run of two logs and the start and end of each launch by the device's clock (ns)."""
    initialisation = (preload.end_ns - preload.start_ns) / 1e6
    reads: list[MeasuredRead] = []
    copies: list[MeasuredCopy] = []
    _add_loads(schedule.program, preload, None, reads, copies)
    _add_loads(schedule.program, run, initialisation, reads, copies)
    shift = _offset_ns(run) - run.start_ns
    times = [
        (max((start + shift) / 1e6, 0.0) + initialisation, max((end + shift) / 1e6, 0.0) + initialisation)
        for start, end in launch_times
    ]
    launches = _launches(schedule.program, times, copies, reads, initialisation)
    memory = _memory(schedule, launches, reads, copies)
    return MeasuredRun(
        schedule.program.name,
        device,
        initialisation,
        tuple(launches),
        tuple(copies),
        tuple(reads),
        dict(allocated),
        memory,
        driver,
    )


def _offset_ns(log: LoadLog) -> int:
    """Return the host's clock less the device's (ns).

    What was measured is some microseconds off; but a copy had ended when a read began to take its place.
    """
    offset, ended, latest = log.offset_ns, 0, 0
    for read, times in zip(log.reads, log.times, strict=True):
        latest = max([latest, *[event.profile.end for event in log.events[ended : read.after]]])
        ended = read.after
        if ended and times is not None:
            offset = min(offset, times[0] - latest)
    return offset


def _add_loads(
    program: Program,
    log: LoadLog,
    begin_ms: float | None,
    reads: list[MeasuredRead],
    copies: list[MeasuredCopy],
) -> None:
    """Append the reads and copies of a log that begins at `begin_ms`; None: of the initialisation."""
    offset = _offset_ns(log)
    events = iter(log.events)

    def shown(ns: int) -> float:
        return (begin_ms or 0.0) + max(ns - log.start_ns, 0) / 1e6

    def beside(copy: Copy) -> int | None:
        return None if begin_ms is None else copy.after

    for read, times in zip(log.reads, log.times, strict=True):
        assert times is not None
        for copy in read.copies:
            event = next(events)
            start, end = (shown(ns + offset) for ns in (event.profile.start, event.profile.end))
            name = program.tensors[copy.tensor].name
            copies.append(MeasuredCopy(name, len(reads), beside(copy), copy.nbytes, start, end))
        reads.append(MeasuredRead(beside(read.copies[0]), read.offset, read.nbytes, *map(shown, times)))


def _launches(
    program: Program,
    times: Sequence[tuple[float, float]],
    copies: Sequence[MeasuredCopy],
    reads: Sequence[MeasuredRead],
    begin_ms: float,
) -> list[MeasuredLaunch]:
    """Return the launches; one stalls from the end of the launch before until its weights are there.

    One that carries a copy in its slot also waits for the read of its bytes.
    """
    arrival: dict[str, float] = {}
    carried: dict[int, float] = {}
    for copy in copies:
        arrival[copy.weight] = max(arrival.get(copy.weight, 0.0), copy.end_ms)
        if copy.launch is not None and (copy.start_ms, copy.end_ms) == times[copy.launch]:
            carried[copy.launch] = reads[copy.read].end_ms
    launches, before = [], begin_ms
    for position, (launch, (start, end)) in enumerate(zip(program.launches, times, strict=True)):
        kernel = program.kernels[launch.kernel]
        needed = [arrival.get(program.tensors[i].name, 0.0) for i in launch.tensors]
        arrived = max([carried.get(position, 0.0), *needed])
        stall = max(0.0, min(arrived, start) - before)
        launches.append(MeasuredLaunch(position, kernel.name, kernel.kind, launch.scope, start, end, stall))
        before = end
    return launches


def _memory(
    schedule: StreamingSchedule,
    launches: Sequence[MeasuredLaunch],
    reads: Sequence[MeasuredRead],
    copies: Sequence[MeasuredCopy],
) -> MemoryCurve:
    """Return the bytes in use over time."""
    program, tensors = schedule.program, schedule.program.tensors
    end = launches[-1].end_ms if launches else 0.0
    changes: list[tuple[int, float, int]] = []

    copied = [end] * len(reads)
    for copy in copies:  # in order
        copied[copy.read] = copy.end_ms
    filled, oldest = 0, 0
    for read in reads:
        filled += read.nbytes
        while filled > schedule.staging_bytes:  # its place was free by then, whatever the device's clock says
            copied[oldest] = min(copied[oldest], read.start_ms)
            filled -= reads[oldest].nbytes
            oldest += 1
    for read, end_ms in zip(reads, copied, strict=True):
        changes += [(0, read.start_ms, read.nbytes), (0, end_ms, -read.nbytes)]
    arrival: dict[str, float] = {}
    for copy in copies:
        arrival[copy.weight] = min(arrival.get(copy.weight, end), copy.start_ms)
    uses, streamed = weight_uses(program), schedule.streamed
    for index, tensor in enumerate(tensors):
        if tensor.name in arrival and tensor.role != "intermediate":
            changes.append((1, arrival[tensor.name], tensor.nbytes))
            if index in streamed:
                changes.append((1, launches[uses[index][1]].end_ms, -tensor.nbytes))
    before = ports = schedule.memory.ports_bytes
    changes.append((2, 0.0, ports))
    for launch, nbytes in zip(launches, activations_of(program), strict=True):
        changes.append((2, launch.start_ms, nbytes - before))
        before = nbytes
    changes.append((2, end, ports - before))
    return memory_curve(changes, end)


# traces -----------------------------------------------------------------------------------------------------


def _trace_events(run: MeasuredRun) -> list[dict[str, Any]]:
    """Return events of the trace format: complete ones (X), names (M) and the counter of memory (C)."""
    events: list[dict[str, Any]] = []
    lanes: dict[str, int] = {}

    def add(lane: str, name: str, start_ms: float, end_ms: float, **args: object) -> None:
        times = {"ts": start_ms * 1e3, "dur": max(end_ms - start_ms, 0.0) * 1e3}
        thread = lanes.setdefault(lane, len(lanes) + 1)
        events.append({"ph": "X", "pid": 1, "tid": thread, "name": name, **times, "args": args})

    add("phases", "initialisation", 0.0, run.initialisation_ms)
    add("phases", "execution", run.initialisation_ms, run.latency_ms)
    for launch in run.launches:
        name = f"{launch.launch}: {launch.kernel}"
        args = {"kind": launch.kind, "scope": launch.scope, "stall_ms": launch.stall_ms}
        add("launches", name, launch.start_ms, launch.end_ms, **args)
    for copy in run.copies:
        beside = "preloaded" if copy.launch is None else f"beside launch {copy.launch}"
        add("copies", copy.weight, copy.start_ms, copy.end_ms, bytes=copy.nbytes, loaded=beside)
    ends: list[float] = []  # of the last read in each lane
    for read in sorted(run.reads, key=lambda read: read.start_ms):
        lane = next((k for k, end in enumerate(ends) if end <= read.start_ms), len(ends))
        ends[lane : lane + 1] = [read.end_ms]
        name = f"{read.nbytes / MEBIBYTE:.2f} MiB at {read.address}"
        add(f"reads {lane + 1}", name, read.start_ms, read.end_ms, bytes=read.nbytes)
    memory = run.memory
    for place, time in enumerate(memory.times_ms.tolist()):
        used = {kind: int(getattr(memory, kind)[place]) for kind in KINDS}
        events.append({"ph": "C", "pid": 1, "name": "bytes in use", "ts": time * 1e3, "args": used})
    named = [("process_name", 0, f"{run.program} on {run.device}")]
    named += [("thread_name", thread, lane) for lane, thread in lanes.items()]
    return [
        *[{"ph": "M", "pid": 1, "tid": tid, "name": key, "args": {"name": name}} for key, tid, name in named],
        *events,
    ]
