"""Measures how much the lowering's own kernels slow while they load (FlashMem, sections 2.3 and 4.2, Fig. 2).

Kernels of each operator class are lowered for the device, and run alone and with their loading slot under
loads of 1/8 to 4 times the bytes that they read. Beside them: the rates of the disk and of copies into the
memory of weights, the cost of a launch, and which way of loading beside a kernel is the fastest.

Results are rows of a journal, which a second start continues: "environment" first; for each kernel its time
alone and under each load ("loads": bytes, median and shortest of interleaved runs, ms), and the time of a
kernel and a load together by each way ("ways", ms); stand-alone copies (kernel "copy"); "disk"; "launch"; the
times of the "host".
`load_fitting` reads them.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchedge.errors import OpenCLError, ProfileError, clipped
from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.kernels.loading import (
    destination_of,
    loading_kernel,
    loading_size,
    slot_numbers,
    with_slot,
)
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.lowering.targets import Target, target_for
from torchedge.opencl import compile_kernels, open_context
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import StagingMemory, counted_buffer, upload, upload_call
from torchedge.opencl.waiting import drain
from torchedge.runtime.executors import Executor
from torchedge.runtime.kernel_stores import StagingBuffers
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.weight_sources import ArraysSource
from torchedge.storage.journals import Row, continued
from torchedge.streaming.capacities import LOADING_WAYS
from torchedge.streaming.instances import Instance, Layer
from torchedge.streaming.plans import always_next, preload_everything
from torchedge.streaming.schedules import LaunchWork, make_schedule, weights_of, works_of
from torchedge.textures.layouts import PAGE_BYTES, Layout

PROBE = "torchedge streaming 1"
RATIOS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Loads over the bytes that a kernel reads."""

_COPIES = (1 << 20, 4 << 20, 16 << 20)
_POOL_BYTES = 256 << 20
_DISK_BYTES, _REQUEST_BYTES = 256 << 20, 4 << 20
_ROUND_S, _WARM_S = 0.5, 0.1
"""Larger sizes of a kernel are skipped where a round of loads takes longer; least time of the timed runs."""

_REPEATS = 9
_LAUNCHES = 200
_MOST_TOGETHER = 16 << 20
"""Largest load at which ways of loading are compared."""

_HOST_LAYERS, _HOST_WIDTH, _LEAST_US = 64, 64, 0.01

_TEXELS = PAGE_BYTES // 16
"""Texels in a row of the image that is filled."""


class _Add(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@dataclass(frozen=True)
class LoadedOperator:
    """A model of one operator and the shapes of its inputs; `size` distinguishes its sizes."""

    kernel: str
    size: tuple[int, ...]
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]


def cases(*, quick: bool = False) -> list[LoadedOperator]:
    """Return all cases, the sizes of each kernel ascending."""
    every: list[LoadedOperator] = []
    for exponent in range(14, 25, 3 if quick else 1):
        count = 1 << exponent
        every.append(LoadedOperator("gelu", (count,), nn.GELU, ((count,),)))
        every.append(LoadedOperator("add", (count,), _Add, ((count,), (count,))))
        every.append(LoadedOperator("relu", (count,), nn.ReLU, ((count,),)))
    lines = [(rows, length) for length in (256, 768, 1024, 4096) for rows in (64, 512, 2048)]
    lines.sort(key=prod)
    for rows, length in lines[::3] if quick else lines:
        every.append(LoadedOperator("softmax", (rows, length), lambda: nn.Softmax(-1), ((rows, length),)))
        norm = partial(nn.LayerNorm, length)
        every.append(LoadedOperator("layer_norm", (rows, length), norm, ((rows, length),)))
    sizes = [(n, n, n) for n in (64, 128, 256, 512, 1024, 2048)]
    sizes += [(1, 768, 768), (16, 768, 3072), (128, 768, 768), (128, 768, 3072), (128, 3072, 768)]
    sizes += [(197, 768, 2304), (512, 1024, 1024), (128, 2048, 8192), (1024, 1024, 4096), (2048, 256, 256)]
    sizes.sort(key=prod)
    for rows, inner, outputs in sizes[:9:2] if quick else sizes:
        linear = partial(nn.Linear, inner, outputs)
        every.append(LoadedOperator("linear", (rows, inner, outputs), linear, ((rows, inner),)))
    planes = [(56, 64, 64), (28, 128, 128), (14, 256, 256), (7, 512, 512), (32, 320, 320), (112, 32, 32)]
    planes += [(64, 128, 128), (32, 64, 256), (128, 16, 64), (64, 32, 32), (16, 64, 128)]
    planes.sort(key=lambda plane: plane[0] ** 2 * plane[1] * plane[2])
    for side, inner, outputs in planes[:5:2] if quick else planes:
        conv = partial(nn.Conv2d, inner, outputs, 3, padding=1)
        every.append(LoadedOperator("conv", (side, inner, outputs), conv, ((1, inner, side, side),)))
    return every


