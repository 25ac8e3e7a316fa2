"""Runs the micro-benchmarks of `kernel_cases` on an OpenCL device, by the kernels of `hooks/kernels`.

A benchmark yields launches and receives their times. This machine's device runs them through pyopencl, one
by one; a device without Python runs those of many cases as a bundle, by the native runner.

Results are rows of a journal, which a second start continues: "environment" first, then for each case its
results in two passes over all cases, from which the repeatability follows. `kernel_fitting` reads them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchedge.errors import OpenCLError, clipped
from torchedge.lowering.programs import Access, Arena, Kernel, Launch, Program, StoredTensor
from torchedge.lowering.targets import DeviceClass, device_class
from torchedge.opencl import compile_kernels, open_context
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import upload
from torchedge.profiling.kernel_cases import (
    SIDE,
    UNITS,
    BenchDevice,
    Case,
    DeviceTraits,
    Value,
    cases,
    stride_walk,
)
from torchedge.profiling.remote_devices import RemoteDevice
from torchedge.profiling.remote_runs import RemoteRunner, RunError
from torchedge.runtime.memory import DeviceMemory
from torchedge.storage import data_folder
from torchedge.storage.journals import Row, continued
from torchedge.storage.locks import cached_property
from torchedge.textures.layouts import Layout, row_major

PROBE = "torchedge kernels 3"

_WARPS: Mapping[str, int] = {"cpu": 1, "gpu": 32, "mobile": 64}
_GROUPS: Mapping[str, int] = {"cpu": 16, "gpu": 256, "mobile": 128}
"""Work-items of a group in measurements of bandwidth and arithmetic."""

_ITEMS: Mapping[str, int] = {"cpu": 256, "gpu": 2048, "mobile": 1024}
"""Work-items of a compute unit in these."""

_CHAIN_STEPS, _SCAN_STEPS, _ACCESSES, _MOST_ACCESSES = 8192, 1024, 1536, 2**19
_COPY_BYTES, _LAUNCHES = 2**24, 200
_LEAST_RUNS, _MOST_RUNS, _CASE_NS = 3, 40, 30e6
_SWEEP_NS = 3e5


@dataclass(frozen=True, slots=True)
class BenchLaunch:
    """A launch of a micro-benchmark, whose shortest time (ns) is its result.

    file, name, defines: the kernel in `hooks/kernels`. memories: its tensors; numbers: its integers, behind
    these. local_bytes: local memory that it declares.
    """

    file: str
    name: str
    defines: tuple[tuple[str, Value], ...]
    memories: tuple[StoredTensor, ...]
    numbers: tuple[int, ...]
    items: int
    group: int
    local_bytes: int = 0

    @property
    def source(self) -> str:
        """OpenCL C of this kernel alone."""
        folder = data_folder("hooks") / "kernels"
        lines = [f"#define {what} {value}" for what, value in self.defines]
        parts = ["memory.cl", self.file] if self.file != "units.cl" else [self.file]
        *before, own = [(folder / part).read_text(encoding="utf-8") for part in parts]
        begin = own.index(f"__kernel void {self.name}(")
        return "\n".join([*lines, *before, own[begin : own.index("\n}\n", begin) + 3]])

    @property
    def kernel(self) -> Kernel:
        """The kernel under a name that tells its defines apart, as one of a program."""
        text = self.source
        name = f"{self.name}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        text = text.replace(f"__kernel void {self.name}(", f"__kernel void {name}(")
        constant = f"{self.name}(__constant" in self.source
        access = tuple([_access(memory, constant) for memory in self.memories])
        return Kernel(name, text, access, local_bytes=self.local_bytes, sizes=len(self.numbers))


def _access(memory: StoredTensor, constant: bool) -> Access:
    if memory.name == "out":
        return "update"
    return "read" if constant or not memory.name.startswith("written") else "write"


@dataclass(frozen=True, slots=True)
class HostLaunches:
    """Many launches without waiting, whose time by the host's clock (us a launch) is the result."""

    launch: BenchLaunch
    count: int


