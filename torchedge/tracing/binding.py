"""Helpers of the interceptor: a call's arguments as inputs and attributes, result dtypes, places."""

from __future__ import annotations

from typing import Any

import torch

from torchedge.graphs import FLOATING
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, TracedTensor
from torchedge.tracing.targets import TorchCall

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NO_ATTRIBUTES = frozenset(("out", "device", "pin_memory", "layout"))
_REAL_DEVICES = frozenset(("cuda", "cpu", "mps", "xpu"))


def bind(target: TorchCall, args: Any, kwargs: Any, rec: Recorder) -> tuple[list[int | None], dict[str, Any]]:
    """Split a call's arguments into tensor inputs (indices of values) and named plain attributes."""
    inputs: list[int | None] = []
    attrs: dict[str, Any] = {}
    params, slots = target.params, target.slots
    for position, arg in enumerate(args):
        name = params[position] if position < len(params) else f"arg{position}"
        _place(name, arg, slots, inputs, attrs, rec)
    for name, arg in kwargs.items():
        if name not in _NO_ATTRIBUTES:
            _place(name, arg, slots, inputs, attrs, rec)
    return inputs, attrs


def _place(name: str, arg: Any, slots: frozenset[str], inputs: list[int | None], attrs: dict[str, Any],
           rec: Recorder) -> None:  # fmt: skip
    if isinstance(arg, torch.Tensor):
        inputs.append(rec.index_of(arg))
    elif arg is None:
        if name in slots:
            inputs.append(None)
    elif isinstance(arg, (tuple, list)) and any(isinstance(a, torch.Tensor) for a in arg):
        inputs.extend(rec.index_of(a) for a in arg if isinstance(a, torch.Tensor))
        rest = tuple(a for a in arg if not isinstance(a, torch.Tensor))
        if rest:
            attrs[name] = rest
    elif type(arg) is not torch.device:
        attrs[name] = arg


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return a tensor's dtype without a detour through the tracing mode."""
    return _DTYPES[tensor.dtype_name] if type(tensor) is TracedTensor else tensor.dtype


def common_dtype(tensors: Any, attrs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result where all tensors agree and no scalar promotes it, else None."""
    if not tensors:
        return None
    first = tensors[0]
    name = first.dtype_name if type(first) is TracedTensor else DTYPE_NAMES[first.dtype]
    for tensor in tensors[1:]:
        other = tensor.dtype_name if type(tensor) is TracedTensor else DTYPE_NAMES[tensor.dtype]
        if other != name:
            return None
    dtype = _DTYPES[name]
    if attrs.get("dtype") not in (None, dtype):
        return None
    if name not in FLOATING and any(isinstance(a, float) for a in attrs.values()):
        return None
    return dtype


def to_meta(item: Any, rec: Recorder) -> Any:
    """Replace real tensors by meta tensors and devices by the meta device, through nested containers."""
    if isinstance(item, torch.Tensor):
        return rec.meta_of(item)
    if isinstance(item, torch.device):
        return torch.device("meta")
    if type(item) is str and item.split(":")[0] in _REAL_DEVICES:
        return "meta"
    if type(item) in (tuple, list):
        return type(item)([to_meta(i, rec) for i in item])
    if type(item) is dict:
        return {k: to_meta(v, rec) for k, v in item.items()}
    return item
