"""PyTorch's own decompositions that a capture applies, and those of its fused transformer layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._decomp.decompositions import lstm_impl
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchedge.tracing.grid_sampling import grid_sampler
from torchedge.tracing.torch_calls import words

Table = dict[Any, Callable[..., Any]]


_BEYOND_CORE = words(
    """
    _batch_norm_with_update_functional batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _adaptive_avg_pool2d _log_softmax _softmax adaptive_max_pool2d addmm addmv dist elu embedding gelu
    hardtanh leaky_relu linalg_vector_norm native_group_norm native_layer_norm repeat
    """
)
_RANDOM = words(
    "bernoulli empty_like exponential native_dropout normal normal_functional rand_like randn_like uniform"
)
"""They become `random_uniform` (see `random_numbers`)."""


def decompositions(keep: Collection[str] = ()) -> Table:
    """Return PyTorch's table (core ATen and a little more) without the operators that are not decomposed.

    keep: ATen base names, such as "native_layer_norm".
    """
    return dict(_table(frozenset(keep)))


@cache
def _table(keep: frozenset[str]) -> Table:
    whole = keep | _RANDOM
    beyond = {op: rule for op, rule in decomposition_table.items() if base_name(op) in _BEYOND_CORE}
    table = {**core_aten_decompositions(), **beyond, **_OWN}
    return {op: rule for op, rule in table.items() if base_name(op) not in whole}


class UnrolledProjections(TorchFunctionMode):
    """Run LSTMs with projections, for which ONNX has no operator, as the steps of their sequence inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of PyTorch."""
        if func is torch.lstm and isinstance(args[1], (tuple, list)):  # not of a packed sequence
            hidden, cell = args[1]
            if hidden.shape[-1] != cell.shape[-1]:
                return lstm_impl(*args)
        return func(*args, **(kwargs or {}))


def base_name(op: Any) -> str:
    """Return the name of an ATen operator without namespace and overload."""
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else op.name()
    return str(name).split("::")[-1]


def _split_with_sizes(source: torch.Tensor, split_sizes: list[int], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(torch.ops.aten.slice.Tensor(source, dim, start, start + size))
        start += size
    return parts


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


# At NaN PyTorch's decompositions of the next ones differ from its kernels, or they overflow before those do.


def _shrink_backward(grad: torch.Tensor, source: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where((source < -lambd) | (source > lambd), grad, 0.0)


def _hardtanh_backward(
    grad: torch.Tensor, source: torch.Tensor, min_val: float, max_val: float
) -> torch.Tensor:
    wide = _single(source)  # a bound may not be a number in half precision
    return torch.where((wide > min_val) & (wide < max_val), grad, 0.0)


def _elu_backward(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, source: torch.Tensor
) -> torch.Tensor:
    """Follow the exponential unless the operand is positive; source: the operand, or elu's result."""
    g, x = _single(grad), _single(source)
    power = x + alpha * scale if is_result else alpha * scale * torch.exp(x * input_scale)
    return torch.where(x > 0, g * scale, g * input_scale * power).to(grad.dtype)


