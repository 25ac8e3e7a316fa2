"""Copies on the device that turn dimensions round: between PyTorch's order of them and a layout's."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import allocate_buffer

_TILE = 16
_SOURCE = """\
__kernel void turn_{bits}(__global const {type} *from, __global {type} *to, int outer, int middle, int inner)
{{
    const int c0 = get_global_id(0) * {tile}, a0 = get_global_id(1) * {tile};
    const int b = get_global_id(2) % middle;
    const size_t start = (size_t)(get_global_id(2) / middle) * outer * middle * inner;
    from += start, to += start;
    for (int c = c0; c < min(c0 + {tile}, inner); c++)
        for (int a = a0; a < min(a0 + {tile}, outer); a++)
            to[((size_t)c * middle + b) * outer + a] = from[((size_t)a * middle + b) * inner + c];
}}
"""
_TYPES = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}


class Turner:
    """Turns tensors round, (N, A, B, C) to (N, C, B, A), through one buffer of its own.

    A work-item moves a tile, so that lines of memory are read and written whole.
    """

    def __init__(self, context: DeviceContext, queue: Any) -> None:
        self._context, self._queue = context, queue
        self._kernels: dict[int, Any] = {}
        self._staging: Any = None

    def staging(self, nbytes: int) -> Any:
        """Return a buffer of at least `nbytes`, the same one until a larger one is asked for."""
        if self._staging is None or self._staging.size < nbytes:
            self._staging = None
            self._staging = allocate_buffer(self._context, nbytes, "copies between layouts")
        return self._staging

    def turn(self, source: Any, target: Any, sizes: tuple[int, int, int, int], item: int) -> None:
        """Copy a buffer of items of so many bytes to another one, turned round; the copy is only enqueued."""
        count, outer, middle, inner = sizes
        kernel = self._kernel(item)
        grid = (-(-inner // _TILE), -(-outer // _TILE), count * middle)
        with translated("turning a tensor round", device=self._context.device):
            kernel.set_args(source, target, *map(np.int32, sizes[1:]))
            self._context.cl.enqueue_nd_range_kernel(self._queue, kernel, grid, None)

    def _kernel(self, item: int) -> Any:
        if item not in self._kernels:
            name = f"turn_{8 * item}"
            source = _SOURCE.format(bits=8 * item, type=_TYPES[item], tile=_TILE)
            self._kernels[item] = compile_kernels(self._context, {name: source}).kernel(name)
        return self._kernels[item]
