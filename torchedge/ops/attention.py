"""Scaled dot-product attention as one operator."""

from __future__ import annotations

from math import prod

from torchedge.graphs import ITEM_SIZES
from torchedge.ops.specs import Call, LoadClass, spec


def attention_flops(call: Call) -> int:
    """Two products and a softmax: q (*, L, E), k (*, S, E), v (*, S, D)."""
    q, k, v = (call.ins[i] or (1, 1) for i in range(3))
    scores = prod(q[:-1]) * k[-2]
    return 2 * scores * (q[-1] + v[-1]) + 5 * scores


def scores_bytes(call: Call) -> int:
    """Bytes of the attention matrix (*, L, S)."""
    q, k = call.ins[0] or (1, 1), call.ins[1] or (1, 1)
    return prod(q[:-1]) * k[-2] * ITEM_SIZES[call.in_dtype(0)]


def fused(call: Call) -> bool:
    """Whether a kernel that never writes the attention matrix runs (flash or memory-efficient attention)."""
    return call.backend in ("cuda", "cpu")


def attention_aux(call: Call) -> tuple[int, ...]:
    """What attention keeps beside its operands: row sums (fused), or the matrix (and its dropout mask)."""
    q = call.ins[0] or (1, 1)
    dropout = call.attrs.get("dropout_p", 0.0) or 0.0
    if fused(call):
        return (prod(q[:-1]) * 4,)
    masks = (scores_bytes(call),) * 2 if dropout else ()
    return (scores_bytes(call), *masks, call.in_bytes(0), call.in_bytes(1))


def attention_saves(call: Call) -> tuple[int, ...]:
    """Fused kernels keep q, k, v, a mask and the output."""
    mask = (3,) if len(call.ins) > 3 and call.ins[3] is not None else ()
    return (0, 1, 2, *mask, -1) if fused(call) else (2,)


OPS = (
    spec(
        "scaled_dot_product_attention",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention",
        load=LoadClass.REUSABLE,
        flops=attention_flops,
        saves=attention_saves,
        aux=attention_aux,
        grads=("new", "new", "new", "none"),
        autocast="lower",
        backward_flops=1.25,
    ),
    spec(
        "_native_multi_head_attention",
        load=LoadClass.REUSABLE,
        flops=attention_flops,
        autocast="lower",
    ),
)