def _hardswish_backward(grad: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    g, x = _single(grad), _single(source)
    inside = torch.where(x >= 3, g, g * (x / 3 + 0.5))
    return torch.where(x <= -3, 0.0, inside).to(grad.dtype)


def _sigmoid_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (_single(grad) * (1 - _single(y)) * _single(y)).to(grad.dtype)


def _searchsorted(
    sequence: torch.Tensor,
    source: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the elements of the sorted sequence below each element; NaN is above all."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    value = source if isinstance(source, torch.Tensor) else torch.full((), source, device=sequence.device)
    if sequence.dim() > 1:
        sequence = sequence.unsqueeze(-2)
    value = value.unsqueeze(-1)
    above = sequence > value if right or side == "right" else sequence >= value
    return above.logical_not().sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _kthvalue(
    source: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if not source.dim():
        return source.clone(), torch.zeros_like(source, dtype=torch.int64)
    values, places = [part.narrow(dim, k - 1, 1) for part in source.topk(k, dim, largest=False)]
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median(source: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower of two middle elements and its position; NaN if any element is NaN."""
    if not source.dim():
        return source.clone(), torch.zeros_like(source, dtype=torch.int64)
    value, place = _kthvalue(source, (source.shape[dim] + 1) // 2, dim, keepdim)
    if not source.is_floating_point():
        return value, place
    unknown = source.isnan().to(torch.int32)
    has_nan = unknown.amax(dim, keepdim) > 0
    return torch.where(has_nan, math.nan, value), torch.where(has_nan, unknown.argmax(dim, keepdim), place)


def _put(
    source: torch.Tensor, index: torch.Tensor, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    flat = source.reshape(-1).index_put((index.reshape(-1),), values.reshape(-1), accumulate)
    return flat.reshape(source.shape)


def _addbmm(
    source: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute one product over the inner dimension of all matrices."""
    rows = batch1.transpose(0, 1).flatten(1)
    return torch.addmm(source, rows, batch2.flatten(0, 1), beta=beta, alpha=alpha)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None = None) -> torch.Tensor:
    distances: torch.Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
    return distances


def _cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """Sum gradient · sign · (difference / distance)^(p - 1) over all points of x2."""
    difference, distance = x1.unsqueeze(-2) - x2.unsqueeze(-3), distances.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(difference.sum(-2))
    sign = torch.where(difference.isnan(), difference, difference.sign())
    if p == 1:
        slope = sign
    elif p == math.inf:
        slope = torch.where(difference.abs() == distance, sign, 0.0 * sign)
    else:
        share = (difference.abs() / distance) ** (p - 1) * sign
        slope = torch.where((distance == 0) | (difference == 0) if p < 1 else distance == 0, 0.0, share)
    return (grad.unsqueeze(-1) * slope).sum(-2)


def _gelu(source: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute the tanh form as x · sigmoid(2 i): 1 + tanh(i) is not 0 where a driver's tanh is 1 - 6e-8."""
    if approximate != "tanh":
        plain: torch.Tensor = decomposition_table[_ATEN.gelu.default](source)
        return plain
    x = _single(source)
    return (x * torch.sigmoid(2 * _inner(x))).to(source.dtype)


def _gelu_backward(grad: torch.Tensor, source: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate != "tanh":
        plain: torch.Tensor = decomposition_table[_ATEN.gelu_backward.default](grad, source)
        return plain
    x = _single(source)
    share, slope = torch.sigmoid(2 * _inner(x)), 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    change = share * torch.sigmoid(-2 * _inner(x))
    return (_single(grad) * (share + x * change * slope)).to(source.dtype)


def _inner(x: torch.Tensor) -> torch.Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))


def _single(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _smooth_l1_loss_backward(
    grad: torch.Tensor, source: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """Compute NaN where the difference is NaN, as PyTorch's kernel does and its decomposition does not."""
    difference = source - target
    scaled = grad / source.numel() if reduction == 1 else grad
    inside = scaled * difference / beta if beta else scaled * difference
    return torch.where(difference <= -beta, -scaled, torch.where(difference >= beta, scaled, inside))


_ATEN = torch.ops.aten


def _trilinear(
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Return the sum over `sumdim` of a product of three tensors: nn.Bilinear's operator."""
    factors = []
    for factor, places in ((first, expand1), (second, expand2), (third, expand3)):
        for place in places:
            factor = factor.unsqueeze(place)
        factors.append(factor)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(sumdim) if sumdim else product


_OWN: Table = {
    _ATEN._trilinear.default: _trilinear,
    _ATEN.addbmm.default: _addbmm,
    _ATEN._cdist_backward.default: _cdist_backward,
    _ATEN._cdist_forward.default: _cdist,
    _ATEN._weight_norm_interface_backward.default: _ATEN._weight_norm_differentiable_backward.default,
    _ATEN.bucketize.Scalar: lambda source, sequence, **options: _searchsorted(sequence, source, **options),
    _ATEN.bucketize.Tensor: lambda source, sequence, **options: _searchsorted(sequence, source, **options),
    _ATEN.copy.default: lambda old, new, *options: new.to(old.dtype).expand(old.shape),
    _ATEN.elu_backward.default: _elu_backward,
    _ATEN.gelu.default: _gelu,
    _ATEN.gelu_backward.default: _gelu_backward,
    _ATEN.grid_sampler_2d.default: grid_sampler,
    _ATEN.grid_sampler_3d.default: grid_sampler,
    _ATEN.hardshrink_backward.default: _shrink_backward,
    _ATEN.hardswish_backward.default: _hardswish_backward,
    _ATEN.hardtanh_backward.default: _hardtanh_backward,
    _ATEN.kthvalue.default: _kthvalue,
    _ATEN.median.default: lambda source: _median(source.reshape(-1), 0)[0],
    _ATEN.median.dim: _median,
    _ATEN.put.default: _put,
    _ATEN.searchsorted.Scalar: _searchsorted,
    _ATEN.searchsorted.Tensor: _searchsorted,
    _ATEN.select_backward.default: _select_backward,
    _ATEN.sigmoid_backward.default: _sigmoid_backward,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    _ATEN.softshrink_backward.default: _shrink_backward,
    _ATEN.split_with_sizes.default: _split_with_sizes,
}
"""Operators for which PyTorch has no form, or one of masks, lookups and repeated reads: slower kernels."""


Tensor = torch.Tensor


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Compute `aten._transformer_encoder_layer_fwd`; src: (N, L, E)."""

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    first, second = [
        partial(F.layer_norm, normalized_shape=[embed_dim], weight=weight, bias=bias, eps=eps)
        for weight, bias in ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))
    ]
    if norm_first:
        src = src + attend(first(src))
        return src + feed(second(src))
    src = first(src + attend(src))
    return second(src + feed(src))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `aten._native_multi_head_attention`; query, key and value: (N, L, E).

    mask_type: 0 for a mask (L, L), 1 for one of keys (N, L), 2 for one of both; True masks a position.
    """
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = [F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in parts]
    scores = (q / math.sqrt(embed_dim // num_head)) @ k.transpose(-2, -1)
    if mask is not None:
        wide = mask[:, None, None, :] if mask_type == 1 else mask
        scores = scores.masked_fill(wide.to(torch.bool), -math.inf)
    weights = scores.softmax(-1)
    out = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


FUSED_LAYERS = {
    torch.ops.aten._native_multi_head_attention.default: attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
}
"""PyTorch's fast paths of transformer layers in eval mode, decomposed into the operators that they fuse."""
