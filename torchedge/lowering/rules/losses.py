"""Losses and their gradients. reduction: 0 each element, 1 their mean, 2 their sum."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torchedge.expressions.scalars import Scalar, apply, constant, where
from torchedge.lowering.building import Operand, elementwise, reduced
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.activations import soft_plus
from torchedge.lowering.rules.promotion import arithmetic_dtype, computed
from torchedge.lowering.rules.registry import Result, rule

MEAN = 1


def _loss(body: Callable[..., Scalar], result: Result, reduction: int, *operands: Operand) -> Node:
    """Return `body` of the operands' elements, reduced."""
    compute = arithmetic_dtype(result.dtype)
    if not reduction:
        return computed(body, result, *operands)
    each = elementwise(body, *operands, dtype=compute, compute=compute)
    count = each.numel if reduction == MEAN else 1
    return reduced("sum", each, finish=lambda s: s / count, dtype=result.dtype)


def _gradient(
    body: Callable[..., Scalar], result: Result, reduction: int, grad_output: Node, *operands: Operand
) -> Node:
    """Return the gradient of the reduction · `body` of the operands' elements."""
    share = 1 / max(1, prod(result.shape)) if reduction == MEAN else 1
    return computed(lambda g, *rest: g * share * body(*rest), result, grad_output, *operands)


@rule("mse_loss")
def mse_loss(result: Result, input: Node, target: Node, reduction: int = MEAN) -> Node:
    """The squared distance."""
    return _loss(lambda a, t: (a - t) * (a - t), result, reduction, input, target)


@rule("mse_loss_backward")
def mse_loss_backward(result: Result, grad_output: Node, input: Node, target: Node, reduction: int) -> Node:
    """Gradient of the squared distance."""
    return _gradient(lambda a, t: (a - t) * 2, result, reduction, grad_output, input, target)


@rule("l1_loss")
def l1_loss(result: Result, input: Node, target: Node, reduction: int = MEAN) -> Node:
    """The distance."""
    return _loss(lambda a, t: apply("abs", a - t), result, reduction, input, target)


@rule("smooth_l1_loss")
def smooth_l1_loss(
    result: Result, input: Node, target: Node, reduction: int = MEAN, beta: float = 1.0
) -> Node:
    """Half the squared distance over beta where it is below beta, the distance less beta / 2 elsewhere."""

    def body(a: Scalar, t: Scalar) -> Scalar:
        distance = apply("abs", a - t)
        if not beta:
            return distance
        return where(distance < beta, distance * distance * (0.5 / beta), distance - 0.5 * beta)

    return _loss(body, result, reduction, input, target)


@rule("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    result: Result, grad_output: Node, input: Node, target: Node, reduction: int, beta: float
) -> Node:
    """Gradient of the smooth distance."""

    def body(a: Scalar, t: Scalar) -> Scalar:
        slope = apply("sign", a - t)
        return where(apply("abs", a - t) < beta, (a - t) / beta, slope) if beta else slope

    return _gradient(body, result, reduction, grad_output, input, target)


@rule("huber_loss")
def huber_loss(result: Result, input: Node, target: Node, reduction: int = MEAN, delta: float = 1.0) -> Node:
    """Half the squared distance where it is below delta, delta · (distance - delta / 2) elsewhere."""

    def body(a: Scalar, t: Scalar) -> Scalar:
        distance = apply("abs", a - t)
        return where(distance < delta, distance * distance * 0.5, (distance - 0.5 * delta) * delta)

    return _loss(body, result, reduction, input, target)


@rule("huber_loss_backward")
def huber_loss_backward(
    result: Result, grad_output: Node, input: Node, target: Node, reduction: int, delta: float
) -> Node:
    """Gradient of Huber's loss."""

    def body(a: Scalar, t: Scalar) -> Scalar:
        return apply("minimum", apply("maximum", a - t, -delta), delta)

    return _gradient(body, result, reduction, grad_output, input, target)


@rule("soft_margin_loss")
def soft_margin_loss(result: Result, input: Node, target: Node, reduction: int = MEAN) -> Node:
    """log(1 + exp(-target · input))."""
    return _loss(lambda a, t: soft_plus(-t * a), result, reduction, input, target)


@rule("soft_margin_loss_backward")
def soft_margin_loss_backward(
    result: Result, grad_output: Node, input: Node, target: Node, reduction: int
) -> Node:
    """Gradient of the soft margin."""
    return _gradient(
        lambda a, t: -t * apply("sigmoid", -t * a), result, reduction, grad_output, input, target
    )


@rule("binary_cross_entropy")
def binary_cross_entropy(
    result: Result, input: Node, target: Node, weight: Operand = 1, reduction: int = MEAN
) -> Node:
    """-weight · (target · log(input) + (1 - target) · log(1 - input)), logarithms not below -100."""

    def body(a: Scalar, t: Scalar, w: Scalar) -> Scalar:
        rest = apply("maximum", apply("log1p", -a), -100)
        return ((t - 1) * rest - t * apply("maximum", apply("log", a), -100)) * w

    return _loss(body, result, reduction, input, target, weight)


@rule("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    result: Result, grad_output: Node, input: Node, target: Node, weight: Operand = 1, reduction: int = MEAN
) -> Node:
    """Gradient · weight · (input - target) / (input · (1 - input))."""

    def body(a: Scalar, t: Scalar, w: Scalar) -> Scalar:
        return (a - t) / apply("maximum", (1 - a) * a, 1e-12) * w

    return _gradient(body, result, reduction, grad_output, input, target, weight)


@rule("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    result: Result,
    input: Node,
    target: Node,
    weight: Operand = 1,
    pos_weight: Operand = 1,
    reduction: int = MEAN,
) -> Node:
    """The binary cross entropy of sigmoid(input), without overflow; positives count `pos_weight` times."""

    def body(a: Scalar, t: Scalar, w: Scalar, positive: Scalar) -> Scalar:
        return ((1 - t) * a + ((positive - 1) * t + 1) * soft_plus(-a)) * w

    return _loss(body, result, reduction, input, target, weight, pos_weight)


@rule("kl_div")
def kl_div(
    result: Result, input: Node, target: Node, reduction: int = MEAN, log_target: bool = False
) -> Node:
    """Target · (log(target) - input), zero where the target is."""

    def body(a: Scalar, t: Scalar) -> Scalar:
        if log_target:
            return apply("exp", t) * (t - a)
        return where(t > 0, t * (apply("log", t) - a), constant(0, t.dtype))

    return _loss(body, result, reduction, input, target)
