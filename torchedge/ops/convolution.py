"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.ops.specs import Call, LoadClass, Work, spec
from torchedge.ops.strides import Sizes, as_image


def spread(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return one number for each spatial dimension, as PyTorch reads `stride=2` or `stride=(2,)`."""
    if isinstance(value, int):
        return (value,) * rank
    return tuple(value) * rank if len(value) == 1 and rank > 1 else tuple(value)


def explicit_padding(attrs: Mapping[str, Any], kernel: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding before and after for each spatial dimension; resolves "same" and "valid"."""
    rank = len(kernel)
    padding = attrs.get("padding", 0)
    if padding == "valid":
        return (0,) * rank, (0,) * rank
    if padding == "same":
        dilation = spread(attrs.get("dilation", 1), rank)
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    both = spread(padding, rank)
    return both, both


def conv_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """Output of a convolution: x (N, C, *spatial) or (C, *spatial), w (n, C/g, *kernel) -> (N, n, *out)."""
    x, w = ins[0], ins[1]
    if x is None or w is None:
        return None
    kernel = w[2:]
    rank = len(kernel)
    if len(x) not in (rank + 1, rank + 2):
        return None
    before, after = explicit_padding(attrs, kernel)
    stride, dilation = spread(attrs.get("stride", 1), rank), spread(attrs.get("dilation", 1), rank)
    lead = len(x) - rank
    if x[lead - 1] != w[1] * attrs.get("groups", 1):
        return None
    spatial = tuple(
        [
            (x[lead + i] + before[i] + after[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in range(rank)
        ]
    )
    if min(spatial) <= 0:
        return None
    return (*x[: lead - 1], w[0], *spatial)


def conv_flops(call: Call) -> int:
    """2 · outputs · (channels of a group) · kernel, plus the bias."""
    w = call.ins[1] or ()
    outputs = prod(call.outs[0])
    bias = outputs if len(call.ins) > 2 and call.ins[2] is not None else 0
    return 2 * outputs * prod(w[1:]) + bias


def transposed_flops(call: Call) -> int:
    """2 · inputs · (output channels of a group) · kernel, plus the bias."""
    x, w = call.ins[0] or (), call.ins[1] or ()
    bias = prod(call.outs[0]) if len(call.ins) > 2 and call.ins[2] is not None else 0
    return 2 * prod(x) * prod(w[1:]) + bias


def winograd_workspace(call: Call) -> tuple[int, ...]:
    """Workspace of the weight gradient of a dense 3×3 convolution with stride 1 under non-fused Winograd.

    For F(m×m, 3×3), m the tile: (m+2)² transformed filters C·K and tiles (C+K)·N·⌈OH/m⌉·⌈OW/m⌉ in float32
    (Lavin and Gray 2016; cuDNN 8 on a Jetson TX2).
    """
    tile, weight = call.workspace, call.ins[1]
    if not tile or weight is None or weight[2:] != (3, 3) or not call.need(1):
        return ()
    if any(
        s != 1 for s in (*spread(call.attrs.get("stride", 1), 2), *spread(call.attrs.get("dilation", 1), 2))
    ):
        return ()
    if weight[1] == 1 and call.attrs.get("groups", 1) > 1:
        return ()
    n, *_, height, width = call.outs[0]
    tiles = n * -(-height // tile) * -(-width // tile)
    channels_in = weight[1] * call.attrs.get("groups", 1)
    return (4 * (tile + 2) ** 2 * (weight[1] * weight[0] + (channels_in + weight[0]) * tiles),)


_convolution = partial(
    spec, load=LoadClass.REUSABLE, work=Work.CONVOLUTION, flops=conv_flops, autocast="lower"
)

OPS = (
    _convolution(
        "conv2d",
        "input weight bias stride padding dilation groups",
        "conv1d conv3d",
        infer=conv_shape,
        strides=as_image,
    ),
    _convolution(
        "conv_transpose2d",
        "input weight bias stride padding output_padding groups dilation",
        "conv_transpose1d conv_transpose3d",
        work=Work.TRANSPOSED_CONVOLUTION,
        flops=transposed_flops,
    ),
    _convolution(
        "convolution",
        "input weight bias stride padding dilation transposed output_padding groups",
        "cudnn_convolution mkldnn_convolution",
        strides=as_image,
    ),
)
