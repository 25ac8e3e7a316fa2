"""Marks of tensors in main memory whose values a device holds: has code written to them since?"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch

from torchedge.runtime.tensor_memory import bytes_of, fingerprint_of

_PART = 1 << 17
"""Bytes of a tensor that one fingerprint covers."""
_VERSION = attrgetter("_version")


class HostMarks:
    """The state of tensors, by name, at the time of construction.

    An in-place operation moves a tensor's version, another `.data` its address. A write through `.data` or
    numpy shows in a fingerprint alone: each call of `changed` takes those of `_PART` bytes, in turn.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._counted = {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}
        self._places = self._now()
        whole = [
            (name, bytes_of(tensor))
            for name, tensor in self._tensors.items()
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
        ]
        parts = [(name, raw[at : at + _PART]) for name, raw in whole for at in range(0, raw.size, _PART)]
        self._parts = [(name, part, fingerprint_of(part)) for name, part in parts]
        self._next = 0

    def changed(self) -> str | None:
        """Return the name of a tensor that was written to, None where none is known to be."""
        now = self._now()
        if now != self._places:
            names = [*self._counted, *self._tensors]
            return next(n for n, new, old in zip(names, now, self._places, strict=True) if new != old)
        nbytes = 0
        for _ in range(len(self._parts)):
            name, part, mark = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if fingerprint_of(part) != mark:
                return name
            nbytes += part.size
            if nbytes >= _PART:
                break
        return None

    def _now(self) -> list[int]:
        """Return the versions, then the addresses; tensors of inference mode have no versions."""
        versions = map(_VERSION, self._counted.values())
        return [*versions, *[tensor.data_ptr() for tensor in self._tensors.values()]]
