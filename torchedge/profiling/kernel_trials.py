"""Kernels by many schedules, timed on an OpenCL device: what the tuner's choices are judged by.

Each candidate is compiled and launched by itself, with memory that all candidates of a kernel share. Times
are the device's own (profiling events), the least of several launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from torchedge.errors import TorchedgeError
from torchedge.lowering.kernels.nests import write_kernel
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.lowering.nodes import Node
from torchedge.lowering.schedules import Schedule
from torchedge.lowering.targets import Target
from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import allocate_buffer, allocate_image, upload
from torchedge.profiling.operator_cases import OperatorKernel
from torchedge.textures.layouts import Layout, row_major

LEAST_MS, LEAST_RUNS, MOST_RUNS = 4.0, 3, 50
"""A candidate runs until its launches took so long together, and this often at least and at most."""


class Trials:
    """Times candidates of one kernel; a context manager that frees their memory."""

    def __init__(self, context: DeviceContext, kernel: OperatorKernel, target: Target) -> None:
        self._context, self._kernel, self._target = context, kernel, target
        self._queue = context.new_queue(True)
        self._memory: dict[tuple[Node, Layout], Any] = {}

    def times(self, candidates: Sequence[tuple[Schedule, Mapping[Node, Layout]]]) -> list[float]:
        """Return the ms of each candidate; infinite where it does not compile or run."""
        written = [self._sources(schedule, layouts) for schedule, layouts in candidates]
        texts = {source.kernel.name: source.kernel.source for parts in written for source in parts}
        try:
            compiled = compile_kernels(self._context, texts, None)
        except TorchedgeError:
            if len(candidates) == 1:
                return [float("inf")]
            return [ms for candidate in candidates for ms in self.times([candidate])]
        times = []
        for parts, (_, layouts) in zip(written, candidates, strict=True):
            try:
                times.append(self._timed([self._bound(compiled, source, layouts) for source in parts]))
            except (self._context.cl.Error, TorchedgeError):
                times.append(float("inf"))
        return times

    def _sources(self, schedule: Schedule, layouts: Mapping[Node, Layout]) -> Sequence[KernelSource]:
        return write_kernel(self._kernel.group, self._kernel.nest, layouts, schedule, self._target)

    def _bound(self, compiled: Any, source: KernelSource, layouts: Mapping[Node, Layout]) -> tuple[Any, ...]:  # noqa: ANN401
        kernel = compiled.kernel(source.kernel.name)
        arguments = [self._memory_of(node, layouts.get(node)) for node in source.tensors]
        for place, argument in enumerate([*arguments, *map(np.int32, source.sizes)]):
            kernel.set_arg(place, argument)
        return kernel, source.global_size, source.local_size

    def _memory_of(self, node: Node, layout: Layout | None) -> Any:  # noqa: ANN401
        """Return the memory of a tensor, filled with small numbers; slices have no layout of their own."""
        placed = layout or row_major(len(node.shape))
        key = (node, placed) if layout else (node, row_major(len(node.shape)))
        if key not in self._memory:
            name = "a tensor of the benchmark"
            packed = placed.pack(np.full(node.shape, 0.01, node.dtype))
            if placed.storage == "buffer":
                memory = allocate_buffer(self._context, max(1, packed.nbytes), name)
            else:
                width, height = placed.extent(node.shape)
                memory = allocate_image(self._context, width, height, node.dtype, name)
            upload(self._context, self._queue, memory, np.ascontiguousarray(packed))
            self._memory[key] = memory
        return self._memory[key]

    def _timed(self, launches: Sequence[tuple[Any, ...]]) -> float:
        best, total, runs = float("inf"), 0.0, 0
        while runs < LEAST_RUNS or (total < LEAST_MS and runs < MOST_RUNS):
            events = [
                self._context.cl.enqueue_nd_range_kernel(self._queue, kernel, size, local)
                for kernel, size, local in launches
            ]
            events[-1].wait()
            ms = sum(event.profile.end - event.profile.start for event in events) * 1e-6
            runs, total = runs + 1, total + ms
            if runs > 1:  # the first one compiles on PoCL
                best = min(best, ms)
        return best

    def close(self) -> None:
        """Free all memory."""
        for memory in self._memory.values():
            memory.release()
        self._memory.clear()

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
