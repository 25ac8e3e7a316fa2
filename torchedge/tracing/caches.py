"""Caches of a fixed length that models of transformers write keys and values to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchedge.errors import CaptureError, needed
from torchedge.tracing.vision import prepare_torchvision

TOLERANCE = 1e-3
"""Largest difference of logits, over the largest of them."""


def cache_class() -> type[Any]:
    """Return the class of caches; raises MissingExtraError where transformers is not installed."""
    prepare_torchvision()
    with needed("transformers", purpose="exporting a language model"):
        from transformers import Cache

    class Fixed(Cache):  # type: ignore[misc, unused-ignore]
        """Keys and values of every layer: a call writes its own at `places`, and reads those `within`.

        A layer that is not `held` keeps nothing. written: what a call wrote, by layer. seen: the number of
        tokens before the call, for models that ask for it.
        """

        def __init__(
            self,
            places: torch.Tensor | None = None,
            held: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
            seen: int | torch.Tensor = 0,
            within: int | None = None,
        ) -> None:
            self.layers: list[Any] = []
            self.places, self.held, self.seen, self.within = places, held or {}, seen, within
            self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.written[layer_idx] = key_states, value_states
            if layer_idx not in self.held:
                return key_states, value_states
            assert self.places is not None
            for cache, new in zip(self.held[layer_idx], (key_states, value_states), strict=True):
                cache.index_copy_(2, self.places, new.to(cache.dtype))
            keys, values = (cache[:, :, : self.within] for cache in self.held[layer_idx])
            return keys.to(key_states.dtype), values.to(value_states.dtype)

        def get_seq_length(self, *_: Any, **__: Any) -> Any:
            return self.seen

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            sizes = [self.within or keys.shape[2] for keys, _ in self.held.values()]
            return (sizes[0] if sizes else 0), 0

    return Fixed


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """Return a mask [texts or 1, 1, T, length] that is added to scores."""
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[:, None]


def check_logits(model: torch.nn.Module, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise CaptureError where logits that a model computes with caches are not the expected ones."""
    error = float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    if not error < TOLERANCE:
        raise CaptureError(
            f"{type(model).__name__} computes other logits with caches of a fixed length than without "
            f"({error:.2g} of the largest): it makes masks or positions of its own; expected a model that "
            "takes both as arguments"
        )
