"""Distances between points: their p-norms, all pairs at once, and the gradients."""

from __future__ import annotations

from math import inf

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, broadcast_shape, elementwise, full
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.reductions import vector_norm
from torchedge.lowering.rules.registry import Result, rule


@rule("dist")
def dist(result: Result, input: Node, other: Node, p: float = 2) -> Node:
    """The p-norm of input - other."""
    difference = elementwise(lambda a, b: a - b, input, other, dtype=result.dtype, compute=result.dtype)
    return vector_norm(result, difference, p)


@rule("_cdist_forward")
def cdist(result: Result, x1: Node, x2: Node, p: float, compute_mode: int | None = None) -> Node:
    """The p-norm between every point of x1 and every one of x2, for each batch."""
    compute, rank = arithmetic_dtype(result.dtype), len(result.shape)
    builder = RowBuilder((*result.shape, x1.shape[-1]), (rank,), "distances")

    def size(*i: Index) -> Scalar:
        *batch, row, column, k = i
        return apply(
            "abs", cast(_at(x1, (*batch, row, k)), compute) - cast(_at(x2, (*batch, column, k)), compute)
        )

    if p in (0, inf):
        found = builder.reduce(
            "max" if p else "sum", lambda *i: size(*i) if p else cast(apply("ne", size(*i), 0), compute)
        )
        made = builder.row(lambda *_: found, result.dtype)
    else:
        total = builder.reduce("sum", lambda *i: _power(size(*i), p))
        made = builder.row(lambda *_: _power(total, 1 / p), result.dtype)
    builder.close()
    return made


def _at(x: Node, indices: tuple[Index, ...]) -> Scalar:
    """Return the element at an index of a shape that x broadcasts to."""
    return x.at(*indices[len(indices) - len(x.shape) :])


def _power(a: Scalar, p: float) -> Scalar:
    if p == 2:
        return a * a
    return {1: a, 0.5: apply("sqrt", a)}.get(p, apply("pow", a, p))


@rule("_cdist_backward")
def cdist_backward(result: Result, grad: Node, x1: Node, x2: Node, p: float, cdist: Node) -> Node:
    """The gradient for x1: over all points of x2, gradient · sign · (difference / distance)^(p - 1)."""
    compute, columns = arithmetic_dtype(result.dtype), x2.shape[-2]
    if not cdist.numel:
        return full(result.shape, 0, result.dtype)
    batch = broadcast_shape(x1.shape[:-2], x2.shape[:-2])
    rank = len(batch)
    builder = RowBuilder((*batch, columns, *x1.shape[-2:]), (rank,), "distances_backward")

    def slope(*i: Index) -> Scalar:
        *outer, column, row, k = i
        a, b = _at(x1, (*outer, row, k)), _at(x2, (*outer, column, k))
        difference = cast(a, compute) - cast(b, compute)
        distance = cast(_at(cdist, (*outer, row, column)), compute)
        gradient = cast(_at(grad, (*outer, row, column)), compute)
        return gradient * _slope(difference, distance, p)

    total = builder.reduce("sum", slope)
    made = builder.row(lambda *_: total, result.dtype)
    builder.close()
    return made


def _slope(difference: Scalar, distance: Scalar, p: float) -> Scalar:
    sign = apply("sign", difference)
    zero = constant(0, difference.dtype)
    if p == 0:
        return zero
    if p == 1:
        return sign
    if p == inf:
        return where(apply("abs", difference).equals(distance), sign, zero)
    share = apply("abs", difference) / distance
    return where(distance.equals(0) | difference.equals(0), zero, sign * _power(share, p - 1))
