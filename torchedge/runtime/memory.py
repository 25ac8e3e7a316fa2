"""The memory of a device: tensors of programs and the arena. Works without PyTorch.

`DeviceMemory` makes every allocation of the runtime; `tensor_memory` adds copies of PyTorch's tensors.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.errors import InputError, OpenCLError
from torchedge.lowering.packing import check_indices
from torchedge.lowering.programs import Arena, Program, StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import (
    allocate_buffer,
    allocate_image,
    download,
    fill,
    image_over_buffer,
    sub_buffer,
    upload,
)
from torchedge.opencl.waiting import wait


@dataclass(slots=True, eq=False)
class DeviceTensor:
    """A tensor of a program, its buffer or image, and whether anything was written there."""

    tensor: StoredTensor
    memory: Any
    written: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ArenaMemory:
    """Memory objects of the intermediates by tensor, the allocations behind them, parts of the buffers.

    owner: what another program made of the same allocations; its parts are freed after these.
    """

    memory: dict[int, Any]
    buffers: tuple[Any, ...]
    images: tuple[Any, ...]
    parts: list[Any]
    owner: ArenaMemory | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(memory.size for memory in (*self.buffers, *self.images))

    def __del__(self) -> None:
        # In reverse: NVIDIA's driver (580.159) crashes where overlapping parts are freed in another order.
        self.memory.clear()
        while self.parts:
            self.parts.pop()


class DeviceMemory:
    """The memory of one device: allocates, and copies arrays.

    A copy between host and device returns when the data is there; those `later` are done after `settle`.
    """

    def __init__(self, context: DeviceContext, queue: Any) -> None:
        self.context, self.queue = context, queue
        self._pending: list[Any] = []

    def settle(self) -> None:
        """Wait for all that the queue holds; raises the errors of `torchedge.opencl.memory.wait`."""
        wait(self.context, self.queue)
        self._pending.clear()

    # allocation -------------------------------------------------------------------------------------------

    def allocate(self, tensor: StoredTensor) -> Any:
        """Return new memory for a tensor; raises DeviceMemoryError where there is too little."""
        layout, what = tensor.layout, f"{tensor.role} {tensor.name}"
        if layout.storage == "image":
            return allocate_image(self.context, *layout.extent(tensor.shape), tensor.dtype, what)
        buffer = allocate_buffer(self.context, tensor.nbytes, what)
        return self._image_of(tensor, buffer) if layout.storage == "image_buffer" else buffer

    def allocate_bytes(self, nbytes: int, what: str) -> Any:
        """Return a new buffer of zeros; `what` names it in errors."""
        buffer = allocate_buffer(self.context, nbytes, what)
        fill(self.context, self.queue, buffer, 0)
        return buffer

    def allocate_arena(
        self,
        program: Program,
        parts: Container[int],
        *,
        common: Arena | None = None,
        owner: ArenaMemory | None = None,
        poisoned: bool = False,
    ) -> ArenaMemory:
        """Allocate the program's arena as planned, to the byte. poisoned: floats start as NaN.

        parts: tensors of its buffers that get a memory object of their own, a part of one. common: the arena
        that is allocated, for this program and others. owner: the program lies in what another one allocated.
        Raises DeviceMemoryError: the device has too little. OpenCLError: a buffer has another size.
        """
        arena, what = program.arena, f"arena of program {program.name}"
        common = common or arena
        buffers = list(owner.buffers) if owner else []
        for nbytes in () if owner else common.buffers:
            buffers.append(allocate_buffer(self.context, nbytes, what))
            if buffers[-1].size != nbytes:
                raise OpenCLError(
                    f"{what}: {nbytes} bytes planned, the driver gave {buffers[-1].size}; report this"
                )
            if poisoned:
                fill(self.context, self.queue, buffers[-1], 0xFF)
        images = owner.images if owner else ()
        images = images or tuple([allocate_image(self.context, *slot, what) for slot in common.slots])
        objects: list[Any] = []
        known: dict[tuple[int, int, int], Any] = {}
        memory: dict[int, Any] = {}
        for index in arena.offset:
            if index not in parts:
                continue
            tensor = program.tensors[index]
            number, offset = arena.place(index)
            place = (number, offset, tensor.nbytes)
            if place not in known:
                part = sub_buffer(self.context, buffers[number], *place[1:], f"{what}: {tensor.name}")
                known[place] = part
                objects.append(part)
            memory[index] = known[place]
            if tensor.layout.storage == "image_buffer":
                memory[index] = self._image_of(tensor, known[place])
                objects.append(memory[index])
        free = list(range(len(common.slots)))
        taken = [free.pop([common.slots[n] for n in free].index(slot)) for slot in arena.slots]
        memory |= {index: images[taken[slot]] for index, slot in arena.slot.items()}
        return ArenaMemory(memory, tuple(buffers), images, objects, owner)

    def _image_of(self, tensor: StoredTensor, buffer: Any) -> Any:
        """Return the image over the buffer of a tensor whose storage is "image_buffer"."""
        layout, what = tensor.layout, f"{tensor.role} {tensor.name}"
        width, height = layout.extent(tensor.shape)
        return image_over_buffer(self.context, buffer, width, height, layout.row_texels, tensor.dtype, what)

    # arrays -----------------------------------------------------------------------------------------------

    def write(self, target: DeviceTensor, array: object, *, later: bool = False) -> None:
        """Copy an array to the device; raises InputError for another shape or kind of dtype."""
        packed = target.tensor.layout.pack(converted(target.tensor, array))
        upload(self.context, self.queue, target.memory, packed, self._pending if later else None)
        target.written = True

    def write_packed(self, target: DeviceTensor, packed: Array) -> None:
        """Copy an array that is packed for the device; raises InputError for another size or dtype."""
        tensor, wanted = target.tensor, _empty(target.tensor)
        if (packed.dtype, packed.nbytes) != (wanted.dtype, wanted.nbytes):
            raise InputError(
                f"{tensor.role} {tensor.name}: {packed.nbytes} bytes of {packed.dtype}, expected "
                f"{wanted.nbytes} of {tensor.dtype}; pack it with its layout"
            )
        upload(self.context, self.queue, target.memory, packed)
        target.written = True

    def read(self, source: DeviceTensor) -> Array:
        """Return the content of a tensor."""
        packed = _empty(source.tensor)
        download(self.context, self.queue, source.memory, packed)
        return source.tensor.layout.unpack(packed, source.tensor.shape)

    def read_all(self, sources: Sequence[DeviceTensor]) -> list[Array]:
        """Return the contents of tensors after one wait; raises the errors of `settle`."""
        packed = [_empty(source.tensor) for source in sources]
        try:
            for source, array in zip(sources, packed, strict=True):
                download(self.context, self.queue, source.memory, array, self._pending)
        finally:  # where a copy cannot be enqueued, an earlier launch that failed is the reason
            self.settle()
        return [
            s.tensor.layout.unpack(array, s.tensor.shape) for s, array in zip(sources, packed, strict=True)
        ]


def _empty(tensor: StoredTensor) -> Array:
    """Return an empty array packed for the device: 1-d, or (height, width, 4) for an image."""
    layout, shape = tensor.layout, tensor.shape
    if layout.storage == "buffer":
        return np.empty(shape, tensor.dtype).reshape(-1)
    width, height = layout.extent(shape)
    return np.empty((height, width, 4), tensor.dtype)


def check_same(mine: StoredTensor, theirs: StoredTensor) -> None:
    """Raise InputError where two programs that share a tensor store it in different ways."""
    here, there = ((t.shape, t.dtype, t.layout) for t in (mine, theirs))
    if here != there:
        raise InputError(
            f"{mine.role} {mine.name} is {here} in this program and {there} in the one that shares it; "
            "lower both with the same layouts"
        )


def converted(tensor: StoredTensor, array: object) -> Array:
    """Return an array in the tensor's dtype; only floats of another width and Python numbers are converted.

    Raises InputError: another shape or kind of dtype, or a number that the dtype cannot hold.
    """
    try:
        values = np.asarray(array)
    except Exception as error:  # of any array-like: a tensor that requires a gradient, a ragged list
        raise InputError(
            f"{tensor.role} {tensor.name}: {type(array).__name__} is no array ({error}); pass a numpy array"
        ) from error
    wanted = np.dtype(tensor.dtype)
    if values.shape != tensor.shape:
        raise InputError(
            f"{tensor.role} {tensor.name} has shape {list(values.shape)}, expected {list(tensor.shape)}; "
            "the program is made for these shapes: reshape, or lower the model again"
        )
    number = type(array) in (bool, int, float) and (
        wanted.kind == "f" or (type(array) is not float and wanted.type(array) == array)
    )
    if values.dtype != wanted and not number and not (values.dtype.kind == "f" and wanted.kind == "f"):
        raise InputError(
            f"{tensor.role} {tensor.name} has dtype {values.dtype}, expected {wanted}; "
            f"convert it with .astype({str(wanted)!r})"
        )
    check_indices(tensor, values)
    return values.astype(wanted, copy=False)
