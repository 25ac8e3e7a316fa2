"""Dropout and random masks."""

from __future__ import annotations

from math import prod

from torchedge.graphs import ITEM_SIZES
from torchedge.ops.specs import Call, spec


def dropout_aux(call: Call) -> tuple[int, ...]:
    """The mask: a byte an element in CUDA's fused kernel, else (and in-place) noise in the input's dtype."""
    elements = prod(call.ins[0] or ())
    if call.backend == "cuda" and not call.inplace:
        return (elements,)
    return (elements * ITEM_SIZES[call.in_dtype(0)],)


def channel_mask_aux(call: Call) -> tuple[int, ...]:
    """Noise of one number for each sample and channel."""
    shape = call.ins[0] or (1, 1)
    return (prod(shape[:2]) * ITEM_SIZES[call.in_dtype(0)],)


OPS = (
    spec(
        "dropout",
        "input p train",
        "native_dropout",
        infer=lambda ins, attrs: ins[0],
        aux=dropout_aux,
        autocast="keep",
    ),
    spec(
        "feature_dropout",
        "input p train",
        infer=lambda ins, attrs: ins[0],
        aux=channel_mask_aux,
        autocast="keep",
    ),
    spec(
        "alpha_dropout",
        "input p train",
        "feature_alpha_dropout",
        infer=lambda ins, attrs: ins[0],
        aux=dropout_aux,
        autocast="keep",
    ),
    spec(
        "bernoulli",
        "input p",
        "uniform normal random exponential log_normal multinomial",
        grads=("new",),
        autocast="keep",
    ),
)
