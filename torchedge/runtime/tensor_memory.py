"""PyTorch's tensors in the memory of a device: results that autograd keeps, and copies of weights.

`TensorMemory` copies a tensor when it has changed, and transposes dimensions on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.lowering.programs import StoredTensor
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import Transposer, download, upload
from torchedge.runtime.memory import DeviceMemory, DeviceTensor
from torchedge.textures.layouts import Layout

_ATTRIBUTE = "torchedge_memory"
_ROWS = (1021, 1019)
"""Words that a fingerprint keeps apart: primes, so that parts of tensors that change places do not cancel."""
_FEW = 1 << 15
"""Bytes that are hashed faster than summed."""
_Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class KeptTensor:
    """A result in device memory; when its last reference goes, the memory returns to its pool.

    stored: its shape, dtype and layout. memory: the buffer or image.
    """

    __slots__ = ("_free", "memory", "stored")

    def __init__(self, stored: StoredTensor, memory: Any, free: list[Any]) -> None:
        self.stored, self.memory, self._free = stored, memory, free

    def __del__(self) -> None:
        self._free.append(self.memory)

    def stand_in(self) -> torch.Tensor:
        """Return a tensor without data for autograd to save; the memory lives as long as it does."""
        dtype = getattr(torch, self.stored.dtype)
        tensor = torch.empty(self.stored.shape, dtype=dtype, device="meta")
        setattr(tensor, _ATTRIBUTE, self)
        return tensor


def kept_behind(tensor: torch.Tensor) -> KeptTensor | None:
    """Return the result for which a tensor stands in; None for any other tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


class ResultPool:
    """Memory of a program's results: taken for each run, and returned when a `KeptTensor` goes."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._free: dict[str, list[Any]] = {}
        self.nbytes = 0

    def take(self, stored: StoredTensor) -> KeptTensor:
        """Return memory for a result; raises DeviceMemoryError where there is too little."""
        free = self._free.setdefault(stored.name, [])
        if free:
            return KeptTensor(stored, free.pop(), free)
        memory = self._memory.allocate(stored)
        self.nbytes += stored.nbytes
        return KeptTensor(stored, memory, free)


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy on the device, and the tensor's version and fingerprint at the time of the copy."""

    owner: weakref.ref[torch.Tensor]
    memory: Any
    nbytes: int
    version: int
    mark: int


class TensorMemory(DeviceMemory):
    """The memory of one device, with copies of PyTorch's tensors.

    Copies to the device are done after `settle`, as are those to the host that are asked for `later`.
    """

    def __init__(self, context: DeviceContext, queue: Any) -> None:
        super().__init__(context, queue)
        self._transposer = Transposer(context, queue)
        self._copies: dict[_Key, dict[Layout, _Copy]] = {}
        self.uploads = 0

    def to_device(self, tensor: torch.Tensor, layout: Layout, memory: Any) -> None:
        """Fill device memory with a tensor in a layout; its dimensions are transposed on the device."""
        plain = tensor.detach().resolve_neg()
        if layout.storage != "buffer":
            upload(self.context, self.queue, memory, layout.pack(plain.numpy()), self._pending)
            return
        order = memory_order(plain)
        dense = plain.permute(order).contiguous()
        sizes = transposition(plain.shape, order, layout.order)
        if sizes is None:
            dense, sizes = plain.permute(layout.order).contiguous(), ()
        target = self._transposer.staging(dense.nbytes) if sizes else memory
        upload(self.context, self.queue, target, dense.numpy().reshape(-1), self._pending)
        if sizes:
            self._transposer.transpose(target, memory, sizes, dense.element_size())

    def to_host(
        self, stored: StoredTensor, memory: Any, form: torch.Tensor, *, later: bool = False
    ) -> torch.Tensor:
        """Return the content of device memory as a new tensor with the strides of `form`."""
        layout, shape, dtype = stored.layout, stored.shape, getattr(torch, stored.dtype)
        if layout.storage == "buffer":
            tensor = self._dense(layout, shape, dtype, memory, memory_order(form))
        else:
            tensor = torch.from_numpy(self.read(DeviceTensor(stored, memory)))
        if not (later and _lies_so(tensor, form.stride())):
            self.settle()
        return with_strides(tensor, form.stride())

    def _dense(
        self, layout: Layout, shape: Sequence[int], dtype: torch.dtype, memory: Any, order: Sequence[int]
    ) -> torch.Tensor:
        """Return the content of a buffer as a tensor, its dimensions in an order of memory if possible."""
        sizes = transposition(shape, layout.order, order)
        if sizes is None:
            order, sizes = layout.order, ()
        dense = torch.empty([shape[d] for d in order], dtype=dtype)
        source = memory
        if sizes:
            source = self._transposer.staging(dense.nbytes)
            self._transposer.transpose(memory, source, sizes, dense.element_size())
        download(self.context, self.queue, source, dense.numpy().reshape(-1), self._pending)
        return dense.permute(sorted(range(dense.dim()), key=list(order).__getitem__))

    def copy_of(self, tensor: torch.Tensor, stored: StoredTensor) -> Any:
        """Return the memory of a tensor's copy in the layout of `stored`; copies it where it has changed.

        Every in-place operation of PyTorch moves the tensor's version counter. Writes through `tensor.data`
        or numpy do not: `fingerprint` detects those.
        Raises DeviceMemoryError: the device has too little.
        """
        copies = self._copies.setdefault(_key(tensor), {})
        copy = copies.get(stored.layout)
        version = -1 if tensor.is_inference() else tensor._version
        if copy is not None and copy.owner() is not None:
            if copy.version == version and copy.mark == fingerprint(tensor):
                return copy.memory
        else:
            owner = weakref.ref(tensor, partial(self._forget, _key(tensor)))
            copy = copies[stored.layout] = _Copy(owner, self.allocate(stored), stored.nbytes, version, 0)
        self.to_device(tensor, stored.layout, copy.memory)
        copy.version, copy.mark = version, fingerprint(tensor)
        self.uploads += 1
        return copy.memory

    def layout_of(self, tensor: torch.Tensor) -> Layout | None:
        """Return the layout of a tensor's copy, the first if several; None without a copy."""
        return next(iter(self._copies.get(_key(tensor), ())), None)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of PyTorch's tensors."""
        return sum(copy.nbytes for copies in list(self._copies.values()) for copy in copies.values())

    def _forget(self, key: _Key, owner: weakref.ref[torch.Tensor]) -> None:
        """Drop the copies of a tensor that is gone, not of a later one there."""
        left = {k: c for k, c in self._copies.get(key, {}).items() if c.owner is not owner}
        if left:
            self._copies[key] = left
        else:
            self._copies.pop(key, None)


