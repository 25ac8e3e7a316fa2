"""Copies of PyTorch's tensors on the device, made again only when the tensor has changed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.runtime.tensors import allocate_tensor
from torchedge.runtime.transfers import Transfers, memory_order
from torchedge.textures.layouts import Layout

_ROW = 1021
"""Words that a fingerprint keeps apart; a prime, so that rows of tensors that change places do not cancel."""

_Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy on the device, and the tensor's version and fingerprint when it was made."""

    owner: weakref.ref[torch.Tensor]
    memory: Any
    nbytes: int
    version: int
    mark: int


class Residents:
    """Copies on one device of tensors in main memory; a copy goes when its tensor does.

    A copy is as its tensor when the version counter is where it was, and a fingerprint of the data too:
    writing through `tensor.data` does not move the counter.
    """

    def __init__(self, context: DeviceContext, transfers: Transfers) -> None:
        self._context, self._transfers = context, transfers
        self._copies: dict[_Key, dict[Layout, _Copy]] = {}
        self.uploads = 0

    def memory(self, tensor: torch.Tensor, stored: StoredTensor) -> Any:
        """Return the memory that holds a tensor in the layout of `stored`, copying it there if need be.

        Raises:
            DeviceMemoryError: the device has too little.
        """
        copies = self._copies.setdefault(_key(tensor), {})
        copy = copies.get(stored.layout)
        version = -1 if tensor.is_inference() else tensor._version
        if copy is not None and copy.owner() is not None:
            if copy.version == version and copy.mark == fingerprint(tensor):
                return copy.memory
        else:
            memory = allocate_tensor(self._context, stored).memory
            owner = weakref.ref(tensor, self._forgetting(_key(tensor)))
            copy = copies[stored.layout] = _Copy(owner, memory, stored.nbytes, version, 0)
        self._transfers.to_device(tensor, stored.layout, copy.memory)
        copy.version, copy.mark = version, fingerprint(tensor)
        self.uploads += 1
        return copy.memory

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """Return the layout of which a tensor has a copy already, the first if several."""
        return next(iter(self._copies.get(_key(tensor), ())), None)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(copy.nbytes for copies in list(self._copies.values()) for copy in copies.values())

    def _forgetting(self, key: _Key) -> Any:
        """Return what drops the copies of a tensor that is gone; its memory may be another's by then."""

        def forget(owner: weakref.ref[torch.Tensor]) -> None:
            left = {k: c for k, c in self._copies.get(key, {}).items() if c.owner is not owner}
            if left:
                self._copies[key] = left
            else:
                self._copies.pop(key, None)

        return forget


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes with the data: sums of 64-bit words by their place modulo a prime."""
    plain = tensor.detach().resolve_neg()
    raw = plain.permute(memory_order(plain)).contiguous().reshape(-1).view(torch.uint8).numpy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    whole = words.size // _ROW * _ROW
    sums = words[:whole].reshape(-1, _ROW).sum(0, dtype=np.uint64)
    return hash((sums.tobytes(), words[whole:].tobytes(), raw[8 * words.size :].tobytes()))


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
