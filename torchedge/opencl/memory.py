"""Buffers and images of a device: allocation, copies from and to numpy, transposed copies on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import DeviceError, DeviceMemoryError
from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import DeviceContext, memory_text, translated
from torchedge.opencl.sharing import keep_in_forks
from torchedge.opencl.waiting import wait

PAGE_BYTES = 4096
"""Bytes of a page: direct reads from a disk go to whole pages."""

CHANNEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "FLOAT", "float16": "HALF_FLOAT", "int32": "SIGNED_INT32", "int16": "SIGNED_INT16",
        "int8": "SIGNED_INT8", "uint32": "UNSIGNED_INT32", "uint16": "UNSIGNED_INT16",
        "uint8": "UNSIGNED_INT8", "bool": "UNSIGNED_INT8",
    }
)  # fmt: skip
"""OpenCL's channel type of each dtype of images."""

_TILE = 16
_SOURCE = """\
__kernel void transpose_{bits}(
    __global const {type} *from, __global {type} *to, int outer, int middle, int inner)
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


def allocate_buffer(context: DeviceContext, nbytes: int, what: str) -> Any:
    """Return a new buffer of `nbytes` bytes; `what` names it in errors.

    Raises DeviceMemoryError: more than the largest allocation of the device, or than its free memory.
    """
    _check_allocation(context, nbytes, what)
    with translated(what, nbytes=nbytes, device=context.device):
        return counted_buffer(context, context.cl.mem_flags.READ_WRITE, max(1, nbytes))


def counted_buffer(context: DeviceContext, flags: int, nbytes: int) -> Any:
    """Return a new buffer that counts as allocated while it lives; raises the driver's errors."""
    buffer = keep_in_forks(context.cl.Buffer, context.context, flags, nbytes)
    context.allocated.add(buffer)
    return buffer


def allocate_image(context: DeviceContext, width: int, height: int, dtype: str, what: str) -> Any:
    """Return a new RGBA image2d of `width` by `height` texels of a dtype.

    Raises:
        DeviceError: the device has no images, none of that dtype or none so large.
        DeviceMemoryError: more than the largest allocation of the device, or than its free memory.
    """
    description = _described(context, width, height, what)
    nbytes = width * height * 4 * np.dtype(dtype).itemsize
    _check_allocation(context, nbytes, what)
    with translated(what, nbytes=nbytes, device=context.device):
        image = _image(context, dtype, description, what)
    context.allocated.add(image)
    return image


def image_over_buffer(
    context: DeviceContext, buffer: Any, width: int, height: int, row_texels: int, dtype: str, what: str
) -> Any:
    """Return an RGBA image2d over the bytes of a buffer whose rows begin `row_texels` texels apart.

    Raises DeviceError: the device makes no images from buffers, or has no images so large or of that dtype.
    """
    description, device = _described(context, width, height, what), context.device
    if not device.image_from_buffer:
        raise DeviceError(
            f"{what}: {device.name} makes no images from buffers (cl_khr_image2d_from_buffer); "
            "lower the program for it with images or buffers"
        )
    pitch = max(width, row_texels)
    if device.pitch_alignment and pitch % device.pitch_alignment:
        raise DeviceError(
            f"{what}: rows of {pitch} texels, {device.name} takes multiples of {device.pitch_alignment}; "
            "lower the program for it again"
        )
    description.pitches = (pitch * 4 * np.dtype(dtype).itemsize, 0)
    description.buffer = buffer
    with translated(what, device=device):
        return _image(context, dtype, description, what)


def sub_buffer(context: DeviceContext, buffer: Any, offset: int, nbytes: int, what: str) -> Any:
    """Return the part of a buffer that begins at byte `offset`, a multiple of the device's alignment."""
    with translated(what, nbytes=nbytes, device=context.device):
        return buffer.get_sub_region(offset, max(1, nbytes))


def upload(
    context: DeviceContext,
    queue: Any,
    target: Any,
    packed: npt.NDArray[Any],
    pending: list[Any] | None = None,
) -> None:
    """Copy a C-contiguous array, (height, width, 4) for an image, to the device and wait for it.

    pending: do not wait, but append the copy's event, which has to be kept until the queue was waited for.
    """
    _copy(context, queue, "to", target, (target, packed), packed, pending)


def download(
    context: DeviceContext,
    queue: Any,
    source: Any,
    packed: npt.NDArray[Any],
    pending: list[Any] | None = None,
) -> None:
    """Fill a C-contiguous array, (height, width, 4) for an image, from the device; waits as `upload` does."""
    _copy(context, queue, "from", source, (packed, source), packed, pending)


def _copy(
    context: DeviceContext,
    queue: Any,
    way: str,
    memory: Any,
    ends: tuple[Any, Any],
    packed: npt.NDArray[Any],
    pending: list[Any] | None,
) -> None:
    if pending is None:
        wait(context, queue)
    if not packed.nbytes:
        return
    options: dict[str, Any] = {"is_blocking": pending is None}
    if isinstance(memory, context.cl.Image):
        options |= {"origin": (0, 0), "region": packed.shape[1::-1]}
    with translated(f"copying {way} the device", device=context.device):
        event = context.cl.enqueue_copy(queue, *ends, **options)
    if pending is not None:
        pending.append(event)


def fill(context: DeviceContext, queue: Any, target: Any, byte: int) -> None:
    """Set every byte of a buffer."""
    with translated("filling memory", nbytes=target.size, device=context.device):
        context.cl.enqueue_fill_buffer(queue, target, np.uint8(byte), 0, target.size)