@dataclass(frozen=True, slots=True)
class BenchCopy:
    """A copy command between two memories of SIDE x SIDE texels, whose shortest time (ns) is the result."""

    source: StoredTensor
    target: StoredTensor


Step = BenchLaunch | HostLaunches | BenchCopy
Steps = Generator[Step, float, float]
"""A benchmark under way: it yields what to run next, receives the result, and returns its own."""


class _Trip(NamedTuple):
    """A walk round a footprint: its accesses in a round, and the launch of a number of accesses."""

    accesses: int
    launch: Callable[[int], BenchLaunch]


class Benchmarks:
    """The micro-benchmarks of a device, as the launches that they consist of.

    large: bytes of the memory that bandwidths sweep.
    """

    def __init__(self, traits: DeviceTraits, large: int | None = None) -> None:
        self.traits = traits
        self._large = large or (2**28 if traits.kind == "gpu" else 2**26)

    def steps(self, case: Case) -> Steps:
        """Begin a case."""
        steps: Steps = getattr(self, f"_{case.benchmark}")(case)
        return steps

    # kernels and memory

    def _on(
        self, storage: str, file: str, name: str, side: int, first: Sequence[StoredTensor],
        numbers: Sequence[int], items: int, group: int, *, local_bytes: int = 0, **defines: Value,
    ) -> BenchLaunch:  # fmt: skip
        """Return a launch on memory of a width, with its results behind its other memories."""
        image: dict[str, Value] = {"IMAGE": 1} if storage == "image" else {}
        known: dict[str, Value] = {"SIDE": SIDE, "WIDTH": side, "FLOATS": "float4", **image, **defines}
        memories = tuple(first) if name in ("fill", "copy") else (*first, _OUT)
        return BenchLaunch(
            file, name, tuple(known.items()), memories, tuple(numbers), items, group, local_bytes
        )

    def _unit(
        self, name: str, first: Sequence[StoredTensor], numbers: Sequence[int], items: int, group: int,
        *, local_bytes: int = 0, **defines: Value,
    ) -> BenchLaunch:  # fmt: skip
        known: dict[str, Value] = {"FLOATS": "float", "CHAINS": 1, "REGISTERS": 8, "PLACES": 1, **defines}
        memories = (*first, _OUT)
        return BenchLaunch(
            "units.cl", name, tuple(known.items()), memories, tuple(numbers), items, group, local_bytes
        )

    @cached_property
    def _far_side(self) -> int:
        """The side of the memory that bandwidths sweep: `large` bytes, a power of two each way."""
        return 1 << ((self._large // 16).bit_length() - 1) // 2

    def _wide(self) -> tuple[int, int]:
        """Return (work-items, group) that fill the device."""
        group = min(_GROUPS[self.traits.kind], self.traits.max_group)
        return self.traits.units * _ITEMS[self.traits.kind], group

    # benchmarks

    def _walk(self, case: Case) -> Steps:
        storage, seed = str(case["storage"]), case.number("seed")
        count = len(stride_walk(seed)[0])
        strides = StoredTensor(f"strides {seed}", (count + 1, 2), "int8", "constant", row_major(2))
        read = _memory(storage, SIDE)
        ns = yield self._on(storage, "chases.cl", "walk", SIDE, (read, strides), (count,), 1, 1)
        return ns / count

    def _loop(self, case: Case) -> Steps:
        """Rounds of a small footprint after the first one, which loads caches; one round of a large one."""
        nbytes = case.number("bytes")
        trip = self._trip("loop", str(case["storage"]), nbytes, case.number("stride"))
        if nbytes >= 2**20:
            return (yield trip.launch(trip.accesses)) / trip.accesses
        rounds = max(16, _CHAIN_STEPS // trip.accesses)
        later = (yield trip.launch(trip.accesses * (rounds + 1))) - (yield trip.launch(trip.accesses))
        return max(later, 1.0) / (trip.accesses * rounds)

    def _line(self, case: Case) -> Steps:
        """Neighbouring places, each once."""
        trip = self._trip("line", str(case["storage"]), 16 * SIDE * SIDE, case.number("stride"))
        return (yield trip.launch(_CHAIN_STEPS)) / _CHAIN_STEPS

    def _flight(self, case: Case) -> Steps:
        trip = self._trip("flight", str(case["storage"]), 2**22, 64)
        return (yield trip.launch(trip.accesses)) / trip.accesses

    def _trip(self, name: str, storage: str, nbytes: int, stride: int) -> _Trip:
        """Return a walk round a footprint, at most `_MOST_ACCESSES` accesses a round.

        Except for a "line", each jump leads past a golden section of the footprint: processors do not
        prefetch its place.
        """
        texels = max(nbytes // 16, 1)
        side = SIDE if texels <= SIDE * SIDE else self._far_side
        texels = min(texels, side * side)
        stride = max(stride // 16, 1 if name == "line" else -(-texels // _MOST_ACCESSES))
        accesses = max(1, texels // stride)
        near = 1 if name == "line" else int(accesses * 0.618) or 1
        jump = next(n for n in range(near, accesses + 2) if gcd(n, accesses) == 1)
        shift = min((texels - 1).bit_length() // 2 + 1, side.bit_length() - 1)
        kernel = "flight" if name == "flight" else "loop"

        def launch(steps: int) -> BenchLaunch:
            numbers = (accesses * stride, jump * stride, shift, steps)
            return self._on(storage, "chases.cl", kernel, side, (_memory(storage, side),), numbers, 1, 1)

        return _Trip(accesses, launch)

    def _scan(self, case: Case) -> Steps:
        storage, pattern, threads = str(case["storage"]), str(case["pattern"]), case.number("threads")
        shift = {"block-2": 1, "block-4": 2, "block-8": 3}.get(pattern, 0)
        numbers, read = (int(pattern == "column"), shift, _SCAN_STEPS), _memory(storage, SIDE)
        ns = yield self._on(storage, "chases.cl", "scan", SIDE, (read,), numbers, threads, threads)
        return ns / _SCAN_STEPS

    def _bandwidth(self, case: Case) -> Steps:
        storage, width, nbytes = str(case["storage"]), case.number("width"), case.number("bytes")
        items, group = self._wide()
        nbytes = self._large if nbytes >= 2**26 else nbytes
        places = nbytes // (4 * width)
        rounds = min(max(64, -(-places // items)), 4096)
        side = SIDE if nbytes <= 16 * SIDE * SIDE else self._far_side
        name = f"sweep_{storage}" if storage in ("local", "constant") else "sweep"
        shift = min(((places - 1).bit_length() + 1) // 2, side.bit_length() - 1)
        read = _memory("image" if storage == "image" else "buffer", side)

        def launch(rounds: int) -> BenchLaunch:
            numbers = (places - 1, shift, rounds) if name == "sweep" else (places - 1, rounds)
            return self._on(
                storage, "rates.cl", name, side, (read,), numbers, items, group,
                local_bytes=nbytes if storage == "local" else 0, FLOATS=_vector(width), PLACES=places,
            )  # fmt: skip

        short = yield launch(rounds)  # what starts a launch must not count
        more = min(max(rounds, int(rounds * _SWEEP_NS / short)), 4096)
        ns = short if more == rounds else (yield launch(more))
        return items * more * 4 * width / ns

    def _write(self, case: Case) -> Steps:
        storage, side = str(case["storage"]), self._far_side
        items, group = self._wide()
        rounds = max(1, min(side * side, 2**22) // items)
        target = _memory(storage, side, "written")
        ns = yield self._on(storage, "rates.cl", "fill", side, (target,), (rounds,), items, group)
        return items * rounds * 16 / ns

    def _arithmetic(self, case: Case) -> Steps:
        width, chains = case.number("width"), case.number("chains")
        items, group = self._wide()
        rounds = 256
        ns = yield self._multiply_add(width, chains, rounds, items, group)
        return items * rounds * 8 * chains * width * 2 / ns

    def _chain(self, case: Case) -> Steps:
        del case
        rounds = 1024
        return (yield self._multiply_add(1, 1, rounds, 1, 1)) / (8 * rounds)

    def _multiply_add(self, width: int, chains: int, rounds: int, items: int, group: int) -> BenchLaunch:
        return self._unit("multiply_add", (), (1, rounds), items, group, FLOATS=_vector(width), CHAINS=chains)

    def _barrier(self, case: Case) -> Steps:
        del case
        rounds, group = 1024, min(64, self.traits.max_group)
        return (
            yield self._unit("barriers", (), (rounds,), group, group, local_bytes=4 * group, PLACES=group)
        ) / rounds

    def _tile(self, case: Case) -> Steps:
        width, places, rounds = case.number("width"), 256, 4096
        items, group = self._wide()
        ns = yield self._on(
            "buffer", "rates.cl", "tile_local", SIDE, (_memory("buffer", SIDE),), (places - 1, rounds), items,
            group, local_bytes=4 * width * places, FLOATS=_vector(width), PLACES=places,
        )  # fmt: skip
        return items * rounds * 8 * width / ns

    def _start(self, case: Case) -> Steps:
        group = min(case.number("warps") * self.traits.warp, self.traits.max_group)
        return (yield self._unit("nothing", (), (), case.number("groups") * group, group))

    def _launch(self, case: Case) -> Steps:
        """By the host's clock: launches that do nothing, many without waiting."""
        del case
        group = min(64, self.traits.max_group)
        return (yield HostLaunches(self._unit("nothing", (), (), group, group), _LAUNCHES))

    def _copy(self, case: Case) -> Steps:
        source, _, target = str(case["way"]).partition("-")
        ns = yield BenchCopy(_memory(source, SIDE), _memory(target, SIDE, "written"))
        return _COPY_BYTES / ns

    def copying(self, copy: BenchCopy) -> BenchLaunch:
        """Return the kernel that does the same as a copy command."""
        storage, (items, group) = copy.source.layout.storage, self._wide()
        across: dict[str, Any] = {} if storage == copy.target.layout.storage else {"ACROSS": 1}
        items = min(items, SIDE * SIDE)
        memories, numbers = (copy.source, copy.target), (SIDE * SIDE // items,)
        return self._on(storage, "rates.cl", "copy", SIDE, memories, numbers, items, group, **across)

    def _waves(self, case: Case) -> Steps:
        registers = case.number("registers")
        group = case.number("warps") * (16 if self.traits.kind == "cpu" else self.traits.warp)
        numbers = (_ACCESSES // registers,)
        return (
            yield self._unit(
                "hold", (_RING,), numbers, case.number("groups") * group, group, REGISTERS=registers
            )
        )

    def _share(self, case: Case) -> Steps:
        nbytes, warp = case.number("bytes"), self.traits.warp
        return (
            yield self._unit(
                "hold_local", (_RING,), (_ACCESSES,), case.number("groups") * warp, warp, local_bytes=nbytes,
                PLACES=max(nbytes // 4, warp),
            )
        )  # fmt: skip


_RING_LINES = 2**16
_RING = StoredTensor("ring", (_RING_LINES, 32), "int32", "constant", row_major(2))
"""A round of places, a cache line apart."""

_OUT = StoredTensor("out", (1 << 14,), "float32", "state", row_major(1))


def _memory(storage: str, side: int, use: str = "read") -> StoredTensor:
    """Return zeros: side x side texels, in a buffer with room for 8 more a row."""
    name = f"{use} {storage} {side}"
    if storage == "image":
        return StoredTensor(name, (side, 4 * side), "float32", "state", Layout((0, 1), "image", 1))
    return StoredTensor(name, (side, 4 * (side + 8)), "float32", "state", row_major(2))


def content_of(memory: StoredTensor) -> np.ndarray[Any, Any] | None:
    """Return what a benchmark's memory holds at first; None: zeros."""
    what, _, seed = memory.name.partition(" ")
    if what == "strides":
        x, y = stride_walk(int(seed))
        places = np.stack([x, y], axis=-1)
        strides = np.zeros((len(x) + 1, 2), np.int8)
        strides[1:-1] = (np.diff(places, axis=0) + SIDE // 2) % SIDE - SIDE // 2
        return strides
    if what == "ring":
        return np.repeat((np.arange(1, _RING_LINES + 1, dtype=np.int32) % _RING_LINES) * 32, 32).reshape(
            memory.shape
        )
    return None


def _vector(width: int) -> str:
    return "float" if width == 1 else f"float{width}"


# this machine -----------------------------------------------------------------------------------------------


class OpenCLBench:
    """An OpenCL device of this machine behind `BenchDevice`.

    device: as in `torchedge.opencl.choose_device`. large: bytes of the memory that bandwidths sweep.
    Raises DeviceError: no such device.
    """

    def __init__(self, device: str | int | None = None, *, large: int | None = None) -> None:
        self.context: DeviceContext = open_context(device)
        described = self.context.device
        kind = device_class(described.kind, described.name, described.vendor, described.platform)
        self._queue = self.context.new_queue(True)
        self._kernels: dict[str, Any] = {}
        self._memories: dict[str, Any] = {}
        traits = DeviceTraits(
            described.name, described.driver, kind, _WARPS[kind], described.compute_units,
            described.work_group, described.local_bytes, described.images,
        )  # fmt: skip
        self._benchmarks = Benchmarks(replace(traits, warp=self._warp(Benchmarks(traits))), large)
        self.traits = self._benchmarks.traits

    def _warp(self, benchmarks: Benchmarks) -> int:
        """Return the warp that the driver states, else the class's; a processor runs items one by one."""
        kind = benchmarks.traits.kind
        if kind == "cpu":
            return 1
        kernel = self._kernel(next(benchmarks.steps(Case("start", (("warps", 1), ("groups", 1))))))
        info = self.context.cl.kernel_work_group_info.PREFERRED_WORK_GROUP_SIZE_MULTIPLE
        try:
            return int(kernel.get_work_group_info(info, self.context.handle)) or _WARPS[kind]
        except self.context.cl.Error:
            return _WARPS[kind]

    def prepare(self, cases: Sequence[Case]) -> None:
        """Nothing: cases are measured one by one."""

    def measure(self, case: Case) -> float:
        """Return the result of a case in its benchmark's unit.

        Raises OpenCLError: the driver does not run it.
        """
        with translated(f"measuring {case.title}", device=self.context.device):
            steps = self._benchmarks.steps(case)
            try:
                step = next(steps)
                while True:
                    step = steps.send(self._result(step))
            except StopIteration as ended:
                return float(ended.value)

    def _result(self, step: Step) -> float:
        if isinstance(step, BenchLaunch):
            return self._ns(step)
        return self._host_us(step) if isinstance(step, HostLaunches) else self._copy_ns(step)

    def _kernel(self, step: Any) -> Any:  # noqa: ANN401 - pyopencl's
        kernel = step.kernel
        if kernel.name not in self._kernels:
            compiled = compile_kernels(self.context, {kernel.name: kernel.source})
            self._kernels[kernel.name] = compiled.kernel(kernel.name)
        return self._kernels[kernel.name]

    def _ready(self, launch: BenchLaunch) -> Any:  # noqa: ANN401
        """Return a launch's kernel with its arguments set."""
        kernel = self._kernel(launch)
        kernel.set_args(*map(self._allocated, launch.memories), *map(np.int32, launch.numbers))
        return kernel

    def _allocated(self, memory: StoredTensor) -> Any:  # noqa: ANN401
        if memory.name not in self._memories:
            allocated = DeviceMemory(self.context, self._queue).allocate(memory)
            if not memory.name.startswith("written"):
                content = content_of(memory)
                content = np.zeros(memory.shape, memory.dtype) if content is None else content
                upload(self.context, self._queue, allocated, memory.layout.pack(content))
            self._memories[memory.name] = allocated
        return self._memories[memory.name]

    def _ns(self, launch: BenchLaunch) -> float:
        """Return the shortest time of several runs."""
        kernel, shortest = self._ready(launch), float("inf")
        spent, runs = 0.0, 0
        while runs < _LEAST_RUNS or (spent < _CASE_NS and runs < _MOST_RUNS):
            event = self.context.cl.enqueue_nd_range_kernel(
                self._queue, kernel, (launch.items,), (launch.group,)
            )
            event.wait()
            ns = max(float(event.profile.end - event.profile.start), 1.0)
            shortest, spent, runs = min(shortest, ns), spent + ns, runs + 1
        return shortest

    def _host_us(self, step: HostLaunches) -> float:
        kernel, launch = self._ready(step.launch), step.launch
        queue, shortest = self.context.queue, float("inf")
        for _ in range(5):
            queue.finish()
            begun = time.perf_counter()
            for _ in range(step.count):
                self.context.cl.enqueue_nd_range_kernel(queue, kernel, (launch.items,), (launch.group,))
            queue.finish()
            shortest = min(shortest, (time.perf_counter() - begun) / step.count)
        return shortest * 1e6

    def _copy_ns(self, step: BenchCopy) -> float:
        memories = [self._allocated(step.target), self._allocated(step.source)]
        options: dict[str, Any] = {"offset": 0, "origin": (0, 0), "region": (SIDE, SIDE)}
        if step.source.layout == step.target.layout:
            options = {"byte_count": _COPY_BYTES}
        shortest = float("inf")
        for _ in range(_LEAST_RUNS + 2):
            event = self.context.cl.enqueue_copy(self._queue, memories[0], memories[1], **options)
            event.wait()
            shortest = min(shortest, max(event.profile.end - event.profile.start, 1))
        return shortest


# a device behind the native runner --------------------------------------------------------------------------


class RemoteBench:
    """A device without Python behind `BenchDevice`: `prepare` runs the launches of many cases as a bundle.

    device: what it has stated about itself.
    """

    def __init__(self, remote: RemoteRunner, device: RemoteDevice, *, large: int | None = None) -> None:
        limits, kind = device.limits, device.device_class
        warp = 1 if kind == "cpu" else limits.warp or _WARPS[kind]
        images = min(limits.image_width, limits.image_height) >= SIDE
        self.traits = DeviceTraits(
            limits.name,
            device.driver,
            kind,
            warp,
            limits.compute_units,
            limits.work_group,
            limits.local_bytes,
            images,
        )
        self._benchmarks = Benchmarks(self.traits, min(large or 2**26, limits.allocation_bytes // 2))
        self._remote = remote
        self._results: dict[str, float | OpenCLError] = {}

    def measure(self, case: Case) -> float:
        """Return the result of a case that was prepared.

        Raises OpenCLError: the driver does not run it.
        """
        if case.title not in self._results:
            self.prepare([case])
        result = self._results.pop(case.title)
        if isinstance(result, OpenCLError):
            raise result
        return result

    def prepare(self, cases: Sequence[Case]) -> None:
        """Measure cases together: the next launches of all of them run as one bundle.

        Raises DeviceError if the device is lost.
        """
        running = {case.title: self._benchmarks.steps(case) for case in cases}
        waiting = {title: next(steps) for title, steps in running.items()}
        while waiting:
            results = self._run(waiting)
            waiting = {}
            for title, result in results.items():
                try:
                    if isinstance(result, OpenCLError):
                        self._results[title] = result
                    else:
                        waiting[title] = running[title].send(result)
                except StopIteration as ended:
                    self._results[title] = float(ended.value)

    def _run(self, steps: Mapping[str, Step]) -> dict[str, float | OpenCLError]:
        """Return the result of each step; what a driver refuses is searched for by halves."""
        results: dict[str, float | OpenCLError] = {}
        launches: dict[str, BenchLaunch] = {}
        for title, step in steps.items():
            if isinstance(step, BenchLaunch):
                launches[title] = step
            elif isinstance(step, HostLaunches):
                results[title] = self._host_us(step)
            else:
                launches[title] = self._benchmarks.copying(step)
        pending = [list(launches)] if launches else []
        while pending:
            titles = pending.pop()
            try:
                figures = self._figures([launches[title] for title in titles], ["--times", str(_MOST_RUNS)])
                results |= {title: float(ns) for title, ns in zip(titles, figures["launch_ns"], strict=True)}
            except RunError as error:
                if len(titles) == 1:
                    results[titles[0]] = OpenCLError(str(error))
                else:
                    half = len(titles) // 2
                    pending += [titles[half:], titles[:half]]
        return results

    def _host_us(self, step: HostLaunches) -> float | OpenCLError:
        try:
            figures = self._figures([step.launch] * step.count, ["--steps", "5"])
        except RunError as error:
            return OpenCLError(str(error))
        return float(figures["lower_quartile_step_ms"]) * 1e3 / step.count

    def _figures(self, launches: Sequence[BenchLaunch], words: Sequence[str]) -> Mapping[str, Any]:
        program = program_of(launches, self.traits.kind)
        data = {tensor.name: content_of(tensor) for tensor in program.tensors}
        held = {name: array for name, array in data.items() if array is not None}
        return self._remote.measure_program(program, ["--figures", *words], held)


def program_of(launches: Sequence[BenchLaunch], target: DeviceClass) -> Program:
    """Return launches of micro-benchmarks as a program."""
    kernels: dict[str, Kernel] = {}
    tensors: dict[str, StoredTensor] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel.name, launch.kernel)
        for memory in launch.memories:
            tensors.setdefault(memory.name, memory)
    places, numbers = ({name: place for place, name in enumerate(names)} for names in (tensors, kernels))
    return Program(
        "micro-benchmarks",
        tuple(tensors.values()),
        tuple(kernels.values()),
        tuple(
            Launch(
                numbers[launch.kernel.name], tuple([places[memory.name] for memory in launch.memories]),
                (launch.items,), (launch.group,), sizes=launch.numbers,
            )
            for launch in launches
        ),
        (), (), Arena(0), target=target,
    )  # fmt: skip


# journals ---------------------------------------------------------------------------------------------------


BATCH = 64
"""Cases that a device may measure together: an interrupted measurement loses no more."""


def measure_kernels(
    out: Path,
    device: BenchDevice,
    *,
    command: str = "torchedge profile --kernels",
    quick: bool = False,
    step: Callable[[str], Any] = lambda _: None,
) -> int:
    """Measure what a journal lacks, in two passes over the cases; return the number of new rows.

    quick: few cases, for a test. `step` receives the title of each case before it is measured or skipped.

    Raises:
        InputError: the journal is of another device or other options.
        ProfileError: the file cannot be written, or is no such journal.
    """
    traits, new = device.traits, 0
    environment = _environment(traits, command, quick)
    with continued(out, environment, ("probe", "device", "driver", "quick"), _key_of) as (journal, done):
        for number in (1, 2):
            every = list(cases(traits, quick=quick))
            left = [case for case in every if (number, case.title) not in done]
            for case in every:
                step(case.title)
                if (number, case.title) in done:
                    continue
                if (place := left.index(case)) % BATCH == 0:
                    device.prepare(left[place : place + BATCH])
                journal.append(
                    {
                        "pass": number,
                        "benchmark": case.benchmark,
                        **dict(case.parameters),
                        **_result(device, case),
                    }
                )
                new += 1
    return new


def _result(device: BenchDevice, case: Case) -> Row:
    """Return a case's value, or the reason why the device does not run it."""
    try:
        return {"value": float(f"{device.measure(case):.6g}"), "unit": UNITS[case.benchmark].split()[0]}
    except OpenCLError as error:
        return {"reason": clipped(str(error))}


def _environment(traits: DeviceTraits, command: str, quick: bool) -> Row:
    from torchedge import __version__

    return {
        "row": "environment", "probe": PROBE, "quick": quick, "device": traits.name, "driver": traits.driver,
        "kind": traits.kind, "warp": traits.warp, "units": traits.units, "max_group": traits.max_group,
        "local_bytes": traits.local_bytes, "images": traits.images, "torchedge": __version__,
        "command": command + " --quick" * quick,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }  # fmt: skip


def _key_of(row: Row) -> tuple[int, str]:
    """Return the pass and the title of a row."""
    if row.get("benchmark") not in UNITS or row.get("pass") not in (1, 2):
        raise ValueError("no benchmark, or no pass")
    parameters = {key: value for key, value in row.items() if key not in _OUTSIDE_PARAMETERS}
    return row["pass"], Case(row["benchmark"], tuple(parameters.items())).title


_OUTSIDE_PARAMETERS = {"pass", "benchmark", "value", "unit", "reason"}
