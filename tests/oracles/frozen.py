"""Networks with frozen layers whose intermediate tensors are made to require gradients, in each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Frozen(nn.Module):
    """An embedding and blocks of which only the last is trained; `require` sees the embedded tokens."""

    def __init__(self, require: Callable[[torch.Tensor], Any] | None = None, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(depth)]
        )
        self.require = require
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.require is not None:
            self.require(x)
        return self.blocks(x)


def assign(x: torch.Tensor) -> None:
    """Set the attribute, as wav2vec2 does."""
    x.requires_grad = True


def hooked() -> nn.Module:
    """Require gradients in a hook, as `enable_input_require_grads` of transformers does."""
    model = Frozen()
    model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    return model


FROZEN: dict[str, Callable[[], nn.Module]] = {
    "nothing": Frozen,
    "call": lambda: Frozen(lambda x: x.requires_grad_()),
    "assignment": lambda: Frozen(assign),
    "hook": hooked,
    "not wanted": lambda: Frozen(lambda x: x.requires_grad_(False)),
}
