"""Batch, layer, group and RMS normalization with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, full, pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype, converted
from torchedge.lowering.rules.reductions import moments
from torchedge.lowering.rules.registry import Result, rule


@dataclass(frozen=True)
class _Statistics:
    """Of each channel: mean, 1 / sqrt(variance + eps), and the running statistics after the step."""

    mean: Node
    rstd: Node
    running: tuple[Node, ...] = ()


def _all_but_channels(x: Node) -> tuple[int, ...]:
    return tuple([d for d in range(len(x.shape)) if d != 1])


def _measured(x: Node, running: Sequence[Node], momentum: float, eps: float) -> _Statistics:
    """Return the statistics of a batch, as outputs of one node."""
    builder = RowBuilder(x.shape, _all_but_channels(x), "batch_norm")
    compute, count = arithmetic_dtype(x.dtype), builder.count

    mean, squares = moments(builder, lambda *i: cast(x.at(*i), compute))
    variance, unbiased = squares / count, squares / max(1, count - 1)

    def moved(old: Node, new: Scalar, channel: Index) -> Scalar:
        return cast(old.at(channel), compute) * (1 - momentum) + new * momentum

    statistics = _Statistics(builder.row(mean), builder.row(lambda c: apply("rsqrt", variance + eps)))
    if not running:
        return statistics
    old_mean, old_var = running
    new_mean = builder.row(lambda c: moved(old_mean, mean(c), c), old_mean.dtype)
    return replace(
        statistics,
        running=(new_mean, builder.row(lambda c: moved(old_var, unbiased, c), old_var.dtype)),
    )


def _in_evaluation(running: Sequence[Node], eps: float) -> _Statistics:
    """Return the running statistics as those to normalize with."""
    mean, var = running
    compute = arithmetic_dtype(var.dtype)
    rstd = pointwise(var.shape, compute, lambda c: apply("rsqrt", cast(var.at(c), compute) + eps))
    return _Statistics(mean, rstd, tuple(running))


def _normalized(x: Node, statistics: _Statistics, weight: Node | None, bias: Node | None) -> Node:
    """Return (x - mean) · rstd · weight + bias of each channel."""
    compute = arithmetic_dtype(x.dtype)

    def body(*indices: Index) -> Scalar:
        channel = indices[1]
        scale = cast(statistics.rstd.at(channel), compute)
        if weight is not None:
            scale = scale * cast(weight.at(channel), compute)
        value = (cast(x.at(*indices), compute) - cast(statistics.mean.at(channel), compute)) * scale
        return value if bias is None else value + cast(bias.at(channel), compute)

    return pointwise(x.shape, x.dtype, body)


def _present(*nodes: Node | None) -> tuple[Node, ...]:
    return tuple([n for n in nodes if n is not None])


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
@rule("_native_batch_norm_legit_no_training", training=False)
@rule("_batch_norm_with_update_functional", training=True)
def batch_norm(
    result: Result,
    input: Node,
    training: bool,
    momentum: float,
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
    running_mean: Node | None = None,
    running_var: Node | None = None,
) -> tuple[Node, ...]:
    """Normalized input, mean and 1 / deviation of each channel (empty in evaluation).

    The functional schemas (5 outputs) add the new running mean and unbiased variance, the updating one
    (6 outputs) before them the empty reserve of PyTorch's own kernel.
    """
    running = _present(running_mean, running_var)
    statistics = _measured(input, running, momentum, eps) if training else _in_evaluation(running, eps)
    output = _normalized(input, statistics, weight, bias)
    saved = [
        converted(node, dtype) if training else full(shape, 0, dtype)
        for node, shape, dtype in zip(
            (statistics.mean, statistics.rstd), result.shapes[1:3], result.dtypes[1:3], strict=True
        )
    ]
    if len(result.shapes) > 5:
        saved.append(full(result.shapes[3], 0, result.dtypes[3]))
    return (output, *saved, *statistics.running)[: len(result.shapes)]


@rule("native_batch_norm_backward")
def batch_norm_backward(
    result: Result,
    grad_out: Node,
    input: Node,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    weight: Node | None = None,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    save_mean: Node | None = None,
    save_invstd: Node | None = None,
) -> tuple[Node, ...]:
    """Gradients for input, weight and bias, as far as the mask asks for them."""
    if train:
        if save_mean is None or save_invstd is None:
            raise LoweringError(
                "aten.native_batch_norm_backward has no saved statistics; expected both in training"
            )
        statistics = _Statistics(save_mean, save_invstd)
    else:
        statistics = _in_evaluation(_present(running_mean, running_var), eps)
    sums = _gradient_sums(grad_out, input, statistics)
    gradients = (
        _input_gradient(grad_out, input, statistics, weight, sums if train else None),
        *sums,
    )
    wanted = [node for node, on in zip(gradients, output_mask, strict=True) if on]
    return tuple([converted(n, d) for n, d in zip(wanted, result.dtypes, strict=True)])


@rule("batch_norm_backward")
def backward_with_reserve(
    result: Result,
    update: bool,
    save_var: Node | None = None,
    reserve: Node | None = None,
    **arguments: Any,  # noqa: ANN401 - those of the older schema
) -> tuple[Node, ...]:
    """`batch_norm_backward` by the newer schema, whose saved variance is 1 / deviation too."""
    return batch_norm_backward(result, train=update, save_invstd=save_var, **arguments)


def _gradient_sums(gradient: Node, x: Node, statistics: _Statistics) -> tuple[Node, Node]:
    """Return the gradients for weight and bias: sums of gradient · x^ and of gradient over a channel."""
    builder = RowBuilder(x.shape, _all_but_channels(x), "batch_norm_backward")
    compute = arithmetic_dtype(x.dtype)

    def product(*indices: Index) -> Scalar:
        distance = cast(x.at(*indices), compute) - cast(statistics.mean.at(indices[1]), compute)
        return cast(gradient.at(*indices), compute) * distance

    products = builder.reduce("sum", product)
    total = builder.reduce("sum", lambda *i: cast(gradient.at(*i), compute))
    return (
        builder.row(lambda c: products * cast(statistics.rstd.at(c), compute)),
        builder.row(lambda c: total),
    )


def _input_gradient(
    gradient: Node, x: Node, statistics: _Statistics, weight: Node | None, sums: tuple[Node, Node] | None
) -> Node:
    """Return rstd · weight · (gradient - mean of gradient - x^ · mean of gradient · x^).

    In evaluation (no sums) the statistics are constants: without both means.
    """
    compute, share = arithmetic_dtype(x.dtype), x.shape[1] / max(1, x.numel)

    def body(*indices: Index) -> Scalar:
        channel = indices[1]
        rstd = cast(statistics.rstd.at(channel), compute)
        value = cast(gradient.at(*indices), compute)
        if sums is not None:
            of_weight, of_bias = [s.at(channel) * share for s in sums]
            distance = cast(x.at(*indices), compute) - cast(statistics.mean.at(channel), compute)
            value = value - of_bias - distance * (rstd * of_weight)
        return value * (rstd if weight is None else rstd * cast(weight.at(channel), compute))

    return pointwise(x.shape, x.dtype, body)


_SMALLEST_STEP = {"float64": 2.0**-52, "float16": 2.0**-10}


@rule("native_layer_norm", name="layer_norm")
@rule("_fused_rms_norm", name="rms_norm")
def row_norm(
    result: Result,
    input: Node,
    normalized_shape: Sequence[int],
    eps: float | None = None,
    weight: Node | None = None,
    bias: Node | None = None,
    *,
    name: str,
) -> tuple[Node, ...]:
    """Normalized input, mean and 1 / deviation of each row (the paper's LayerNorm); RMS: about zero."""
    lead = len(input.shape) - len(normalized_shape)
    builder = RowBuilder(input.shape, range(lead, len(input.shape)), name)
    compute = arithmetic_dtype(result.dtype)
    small = _SMALLEST_STEP.get(input.dtype, 2.0**-23) if eps is None else eps

    def element(*indices: Index) -> Scalar:
        return cast(input.at(*indices), compute)

    mean = builder.reduce("sum", element) / builder.count if name == "layer_norm" else None

    def distance(*indices: Index) -> Scalar:
        return element(*indices) if mean is None else element(*indices) - mean

    rstd = apply(
        "rsqrt", builder.reduce("sum", lambda *i: distance(*i) * distance(*i)) / builder.count + small
    )

    def normalized(*indices: Index) -> Scalar:
        value = distance(*indices) * rstd
        value = value if weight is None else value * cast(weight.at(*indices[lead:]), compute)
        return value if bias is None else value + cast(bias.at(*indices[lead:]), compute)

    output = builder.element(normalized, result.dtypes[0])
    statistics = [row for row in (mean, rstd) if row is not None]
    rows = [
        builder.row(lambda *_, row=row: row, dtype, keepdim=True)
        for row, dtype in zip(statistics, result.dtypes[1:], strict=True)
    ]
    return (output, *rows)


@rule("native_layer_norm_backward", name="layer_norm")
@rule("_fused_rms_norm_backward", name="rms_norm")
def row_norm_backward(
    result: Result,
    grad_out: Node,
    input: Node,
    normalized_shape: Sequence[int],
    rstd: Node,
    output_mask: Sequence[bool],
    mean: Node | None = None,
    weight: Node | None = None,
    bias: Node | None = None,
    *,
    name: str,
) -> tuple[Node, ...]:
    """Gradients for input, weight and bias, as far as the mask asks for them."""
    compute, lead = arithmetic_dtype(input.dtype), len(input.shape) - len(normalized_shape)

    def gradient(*indices: Index) -> Scalar:
        return cast(grad_out.at(*indices), compute)

    def normalized(*indices: Index) -> Scalar:
        value = cast(input.at(*indices), compute)
        distance = value if mean is None else value - cast(mean.at(*indices), compute)
        return distance * cast(rstd.at(*indices), compute)

    def weighted(*indices: Index) -> Scalar:
        scale = 1 if weight is None else cast(weight.at(*indices[lead:]), compute)
        return gradient(*indices) * scale

    gradients: list[Node] = []
    if output_mask[0]:
        rows = RowBuilder(input.shape, range(lead, len(input.shape)), f"{name}_backward")
        shift = None if mean is None else rows.reduce("sum", weighted) / rows.count
        product = rows.reduce("sum", lambda *i: weighted(*i) * normalized(*i)) / rows.count

        def before(*indices: Index) -> Scalar:
            value = weighted(*indices) if shift is None else weighted(*indices) - shift
            return (value - normalized(*indices) * product) * cast(rstd.at(*indices), compute)

        gradients.append(rows.element(before))
    if any(output_mask[1:]):
        columns = RowBuilder(input.shape, range(lead), f"{name}_weights")
        bodies = (lambda *i: gradient(*i) * normalized(*i), gradient)
        for body, on in zip(bodies, output_mask[1:], strict=False):  # without a mean, there is no bias
            if on:
                total = columns.reduce("sum", body)
                gradients.append(columns.row(lambda *_, total=total: total))
    return tuple([converted(n, d) for n, d in zip(gradients, result.dtypes, strict=True)])


@rule("native_group_norm")
def group_norm(
    result: Result,
    input: Node,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """Normalized input, mean and 1 / deviation of each group of channels."""
    each = C // group
    x = reshaped(input, (N, group, each, HxW))
    builder = RowBuilder(x.shape, (2, 3), "group_norm")
    compute = arithmetic_dtype(result.dtype)

    def element(*indices: Index) -> Scalar:
        return cast(x.at(*indices), compute)

    mean, squares = moments(builder, element)
    means = builder.row(mean, result.dtypes[1])
    rstds = builder.row(lambda *_: apply("rsqrt", squares / builder.count + eps), result.dtypes[2])

    def normalized(n: Index, g: Index, c: Index, place: Index) -> Scalar:
        scale = cast(rstds.at(n, g), compute)
        if weight is not None:
            scale = scale * cast(weight.at(g * each + c), compute)
        value = (element(n, g, c, place) - cast(means.at(n, g), compute)) * scale
        return value if bias is None else value + cast(bias.at(g * each + c), compute)

    return reshaped(pointwise(x.shape, result.dtype, normalized), input.shape), means, rstds


@rule("native_group_norm_backward")
def group_norm_backward(
    result: Result,
    grad_out: Node,
    input: Node,
    mean: Node,
    rstd: Node,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
    weight: Node | None = None,
) -> tuple[Node, ...]:
    """Gradients for input, weight and bias: all from sums of each channel of each image."""
    compute, each = arithmetic_dtype(input.dtype), C // group
    shape = (N, group, each, HxW)
    x, dy = reshaped(input, shape), reshaped(grad_out, shape)
    means, rstds = reshaped(mean, (N, group)), reshaped(rstd, (N, group))

    def gradient(*indices: Index) -> Scalar:
        return cast(dy.at(*indices), compute)

    def normalized(*indices: Index) -> Scalar:
        distance = cast(x.at(*indices), compute) - cast(means.at(*indices[:2]), compute)
        return distance * cast(rstds.at(*indices[:2]), compute)

    def scale(g: Index, c: Index) -> Scalar | float:
        return 1 if weight is None else cast(weight.at(g * each + c), compute)

    channels = RowBuilder(shape, (3,), "group_norm_backward")
    product = channels.reduce("sum", lambda *i: gradient(*i) * normalized(*i))
    total = channels.reduce("sum", gradient)
    products, totals = channels.row(lambda *_: product), channels.row(lambda *_: total)
    gradients: list[Node] = []
    if output_mask[0]:
        groups = RowBuilder((N, group, each), (2,), "group_norm_backward")
        sums = [groups.reduce("sum", lambda *i, s=s: s.at(*i) * scale(*i[1:])) for s in (products, totals)]
        of_products, of_totals = [groups.row(lambda *_, s=s: s / (each * HxW)) for s in sums]

        def of_input(n: Index, g: Index, c: Index, place: Index) -> Scalar:
            value = gradient(n, g, c, place) * scale(g, c) - of_totals.at(n, g)
            value = value - normalized(n, g, c, place) * of_products.at(n, g)
            return value * cast(rstds.at(n, g), compute)

        gradients.append(reshaped(pointwise(shape, input.dtype, of_input), input.shape))
    if any(output_mask[1:]):
        images = RowBuilder((N, group, each), (0,), "group_norm_weights")
        for source, on in zip((products, totals), output_mask[1:], strict=True):
            if on:
                total = images.reduce("sum", lambda *i, s=source: s.at(*i))
                gradients.append(reshaped(images.row(lambda *_, total=total: total), (C,)))
    return tuple([converted(n, d) for n, d in zip(gradients, result.dtypes, strict=True)])
