"""Packed sequences (`torch.nn.utils.rnn`) as dense ones of one length, that of the longest.

Only the data knows how long each is; what a step takes at most is known without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))


def dense(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent operator that takes packed sequences, too: data, sizes, states, weights, options."""

    def run(*args: Any) -> Any:
        if not isinstance(args[3], (list, tuple)):
            return func(*args)
        data, sizes, *rest = args
        steps = sizes.shape[0]
        padded = data.reshape(steps, data.shape[0] // steps, data.shape[1])
        output, *states = func(padded, *rest, False)
        return output.reshape(data.shape[0], output.shape[2]), *states

    return run


class _Sizes(torch.Tensor):
    """How many sequences reach each step; models read the first one."""

    def __getitem__(self, index: Any) -> Any:
        with torch._C.DisableTorchFunction():
            found = super().__getitem__(index)
            return int(found) if found.dim() == 0 else found


def _pack(source: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Return a padded batch step by step, and how many sequences reach each step: all of them."""
    steps_first = source.transpose(0, 1) if batch_first else source.clone()
    steps, batch = steps_first.shape[:2]
    with torch._C.DisableTorchFunction():
        sizes = torch.full((steps,), batch, device="cpu").as_subclass(_Sizes)
    return steps_first.reshape(steps * batch, *source.shape[2:]), sizes


def _pad(data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total_length: int) -> Any:
    """Return the padded batch of packed sequences, and their lengths."""
    steps = sizes.shape[0]
    batch = data.shape[0] // steps
    padded = data.reshape(steps, batch, *data.shape[1:]).clone()
    if total_length > steps:
        behind = [*[0] * (2 * padded.dim() - 1), total_length - steps]
        padded = torch.nn.functional.pad(padded, behind, value=value)
    return padded.transpose(0, 1) if batch_first else padded, torch.full((batch,), steps)


PACKED: dict[str, Callable[..., Any]] = {"_pack_padded_sequence": _pack, "_pad_packed_sequence": _pad}
"""Functions of PyTorch that a capture replaces."""