# the device -------------------------------------------------------------------------------------------------


@dataclass
class _Bound:
    """A launch with its arguments set: the plain kernel and the one with a slot."""

    work: LaunchWork
    plain: Any
    loaded: Any
    host: list[Any]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None


class LoadBench:
    """A device with two queues, a pool of bytes to load in unified memory, and the memory that is filled."""

    def __init__(self, context: DeviceContext, target: Target, pool_bytes: int = _POOL_BYTES) -> None:
        self.context, self.target = context, target
        cl, device = context.cl, context.device
        self.queue, self.second = context.new_queue(True), context.new_queue(True)
        self.memory = DeviceMemory(context, self.queue)
        self.pool_bytes = min(pool_bytes, device.allocation_bytes, device.global_bytes // 8)
        image = target.storage == "image" and device.images
        if image:
            self.pool_bytes = min(self.pool_bytes, device.image_height * PAGE_BYTES)
        self.pool_bytes = self.pool_bytes // PAGE_BYTES * PAGE_BYTES
        layout = Layout((0, 1), "image", 1) if image else Layout((0, 1))
        shape = self.pool_bytes // PAGE_BYTES, _TEXELS * 4
        self.filled = StoredTensor("the loaded weight", shape, "float32", "parameter", layout)
        self.texture = "image2d" if image else "buffer"
        with translated("the pool of bytes to load", nbytes=self.pool_bytes, device=device):
            unified = cl.mem_flags.READ_ONLY | cl.mem_flags.ALLOC_HOST_PTR
            self.pool = counted_buffer(context, unified, self.pool_bytes)
        block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
        upload(context, self.queue, self.pool, np.resize(block, self.pool_bytes // 4))
        self.weight = self.memory.allocate(self.filled)
        self.most_together = min(_MOST_TOGETHER, self.pool_bytes)
        self.staging = StagingMemory(context, self.queue, self.most_together + PAGE_BYTES, "staging pool")
        self.buffers = StagingBuffers(context, 3 * (self.most_together + PAGE_BYTES), self.queue)
        self.next, self.reading = 0, dict[int, list[Any]]()  # the next buffer; what reads each of them
        self.first = 0
        loading = loading_kernel(destination_of(self.filled), target.name)
        self.loading = compile_kernels(context, {loading.name: loading.source}).kernel(loading.name)

    def slot_arguments(self, nbytes: int) -> list[Any]:
        """Return the arguments of a slot that loads `nbytes` bytes, from the next place of the pool."""
        if self.first + nbytes > self.pool_bytes:
            self.first = 0
        numbers = slot_numbers(self.filled, 0, nbytes, self.first)
        self.first += nbytes
        return [self.pool, self.weight, *map(np.uint32, numbers)]

    def load(self, way: str, nbytes: int, bound: _Bound | None = None) -> None:
        """Enqueue a load by copy commands or loading kernels on the second queue, or in a kernel's slot.

        A kernel without a load of its own is enqueued beside, on the first queue.
        """
        cl = self.context.cl
        if bound is not None and way != "slot":
            self.launch(bound, 0)
        if way == "copy":
            place = (0, 0, _TEXELS, nbytes // PAGE_BYTES) if self.texture == "image2d" else (0,)
            content = self.staging.bytes[:nbytes]
            upload_call(self.context, self.second, self.weight, content, place)()
        elif way != "alone":
            number = self.next
            self.next = (number + 1) % len(self.buffers.buffers)
            self.buffers.open(number * self.buffers.part_bytes, self.reading.pop(number, []))
            ready, offset = self.buffers.hand_over(number, self.second)
            self.second.flush()
            numbers = map(np.uint32, slot_numbers(self.filled, 0, nbytes, offset))
            arguments = [self.buffers.buffers[number], self.weight, *numbers]
            if bound is not None and way == "slot":
                bound.loaded.set_args(*bound.host, *arguments)
                sizes = bound.global_size, bound.local_size
                event = cl.enqueue_nd_range_kernel(self.queue, bound.loaded, *sizes, wait_for=[ready])
            else:
                self.loading.set_args(*arguments)
                sizes = loading_size(nbytes, self.target.name, self.target.largest_group)
                event = cl.enqueue_nd_range_kernel(self.second, self.loading, *sizes)
            self.reading[number] = [event]

    def together_ms(self, way: str, nbytes: int, count: int, bound: _Bound | None = None) -> float:
        """Return the time of one load (and one kernel), of `count` that run without waiting, ms."""
        begun = time.perf_counter()
        for _ in range(count):
            self.load(way, nbytes, bound)
        self.queue.flush()
        drain(self.context, self.second, self.queue)
        return 1e3 * (time.perf_counter() - begun) / count

    def bind(self, program: Program) -> _Bound:
        """Return the launch of a program with the most FLOPs, its tensors filled with random numbers."""
        works = works_of(program)
        place = max(range(len(works)), key=lambda k: (works[k].flops, works[k].bytes_moved))
        launch = program.launches[place]
        kernel = program.kernels[launch.kernel]
        loaded = with_slot(kernel, destination_of(self.filled), self.target.name)
        compiled = compile_kernels(self.context, {k.name: k.source for k in (kernel, loaded)})
        host = [self._tensor(program.tensors[index]) for index in launch.tensors]
        host += map(np.int32, launch.sizes)
        plain = compiled.kernel(kernel.name)
        plain.set_args(*host)
        sizes = launch.global_size, launch.local_size
        return _Bound(works[place], plain, compiled.kernel(loaded.name), host, *sizes)

    def _tensor(self, tensor: StoredTensor) -> Any:  # noqa: ANN401 - pyopencl's
        memory = self.memory.allocate(tensor)
        block = np.random.default_rng(1).standard_normal(1 << 16)
        values = np.resize(block, tensor.shape).astype(tensor.dtype)
        upload(self.context, self.queue, memory, tensor.layout.pack(values))
        return memory

    def launch(self, bound: _Bound, nbytes: int) -> Any:  # noqa: ANN401 - pyopencl's
        """Enqueue a kernel under a load (0: the plain kernel); return its event."""
        kernel = bound.plain
        if nbytes:
            kernel = bound.loaded
            kernel.set_args(*bound.host, *self.slot_arguments(nbytes))
        enqueue = self.context.cl.enqueue_nd_range_kernel
        return enqueue(self.queue, kernel, bound.global_size, bound.local_size)

    def round(self, bound: _Bound, loads: Sequence[int]) -> list[float]:
        """Run a kernel once under each load; return the times by the device's clock, ms."""
        events = [self.launch(bound, nbytes) for nbytes in loads]
        self.queue.finish()
        return [(event.profile.end - event.profile.start) / 1e6 for event in events]

    def launch_us(self) -> float:
        """Return the time of one of many launches that do nothing, us."""
        shortest, sizes = float("inf"), loading_size(0, self.target.name, self.target.largest_group)
        self.loading.set_args(*self.slot_arguments(0))
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(_LAUNCHES):
                self.context.cl.enqueue_nd_range_kernel(self.queue, self.loading, *sizes)
            self.queue.finish()
            shortest = min(shortest, (time.perf_counter() - begun) / _LAUNCHES)
        return 1e6 * shortest


def rounded(ms: float) -> float:
    """Return a time as rows hold it."""
    return float(f"{ms:.5g}")


# the rows ---------------------------------------------------------------------------------------------------

Key = tuple[str, tuple[int, ...]]


def count_rows(*, quick: bool = False) -> int:
    """Return the number of rows of a whole journal without the environment."""
    return len(cases(quick=quick)) + 2 * len(_COPIES) + 3


def measure_loads(
    out: Path,
    device: str | int | None = None,
    *,
    quick: bool = False,
    step: Callable[[str], Any] = lambda _: None,
) -> int:
    """Measure the rows that a journal lacks; return their number.

    device: as in `torchedge.opencl.choose_device`. quick: few sizes and loads, for a test. `step` receives
    the name of each row before it is measured or skipped.

    Raises:
        DeviceError: no such device.
        InputError: the journal is of another device or other options.
        ProfileError: the file cannot be written, or is no such journal; the disk has no room.
        OpenCLError: the driver fails other than by a single kernel.
    """
    context = open_context(device)
    bench = LoadBench(context, target_for(context.device), _POOL_BYTES // 4 if quick else _POOL_BYTES)
    return loads_measured(out, _environment(bench, quick), _tasks(bench, out.absolute().parent, quick), step)


def loads_measured(
    out: Path, environment: Row, tasks: Iterable[tuple[Key, Callable[[], Row]]], step: Callable[[str], Any]
) -> int:
    """Measure what a journal lacks of some rows; return their number.

    Larger sizes of a kernel are skipped where a round of loads takes over half a second.
    """
    new, slow = 0, set[str]()
    fixed = ("probe", "device", "target", "texture", "quick")
    with continued(out, environment, fixed, _key_of) as (journal, done):
        for key, measure in tasks:
            step(" ".join(map(str, (key[0], *key[1]))))
            row = done.get(key)
            if row is None and key[0] not in slow:
                row = measure()
                journal.append(row)
                new += 1
            if row is not None and sum(ms for _, ms, _ in row.get("loads", ())) > 1e3 * _ROUND_S:
                slow.add(key[0])
    return new


def _tasks(bench: LoadBench, folder: Path, quick: bool) -> Iterator[tuple[Key, Callable[[], Row]]]:
    """Yield the key of each row and its measurement."""
    for case in cases(quick=quick):
        yield (case.kernel, case.size), partial(measure_case, bench, case, quick=quick)
    for nbytes in _COPIES:
        for way in ("copy", "kernel"):
            size = min(nbytes, bench.most_together)
            yield (f"copy by {way}", (size,)), partial(_copy_row, bench, way, size)
    yield ("disk", ()), partial(disk_row, folder)
    yield ("launch", ()), lambda: {"row": "launch", "us": rounded(bench.launch_us())}
    yield ("host", ()), partial(_host_row, bench.context)


def _environment(bench: LoadBench, quick: bool) -> Row:
    device = bench.context.device
    return {
        "row": "environment", "probe": PROBE, "quick": quick, "device": device.name,
        "vendor": device.vendor, "platform": device.platform, "opencl": device.version,
        "driver": device.driver, "target": bench.target.name, "texture": bench.texture,
        "pool_bytes": bench.pool_bytes, "command": "torchedge profile --streaming" + " --quick" * quick,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }  # fmt: skip


def _key_of(row: Row) -> Key:
    if "row" in row:
        return str(row["row"]), ()
    name = f"copy by {row['way']}" if row["kernel"] == "copy" else str(row["kernel"])
    return name, tuple([int(number) for number in row["size"]])


def measure_case(bench: LoadBench, case: LoadedOperator, *, quick: bool) -> dict[str, Any]:
    """Return the row of a case; where its kernel does not run here, a row with the reason."""
    inputs = [torch.zeros(shape) for shape in case.inputs]
    program = lower_inference(capture_inference_step(case.make(), tuple(inputs)), bench.target).program
    row: dict[str, Any] = {"kernel": case.kernel, "size": list(case.size)}
    try:
        bound = bench.bind(program)
        return {**row, **_loads_of(bench, bound, quick=quick)}
    except OpenCLError as error:  # too little memory, or too few registers
        return {**row, "reason": clipped(str(error))}


def loads_under(work: LaunchWork, most: int, *, quick: bool) -> list[int]:
    """Return the loads under which a kernel is measured, in bytes from 0 on, whole pages."""
    wanted = [int(work.input_bytes * ratio) // PAGE_BYTES * PAGE_BYTES for ratio in RATIOS[:: 1 + quick]]
    return [0, *sorted({nbytes for nbytes in wanted if 0 < nbytes <= most})]


def row_of_loads(
    work: LaunchWork, sizes: Sequence[Any], loads: Sequence[int], times: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the row of a kernel's runs; sizes: all work-items and a group's. times: ms by load and run."""
    runs = [[rounded(statistics.median(t)), rounded(min(t))] for t in times]
    return {
        "class": work.load_class, "flops": max(work.flops, 1), "input_bytes": work.input_bytes,
        "output_bytes": work.output_bytes, "global": list(sizes[0]), "local": list(sizes[1] or [1]),
        "loads": [[nbytes, *ms] for nbytes, ms in zip(loads, runs, strict=True)],
    }  # fmt: skip


def _loads_of(bench: LoadBench, bound: _Bound, *, quick: bool) -> dict[str, Any]:
    work = bound.work
    loads = loads_under(work, bench.pool_bytes, quick=quick)
    with translated(f"measuring {work.name}", device=bench.context.device):
        bench.round(bound, loads)  # compiles, and fills caches
        begun = time.perf_counter()
        bench.round(bound, loads)
        seconds = max(time.perf_counter() - begun, 1e-6)
        least = 3 if quick else _REPEATS
        runs = max(least, min(10 * least, int(_WARM_S / seconds)))
        times = list(zip(*[bench.round(bound, loads) for _ in range(runs)], strict=True))
        alone_s = max(statistics.median(times[0]) / 1e3, 1e-6)
        row = {**row_of_loads(work, (bound.global_size, bound.local_size), loads, times), "runs": runs}
        fitting = [nbytes for nbytes in loads[1:] if nbytes <= bench.most_together]
        if fitting:
            near = min(fitting, key=lambda nbytes: abs(nbytes - work.input_bytes))
            ways, count = ("alone", *LOADING_WAYS), max(3, min(200, int(_WARM_S / 4 / alone_s)))
            for way in ways:
                bench.together_ms(way, near, 1, bound)
            rounds = [[bench.together_ms(way, near, count, bound) for way in ways] for _ in range(3)]
            shortest = [rounded(min(ms)) for ms in zip(*rounds, strict=True)]
            row["ways"] = {"bytes": near, **dict(zip(ways, shortest, strict=True))}
    return row


def _copy_row(bench: LoadBench, way: str, nbytes: int) -> Row:
    """Return the row of loads from staging memory without a kernel beside them."""
    with translated(f"copying {nbytes} bytes", device=bench.context.device):
        bench.together_ms(way, nbytes, 1)
        times = [bench.together_ms(way, nbytes, 4) for _ in range(_REPEATS)]
    local = (
        list(loading_size(nbytes, bench.target.name, bench.target.largest_group)[1])
        if way == "kernel"
        else [1]
    )
    shortest, median = rounded(min(times)), rounded(statistics.median(times))
    return {
        "kernel": "copy", "way": way, "size": [nbytes], "local": local, "ms": median, "least_ms": shortest,
        "runs": len(times),
    }  # fmt: skip


def disk_row(folder: Path, nbytes: int = _DISK_BYTES) -> dict[str, Any]:
    """Return the row of the disk: a temporary file read with requests of 4 MiB, past the page cache.

    direct: by O_DIRECT; otherwise the system was asked to drop the file from its cache.
    Raises ProfileError: there is no room for the file, or it cannot be read.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".torchedge-disk-") as file:
            block = np.random.default_rng(0).bytes(_REQUEST_BYTES)
            for _ in range(0, nbytes, _REQUEST_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            direct = getattr(os, "O_DIRECT", 0)
            try:
                handle = os.open(file.name, os.O_RDONLY | direct)
            except OSError:  # a file system without direct reads
                direct, handle = 0, os.open(file.name, os.O_RDONLY)
            try:
                times = [_read_ms(handle, nbytes) for _ in range(3)]
            finally:
                os.close(handle)
    except OSError as error:
        raise ProfileError(
            f"{folder}: reading a temporary file of {nbytes >> 20} MiB failed ({error.strerror or error}); "
            "make room, or choose another --out"
        ) from error
    return {"row": "disk", "bytes": nbytes, "ms": rounded(statistics.median(times)), "direct": bool(direct)}


def _host_row(context: DeviceContext) -> Row:
    launch, transfer = host_us(context)
    return {"row": "host", "launch_us": rounded(launch), "transfer_us": rounded(transfer)}


def host_us(context: DeviceContext) -> tuple[float, float]:
    """Return the time that the thread that launches takes for a launch, and for a transfer beside it, us.

    Small products run with all weights preloaded, and streamed from main memory through a staging pool that
    has room for all of them, so that nothing is waited for but the hand-over.
    """
    model = nn.Sequential(*[nn.Linear(_HOST_WIDTH, _HOST_WIDTH, bias=False) for _ in range(_HOST_LAYERS)])
    step = capture_inference_step(model, (torch.zeros(1, _HOST_WIDTH),))
    program = lower_inference(step, target_for(context.device)).program
    arrays = {
        tensor.name: tensor.layout.pack(np.zeros(tensor.shape, tensor.dtype))
        for tensor in program.tensors
        if tensor.role in WEIGHT_ROLES
    }
    layers = tuple([Layer(str(number), 2**31, 1.0, "reusable") for number in range(len(program.launches))])
    problem = Instance(PAGE_BYTES, layers, weights_of(program, PAGE_BYTES))
    staging = 2 * sum(array.nbytes + PAGE_BYTES for array in arrays.values()) // PAGE_BYTES * PAGE_BYTES
    shortest, transfers = [], 0
    for solve in (preload_everything, always_next):
        schedule = make_schedule(program, problem, solve(problem), staging)
        transfers = sum(map(len, schedule.transfers))
        with Executor(schedule, context.device, source=ArraysSource(arrays)) as executor:
            executor.run(np.zeros((1, _HOST_WIDTH), np.float32))
            times = []
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                executor.launch()
                times.append(1e6 * (time.perf_counter() - begun))
                executor.finish()
            shortest.append(min(times))
    preloaded, streamed = shortest
    return preloaded / len(layers), max(_LEAST_US, (streamed - preloaded) / transfers)


def _read_ms(handle: int, nbytes: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, nbytes, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, _REQUEST_BYTES) as page_aligned:
        begun = time.perf_counter()
        for place in range(0, nbytes, _REQUEST_BYTES):
            if os.preadv(handle, [page_aligned], place) != _REQUEST_BYTES:
                raise OSError("a short read")
        return 1e3 * (time.perf_counter() - begun)
