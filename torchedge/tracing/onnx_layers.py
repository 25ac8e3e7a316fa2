"""ONNX operators that are layers: convolutions, products, pooling, normalisation, resizing, recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torchedge.errors import CaptureError
from torchedge.tracing.onnx_node import Node
from torchedge.tracing.onnx_operators import numbers, operand, tensor_of

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_WHOLE_AVERAGES = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _padded(node: Node, x: Any, kernel: tuple[int, ...], value: float = 0.0) -> tuple[Any, tuple[int, ...]]:
    """Return the input, padded where both sides differ, and the padding left to the operator itself."""
    rank = len(kernel)
    pads = tuple(node.get("pads", (0,) * 2 * rank))
    how = node.get("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        pads = _same(node, x, kernel, how == "SAME_UPPER")
    before, after = pads[:rank], pads[rank:]
    if before == after:
        return x, before
    sides = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return F.pad(x, sides, value=value), (0,) * rank


def _same(node: Node, x: Any, kernel: tuple[int, ...], upper: bool) -> tuple[int, ...]:
    rank = len(kernel)
    strides, dilations = node.get("strides", (1,) * rank), node.get("dilations", (1,) * rank)
    before, after = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return (*before, *after)


def _conv(node: Node, x: Any, w: Any, b: Any = None) -> Any:
    kernel = tuple(w.shape[2:])
    rank = len(kernel)
    x, padding = _padded(node, x, kernel)
    strides, dilations = node.get("strides", (1,) * rank), node.get("dilations", (1,) * rank)
    return _CONVOLUTIONS[rank](x, w, b, strides, padding, dilations, node.get("group", 1))


def _conv_transpose(node: Node, x: Any, w: Any, b: Any = None) -> Any:
    rank = w.dim() - 2
    pads = node.get("pads", (0,) * 2 * rank)
    if tuple(pads[:rank]) != tuple(pads[rank:]) or "output_shape" in node.attributes:
        raise CaptureError(f"{node.name}: a transposed convolution with uneven padding or an output shape")
    ones, zeros = (1,) * rank, (0,) * rank
    return _TRANSPOSED[rank]( 
        x, w, b, node.get("strides", ones), tuple(pads[:rank]), node.get("output_padding", zeros),
        node.get("group", 1), node.get("dilations", ones),
    )  # fmt: skip


def _gemm(node: Node, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    if alpha == 1.0 and (c is None or (beta == 1.0 and c.ndim == 1)):
        return F.linear(a, b if node.get("transB", 0) else b.t(), c)
    product = torch.matmul(a, b.t() if node.get("transB", 0) else b)
    product = product * alpha if alpha != 1.0 else product
    return product if c is None else product + (operand(c) * beta if beta != 1.0 else operand(c))


def _matmul(node: Node, a: Any, b: Any) -> Any:
    return torch.matmul(tensor_of(a), tensor_of(b))


def _max_pool(node: Node, x: Any) -> Any:
    kernel = tuple(node.get("kernel_shape", ()))
    rank, ones = len(kernel), (1,) * len(kernel)
    if len(node.outputs) > 1 and node.outputs[1]:
        raise CaptureError(f"{node.name}: max pooling that returns indices")
    x, padding = _padded(node, x, kernel, float("-inf"))
    return _MAX_POOLS[rank](x, kernel, node.get("strides", ones), padding, node.get("dilations", ones), 
                            bool(node.get("ceil_mode", 0)))  # fmt: skip


def _average_pool(node: Node, x: Any) -> Any:
    kernel = tuple(node.get("kernel_shape", ()))
    rank = len(kernel)
    x, padding = _padded(node, x, kernel)
    ceil, whole = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    return _AVERAGES[rank](x, kernel, node.get("strides", (1,) * rank), padding, ceil, whole)


def _global_average(node: Node, x: Any) -> Any:
    rank = x.dim() - 2
    return _WHOLE_AVERAGES[rank](x, (1,) * rank)


def _global_max(node: Node, x: Any) -> Any:
    return torch.amax(x, tuple(range(2, x.dim())), True)


def _batch_norm(node: Node, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    training = bool(node.get("training_mode", 0))
    made = torch.batch_norm(x, scale, bias, mean, var, training, 0.1, node.get("epsilon", 1e-5), True)
    return (made, mean, var) if len(node.outputs) > 1 else made


def _instance_norm(node: Node, x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(
        x, None, None, tensor_of(scale), tensor_of(bias), True, 0.1, node.get("epsilon", 1e-5)
    )


def _layer_norm(node: Node, x: Any, scale: Any = None, bias: Any = None) -> Any:
    shape = tuple(x.shape[node.get("axis", -1) :])
    weight = None if scale is None else tensor_of(scale)
    return F.layer_norm(
        x, shape, weight, None if bias is None else tensor_of(bias), node.get("epsilon", 1e-5)
    )


def _group_norm(node: Node, x: Any, scale: Any, bias: Any) -> Any:
    return F.group_norm(
        x, node.get("num_groups", 1), tensor_of(scale), tensor_of(bias), node.get("epsilon", 1e-5)
    )


def _rms_norm(node: Node, x: Any, scale: Any) -> Any:
    return F.rms_norm(x, tuple(x.shape[node.get("axis", -1) :]), tensor_of(scale), node.get("epsilon", 1e-5))


def _local_response(node: Node, x: Any) -> Any:
    return F.local_response_norm(
        x, node.get("size", 5), node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    )


def _lp_normalization(node: Node, x: Any) -> Any:
    return F.normalize(x, node.get("p", 2), node.get("axis", -1))


def _resize(node: Node, x: Any, *rest: Any) -> Any:
    """Resize (roi, scales, sizes) and the older Upsample (scales)."""
    given = [r for r in (rest if node.title == "Upsample" else rest[1:]) if r is not None and np.size(r)]
    if not given:
        raise CaptureError(f"{node.name}: a resize without a size")
    last = given[-1]
    spatial = x.dim() - 2
    if np.issubdtype(np.asarray(last).dtype, np.integer):
        size: list[int] = numbers(last, f"the size of {node.name}")[-spatial:]
    else:
        size = [
            int(s * f)
            for s, f in zip(x.shape[2:], np.asarray(last).reshape(-1)[-spatial:].tolist(), strict=True)
        ]
    mode = node.get("mode", "nearest")
    if mode == "nearest":
        return F.interpolate(x, size)
    aligned = node.get("coordinate_transformation_mode", "half_pixel") == "align_corners"
    return F.interpolate(
        x, size, mode="bicubic" if mode == "cubic" else _MODES[spatial], align_corners=aligned
    )


def _recurrent(function: Callable[..., Any], gates: int) -> Callable[..., Any]:
    """LSTM and GRU: one layer, one or two directions, sequence first."""

    def apply(node: Node, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, *states: Any) -> Any:
        if isinstance(lengths, torch.Tensor) or node.get("layout", 0):
            raise CaptureError(f"{node.name}: a recurrent layer with sequence lengths or batch-first layout")
        directions, hidden = w.shape[0], r.shape[2]
        shape = (directions, x.shape[1], hidden)
        weights = []
        for k in range(directions):
            weights += [w[k], r[k]]
            weights += [] if b is None else [b[k, : gates * hidden], b[k, gates * hidden :]]
        count = 2 if gates == 4 else 1
        initial = [
            s if isinstance(s, torch.Tensor) else x.new_zeros(shape) for s in (*states, None, None)[:count]
        ]
        hx: Any = initial if count == 2 else initial[0]
        made = function(x, hx, weights, b is not None, 1, 0.0, False, directions == 2, False)
        steps = made[0].reshape(x.shape[0], x.shape[1], directions, hidden).permute(0, 2, 1, 3)
        return (steps, *made[1:])

    return apply


LAYERS: dict[str, Callable[..., Any]] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _matmul, "MaxPool": _max_pool,
    "AveragePool": _average_pool, "GlobalAveragePool": _global_average, "GlobalMaxPool": _global_max,
    "BatchNormalization": _batch_norm, "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm, "GroupNormalization": _group_norm, "RMSNormalization": _rms_norm,
    "LRN": _local_response, "LpNormalization": _lp_normalization, "Resize": _resize, "Upsample": _resize,
    "LSTM": _recurrent(torch.lstm, 4), "GRU": _recurrent(torch.gru, 3),
}  # fmt: skip
"""ONNX name -> function of the node and its inputs (tensors, known arrays, None for an absent one)."""
