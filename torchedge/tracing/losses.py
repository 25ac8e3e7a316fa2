"""The loss a training step is captured with when the user names none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def default_loss(outputs: Any) -> torch.Tensor | None:
    """Return a scalar to differentiate: the model's own loss, else cross entropy on every float output.

    Class scores (N, C) or (N, C, H, W) have classes in dimension 1, token scores (N, S, V) in the last;
    anything else is averaged. Auxiliary outputs (GoogLeNet, Inception, DeepLab) are added up.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor) and own.dim() == 0:
        return own
    scores = [t for t in _scores(outputs) if t.dtype.is_floating_point]
    total: torch.Tensor | None = None
    for tensor in scores:
        part = _cross_entropy(tensor)
        total = part if total is None else total + part
    return total


def _scores(outputs: Any) -> list[torch.Tensor]:
    """The tensors a loss would read: `logits` where there are any, else every tensor."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor) and isinstance(outputs, tuple):
        return [t for t in outputs if isinstance(t, torch.Tensor)]
    if isinstance(logits, torch.Tensor):
        return [logits]
    for name in ("last_hidden_state", "out"):
        head = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(head, torch.Tensor):
            aux = outputs.get("aux") if isinstance(outputs, Mapping) else None
            return [head] if aux is None else [head, aux]
    return [t for t in tree_flatten(outputs)[0] if isinstance(t, torch.Tensor)]


def _cross_entropy(scores: torch.Tensor) -> torch.Tensor:
    rank = scores.dim()
    if rank in (2, 4) and scores.shape[1] > 1:
        target = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        return torch.nn.functional.cross_entropy(scores, target)
    if rank == 3 and scores.shape[2] > 1:
        target = torch.zeros((scores.shape[0] * scores.shape[1],), dtype=torch.int64, device=scores.device)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target)
    return scores.mean()
