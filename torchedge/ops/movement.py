"""Operators that copy elements from one place to another without computing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchedge.ops.specs import Call, Sizes, keep, no_flops, spec


def cat_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """Shapes agree but along `dim`, where sizes add up; empty 1-D tensors do not count."""
    shapes = [s for s in ins if s is not None and s != (0,)]
    dim = attrs.get("dim", 0)
    if not shapes or not isinstance(dim, int):
        return None
    first = shapes[0]
    dim = dim % len(first)
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        return None
    return (*first[:dim], sum([s[dim] for s in shapes]), *first[dim + 1 :])


def index_saves(call: Call) -> tuple[int, ...]:
    """The index tensors (inputs from 1 on)."""
    return tuple(range(1, len(call.ins)))


_copy = partial(spec, flops=no_flops, backward_flops=0.0)

OPS = (
    _copy("cat", "tensors dim", "concat concatenate", infer=cat_shape, grads=("view",)),
    _copy("stack", "tensors dim", "hstack vstack dstack column_stack", grads=("view",)),
    _copy(
        "pad",
        "input pad mode value",
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d _pad_circular",
    ),
    _copy("roll", "input shifts dims", "flip rot90 fliplr flipud"),
    _copy("repeat", "input repeats", "tile repeat_interleave"),
    _copy("expand_copy", "input"),
    _copy("clone", "input", grads=("pass",), autocast="keep"),
    _copy("to_copy", "input", "_to_copy", autocast="keep"),
    _copy("copy", "input src", "set_", grads=("none", "pass")),
    _copy("index", "input indices", "take_along_dim", saves=index_saves, grads=("new", "none"), gathers=True),
    _copy(
        "index_select", "input dim index", "gather take", saves=keep(1), grads=("new", "none"), gathers=True
    ),
    _copy(
        "index_put",
        "input indices values",
        "scatter scatter_add index_add index_copy index_fill masked_scatter scatter_reduce __setitem__",
        saves=index_saves,
        grads=("pass", "none", "new"),
    ),
    _copy("embedding", "weight input padding_idx", saves=keep(1), grads=("new", "none"), gathers=True),
    _copy("one_hot", "input num_classes", grads=("none",)),
    _copy("tril", "input diagonal", "triu"),
    _copy("pixel_shuffle", "input upscale_factor", "pixel_unshuffle channel_shuffle native_channel_shuffle"),
    _copy("im2col", "input kernel_size dilation padding stride", "col2im"),
    spec("fft_fft2", targets="fft_ifft2 fft_rfft2 fft_irfft2 fft_fft fft_ifft fft_rfft fft_irfft stft istft"),
    _copy("meshgrid", grads=("none",)),
)
