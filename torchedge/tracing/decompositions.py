"""Which of PyTorch's own decompositions a capture applies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

Table = dict[Any, Callable[..., Any]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEYOND_CORE = _names(
    """
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _adaptive_avg_pool2d _log_softmax _softmax adaptive_max_pool2d addmm elu embedding gelu grid_sampler_2d
    hardtanh native_group_norm native_layer_norm
    """
)
_RANDOM = _names(
    "bernoulli empty_like exponential native_dropout normal normal_functional rand_like randn_like uniform"
)
"""They become `random_uniform` (see `random_numbers`)."""


def decompositions(keep: Collection[str] = ()) -> Table:
    """Return PyTorch's table (core ATen and a little more) without what stays whole.

    keep: ATen base names, such as "native_layer_norm".
    """
    return dict(_table(frozenset(keep)))


@cache
def _table(keep: frozenset[str]) -> Table:
    whole = keep | _RANDOM
    beyond = {op: rule for op, rule in decomposition_table.items() if _base_name(op) in _BEYOND_CORE}
    table = {**core_aten_decompositions(), **beyond, **_OWN}
    return {op: rule for op, rule in table.items() if _base_name(op) not in whole}


def _base_name(op: Any) -> str:
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else op.name()
    return str(name).split("::")[-1]


def _split_with_sizes(source: torch.Tensor, split_sizes: list[int], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(torch.ops.aten.slice.Tensor(source, dim, start, start + size))
        start += size
    return parts


def _copy(source: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(source.dtype).expand(source.shape)


def _roll(source: torch.Tensor, shifts: list[int], dims: list[int] = ()) -> torch.Tensor:  # type: ignore[assignment]
    """Exchange two slices a dimension, where PyTorch's own form looks indices up."""
    if not dims:
        return _roll(source.reshape(-1), shifts, [0]).reshape(source.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = source.shape[dim]
        if size and shift % size:
            cut = size - shift % size
            source = torch.cat([source.narrow(dim, cut, size - cut), source.narrow(dim, 0, cut)], dim)
    return source


def _select_backward(grad: torch.Tensor, input_sizes: list[int], dim: int, index: int) -> torch.Tensor:
    size = input_sizes[dim]
    return _padded(grad.unsqueeze(dim), dim, index % size, size)


def _slice_backward(
    grad: torch.Tensor, input_sizes: list[int], dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    first, last, stride = slice(start, end, step).indices(input_sizes[dim])
    if stride == 1:
        return _padded(grad, dim, first, input_sizes[dim])
    zeros = torch.zeros(input_sizes, dtype=grad.dtype, device=grad.device)
    return torch.slice_scatter(zeros, grad, dim, first, last, stride)


def _padded(grad: torch.Tensor, dim: int, before: int, size: int) -> torch.Tensor:
    """Return a gradient with zeros around it along one dimension, `size` long."""
    pad = [0, 0] * grad.dim()
    place = 2 * (grad.dim() - 1 - dim % grad.dim())
    pad[place : place + 2] = [before, size - before - grad.shape[dim]]
    return torch.constant_pad_nd(grad, pad)


def _vector_norm(
    source: torch.Tensor,
    ord: float = 2,
    dim: list[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    source = source if dtype is None else source.to(dtype)
    dims = list(range(source.dim())) if dim is None else dim
    if ord == 2:
        return (source * source).sum(dims, keepdim).sqrt()
    size = source.abs()
    if abs(ord) == math.inf:
        return size.amax(dims, keepdim) if ord > 0 else size.amin(dims, keepdim)
    if ord == 0:
        return (source != 0).to(source.dtype).sum(dims, keepdim)
    return size.sum(dims, keepdim) if ord == 1 else (size**ord).sum(dims, keepdim) ** (1.0 / ord)


_OWN: Table = {
    torch.ops.aten._weight_norm_interface_backward.default: (
        torch.ops.aten._weight_norm_differentiable_backward.default
    ),
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.linalg_vector_norm.default: _vector_norm,
    torch.ops.aten.roll.default: _roll,
    torch.ops.aten.select_backward.default: _select_backward,
    torch.ops.aten.slice_backward.default: _slice_backward,
    torch.ops.aten.split_with_sizes.default: _split_with_sizes,
}
"""Where views and sums say what PyTorch's own form says with lookups, masks or one operator more."""
