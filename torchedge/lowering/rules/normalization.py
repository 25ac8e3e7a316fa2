"""Layer, group and RMS normalization with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.conversions import converted
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.statistics import moments

_SMALLEST_STEP = {"float64": 2.0**-52, "float16": 2.0**-10}


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
    kept = len(input.shape) - len(normalized_shape)
    builder = RowBuilder(input.shape, range(kept, len(input.shape)), "layer_norm")
    compute = arithmetic_dtype(result.dtype)

    def element(*indices: Index) -> Scalar:
        return cast(input.at(*indices), compute)

    mean = builder.reduce("sum", element) / builder.count

    def squared(*indices: Index) -> Scalar:
        distance = element(*indices) - mean
        return distance * distance

    rstd = apply("rsqrt", builder.reduce("sum", squared) / builder.count + eps)

    def normalized(*indices: Index) -> Scalar:
        value = (element(*indices) - mean) * rstd
        value = value if weight is None else value * cast(weight.at(*indices[kept:]), compute)
        return value if bias is None else value + cast(bias.at(*indices[kept:]), compute)

    made = (
        builder.element(normalized, result.dtypes[0]),
        builder.row(lambda *_: mean, result.dtypes[1], keepdim=True),
        builder.row(lambda *_: rstd, result.dtypes[2], keepdim=True),
    )
    builder.close()
    return made


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
    compute, kept = arithmetic_dtype(input.dtype), len(input.shape) - len(normalized_shape)

    def gradient(*indices: Index) -> Scalar:
        return cast(grad_out.at(*indices), compute)

    def normalized(*indices: Index) -> Scalar:
        distance = cast(input.at(*indices), compute) - cast(mean.at(*indices), compute)
        return distance * cast(rstd.at(*indices), compute)

    def weighted(*indices: Index) -> Scalar:
        scale = 1 if weight is None else cast(weight.at(*indices[kept:]), compute)
        return gradient(*indices) * scale

    made: list[Node] = []
    if output_mask[0]:
        rows = RowBuilder(input.shape, range(kept, len(input.shape)), "layer_norm_backward")
        total = rows.reduce("sum", weighted) / rows.count
        product = rows.reduce("sum", lambda *i: weighted(*i) * normalized(*i)) / rows.count
        made.append(
            rows.element(
                lambda *i: (weighted(*i) - total - normalized(*i) * product) * cast(rstd.at(*i), compute)
            )
        )
        rows.close()
    if any(output_mask[1:]):
        columns = RowBuilder(input.shape, range(kept), "layer_norm_weights")
        bodies = (lambda *i: gradient(*i) * normalized(*i), gradient)
        for body, on in zip(bodies, output_mask[1:], strict=True):
            if on:
                found = columns.reduce("sum", body)
                made.append(columns.row(lambda *_, found=found: found))
        columns.close()
    return tuple([converted(n, d) for n, d in zip(made, result.dtypes, strict=True)])


@rule("_fused_rms_norm")
def rms_norm(
    result: Result,
    input: Node,
    normalized_shape: Sequence[int],
    weight: Node | None = None,
    eps: float | None = None,
) -> tuple[Node, ...]:
    """Input over its root mean square, and the latter's reciprocal."""
    kept = len(input.shape) - len(normalized_shape)
    builder = RowBuilder(input.shape, range(kept, len(input.shape)), "rms_norm")
    compute = arithmetic_dtype(result.dtype)
    small = _SMALLEST_STEP.get(input.dtype, 2.0**-23) if eps is None else eps

    def element(*indices: Index) -> Scalar:
        return cast(input.at(*indices), compute)

    squares = builder.reduce("sum", lambda *i: element(*i) * element(*i))
    rstd = apply("rsqrt", squares / builder.count + small)

    def normalized(*indices: Index) -> Scalar:
        scale = 1 if weight is None else cast(weight.at(*indices[kept:]), compute)
        return element(*indices) * rstd * scale

    made = (
        builder.element(normalized, result.dtypes[0]),
        builder.row(lambda *_: rstd, result.dtypes[1], keepdim=True),
    )
    builder.close()
    return made


@rule("_fused_rms_norm_backward")
def rms_norm_backward(
    result: Result,
    grad_out: Node,
    input: Node,
    normalized_shape: Sequence[int],
    rstd: Node,
    output_mask: Sequence[bool],
    weight: Node | None = None,
) -> tuple[Node, ...]:
    """Gradients for input and weight, as far as the mask asks for them."""
    compute, kept = arithmetic_dtype(input.dtype), len(input.shape) - len(normalized_shape)

    def gradient(*indices: Index) -> Scalar:
        return cast(grad_out.at(*indices), compute)

    def normalized(*indices: Index) -> Scalar:
        return cast(input.at(*indices), compute) * cast(rstd.at(*indices), compute)

    def weighted(*indices: Index) -> Scalar:
        scale = 1 if weight is None else cast(weight.at(*indices[kept:]), compute)
        return gradient(*indices) * scale

    made: list[Node] = []
    if output_mask[0]:
        rows = RowBuilder(input.shape, range(kept, len(input.shape)), "rms_norm_backward")
        product = rows.reduce("sum", lambda *i: weighted(*i) * normalized(*i)) / rows.count
        made.append(
            rows.element(lambda *i: (weighted(*i) - normalized(*i) * product) * cast(rstd.at(*i), compute))
        )
        rows.close()
    if output_mask[1]:
        columns = RowBuilder(input.shape, range(kept), "rms_norm_weights")
        found = columns.reduce("sum", lambda *i: gradient(*i) * normalized(*i))
        made.append(columns.row(lambda *_: found))
        columns.close()
    return tuple([converted(n, d) for n, d in zip(made, result.dtypes, strict=True)])


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
    builder.close()

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
    channels.close()
    made: list[Node] = []
    if output_mask[0]:
        groups = RowBuilder((N, group, each), (2,), "group_norm_backward")
        sums = [groups.reduce("sum", lambda *i, s=s: s.at(*i) * scale(*i[1:])) for s in (products, totals)]
        of_products, of_totals = [groups.row(lambda *_, s=s: s / (each * HxW)) for s in sums]
        groups.close()

        def of_input(n: Index, g: Index, c: Index, place: Index) -> Scalar:
            value = gradient(n, g, c, place) * scale(g, c) - of_totals.at(n, g)
            value = value - normalized(n, g, c, place) * of_products.at(n, g)
            return value * cast(rstds.at(n, g), compute)

        made.append(reshaped(pointwise(shape, input.dtype, of_input), input.shape))
    if any(output_mask[1:]):
        images = RowBuilder((N, group, each), (0,), "group_norm_weights")
        for source, on in zip((products, totals), output_mask[1:], strict=True):
            if on:
                found = images.reduce("sum", lambda *i, s=source: s.at(*i))
                made.append(reshaped(images.row(lambda *_, found=found: found), (C,)))
        images.close()
    return tuple([converted(n, d) for n, d in zip(made, result.dtypes, strict=True)])
