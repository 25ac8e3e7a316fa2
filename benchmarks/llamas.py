"""Llamas with random weights, and when their tokens come: what the benchmarks of language models share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest.mock import patch

import torch

from torchedge.tracing.vision import prepare_torchvision

BLOCK = 1 << 20


def llama(hidden: int, layers: int, vocabulary: int, length: int, intermediate: int | None = None) -> Any:  # noqa: ANN401 - transformers' class
    """Return a Llama with heads of 64 numbers, the same weights in every process."""
    prepare_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=length,
    )
    with uninitialised():
        return filled(LlamaForCausalLM(config))


def stamps_of(generator: Any, ids: list[int], count: int, **options: Any) -> list[float]:  # noqa: ANN401
    """Continue a prompt by a bundle or its runner; return when it began and when each token was there."""
    stamps = [time.perf_counter()]
    generator.generate(ids, count, stream=lambda _: stamps.append(time.perf_counter()), **options)
    return stamps


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Skip the initialisation of weights, which takes minutes for billions of them."""

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        return tensor

    names = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    with (
        patch.multiple(torch.nn.init, **dict.fromkeys(names, kept)),
        patch.multiple(torch.Tensor, normal_=kept, uniform_=kept),
    ):
        yield


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """Fill the parameters with random numbers that keep activations of the order of one."""
    block = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), BLOCK):
                flat[start : start + BLOCK] = block[: min(BLOCK, flat.numel() - start)]
            parameter.mul_(prod(parameter.shape[1:]) ** -0.5)
    return model.eval()
