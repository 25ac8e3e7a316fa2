"""Copies of PyTorch's tensors to the device and back; dimensions change their order on the device."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import download, upload
from torchedge.opencl.turning import Turner
from torchedge.runtime.tensors import DeviceTensor
from torchedge.textures.layouts import Layout


class Transfers:
    """Moves tensors between main memory and one device; each call returns when the data is there."""

    def __init__(self, context: DeviceContext, queue: Any) -> None:
        self._context, self._queue = context, queue
        self._turner = Turner(context, queue)

    def to_device(self, tensor: torch.Tensor, layout: Layout, memory: Any) -> None:
        """Fill device memory with a tensor, laid out so."""
        plain = tensor.detach().resolve_neg()
        if layout.storage != "buffer":
            upload(self._context, self._queue, memory, layout.pack(plain.numpy()))
            return
        order = memory_order(plain)
        dense = plain.permute(order).contiguous()
        sizes = turn_between(plain.shape, order, layout.order)
        if sizes is None:
            dense, sizes = plain.permute(layout.order).contiguous(), ()
        target = self._turner.staging(dense.nbytes) if sizes else memory
        upload(self._context, self._queue, target, dense.numpy().reshape(-1))
        if sizes:
            self._turner.turn(target, memory, sizes, dense.element_size())

    def to_host(self, stored: StoredTensor, memory: Any, form: torch.Tensor) -> torch.Tensor:
        """Return what device memory holds as a new tensor with the strides of `form`."""
        layout, shape, dtype = stored.layout, stored.shape, getattr(torch, stored.dtype)
        if layout.storage == "buffer":
            tensor = self._dense(layout, shape, dtype, memory, memory_order(form))
        else:
            tensor = torch.from_numpy(DeviceTensor(stored, memory).read(self._context, self._queue))
        if _same_strides(tensor, form):
            return tensor
        return torch.empty_strided(tensor.shape, form.stride(), dtype=dtype).copy_(tensor)

    def _dense(
        self, layout: Layout, shape: Sequence[int], dtype: torch.dtype, memory: Any, order: Sequence[int]
    ) -> torch.Tensor:
        """Return what a buffer holds as a tensor, whose dimensions lie in memory in an order if possible."""
        sizes = turn_between(shape, layout.order, order)
        if sizes is None:
            order, sizes = layout.order, ()
        held = torch.empty([shape[d] for d in order], dtype=dtype)
        source = memory
        if sizes:
            source = self._turner.staging(held.nbytes)
            self._turner.turn(memory, source, sizes, held.element_size())
        download(self._context, self._queue, source, held.numpy().reshape(-1))
        return held.permute(sorted(range(held.dim()), key=list(order).__getitem__))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost to the innermost one in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.shape[d] == 1, -strides[d])))


def turn_between(
    shape: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> tuple[int, int, int, int] | tuple[()] | None:
    """Return (N, A, B, C) where memory in the one order holds those dimensions and in the other (N, C, B, A).

    Dimensions that stay together count as one. An empty tuple: both orders are the same; None: they differ in
    another way.
    """
    first, last = ([d for d in order if shape[d] != 1] for order in (before, after))
    if first == last:
        return ()
    same = 0
    while first[same] == last[same]:
        same += 1
    runs: list[list[int]] = []
    for dim in first[same:]:
        place = last.index(dim)
        if runs and last.index(runs[-1][-1]) == place - 1:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    if len(runs) > 3 or [d for run in reversed(runs) for d in run] != last[same:]:
        return None
    sizes = [prod([shape[d] for d in run]) for run in runs]
    outer, middle, inner = sizes if len(sizes) == 3 else (sizes[0], 1, sizes[1])
    return prod([shape[d] for d in first[:same]]), outer, middle, inner


def _same_strides(tensor: torch.Tensor, form: torch.Tensor) -> bool:
    strides = zip(tensor.stride(), form.stride(), tensor.shape, strict=True)
    return all(a == b or n == 1 for a, b, n in strides)
