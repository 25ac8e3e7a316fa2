"""Kernels timed on an OpenCL device: the measurements by which the tuner, and its judges, choose schedules.

Each candidate is compiled and launched by itself, with memory that all candidates of a kernel share. Times
are the device's own (profiling events), the least of several launches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from torchedge.errors import TorchedgeError
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.lowering.nodes import Node
from torchedge.lowering.tuning import KernelCandidate
from torchedge.opencl.binary_caches import BinaryCache, key_of
from torchedge.opencl.compiling import CompiledKernels, compile_kernels
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import allocate_buffer, allocate_image
from torchedge.storage import cache_folder
from torchedge.textures.layouts import Layout, row_major

LEAST_MS, LEAST_RUNS, MOST_RUNS = 4.0, 3, 50
"""A candidate runs until its launches took so long together, and this often at least and at most."""


def kernel_times(
    context: DeviceContext,
    kernels: Sequence[Sequence[KernelCandidate]],
    cache: BinaryCache | Literal["auto"] | None = "auto",
    passes: int = 1,
) -> list[list[float]]:
    """Return the ms of each candidate of each kernel; infinite where it does not compile or run.

    cache: of binaries, as in `compile_kernels`. passes: each kernel's candidates are timed so often, one
    after the other; the least time counts.
    """
    sources = [source for kernel in kernels for written, _ in kernel for source in written]
    compiled = _compiled(context, {s.kernel.name: s.kernel.source for s in sources}, cache)
    queue = context.new_queue(True)
    return [
        np.min([_times_of(context, queue, compiled, kernel) for _ in range(passes)], axis=0).tolist()
        for kernel in kernels
    ]


class CachedTimes:
    """A timer for the tuner that remembers on disk what a device once took: same kernels, same choices."""

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self.device = key_of(context.device, "", ("kernel times 1",))
        """A hash of the device and its driver."""
        self._cache = BinaryCache(cache_folder() / "kernel-times")

    def __call__(self, kernels: Sequence[Sequence[KernelCandidate]]) -> list[list[float]]:
        """Return the ms of each candidate of each kernel; infinite where it does not compile or run."""
        keys = [self._key(kernel) for kernel in kernels]
        times = [self._cached(key, len(kernel)) for key, kernel in zip(keys, kernels, strict=True)]
        missing = [place for place, known in enumerate(times) if known is None]
        for place, ms in zip(
            missing, kernel_times(self._context, [kernels[k] for k in missing]), strict=True
        ):
            times[place] = ms
            entry = {"ms": [value if np.isfinite(value) else None for value in ms]}
            self._cache.write(keys[place], json.dumps(entry).encode())
        return [ms for ms in times if ms is not None]

    def _key(self, kernel: Sequence[KernelCandidate]) -> str:
        launches = [
            (source.kernel.source, source.launch.global_size, source.launch.local_size, source.launch.sizes)
            for sources, _ in kernel
            for source in sources
        ]
        return hashlib.sha256(f"{self.device}{launches}".encode()).hexdigest()

    def _cached(self, key: str, count: int) -> list[float] | None:
        entry = self._cache.read(key)
        times = json.loads(entry)["ms"] if entry else []
        return [float("inf") if ms is None else ms for ms in times] if len(times) == count else None


def _compiled(
    context: DeviceContext, texts: Mapping[str, str], cache: BinaryCache | Literal["auto"] | None
) -> dict[str, CompiledKernels]:
    """Return the kernels that compile, by name."""
    try:
        return dict.fromkeys(texts, compile_kernels(context, texts, cache))
    except TorchedgeError:
        if len(texts) == 1:
            return {}
    alone = [_compiled(context, {name: text}, cache) for name, text in texts.items()]
    return {name: kernels for compiled in alone for name, kernels in compiled.items()}


def _times_of(
    context: DeviceContext,
    queue: Any,
    compiled: Mapping[str, CompiledKernels],
    kernel: Sequence[KernelCandidate],
) -> list[float]:
    memory: dict[tuple[Node, Layout], Any] = {}

    def bound(source: KernelSource, layouts: Mapping[Node, Layout]) -> tuple[Any, ...]:
        launched = compiled[source.kernel.name].kernel(source.kernel.name)
        arguments = []
        for node in source.tensors:
            placed = layouts.get(node) or row_major(len(node.shape))  # slices have no layout of their own
            if (node, placed) not in memory:
                memory[node, placed] = _filled(context, queue, node, placed)
            arguments.append(memory[node, placed])
        for place, argument in enumerate([*arguments, *map(np.int32, source.launch.sizes)]):
            launched.set_arg(place, argument)
        return launched, source.launch.global_size, source.launch.local_size

    times = []
    try:
        for sources, layouts in kernel:
            try:
                times.append(_timed(context, queue, [bound(source, layouts) for source in sources]))
            except (context.cl.Error, TorchedgeError, KeyError):
                times.append(float("inf"))
    finally:
        for block in memory.values():
            block.release()
    return times


def _filled(context: DeviceContext, queue: Any, node: Node, layout: Layout) -> Any:
    """Return the memory of a tensor, filled with small numbers on the device."""
    name, value = "a tensor of a timed kernel", np.dtype(node.dtype).type(0.01)
    if layout.storage == "buffer":
        nbytes = max(value.nbytes, layout.packed_bytes(node.shape, node.dtype))
        memory = allocate_buffer(context, nbytes, name)
        context.cl.enqueue_fill_buffer(queue, memory, value, 0, nbytes)
    else:
        width, height = layout.extent(node.shape)
        memory = allocate_image(context, width, height, node.dtype, name)
        color = np.full(4, 0.01, np.float32)
        context.cl.enqueue_fill_image(queue, memory, color, (0, 0, 0), (width, height, 1))
    return memory


def _timed(context: DeviceContext, queue: Any, launches: Sequence[tuple[Any, ...]]) -> float:
    best, total, runs = float("inf"), 0.0, 0
    while runs < LEAST_RUNS or (total < LEAST_MS and runs < MOST_RUNS):
        events = [
            context.cl.enqueue_nd_range_kernel(queue, kernel, size, local) for kernel, size, local in launches
        ]
        events[-1].wait()
        ms = sum(event.profile.end - event.profile.start for event in events) * 1e-6
        runs, total = runs + 1, total + ms
        if runs > 1:  # the first one compiles on PoCL
            best = min(best, ms)
    return best
