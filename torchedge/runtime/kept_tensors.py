"""Tensors that stay on the device between programs, and what stands for them in PyTorch meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import download
from torchedge.runtime.tensors import DeviceTensor, allocate_tensor
from torchedge.runtime.transposing import transposed

_ATTRIBUTE = "torchedge_memory"


class KeptTensor:
    """A tensor in device memory; when nobody refers to it any more, the memory serves the next one.

    stored: its shape, dtype and layout. memory: the buffer or image. free: where the memory goes back to.
    """

    __slots__ = ("_free", "memory", "stored")

    def __init__(self, stored: StoredTensor, memory: Any, free: list[Any]) -> None:
        self.stored, self.memory, self._free = stored, memory, free

    def __del__(self) -> None:
        self._free.append(self.memory)


class MemoryPool:
    """Memory of a program's results, taken anew for each run and given back by `KeptTensor`."""

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self._free: dict[str, list[Any]] = {}
        self.nbytes = 0

    def take(self, stored: StoredTensor) -> KeptTensor:
        """Return memory for a tensor; raises DeviceMemoryError where there is too little."""
        free = self._free.setdefault(stored.name, [])
        if free:
            return KeptTensor(stored, free.pop(), free)
        memory = allocate_tensor(self._context, stored).memory
        self.nbytes += stored.nbytes
        return KeptTensor(stored, memory, free)


def stand_in(kept: KeptTensor) -> torch.Tensor:
    """Return a tensor without data for autograd to save; the device's memory lives as long as it does."""
    dtype = getattr(torch, kept.stored.dtype)
    tensor = torch.empty(kept.stored.shape, dtype=dtype, device="meta")
    setattr(tensor, _ATTRIBUTE, kept)
    return tensor


def kept_behind(tensor: torch.Tensor) -> KeptTensor | None:
    """Return what `stand_in` made a tensor for; None for any other tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


def to_host(
    context: DeviceContext, queue: Any, kept: KeptTensor, form: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy a tensor from the device, with the strides of `form`, by default contiguous."""
    stored, layout = kept.stored, kept.stored.layout
    order: list[int] = list(range(len(stored.shape)))
    if form is not None:
        strides = form.stride()
        order.sort(key=lambda d: (stored.shape[d] == 1, -strides[d]))
    if layout.storage == "buffer":
        held = torch.empty(layout.sizes(stored.shape), dtype=getattr(torch, stored.dtype))
        download(context, queue, kept.memory, held.numpy().reshape(-1))
        held = transposed(held, [layout.order.index(d) for d in order])
    else:
        read = torch.from_numpy(DeviceTensor(stored, kept.memory).read(context, queue))
        held = transposed(read, order)
    tensor = held.permute(sorted(range(held.dim()), key=order.__getitem__))
    if form is None or _same_strides(tensor, form):
        return tensor
    return torch.empty_strided(tensor.shape, form.stride(), dtype=tensor.dtype).copy_(tensor)


def _same_strides(tensor: torch.Tensor, form: torch.Tensor) -> bool:
    strides = zip(tensor.stride(), form.stride(), tensor.shape, strict=True)
    return all(a == b or n == 1 for a, b, n in strides)
