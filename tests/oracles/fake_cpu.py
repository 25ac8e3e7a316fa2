"""The oracle's loop on fake CPU tensors: autocast knows them, and leaves meta tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles.eager_memory import OracleStep, run_training
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


def run_training_on_fake_cpu(
    model: torch.nn.Module,
    feed: tuple[tuple[Any, ...], dict[str, Any]],
    criterion: Callable[[Any], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    **loop: Any,
) -> OracleStep:
    """Run the loop with a meta model whose parameters become fake CPU tensors, and put the model back."""
    saved = [(table, dict(table)) for m in model.modules() for table in (m._parameters, m._buffers)]
    seen: dict[int, torch.Tensor] = {}
    try:
        with FakeTensorMode():
            for table, old in saved:
                table.update({k: seen.setdefault(id(t), _on_cpu(t)) for k, t in old.items() if t is not None})
            fed = tree_map(
                lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, torch.Tensor) else t, feed
            )
            return run_training(model, lambda: fed, criterion, make_optimizer, **loop)
    finally:
        for table, old in saved:
            table.update(old)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return (
        torch.nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fresh
    )
