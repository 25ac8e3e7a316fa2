"""Runs the micro-benchmarks of `kernel_cases` on an OpenCL device, by the kernels of `hooks/kernels`.

Results are rows of a journal, which a second start continues: "environment" first, then for each case its
results in two passes over all cases, from which the repeatability follows. `kernel_fitting` reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchedge.errors import OpenCLError, clipped
from torchedge.lowering.targets import device_class
from torchedge.opencl import compile_kernels, open_context
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import allocate_buffer, allocate_image, upload
from torchedge.profiling.kernel_cases import SIDE, UNITS, BenchDevice, Case, DeviceTraits, cases, stride_walk
from torchedge.storage import data_folder
from torchedge.storage.journals import Row, continued
from torchedge.storage.locks import cached_property

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


class _Trip(NamedTuple):
    """A walk round a footprint: its accesses in a round, and the time of a number of accesses in ns."""

    accesses: int
    ns: Callable[[int], float]


class OpenCLBench:
    """An OpenCL device behind `BenchDevice`.

    device: as in `torchedge.opencl.choose_device`. large: bytes of the memory that bandwidths sweep.

    Raises:
        DeviceError: no such device.
    """

    def __init__(self, device: str | int | None = None, *, large: int | None = None) -> None:
        self.context: DeviceContext = open_context(device)
        described = self.context.device
        kind = device_class(described.kind, described.name, described.vendor, described.platform)
        self._large = large or (2**28 if kind == "gpu" else 2**26)
        self._queue = self.context.new_queue(True)
        self._kernels: dict[Any, Any] = {}
        self._memories: dict[Any, Any] = {}
        self.traits = DeviceTraits(
            described.name, described.driver, kind, self._warp(kind), described.compute_units,
            described.work_group, described.local_bytes, described.images,
        )  # fmt: skip

    def _warp(self, kind: str) -> int:
        """Return the warp that the driver states, else the class's; a processor runs items one by one."""
        if kind == "cpu":
            return 1
        kernel = self._kernel("units.cl", "nothing", FLOATS="float", CHAINS=1, REGISTERS=8)
        info = self.context.cl.kernel_work_group_info.PREFERRED_WORK_GROUP_SIZE_MULTIPLE
        try:
            return int(kernel.get_work_group_info(info, self.context.handle)) or _WARPS[kind]
        except self.context.cl.Error:
            return _WARPS[kind]

    def measure(self, case: Case) -> float:
        """Return the result of a case in its benchmark's unit.

        Raises:
            OpenCLError: the driver does not run it.
        """
        with translated(f"measuring {case.title}", device=self.context.device):
            return float(getattr(self, f"_{case.benchmark}")(case))

    # kernels and memory

    def _kernel(self, file: str, name: str, **defines: object) -> Any:  # noqa: ANN401 - pyopencl's
        key = file, name, tuple(defines.items())
        if key not in self._kernels:
            folder = data_folder("hooks") / "kernels"
            lines = [f"#define {what} {value}" for what, value in {"SIDE": SIDE, **defines}.items()]
            parts = ["memory.cl", file] if file != "units.cl" else [file]
            source = "\n".join(lines + [(folder / part).read_text(encoding="utf-8") for part in parts])
            self._kernels[key] = compile_kernels(self.context, {name: source}).kernel(name)
        return self._kernels[key]

    def _on(self, storage: str, file: str, name: str, side: int = SIDE, **defines: object) -> Any:  # noqa: ANN401
        image = {"IMAGE": 1} if storage == "image" else {}
        return self._kernel(file, name, WIDTH=side, **{"FLOATS": "float4", **image, **defines})

    def _memory(self, storage: str, side: int) -> Any:  # noqa: ANN401
        """Return zeros: side x side texels."""
        memory = self._memories.get((storage, side))
        if memory is None:
            memory = self._memories[storage, side] = self._allocated("read", storage, side)
            zeros = np.zeros((side, side + 8 * (storage == "buffer"), 4), np.float32)
            upload(self.context, self._queue, memory, zeros)
        return memory

    def _allocated(self, use: str, storage: str, side: int) -> Any:  # noqa: ANN401
        """Return memory for a use: an image, or a buffer with room for 8 more texels a row."""
        key = use, storage, side
        if key not in self._memories:
            self._memories[key] = (
                allocate_image(self.context, side, side, "float32", "benchmark image")
                if storage == "image"
                else allocate_buffer(self.context, 16 * side * (side + 8), "benchmark buffer")
            )
        return self._memories[key]

    @cached_property
    def _out(self) -> Any:  # noqa: ANN401
        return allocate_buffer(self.context, 1 << 16, "benchmark results")

    @cached_property
    def _far_side(self) -> int:
        """The side of the memory that bandwidths sweep: `large` bytes, a power of two each way."""
        return 1 << ((self._large // 16).bit_length() - 1) // 2

    def _ns(self, kernel: Any, items: int, group: int) -> float:  # noqa: ANN401
        """Return the shortest time of a kernel whose arguments are set, of several runs."""
        shortest = float("inf")
        spent, runs = 0.0, 0
        while runs < _LEAST_RUNS or (spent < _CASE_NS and runs < _MOST_RUNS):
            event = self.context.cl.enqueue_nd_range_kernel(self._queue, kernel, (items,), (group,))
            event.wait()
            ns = max(float(event.profile.end - event.profile.start), 1.0)
            shortest, spent, runs = min(shortest, ns), spent + ns, runs + 1
        return shortest

    def _wide(self) -> tuple[int, int]:
        """Return (work-items, group) that fill the device."""
        return self.traits.units * _ITEMS[self.traits.kind], min(
            _GROUPS[self.traits.kind], self.traits.max_group
        )

    # benchmarks

    def _walk(self, case: Case) -> float:
        storage = str(case["storage"])
        x, y = stride_walk(case.number("seed"))
        places = np.stack([x, y], axis=-1)
        strides = np.zeros((len(x) + 1, 2), np.int8)
        strides[1:-1] = (np.diff(places, axis=0) + SIDE // 2) % SIDE - SIDE // 2
        steps = self._uploaded("strides", strides)
        kernel = self._on(storage, "chases.cl", "walk")
        kernel.set_args(self._memory(storage, SIDE), steps, np.int32(len(x)), self._out)
        return self._ns(kernel, 1, 1) / len(x)

    def _uploaded(self, key: str, values: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        memory = self._memories.get(key)
        if memory is None or memory.size < values.nbytes:
            memory = self._memories[key] = allocate_buffer(self.context, values.nbytes, key)
        upload(self.context, self._queue, memory, np.ascontiguousarray(values))
        return memory

    def _loop(self, case: Case) -> float:
        """Rounds of a small footprint after the first one, which loads caches; one round of a large one."""
        nbytes = case.number("bytes")
        trip = self._trip("loop", str(case["storage"]), nbytes, case.number("stride"))
        if nbytes >= 2**20:
            return trip.ns(trip.accesses) / trip.accesses
        rounds = max(16, _CHAIN_STEPS // trip.accesses)
        later = trip.ns(trip.accesses * (rounds + 1)) - trip.ns(trip.accesses)
        return max(later, 1.0) / (trip.accesses * rounds)

    def _line(self, case: Case) -> float:
        """Neighbouring places, each once."""
        trip = self._trip("line", str(case["storage"]), 16 * SIDE * SIDE, case.number("stride"))
        return trip.ns(_CHAIN_STEPS) / _CHAIN_STEPS

    def _flight(self, case: Case) -> float:
        trip = self._trip("flight", str(case["storage"]), 2**22, 64)
        return trip.ns(trip.accesses) / trip.accesses

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
        kernel = self._on(storage, "chases.cl", "flight" if name == "flight" else "loop", side)
        memory = self._memory(storage, side)

        def ns(steps: int) -> float:
            numbers = [np.int32(number) for number in (accesses * stride, jump * stride, shift, steps)]
            kernel.set_args(memory, *numbers, self._out)
            return self._ns(kernel, 1, 1)

        return _Trip(accesses, ns)

    def _scan(self, case: Case) -> float:
        storage, pattern, threads = str(case["storage"]), str(case["pattern"]), case.number("threads")
        shift = {"block-2": 1, "block-4": 2, "block-8": 3}.get(pattern, 0)
        kernel = self._on(storage, "chases.cl", "scan")
        numbers = [np.int32(number) for number in (pattern == "column", shift, _SCAN_STEPS)]
        kernel.set_args(self._memory(storage, SIDE), *numbers, self._out)
        return self._ns(kernel, threads, threads) / _SCAN_STEPS

    def _bandwidth(self, case: Case) -> float:
        storage, width, nbytes = str(case["storage"]), case.number("width"), case.number("bytes")
        items, group = self._wide()
        nbytes = self._large if nbytes >= 2**26 else nbytes
        places = nbytes // (4 * width)
        rounds = min(max(64, -(-places // items)), 4096)
        side = SIDE if nbytes <= 16 * SIDE * SIDE else self._far_side
        name = f"sweep_{storage}" if storage in ("local", "constant") else "sweep"
        kernel = self._on(storage, "rates.cl", name, side, FLOATS=_vector(width))
        shift = min(((places - 1).bit_length() + 1) // 2, side.bit_length() - 1)
        local = [self.context.cl.LocalMemory(nbytes)] if storage == "local" else []
        memory = self._memory("image" if storage == "image" else "buffer", side)

        def ns(rounds: int) -> float:
            numbers = (places - 1, shift, rounds) if name == "sweep" else (places - 1, rounds)
            kernel.set_args(memory, *map(np.int32, numbers), *local, self._out)
            return self._ns(kernel, items, group)

        short = ns(rounds)  # what starts a launch must not count
        more = min(max(rounds, int(rounds * _SWEEP_NS / short)), 4096)
        return items * more * 4 * width / (short if more == rounds else ns(more))

    def _write(self, case: Case) -> float:
        storage, side = str(case["storage"]), self._far_side
        items, group = self._wide()
        rounds = max(1, min(side * side, 2**22) // items)
        kernel = self._on(storage, "rates.cl", "fill", side)
        kernel.set_args(self._allocated("written", storage, side), np.int32(rounds))
        return items * rounds * 16 / self._ns(kernel, items, group)

    def _arithmetic(self, case: Case) -> float:
        width, chains = case.number("width"), case.number("chains")
        items, group = self._wide()
        rounds = 256
        ns = self._ns(self._multiply_add(width, chains, rounds), items, group)
        return items * rounds * 8 * chains * width * 2 / ns

    def _chain(self, case: Case) -> float:
        del case
        rounds = 1024
        return self._ns(self._multiply_add(1, 1, rounds), 1, 1) / (8 * rounds)

    def _multiply_add(self, width: int, chains: int, rounds: int) -> Any:  # noqa: ANN401
        kernel = self._kernel("units.cl", "multiply_add", FLOATS=_vector(width), CHAINS=chains, REGISTERS=8)
        kernel.set_args(np.float32(0.5), np.int32(rounds), self._out)
        return kernel

    def _barrier(self, case: Case) -> float:
        del case
        rounds, group = 1024, min(64, self.traits.max_group)
        kernel = self._kernel("units.cl", "barriers", FLOATS="float", CHAINS=1, REGISTERS=8)
        kernel.set_args(np.int32(rounds), self.context.cl.LocalMemory(4 * group), self._out)
        return self._ns(kernel, group, group) / rounds

    def _tile(self, case: Case) -> float:
        width, places, rounds = case.number("width"), 256, 4096
        items, group = self._wide()
        kernel = self._on("buffer", "rates.cl", "tile_local", FLOATS=_vector(width))
        local = self.context.cl.LocalMemory(4 * width * places)
        kernel.set_args(
            self._memory("buffer", SIDE), np.int32(places - 1), np.int32(rounds), local, self._out
        )
        return items * rounds * 8 * width / self._ns(kernel, items, group)

    def _start(self, case: Case) -> float:
        group = min(case.number("warps") * self.traits.warp, self.traits.max_group)
        kernel = self._kernel("units.cl", "nothing", FLOATS="float", CHAINS=1, REGISTERS=8)
        kernel.set_args(self._out)
        return self._ns(kernel, case.number("groups") * group, group)

    def _launch(self, case: Case) -> float:
        """By the host's clock: launches that do nothing, many without waiting."""
        del case
        kernel = self._kernel("units.cl", "nothing", FLOATS="float", CHAINS=1, REGISTERS=8)
        kernel.set_args(self._out)
        queue, shortest = self.context.queue, float("inf")
        for _ in range(5):
            queue.finish()
            begun = time.perf_counter()
            for _ in range(_LAUNCHES):
                self.context.cl.enqueue_nd_range_kernel(queue, kernel, (64,), (64,))
            queue.finish()
            shortest = min(shortest, (time.perf_counter() - begun) / _LAUNCHES)
        return shortest * 1e6

    def _copy(self, case: Case) -> float:
        cl, texels = self.context.cl, _COPY_BYTES // 16
        source, _, target = str(case["way"]).partition("-")
        memories = [self._memory(source, SIDE), self._allocated("copied", target, SIDE)]
        options: dict[str, Any] = {"offset": 0, "origin": (0, 0), "region": (SIDE, SIDE)}
        if source == target:
            options = {"byte_count": _COPY_BYTES}
        shortest = float("inf")
        for _ in range(_LEAST_RUNS + 2):
            event = cl.enqueue_copy(self._queue, memories[1], memories[0], **options)
            event.wait()
            shortest = min(shortest, max(event.profile.end - event.profile.start, 1))
        return 16 * texels / shortest

    def _waves(self, case: Case) -> float:
        registers = case.number("registers")
        kernel = self._kernel("units.cl", "hold", FLOATS="float", CHAINS=1, REGISTERS=registers)
        kernel.set_args(self._ring, np.int32(_ACCESSES // registers), self._out)
        group = case.number("warps") * (16 if self.traits.kind == "cpu" else self.traits.warp)
        return self._ns(kernel, case.number("groups") * group, group)

    def _share(self, case: Case) -> float:
        kernel = self._kernel("units.cl", "hold_local", FLOATS="float", CHAINS=1, REGISTERS=8)
        local = self.context.cl.LocalMemory(case.number("bytes"))
        kernel.set_args(self._ring, np.int32(_ACCESSES), local, self._out)
        return self._ns(kernel, case.number("groups") * self.traits.warp, self.traits.warp)

    @cached_property
    def _ring(self) -> Any:  # noqa: ANN401
        """A round of places, a cache line apart."""
        lines = 2**16
        values = np.repeat((np.arange(1, lines + 1, dtype=np.int32) % lines) * 32, 32)
        return self._uploaded("ring", values)


def _vector(width: int) -> str:
    return "float" if width == 1 else f"float{width}"


# journals ---------------------------------------------------------------------------------------------------


def measure_kernels(
    out: Path,
    device: BenchDevice,
    *,
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
    environment = _environment(traits, quick)
    with continued(out, environment, ("probe", "device", "driver", "quick"), _key_of) as (journal, done):
        for number in (1, 2):
            for case in cases(traits, quick=quick):
                step(case.title)
                if (number, case.title) in done:
                    continue
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


def _environment(traits: DeviceTraits, quick: bool) -> Row:
    from torchedge import __version__

    return {
        "row": "environment", "probe": PROBE, "quick": quick, "device": traits.name, "driver": traits.driver,
        "kind": traits.kind, "warp": traits.warp, "units": traits.units, "max_group": traits.max_group,
        "local_bytes": traits.local_bytes, "images": traits.images, "torchedge": __version__,
        "command": "torchedge profile --kernels" + " --quick" * quick,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }  # fmt: skip


def _key_of(row: Row) -> tuple[int, str]:
    """Return the pass and the title of a row."""
    if row.get("benchmark") not in UNITS or row.get("pass") not in (1, 2):
        raise ValueError("no benchmark, or no pass")
    parameters = {key: value for key, value in row.items() if key not in _OUTSIDE_PARAMETERS}
    return row["pass"], Case(row["benchmark"], tuple(parameters.items())).title


_OUTSIDE_PARAMETERS = {"pass", "benchmark", "value", "unit", "reason"}
