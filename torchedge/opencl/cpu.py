"""Kernels on this machine's own processor, for work that numpy cannot vectorize: arrays in, arrays out.

PoCL (`pip install 'torchedge[opencl]'`) compiles them; callers need a fallback without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.opencl.platforms import load_pyopencl
from torchedge.opencl.sharing import check_process

Array = npt.NDArray[Any]


class CpuKernel:
    """One compiled kernel; use `compile_kernel` to get it."""

    def __init__(self, source: str, name: str) -> None:
        check_process()
        pyopencl = self._cl = load_pyopencl()
        devices = [
            device
            for platform in pyopencl.get_platforms()
            for device in platform.get_devices(pyopencl.device_type.CPU)
        ]
        self._context = pyopencl.Context(devices[:1])
        self._queue = pyopencl.CommandQueue(self._context)
        self._kernel = pyopencl.Kernel(pyopencl.Program(self._context, source).build(), name)
        self._process = os.getpid()
        self._lock = threading.Lock()  # a kernel's arguments are part of the kernel

    @property
    def usable(self) -> bool:
        """Whether this is the process that compiled it: the runtime's threads do not survive a fork."""
        return os.getpid() == self._process

    def run(
        self, count: int, inputs: Sequence[Array], scratch: Sequence[int], numbers: Sequence[int], out: Array
    ) -> None:
        """Run `count` work-items and fill `out`.

        The kernel's arguments: inputs (read), scratch buffers of so many bytes, int32 numbers, out (written).
        """
        flags = self._cl.mem_flags
        buffers = [
            self._cl.Buffer(self._context, flags.READ_ONLY | flags.USE_HOST_PTR, hostbuf=array)
            for array in inputs
        ]
        buffers += [self._cl.Buffer(self._context, flags.READ_WRITE, size) for size in scratch]
        result = self._cl.Buffer(self._context, flags.WRITE_ONLY, out.nbytes)
        whole = [np.int32(number) for number in numbers]
        with self._lock:
            self._kernel(self._queue, (count,), (1,), *buffers, *whole, result)
            self._cl.enqueue_copy(self._queue, out, result)
            self._queue.finish()


def compile_kernel(source: str, name: str) -> CpuKernel | None:
    """Return a kernel for this machine's processor; None where pyopencl, a device or its compiler fails."""
    try:
        return CpuKernel(source, name)
    except Exception:  # any error of a driver: the caller falls back
        return None
