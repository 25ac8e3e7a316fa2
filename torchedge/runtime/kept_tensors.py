"""Tensors that stay on the device between programs, and what stands for them in PyTorch meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.runtime.tensors import allocate_tensor

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
