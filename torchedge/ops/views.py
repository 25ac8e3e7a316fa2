"""Views: other shapes and strides over the same storage. They cost neither memory nor time.

`reshape`, `flatten` and `contiguous` copy where the strides ask for it; capture then records them with an
output of its own.
"""

from __future__ import annotations

from functools import partial

from torchedge.ops.specs import LoadClass, no_flops, spec

_view = partial(spec, load=LoadClass.FREE, flops=no_flops, view=True, autocast="keep", backward_flops=0.0)
_shared = partial(_view, grads=("view", "none"))
_written = partial(_view, grads=("new", "none"))

OPS = (
    _shared("view", "input size", "view_as _unsafe_view alias lift_fresh"),
    _shared("reshape", "input shape", "reshape_as _reshape_alias"),
    _shared("flatten", "input start_dim end_dim", "ravel unflatten"),
    _shared("transpose", "input dim0 dim1", "swapaxes swapdims t T mT H mH adjoint matrix_H numpy_T"),
    _shared("permute", "input dims", "movedim moveaxis"),
    _shared("squeeze", "input dim", "unsqueeze"),
    _shared("contiguous", "input memory_format"),
    _written("expand", "input size", "expand_as broadcast_to"),
    _written("broadcast_tensors"),
    _written("getitem", "input index", "select slice narrow diagonal as_strided __getitem__"),
    _written(
        "chunk",
        "input chunks dim",
        "split split_with_sizes tensor_split unsafe_chunk unsafe_split hsplit vsplit dsplit",
    ),
    _written("unbind", "input dim"),
    _written("unfold", "input dimension size step"),
    _view("detach", "input", "data", grads=("none",)),
    _shared("view_as_real", "input", "view_as_complex real imag"),
    _shared("to", "input", "type float half double bfloat16 long int bool type_as"),
    _shared("requires_grad", "input", "retain_grad is_leaf"),
)
