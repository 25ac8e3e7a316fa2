"""Arrays of the user as tensors of a program: checked, converted, packed, copied to the device and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import InputError
from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import allocate_buffer, allocate_image, download, image_over_buffer, upload

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class DeviceTensor:
    """A tensor of a program, the buffer or image that holds it, and whether anything was written there."""

    tensor: StoredTensor
    memory: Any
    written: bool = False

    def write(self, context: DeviceContext, queue: Any, array: object) -> None:
        """Copy an array to the device; raises InputError for another shape or kind of dtype."""
        upload(context, queue, self.memory, self.tensor.layout.pack(converted(self.tensor, array)))
        self.written = True

    def write_packed(self, context: DeviceContext, queue: Any, held: Array) -> None:
        """Copy an array that lies as the device holds it; raises InputError for another size or dtype."""
        if (held.dtype, held.nbytes) != (np.dtype(self.tensor.dtype), self._held().nbytes):
            raise InputError(
                f"{self.tensor.role} {self.tensor.name}: {held.nbytes} bytes of {held.dtype}, expected "
                f"{self._held().nbytes} of {self.tensor.dtype}; pack it with its layout"
            )
        upload(context, queue, self.memory, held)
        self.written = True

    def read(self, context: DeviceContext, queue: Any) -> Array:
        """Return what the device holds."""
        held = self._held()
        download(context, queue, self.memory, held)
        return self.tensor.layout.unpack(held, self.tensor.shape)

    def _held(self) -> Array:
        """Return an empty array as the device holds it: 1-d, or (height, width, 4) for an image."""
        layout, shape = self.tensor.layout, self.tensor.shape
        if layout.storage == "buffer":
            return np.empty(shape, self.tensor.dtype).reshape(-1)
        width, height = layout.extent(shape)
        return np.empty((height, width, 4), self.tensor.dtype)


def allocate_tensor(context: DeviceContext, tensor: StoredTensor) -> DeviceTensor:
    """Return a tensor with memory of its own; raises DeviceMemoryError where there is too little."""
    layout, what = tensor.layout, f"{tensor.role} {tensor.name}"
    if layout.storage == "image":
        memory = allocate_image(context, *layout.extent(tensor.shape), tensor.dtype, what)
    else:
        memory = allocate_buffer(context, tensor.nbytes, what)
        if layout.storage == "image_buffer":
            memory = image_of(context, tensor, memory)
    return DeviceTensor(tensor, memory)


def image_of(context: DeviceContext, tensor: StoredTensor, buffer: Any) -> Any:
    """Return the image over the buffer of a tensor whose storage is "image_buffer"."""
    layout, what = tensor.layout, f"{tensor.role} {tensor.name}"
    width, height = layout.extent(tensor.shape)
    return image_over_buffer(context, buffer, width, height, layout.row_texels, tensor.dtype, what)


def check_same(mine: StoredTensor, theirs: StoredTensor) -> None:
    """Raise InputError where two programs that share a tensor store it in different ways."""
    here, there = ((t.shape, t.dtype, t.layout) for t in (mine, theirs))
    if here != there:
        raise InputError(
            f"{mine.role} {mine.name} is {here} in this program and {there} in the one that shares it; "
            "lower both with the same layouts"
        )


def converted(tensor: StoredTensor, array: object) -> Array:
    """Return an array in the tensor's dtype: floats of other widths are converted, the rest refused.

    A Python number becomes a 0-d tensor of any dtype that holds it.

    Raises:
        InputError: another shape, or a dtype that would have to be guessed.
    """
    try:
        given = np.asarray(array)
    except (
        Exception
    ) as error:  # whatever an array-like says: a tensor that requires a gradient, a ragged list
        raise InputError(
            f"{tensor.role} {tensor.name}: {type(array).__name__} is no array ({error}); give a numpy array"
        ) from error
    wanted = np.dtype(tensor.dtype)
    if given.shape != tensor.shape:
        raise InputError(
            f"{tensor.role} {tensor.name} has shape {list(given.shape)}, expected {list(tensor.shape)}; "
            "the program is made for these shapes: reshape, or lower the model again"
        )
    number = type(array) in (bool, int, float) and (
        wanted.kind == "f" or (type(array) is not float and wanted.type(array) == array)
    )
    if given.dtype != wanted and not number and not (given.dtype.kind == "f" and wanted.kind == "f"):
        raise InputError(
            f"{tensor.role} {tensor.name} has dtype {given.dtype}, expected {wanted}; "
            f"convert it with .astype({str(wanted)!r})"
        )
    return given.astype(wanted, copy=False)
