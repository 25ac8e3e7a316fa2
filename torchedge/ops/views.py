"""Views: other shapes and strides over the same storage. They cost neither memory nor time.

`reshape`, `flatten` and `contiguous` copy where the strides ask for it; capture then records them with an output of its own.
"""

from __future__ import annotations

from torchedge.ops.specs import LoadClass, no_flops, spec

_VIEW = {"load": LoadClass.FREE, "flops": no_flops, "view": True, "autocast": "keep", "backward_flops": 0.0}
_SHARED = {**_VIEW, "grads": ("view", "none")}
_WRITTEN = {**_VIEW, "grads": ("new", "none")}

OPS = (
    spec("view", "input size", "view_as _unsafe_view alias lift_fresh", **_SHARED),
    spec("reshape", "input shape", "reshape_as _reshape_alias", **_SHARED),
    spec("flatten", "input start_dim end_dim", "ravel unflatten", **_SHARED),
    spec("transpose", "input dim0 dim1", "swapaxes swapdims t T mT H mH adjoint matrix_H numpy_T", **_SHARED),
    spec("permute", "input dims", "movedim moveaxis", **_SHARED),
    spec("squeeze", "input dim", "unsqueeze", **_SHARED),
    spec("contiguous", "input memory_format", **_SHARED),
    spec("expand", "input size", "expand_as broadcast_to", **_WRITTEN),
    spec("broadcast_tensors", **_WRITTEN),
    spec("getitem", "input index", "select slice narrow diagonal as_strided __getitem__", **_WRITTEN),
    spec("chunk", "input chunks dim", "split split_with_sizes tensor_split unsafe_chunk unsafe_split "
         "hsplit vsplit dsplit", **_WRITTEN),
    spec("unbind", "input dim", **_WRITTEN),
    spec("unfold", "input dimension size step", **_WRITTEN),
    spec("detach", "input", "data", **{**_VIEW, "grads": ("none",)}),
    spec("view_as_real", "input", "view_as_complex real imag", **_SHARED),
    spec("to", "input", "type float half double bfloat16 long int bool type_as", **_SHARED),
    spec("requires_grad", "input", "retain_grad is_leaf", **_SHARED),
)  # fmt: skip
