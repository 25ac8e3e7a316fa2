"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.graphs.footprints import Footprint
from torchedge.ops.elementwise import broadcast
from torchedge.ops.kernels import kernel
from torchedge.ops.specs import Call, LoadClass, Work, spec
from torchedge.ops.strides import Sizes, packed


def linear_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """X (*, m), w (n, m) -> (*, n)."""
    x, w = ins[0], ins[1]
    if x is None or w is None or len(w) != 2 or not x or x[-1] != w[1]:
        return None
    return (*x[:-1], w[0])


def linear_flops(call: Call) -> int:
    """2 · outputs · inner dimension, plus the bias."""
    x = call.ins[0] or (0,)
    outputs = prod(call.outs[0])
    return 2 * outputs * x[-1] + (outputs if len(call.ins) > 2 and call.ins[2] is not None else 0)


def grouped_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """X (s, m) sorted into groups of rows, w (g, m, n), ends of the groups (g,) -> (s, n)."""
    x, w, ends = (*ins, None, None)[:3]
    if x is None or w is None or ends is None or len(x) != 2 or len(w) != 3 or x[1] != w[1]:
        return None
    return (x[0], w[2])


def matmul_flops(call: Call) -> int:
    """2 · outputs · inner dimension."""
    return 2 * prod(call.outs[0]) * (call.ins[0] or (0,))[-1]


def added_flops(call: Call) -> int:
    """Addmm and baddbmm: the product plus one addition an output; operands are inputs 1 and 2."""
    return 2 * prod(call.outs[0]) * (call.ins[1] or (0,))[-1] + prod(call.outs[0])


def added_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """Addmm: (n, p) at most, (n, m), (m, p) -> (n, p); None for batches and vectors."""
    added, a, b = (*ins, None, None)[:3]
    if added is None or a is None or b is None or len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        return None
    out = (a[0], b[1])
    return out if broadcast([added, out], {}) == out else None


def einsum_flops(call: Call) -> int:
    """2 · outputs · contracted dimensions of a two-operand einsum.

    Where the equation is not understood, two for each element of the largest tensor.
    """
    operands = [s for s in call.ins if s is not None]
    outputs = prod(call.outs[0])
    equation = str(call.attrs.get("equation", "")).replace(" ", "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return 2 * max([outputs, *map(prod, operands)])
    left, right = equation.split("->")
    sizes = {
        k: s
        for term, shape in zip(left.split(","), operands, strict=False)
        for k, s in zip(term, shape, strict=False)
    }
    return 2 * outputs * prod(s for k, s in sizes.items() if k not in right)


def attention_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """Q (*, L, E), k (*, S, E), v (*, S, D), mask (L, S) at most -> (*, L, D); None for shared heads."""
    q, k, v, mask = (*ins, None, None)[:4]
    if q is None or k is None or v is None or len(q) < 3 or q[-1] != k[-1] or k[:-1] != v[:-1]:
        return None
    if q[:-2] != k[:-2]:
        grouped = attrs.get("enable_gqa") and len(q) == len(k) == 4 and q[0] == k[0] and not q[1] % k[1]
        if not grouped:
            return None
    if mask is not None:
        scores = (*q[:-1], k[-2])
        fits = broadcast([mask, scores], {}) == scores
        if attrs.get("is_causal") or not fits:
            return None
    return (*q[:-1], v[-1])


def attention_flops(call: Call) -> int:
    """Two products and a softmax: q (*, L, E), k (*, S, E), v (*, S, D)."""
    q, k, v = (call.ins[i] or (1, 1) for i in range(3))
    scores = prod(q[:-1]) * k[-2]
    return 2 * scores * (q[-1] + v[-1]) + 5 * scores


def writes_scores(call: Call) -> bool:
    """Whether attention runs as products and a softmax, which keep the matrix of scores, and not fused.

    The conditions are those of PyTorch 2.11 to 2.13 (`sdp_utils.cpp`, `sdp_utils_cpp.cpp`), on CUDA from
    compute capability 8.0 on: flash attention takes half precision without a mask, memory-efficient attention
    float32 and masks, but no grouped queries; the CPU's takes everything but dropout.
    """
    q, k, v = (call.ins[i] or () for i in range(3))
    dtype = call.in_dtype(0)
    if not len(q) == len(k) == len(v) == 4 or q[-1] != k[-1]:
        return True
    grouped = q[1] != k[1] or q[1] != v[1]
    if call.backend == "cpu":
        return bool(call.attrs.get("dropout_p")) or dtype not in _ON_CPU or q[-1] != v[-1]
    half = dtype in ("float16", "bfloat16")
    masked = len(call.ins) > 3 and call.ins[3] is not None
    ragged = bool(call.attrs.get("is_causal")) and q[2] != k[2]
    if half and not masked and not ragged and q[-1] == v[-1] <= _MOST_FLASH:
        return False
    step = 8 if half else 4
    return grouped or not (half or dtype == "float32") or q[-1] % step != 0 or v[-1] % step != 0


_FLOAT = 4
_MOST_FLASH = 256
"""The largest heads of flash attention."""
_ON_CPU = ("float32", "float64", "float16", "bfloat16")


def attention(call: Call) -> Footprint:
    """Fused kernels keep q, k, v, a mask, the output and the logarithm of each row's sum.

    On CUDA, the backward kernel takes sums for each row, and in half precision sums the query's gradient in
    float32.
    """
    q = call.ins[0] or (1, 1)
    rows = prod(q[:-1]) * _FLOAT
    sums = (rows,) if call.in_dtype(0) == "float32" else (rows, rows * q[-1])
    return kernel(call, (0, 1, 2, 3, -1), (rows,), (), () if call.backend == "cpu" else sums)


_product = partial(spec, load=LoadClass.REUSABLE, work=Work.PRODUCT, autocast="lower", strides=packed)
_multiplied = partial(_product, flops=matmul_flops)
_attention = partial(
    _product,
    params="query key value attn_mask dropout_p is_causal scale enable_gqa",
    work=Work.ATTENTION,
    flops=attention_flops,
    memory=attention,
    stops=(3,),
    composite="attention",
)

OPS = (
    _product(
        "linear",
        "input weight bias",
        infer=linear_shape,
        flops=linear_flops,
        hides=lambda ins: len(ins) > 2 and ins[2] is not None and len(ins[0] or ()) > 2,
    ),
    _multiplied("matmul", "input other", "mm bmm mv __matmul__ chain_matmul"),
    _multiplied(
        "grouped_mm",
        "mat_a mat_b offs bias out_dtype",
        "_grouped_mm grouped_mm_fallback",
        infer=grouped_shape,
        first_dtype=True,
        autocast="widest",
    ),
    _multiplied("inner", "input other"),
    _multiplied("dot", "input other", "vdot", autocast="join_on_cuda"),
    _multiplied("__rmatmul__", "other input"),
    _product(
        "addmm",
        "input mat1 mat2 beta alpha",
        "baddbmm addbmm addmv",
        work=Work.ADDED_PRODUCT,
        infer=added_shape,
        flops=added_flops,
    ),
    _product("einsum", "equation operands", flops=einsum_flops),
    _multiplied("bilinear", "input1 input2 weight bias", autocast="widest"),
    _product("outer", "input vec2", "ger", autocast="widest"),
    _attention("scaled_dot_product_attention", infer=attention_shape),
    _attention(
        "_scaled_dot_product_flash_attention",
        targets="_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_cudnn_attention",
    ),
    _product("_native_multi_head_attention", work=Work.ATTENTION, flops=attention_flops),
)
