"""Kernels on this machine's own processor, for work that numpy cannot vectorize: arrays in, arrays out.

PoCL (`pip install 'torchedge[opencl]'`) compiles them; callers need a fallback without it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import open_context
from torchedge.opencl.sharing import is_fork

Array = npt.NDArray[Any]


class CpuKernel:
    """One compiled kernel; use `compile_kernel` to get it."""

    def __init__(self, source: str, name: str) -> None:
        self._context = open_context("cpu")
        self._kernel = compile_kernels(self._context, {name: source}).kernel(name)
        self._lock = threading.Lock()  # a kernel's arguments are part of the kernel

    @property
    def usable(self) -> bool:
        """Whether this is the process that compiled it: the runtime's threads do not survive a fork."""
        return not is_fork()

    def run(
        self, count: int, inputs: Sequence[Array], scratch: Sequence[int], numbers: Sequence[int], out: Array
    ) -> None:
        """Run `count` work-items and fill `out`.

        The kernel's arguments: inputs (read), scratch buffers of so many bytes, int32 numbers, out (written).
        """
        cl, context, queue = self._context.cl, self._context.context, self._context.queue
        read = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
        buffers = [cl.Buffer(context, read, hostbuf=array) for array in inputs]
        buffers += [cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for size in (*scratch, out.nbytes)]
        whole = [np.int32(number) for number in numbers]
        with self._lock:
            self._kernel(queue, (count,), (1,), *buffers[:-1], *whole, buffers[-1])
            cl.enqueue_copy(queue, out, buffers[-1])


def compile_kernel(source: str, name: str) -> CpuKernel | None:
    """Return a kernel for this machine's processor; None where pyopencl, a device or its compiler fails."""
    try:
        return CpuKernel(source, name)
    except Exception:  # any error of a driver: the caller falls back
        return None
