"""Batch, layer and group normalization with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, elements, full, pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype, converted
from torchedge.lowering.rules.reductions import moments
from torchedge.lowering.rules.registry import Result, rule

Place = Callable[[Sequence[Index]], Sequence[Index]]


def _normalized(
    x: Node, dtype: str, rows: tuple[Node, Node], affine: Sequence[Node | None], row: Place, channel: Place
) -> Node:
    """Return (x - mean) · rstd · weight + bias.

    rows: mean and rstd, of which an element has those at `row(index)`; affine: weight and bias, at
    `channel(index)`.
    """
    compute = arithmetic_dtype(dtype)
    mean, rstd = (elements(node, compute) for node in rows)
    weight, bias = (None if node is None else elements(node, compute) for node in affine)

    def body(*at: Index) -> Scalar:
        scale = rstd(*row(at))
        scale = scale if weight is None else scale * weight(*channel(at))
        value = (cast(x.at(*at), compute) - mean(*row(at))) * scale
        return value if bias is None else value + bias(*channel(at))

    return pointwise(x.shape, dtype, body)


def _asked(result: Result, mask: Sequence[bool], *gradients: Node) -> tuple[Node, ...]:
    """Return the gradients that a mask asks for; nothing computes the others."""
    return tuple([converted(n, d) for n, d in zip(compress(gradients, mask), result.dtypes, strict=True)])


def _channel(at: Sequence[Index]) -> Sequence[Index]:
    return at[1:2]


def _all_but_channels(x: Node, name: str) -> RowBuilder:
    return RowBuilder(x.shape, [d for d in range(len(x.shape)) if d != 1], name)


def _in_evaluation(running: Sequence[Node | None], eps: float) -> tuple[Node, Node]:
    """Return mean and 1 / sqrt(variance + eps) of each channel by the running statistics."""
    mean, var = running
    if mean is None or var is None:
        raise LoweringError("a batch norm in evaluation has no running statistics; expected both")
    compute = arithmetic_dtype(var.dtype)
    return mean, pointwise(var.shape, compute, lambda c: apply("rsqrt", cast(var.at(c), compute) + eps))


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
@rule("_native_batch_norm_legit_no_training", training=False)
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

    The functional schema (5 outputs) adds the new running mean and unbiased variance.
    """
    running = [node for node in (running_mean, running_var) if node is not None]
    if training:
        builder, compute = _all_but_channels(input, "batch_norm"), arithmetic_dtype(input.dtype)
        mean, squares = moments(builder, elements(input, compute))
        variance = squares / builder.count
        news = (mean, lambda c: squares / max(1, builder.count - 1))
        rows = builder.row(mean), builder.row(lambda c: apply("rsqrt", variance + eps))
        running = [
            builder.row(
                lambda c, old=old, new=new: cast(old.at(c), compute) * (1 - momentum) + new(c) * momentum,
                old.dtype,
            )
            for old, new in zip(running, news, strict=False)
        ]
    else:
        rows = _in_evaluation((running_mean, running_var), eps)
    output = _normalized(input, input.dtype, rows, (weight, bias), _channel, _channel)
    saved = [
        converted(node, dtype) if training else full(shape, 0, dtype)
        for node, shape, dtype in zip(rows, result.shapes[1:3], result.dtypes[1:3], strict=True)
    ]
    return (output, *saved, *running)[: len(result.shapes)]


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
    """Gradients for input, weight and bias, as far as the mask asks for them.

    That for input is rstd · weight · (gradient - mean of gradient - x^ · mean of gradient · x^). In
    evaluation the statistics are constants: without both means.
    """
    if not train:
        rows = _in_evaluation((running_mean, running_var), eps)
    elif save_mean is None or save_invstd is None:
        raise LoweringError(
            "aten.native_batch_norm_backward has no saved statistics; expected both in training"
        )
    else:
        rows = save_mean, save_invstd
    compute, share = arithmetic_dtype(input.dtype), input.shape[1] / max(1, input.numel)
    gradient, x, mean, rstd = (elements(node, compute) for node in (grad_out, input, *rows))

    def distance(*at: Index) -> Scalar:
        return x(*at) - mean(at[1])

    builder = _all_but_channels(input, "batch_norm_backward")
    products = builder.reduce("sum", lambda *at: gradient(*at) * distance(*at))
    total = builder.reduce("sum", gradient)
    of_weight = builder.row(lambda c: products * rstd(c))
    of_bias = builder.row(lambda c: total)

    def body(*at: Index) -> Scalar:
        value, channel = gradient(*at), at[1]
        if train:
            value = value - of_bias.at(channel) * share
            value = value - distance(*at) * (rstd(channel) * (of_weight.at(channel) * share))
        scale = rstd(channel) if weight is None else rstd(channel) * cast(weight.at(channel), compute)
        return value * scale

    return _asked(result, output_mask, pointwise(input.shape, input.dtype, body), of_weight, of_bias)


