"""Marks of tensors in main memory whose values a device holds: has code written to them since?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchedge.runtime.tensor_memory import fingerprint

_PART = 1 << 15
"""Elements of a tensor that one fingerprint covers."""


class HostMarks:
    """The state of tensors, by name, at the time of construction.

    An in-place operation moves a tensor's version, another `.data` its address. A write through `.data` or
    numpy shows in a fingerprint alone: each call of `changed` takes those of `_PART` elements, in turn.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._places = self._now()
        parts = [
            (name, part)
            for name, tensor in self._tensors.items()
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
            for part in tensor.detach().reshape(-1).split(_PART)
        ]
        self._parts = [(name, part, fingerprint(part)) for name, part in parts if part.numel()]
        self._next = 0

    def changed(self) -> str | None:
        """Return the name of a tensor that was written to, None where none is known to be."""
        now = self._now()
        if now != self._places:
            pairs = zip(self._tensors, now, self._places, strict=True)
            return next(name for name, new, old in pairs if new != old)
        elements = 0
        for _ in range(len(self._parts)):
            name, part, mark = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if fingerprint(part) != mark:
                return name
            elements += part.numel()
            if elements >= _PART:
                break
        return None

    def _now(self) -> list[tuple[int, int]]:
        return [
            (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr())
            for tensor in self._tensors.values()
        ]
