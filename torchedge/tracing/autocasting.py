"""The casts that `torch.autocast` inside a model runs on an operator's arguments, as operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchedge.ops import OpSpec
from torchedge.tracing.binding import dtype_of
from torchedge.tracing.recorder import Recorder, TracedTensor

_LOW = (torch.float16, torch.bfloat16)
Cast = Callable[[torch.Tensor, torch.dtype], Any]


def autocast_arguments(rec: Recorder, known: OpSpec, args: Any, kwargs: Any, cast: Cast) -> tuple[Any, Any]:
    """Return the arguments as autocast passes them on; casts of parameters are kept while it is on."""
    low = _low_dtype()
    if known.autocast == "lower" and low is not None:
        wanted, given = low, frozenset((torch.float32, *_LOW))
    elif known.autocast in ("float32", "float32_on_cuda") and low is not None:
        wanted, given = torch.float32, frozenset(_LOW)
    else:
        return args, kwargs

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            dtype = dtype_of(item)
            return item if dtype is wanted or dtype not in given else _cast_once(rec, item, wanted, cast)
        if type(item) in (tuple, list):
            return type(item)([convert(i) for i in item])
        return item

    return tuple([convert(a) for a in args]), {k: convert(v) for k, v in kwargs.items()}


def _cast_once(rec: Recorder, tensor: torch.Tensor, dtype: torch.dtype, cast: Cast) -> Any:
    if type(tensor) is TracedTensor:
        return cast(tensor, dtype)
    key = (id(tensor), dtype)
    if key not in rec.casts:
        rec.casts[key] = cast(tensor, dtype)
    return rec.casts[key]


def _low_dtype() -> torch.dtype | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None