@rule("native_layer_norm")
def layer_norm(
    result: Result,
    input: Node,
    normalized_shape: Sequence[int],
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """Normalized input, mean and 1 / deviation of each row (the paper's LayerNorm)."""
    lead = len(input.shape) - len(normalized_shape)
    builder = RowBuilder(input.shape, range(lead, len(input.shape)), "layer_norm")
    compute = arithmetic_dtype(result.dtype)
    x = elements(input, compute)
    mean = builder.reduce("sum", x) / builder.count

    def distance(*at: Index) -> Scalar:
        return x(*at) - mean

    squares = builder.reduce("sum", lambda *at: distance(*at) * distance(*at))
    rstd = apply("rsqrt", squares / builder.count + eps)

    def normalized(*at: Index) -> Scalar:
        value = distance(*at) * rstd
        value = value if weight is None else value * cast(weight.at(*at[lead:]), compute)
        return value if bias is None else value + cast(bias.at(*at[lead:]), compute)

    return (
        builder.element(normalized, result.dtypes[0]),
        builder.row(lambda *_: mean, result.dtypes[1], keepdim=True),
        builder.row(lambda *_: rstd, result.dtypes[2], keepdim=True),
    )


@rule("native_layer_norm_backward")
def layer_norm_backward(
    result: Result,
    grad_out: Node,
    input: Node,
    normalized_shape: Sequence[int],
    mean: Node,
    rstd: Node,
    output_mask: Sequence[bool],
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """Gradients for input, weight and bias, as far as the mask asks for them."""
    compute, lead = arithmetic_dtype(input.dtype), len(input.shape) - len(normalized_shape)
    gradient, x, means, rstds = (elements(node, compute) for node in (grad_out, input, mean, rstd))

    def normalized(*at: Index) -> Scalar:
        return (x(*at) - means(*at)) * rstds(*at)

    def weighted(*at: Index) -> Scalar:
        return gradient(*at) * (1 if weight is None else cast(weight.at(*at[lead:]), compute))

    rows = RowBuilder(input.shape, range(lead, len(input.shape)), "layer_norm_backward")
    shift = rows.reduce("sum", weighted) / rows.count
    product = rows.reduce("sum", lambda *at: weighted(*at) * normalized(*at)) / rows.count
    of_input = rows.element(lambda *at: (weighted(*at) - shift - normalized(*at) * product) * rstds(*at))
    columns = RowBuilder(input.shape, range(lead), "layer_norm_weights")
    products = columns.reduce("sum", lambda *at: gradient(*at) * normalized(*at))
    total = columns.reduce("sum", gradient)
    of_weight, of_bias = columns.row(lambda *_: products), columns.row(lambda *_: total)
    return _asked(result, output_mask, of_input, of_weight, of_bias)


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
    mean, squares = moments(builder, elements(x, arithmetic_dtype(result.dtype)))
    means = builder.row(mean, result.dtypes[1])
    rstds = builder.row(lambda *_: apply("rsqrt", squares / builder.count + eps), result.dtypes[2])
    output = _normalized(
        x, result.dtype, (means, rstds), (weight, bias), lambda at: at[:2], lambda at: (at[1] * each + at[2],)
    )
    return reshaped(output, input.shape), means, rstds


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
    x, gradient = (elements(reshaped(node, shape), compute) for node in (input, grad_out))
    means, rstds = (elements(reshaped(node, (N, group)), compute) for node in (mean, rstd))

    def normalized(*at: Index) -> Scalar:
        return (x(*at) - means(*at[:2])) * rstds(*at[:2])

    def scale(g: Index, c: Index) -> Scalar | float:
        return 1 if weight is None else cast(weight.at(g * each + c), compute)

    channels = RowBuilder(shape, (3,), "group_norm_backward")
    product = channels.reduce("sum", lambda *at: gradient(*at) * normalized(*at))
    total = channels.reduce("sum", gradient)
    by_channel = channels.row(lambda *_: product), channels.row(lambda *_: total)
    groups = RowBuilder((N, group, each), (2,), "group_norm_backward")
    sums = [groups.reduce("sum", lambda *at, s=s: s.at(*at) * scale(*at[1:])) for s in by_channel]
    of_products, of_totals = [groups.row(lambda *_, s=s: s / (each * HxW)) for s in sums]

    def of_input(n: Index, g: Index, c: Index, place: Index) -> Scalar:
        value = gradient(n, g, c, place) * scale(g, c) - of_totals.at(n, g)
        value = value - normalized(n, g, c, place) * of_products.at(n, g)
        return value * rstds(n, g)

    images = RowBuilder((N, group, each), (0,), "group_norm_weights")
    totals = [images.reduce("sum", s.at) for s in by_channel]
    return _asked(
        result,
        output_mask,
        reshaped(pointwise(shape, input.dtype, of_input), input.shape),
        *[reshaped(images.row(lambda *_, s=s: s), (C,)) for s in totals],
    )
