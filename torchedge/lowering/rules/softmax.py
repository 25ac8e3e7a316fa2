"""Softmax and the negative log likelihood of classes, with their gradients.

The likelihood's input is (C), (N, C) or (N, C, H, W); the target lacks C. A target that is no class gives
NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import ZERO, Index
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, where
from torchedge.lowering.building import RowBuilder, elements, normal_dims, pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.indexing import read_at
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.reductions import with_dimension
from torchedge.lowering.rules.registry import Result, rule


@rule("_softmax")
@rule("_log_softmax", log=True)
@rule("_safe_softmax", safe=True)
def softmax(
    result: Result,
    input: Node,
    dim: int,
    half_to_float: bool = False,
    dtype: str | None = None,
    *,
    log: bool = False,
    safe: bool = False,
) -> Node:
    """Exponentials over their sum along a dimension (the paper's SoftMax), or the logarithm of that.

    safe: zero where a whole row is -inf.
    """
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), "log_softmax" if log else "softmax")
    compute = arithmetic_dtype(result.dtype)
    element = elements(x, compute)
    largest = builder.reduce("max", element)
    spread = builder.reduce("sum", lambda *i: apply("exp", element(*i) - largest))

    def finish(*indices: Index) -> Scalar:
        if log:
            return element(*indices) - largest - apply("log", spread)
        share = apply("exp", element(*indices) - largest) / spread
        return where(largest.equals(float("-inf")), constant(0, compute), share) if safe else share

    return reshaped(builder.element(finish, result.dtype), result.shape)


MEAN = 1
"""PyTorch's number of the reduction to the mean."""


def _at_class(
    x: Node, before: Sequence[Index], chosen: Scalar, after: Sequence[Index], compute: str
) -> Scalar:
    """Return the element of x at a class that is itself an element; NaN where it is no class."""
    return cast(read_at(x, [*before, ZERO, *after], {len(before): chosen}), compute)


@rule("nll_loss_forward", "nll_loss2d_forward", indexes=ranges.classes)
def nll_loss(
    result: Result, input: Node, target: Node, reduction: int, ignore_index: int, weight: Node | None = None
) -> tuple[Node, Node]:
    """-weight[class] · input[class], reduced (the mean is over the weights), and the sum of the weights."""
    compute = arithmetic_dtype(result.dtype)
    x, classes = (
        (input, target)
        if len(input.shape) > 1
        else (reshaped(input, (1, *input.shape)), reshaped(target, (1,)))
    )

    def unless_ignored(sample: Sequence[Index], value: Scalar) -> Scalar:
        return where(classes.at(*sample).equals(ignore_index), constant(0, value.dtype), value)

    def chosen(*sample: Index) -> Scalar:
        return unless_ignored(sample, classes.at(*sample))

    def counted(*sample: Index) -> Scalar:
        one = constant(1, compute) if weight is None else _at_class(weight, (), chosen(*sample), (), compute)
        return unless_ignored(sample, one)

    def each(*sample: Index) -> Scalar:
        value = _at_class(x, sample[:1], chosen(*sample), sample[1:], compute)
        return unless_ignored(sample, -value * counted(*sample))

    if not reduction and len(input.shape) > 1:
        losses = pointwise(classes.shape, result.dtype, each)
        return reshaped(losses, result.shape), pointwise((), result.dtypes[1], lambda: constant(0, compute))
    builder = RowBuilder(classes.shape, range(len(classes.shape)), "nll_loss")
    total, weights = builder.reduce("sum", each), builder.reduce("sum", counted)
    return (
        builder.row(lambda: total / weights if reduction == MEAN else total, result.dtypes[0]),
        builder.row(lambda: weights, result.dtypes[1]),
    )


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    result: Result,
    grad_output: Node,
    input: Node,
    target: Node,
    reduction: int,
    ignore_index: int,
    total_weight: Node,
    weight: Node | None = None,
) -> Node:
    """-weight[class] · gradient at the target's class, over the total weight for a mean; zero elsewhere."""
    compute, alone = arithmetic_dtype(result.dtype), len(input.shape) == 1

    def body(*indices: Index) -> Scalar:
        place, sample = (indices[0], ()) if alone else (indices[1], (indices[0], *indices[2:]))
        wanted = target.at(*sample) if target.shape else target.at()
        here = wanted.equals(Position(place, wanted.dtype)) & apply("ne", wanted, ignore_index)
        value = -cast(grad_output.at(*sample) if grad_output.shape else grad_output.at(), compute)
        if weight is not None:
            value = value * cast(weight.at(place), compute)
        if reduction == MEAN:
            value = value / cast(total_weight.at(), compute)
        return where(here, value, 0)

    return pointwise(result.shape, result.dtype, body)
