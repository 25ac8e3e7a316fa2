"""Views, copies and new tensors. Views cost neither memory nor time.

`reshape`, `flatten` and `contiguous` copy where the strides ask for it; capture then records them with an
output of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchedge.graphs.footprints import Footprint
from torchedge.ops import strides
from torchedge.ops.kernels import kernel
from torchedge.ops.specs import EVERY, Call, LoadClass, Work, no_flops, spec
from torchedge.ops.strides import Sizes


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


_free = partial(spec, work=Work.NONE, flops=no_flops, autocast="keep")
_view = partial(_free, load=LoadClass.FREE, view=True)
_reshaped = partial(_view, strides=strides.reshaped)
_part = partial(_view, strides=strides.unchanged)


def written_by_mask(call: Call) -> Footprint | None:
    """What is written where a mask says keeps the mask: its number of places is unknown without values."""
    masks = [
        slot for slot, shape in enumerate(call.ins) if shape is not None and call.in_dtype(slot) == "bool"
    ]
    return kernel(call, [slot for slot in masks if slot]) if any(masks) else None


_copy = partial(spec, work=Work.COPY, flops=no_flops)
_join = partial(_copy, work=Work.JOIN, autocast="join", strides=strides.as_image)
_new = partial(_free, stops=EVERY)

OPS = (
    _reshaped("view", "input size", "view_as _unsafe_view alias lift_fresh"),
    _reshaped("reshape", "input shape", "reshape_as _reshape_alias"),
    _reshaped("flatten", "input start_dim end_dim", "ravel unflatten"),
    _reshaped("squeeze", "input dim"),
    _reshaped("contiguous", "input memory_format"),
    _reshaped("to", "input", "type float half double bfloat16 long int bool type_as"),
    _view("unsqueeze", "input dim", strides=strides.with_new_dimension),
    _view("transpose", "input dim0 dim1", "swapaxes swapdims", strides=strides.exchanged),
    _view("t", "input", "T mT H mH adjoint matrix_H numpy_T", strides=strides.transposed),
    _view("permute", "input dims", strides=strides.reordered),
    _view("movedim", "input source destination", "moveaxis"),
    _view("view_as_real", "input", "view_as_complex"),
    _view("real", "input", "imag conj"),
    _view("requires_grad", "input", "retain_grad is_leaf", strides=strides.unchanged),
    _view("detach", "input", "data", strides=strides.reshaped, stops=EVERY),
    _view("expand", "input size", "expand_as broadcast_to", strides=strides.expanded),
    _view("getitem", "input index", "__getitem__", strides=strides.indexed),
    _view("select", "input dim index", strides=strides.selected),
    _view("unbind", "input dim", strides=strides.selected),
    _part("slice", "input dim start end step"),
    _part("narrow", "input dim start length"),
    _part(
        "chunk",
        "input chunks dim",
        "split split_with_sizes tensor_split unsafe_chunk unsafe_split hsplit vsplit dsplit",
    ),
    _view("diagonal", "input offset dim1 dim2"),
    _view("as_strided", "input size stride storage_offset"),
    _view("unfold", "input dimension size step"),
    _join("cat", "tensors dim", "concat concatenate", infer=cat_shape),
    _join("stack", "tensors dim", "hstack vstack dstack column_stack"),
    _copy(
        "pad",
        "input pad mode value",
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d _pad_circular",
        strides=strides.as_image,
    ),
    _copy("roll", "input shifts dims", "flip rot90 fliplr flipud"),
    _copy("repeat", "input repeats", "tile repeat_interleave"),
    _copy("expand_copy", "input"),
    _copy("clone", "input", autocast="keep"),
    _copy("to_copy", "input", "_to_copy", autocast="keep", strides=strides.as_input),
    _copy("copy", "input src", "set_"),
    _part("copy_slices", "input view", memory=kernel),
    _part("custom_function"),
    _part("view_again", "view input", stops=(0,), memory=kernel),
    _copy("index", "input indices", gathers=True),
    _copy("index_select", "input dim index", "take", gathers=True),
    _copy("gather", "input dim index", "take_along_dim", gathers=True),
    _copy(
        "index_put",
        "input indices values",
        "scatter scatter_add index_fill __setitem__",
        memory=written_by_mask,
    ),
    _copy(
        "index_reduce", "input dim index source reduce", "index_add index_copy scatter_reduce masked_scatter"
    ),
    _copy("embedding", "weight input padding_idx", gathers=True),
    _copy(
        "embedding_bag",
        "weight input offsets scale_grad_by_freq mode sparse per_sample_weights",
        gathers=True,
    ),
    _copy("one_hot", "input num_classes", stops=EVERY),
    _copy("tril", "input diagonal", "triu"),
    _copy("pixel_shuffle", "input upscale_factor", "pixel_unshuffle channel_shuffle native_channel_shuffle"),
    _copy("im2col", "input kernel_size dilation padding stride", "col2im"),
    spec(
        "fft_fft2",
        targets="fft_ifft2 fft_rfft2 fft_irfft2 fft_fft fft_ifft fft_rfft fft_irfft stft istft",
        work=Work.COPY,
    ),
    _copy("meshgrid", stops=EVERY),
    _new(
        "zeros",
        targets="ones empty full rand randn randint arange linspace logspace eye tensor scalar_tensor "
        "as_tensor zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
        "new_ones new_empty new_full new_tensor randperm hann_window tril_indices triu_indices "
        "empty_strided _assert_async lift",
    ),
    _free("fill", "input value", "zero zero_"),
)
