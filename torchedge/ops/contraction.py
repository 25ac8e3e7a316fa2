"""Linear layers and matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torchedge.ops.specs import Call, LoadClass, Sizes, spec


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


def matmul_flops(call: Call) -> int:
    """2 · outputs · inner dimension."""
    return 2 * prod(call.outs[0]) * (call.ins[0] or (0,))[-1]


def added_flops(call: Call) -> int:
    """Addmm and baddbmm: the product plus one addition an output; operands are inputs 1 and 2."""
    return 2 * prod(call.outs[0]) * (call.ins[1] or (0,))[-1] + prod(call.outs[0])


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


def product_saves(call: Call) -> tuple[int, ...]:
    """Each operand is kept for the gradient of the other."""
    return tuple(i for i, other in ((0, 1), (1, 0)) if call.need(other))


def added_saves(call: Call) -> tuple[int, ...]:
    """addmm: operands are inputs 1 and 2."""
    return tuple(i for i, other in ((1, 2), (2, 1)) if call.need(other))


OPS = (
    spec(
        "linear",
        "input weight bias",
        load=LoadClass.REUSABLE,
        infer=linear_shape,
        flops=linear_flops,
        saves=product_saves,
        grads=("folded", "turned", "new"),
        autocast="lower",
    ),
    spec(
        "matmul",
        "input other",
        "mm bmm mv dot vdot inner __matmul__ chain_matmul",
        load=LoadClass.REUSABLE,
        flops=matmul_flops,
        saves=product_saves,
        grads=("folded",),
        autocast="lower",
    ),
    spec(
        "__rmatmul__",
        "other input",
        load=LoadClass.REUSABLE,
        flops=matmul_flops,
        saves=product_saves,
        autocast="lower",
    ),
    spec(
        "addmm",
        "input mat1 mat2 beta alpha",
        "baddbmm addbmm addmv",
        load=LoadClass.REUSABLE,
        flops=added_flops,
        saves=added_saves,
        grads=("pass", "new"),
        autocast="lower",
    ),
    spec(
        "einsum",
        "equation operands",
        load=LoadClass.REUSABLE,
        flops=einsum_flops,
        saves=product_saves,
        autocast="lower",
    ),
    spec(
        "bilinear",
        "input1 input2 weight bias",
        load=LoadClass.REUSABLE,
        flops=matmul_flops,
        saves=lambda c: (0, 1, 2),
    ),
    spec("outer", "input vec2", "ger", load=LoadClass.REUSABLE, saves=product_saves, autocast="lower"),
)
