"""Small networks that use activation checkpointing in PyTorch's ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from oracles.networks import Network, _images
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Block(nn.Module):
    """Two convolutions with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Checkpointed(nn.Module):
    """A stem, blocks each in a checkpoint of its own, a head.

    The checkpoint function gets its options (those of `checkpoint`) bound before the model runs.
    """

    def __init__(
        self, reentrant: bool, width: int = 64, depth: int = 4, sequential: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1000)
        self.reentrant, self.sequential = reentrant, sequential
        self.run = partial(checkpoint, use_reentrant=reentrant, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.sequential:
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = self.run(block, x)
        return self.head(x.mean((2, 3)))


class SharedLayer(nn.Module):
    """A layer that several checkpoints share, or one wide layer at the end of a checkpoint."""

    def __init__(self, reentrant: bool, width: int, repeats: int) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(256, 256), nn.Linear(256, width)
        self.reentrant, self.repeats = reentrant, repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for _ in range(self.repeats):
            x = torch.relu(x) if self.repeats > 1 else x
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x.mean(1) if x.dim() > 2 else x


def stores_convolutions(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpointing: convolutions are not computed again."""
    stored = operator is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if stored else CheckpointPolicy.PREFER_RECOMPUTE


def _densenet() -> nn.Module:
    from torchedge.tracing.vision import import_torchvision

    model = import_torchvision().models.densenet121(weights=None, memory_efficient=True)
    for module in model.modules():
        if hasattr(module, "any_requires_grad"):
            module.any_requires_grad = lambda tensors: (
                True
            )  # true of every layer; tracing's tensors do not say so
    return model


def _features(batch: int) -> Any:
    return (torch.empty(batch, 256, device="meta"),), {}


_SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, stores_convolutions)}
CHECKPOINTED: dict[str, Network] = {
    network.name: network
    for network in (
        Network("blocks", lambda: Checkpointed(False), _images(3, 64, 64)),
        Network("blocks-reentrant", lambda: Checkpointed(True), _images(3, 64, 64)),
        Network("blocks-selective", lambda: Checkpointed(False, **_SELECTIVE), _images(3, 64, 64)),
        Network("sequential", lambda: Checkpointed(False, sequential=True), _images(3, 64, 64)),
        Network("sequential-reentrant", lambda: Checkpointed(True, sequential=True), _images(3, 64, 64)),
        Network("shared-layer", lambda: SharedLayer(False, 256, 3), _features),
        Network("shared-layer-reentrant", lambda: SharedLayer(True, 256, 3), _features),
        Network(
            "last-layer",
            lambda: SharedLayer(False, 2048, 1),
            lambda batch: ((torch.empty(batch, 512, 256, device="meta"),), {}),
        ),
        Network("densenet121-efficient", _densenet, _images(3, 224, 224)),
    )
}