class StagingMemory:
    """Host-visible memory that stays mapped: `bytes` is a writable array over its whole pages.

    It serves copy commands as a pool (`runtime.staging.StagingPool`) with places of any size.
    Raises DeviceMemoryError: no memory is left.
    """

    def __init__(self, context: DeviceContext, queue: Any, nbytes: int, what: str) -> None:
        cl, flags = context.cl, context.cl.mem_flags
        self._queue, self.device = queue, context.device
        with translated(what, nbytes=nbytes, device=self.device):
            self._buffer = counted_buffer(context, flags.READ_WRITE | flags.ALLOC_HOST_PTR, nbytes)
            ways = cl.map_flags.READ | cl.map_flags.WRITE
            mapped, _ = cl.enqueue_map_buffer(queue, self._buffer, ways, 0, (nbytes,), np.uint8)
        self._map: Any = mapped.base
        start = -mapped.ctypes.data % PAGE_BYTES
        self.bytes: npt.NDArray[np.uint8] = mapped[
            start : start + (nbytes - start) // PAGE_BYTES * PAGE_BYTES
        ]

    def open(self, at: int, events: Sequence[Any]) -> None:
        """Wait until a place is free."""
        with translated("copying weights to the device", device=self.device):
            for event in events:
                event.wait()

    def view(self, at: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return bytes of a place."""
        return self.bytes[at : at + nbytes]

    def clear(self) -> None:
        """Do nothing: a run begins with free places."""

    def release(self) -> None:
        """Give the memory back; nothing may use `bytes` or copy from there any more."""
        if self._map is not None:
            with translated("unmapping memory", device=self.device):
                self._map.release(self._queue).wait()
            self._map = self._buffer = None
            self.bytes = np.zeros(0, np.uint8)


def upload_call(
    context: DeviceContext, queue: Any, target: Any, content: npt.NDArray[np.uint8], place: tuple[int, ...]
) -> Callable[..., Any]:
    """Return a function that enqueues the copy of bytes to the device and returns its event.

    It takes `wait_for`, events or None. The bytes must stay until the copy has completed. place: (offset,) in
    a buffer; (x, y, width, height) in an image.
    """
    copy = partial(context.cl.enqueue_copy, queue, target, content, is_blocking=False)
    if len(place) == 1:
        return partial(copy, dst_offset=place[0])
    return partial(copy, origin=place[:2], region=place[2:])


def _check_allocation(context: DeviceContext, nbytes: int, what: str) -> None:
    device = context.device
    if nbytes > device.allocation_bytes:
        raise DeviceMemoryError(memory_text(what, nbytes, device), nbytes=nbytes)


def _described(context: DeviceContext, width: int, height: int, what: str) -> Any:
    """Return the description of an image; raises DeviceError where the device has none so large."""
    device, cl = context.device, context.cl
    if not device.images:
        raise DeviceError(f"{what}: {device.name} has no images; lower the program for it with buffers")
    if width > device.image_width or height > device.image_height:
        raise DeviceError(
            f"{what}: an image of {width} x {height} texels, {device.name} takes at most "
            f"{device.image_width} x {device.image_height}; fold it (textures.layouts.fitted) or use a buffer"
        )
    description = cl.ImageDescriptor()
    description.image_type, description.shape = cl.mem_object_type.IMAGE2D, (width, height)
    return description


def _image(context: DeviceContext, dtype: str, description: Any, what: str) -> Any:
    cl = context.cl
    if dtype not in CHANNEL_TYPES or (dtype == "float16" and not context.device.half_images):
        raise DeviceError(f"{what}: {context.device.name} has no images of {dtype}; use a buffer")
    texels = cl.ImageFormat(cl.channel_order.RGBA, getattr(cl.channel_type, CHANNEL_TYPES[dtype]))
    return keep_in_forks(cl.Image, context.context, cl.mem_flags.READ_WRITE, texels, desc=description)


class Transposer:
    """Transposes tensors on the device, (N, A, B, C) to (N, C, B, A), with one staging buffer.

    A work-item moves a tile, so that whole lines of memory are read and written.
    """

    def __init__(self, context: DeviceContext, queue: Any) -> None:
        self._context, self._queue = context, queue
        self._kernels: dict[int, Any] = {}
        self._staging: Any = None

    def staging(self, nbytes: int) -> Any:
        """Return the staging buffer, of at least `nbytes`."""
        if self._staging is None or self._staging.size < nbytes:
            self._staging = None
            self._staging = allocate_buffer(self._context, nbytes, "copies between layouts")
        return self._staging

    def transpose(self, source: Any, target: Any, sizes: tuple[int, int, int, int], item: int) -> None:
        """Enqueue the copy of a buffer to another one, transposed; `item`: bytes of an element."""
        count, outer, middle, inner = sizes
        if 0 in sizes:  # a launch of no work-items divides by zero in some drivers
            return
        kernel = self._kernel(item)
        grid = (-(-inner // _TILE), -(-outer // _TILE), count * middle)
        with translated("transposing a tensor", device=self._context.device):
            kernel.set_args(source, target, *map(np.int32, sizes[1:]))
            self._context.cl.enqueue_nd_range_kernel(self._queue, kernel, grid, None)

    def _kernel(self, item: int) -> Any:
        if item not in self._kernels:
            name = f"transpose_{8 * item}"
            source = _SOURCE.format(bits=8 * item, type=_TYPES[item], tile=_TILE)
            self._kernels[item] = compile_kernels(self._context, {name: source}).kernel(name)
        return self._kernels[item]