_OF_NUMPY = (torch.float16, torch.float32, torch.float64)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes with the data, all of which is read, as fast as memory allows."""
    return fingerprint_of(bytes_of(tensor))


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's bytes in memory; a copy of them where its elements are not in order there."""
    plain = tensor.detach().resolve_neg()
    if plain.dtype.is_floating_point and plain.dtype not in _OF_NUMPY:
        plain = plain.view(torch.int16 if plain.itemsize == 2 else torch.uint8)
    if not plain.is_contiguous():
        plain = plain.permute(memory_order(plain)).contiguous()
    return plain.numpy().reshape(-1).view(np.uint8)


def fingerprint_of(raw: npt.NDArray[np.uint8]) -> int:
    """Return the fingerprint of bytes: a hash of few ones; of many, one of sums.

    Those are sums of 64-bit words by their place modulo two primes. A change goes unseen only if every
    changed word shares both of its sums with others that change by the opposite amounts: four words at least.
    """
    if raw.size <= _FEW:
        return hash(raw.tobytes())
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    parts = [raw[8 * words.size :].tobytes()]
    for row in _ROWS:
        whole = words.size // row * row
        parts += [words[:whole].reshape(-1, row).sum(0, dtype=np.uint64).tobytes(), words[whole:].tobytes()]
    return hash(tuple(parts))


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor with other strides that is no view: over the same storage where nothing moves."""
    if not _lies_so(tensor, strides):
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    if not tensor._is_view() and tensor.stride() == tuple(strides):
        return tensor
    return over_storage(tensor, (tuple(tensor.shape), tuple(strides), 0))


def _lies_so(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether strides address a tensor's elements where they are."""
    pairs = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return not tensor.numel() or all(a == b or n == 1 for a, b, n in pairs)


def over_storage(tensor: torch.Tensor, view: tuple[tuple[int, ...], tuple[int, ...], int]) -> torch.Tensor:
    """Return a tensor of a size, strides and further offset in another's storage, but no view of it.

    Autograd lets nothing write to a view that a function of its own returns.
    """
    size, stride, offset = view
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, size, stride)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost to the innermost one in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.shape[d] == 1, -strides[d])))


def transposition(
    shape: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> tuple[int, int, int, int] | tuple[()] | None:
    """Return (N, A, B, C) where one order of memory is (N, A, B, C) and the other (N, C, B, A).

    Dimensions that stay together count as one. An empty tuple: both orders are the same. None: they differ in
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
