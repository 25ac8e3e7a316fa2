"""From the arrays of a model's weights to the bytes that a device keeps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchedge.arrays import Array
from torchedge.errors import IndexRangeError, InputError
from torchedge.lowering.programs import StoredTensor


def check_weight(tensor: StoredTensor, data: Mapping[str, Array]) -> None:
    """Raise InputError where a tensor has no array, or one of another shape, dtype or range of indices."""
    title = f"{tensor.role} {tensor.name}"
    if tensor.name not in data:
        raise InputError(f"{title}: the captured step has no data for it; report this with the model")
    array = data[tensor.name]
    dtypes = (tensor.dtype, "float32") if tensor.dtype == "float16" else (tensor.dtype,)
    if array.shape != tensor.shape or str(array.dtype) not in dtypes:
        raise InputError(
            f"{title} is {array.dtype}{list(array.shape)}; expected {tensor.dtype}"
            f"{list(tensor.shape)}: report this with the model"
        )
    check_indices(tensor, array)


def check_indices(tensor: StoredTensor, values: Array) -> None:
    """Raise IndexRangeError where an array of class labels or indices holds one out of range."""
    bound = tensor.indices
    if bound is None or not values.size or (values.min() >= bound.low and values.max() < bound.high):
        return
    outside = (values < bound.low) | (values >= bound.high)
    if bound.ignored is not None:
        outside &= values != bound.ignored
    if outside.any():
        place = np.unravel_index(int(np.argmax(outside)), values.shape)
        raise IndexRangeError(
            f"{tensor.role} {tensor.name} holds {values[place]} at {[int(n) for n in place]}; expected "
            f"classes or indices {bound}: correct the data"
        )


def pack_weight(tensor: StoredTensor, array: Array) -> Array:
    """Return an array as the device keeps it; single precision is converted where the tensor is in half.

    Raises:
        InputError: half precision cannot hold it.
    """
    with np.errstate(over="ignore"):
        converted = np.asarray(array).astype(tensor.dtype, copy=False)
    if converted.dtype != array.dtype and bool(np.isinf(converted).any() and not np.isinf(array).any()):
        raise InputError(
            f"{tensor.role} {tensor.name} holds {np.abs(array).max():g}, half precision ends at "
            f"{np.finfo(converted.dtype).max:g}; use precision='float32'"
        )
    return np.ascontiguousarray(tensor.layout.pack(converted))
