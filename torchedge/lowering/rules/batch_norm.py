"""Batch normalization: statistics of a channel in one pass, the normalized tensor left to its readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, full, pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.conversions import converted
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.statistics import moments


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

    made = [
        builder.row(mean),
        builder.row(lambda c: apply("rsqrt", variance + eps)),
    ]
    if running:
        old_mean, old_var = running
        made.append(builder.row(lambda c: moved(old_mean, mean(c), c), old_mean.dtype))
        made.append(builder.row(lambda c: moved(old_var, unbiased, c), old_var.dtype))
    builder.close()
    return _Statistics(made[0], made[1], tuple(made[2:]))


def _kept(running: Sequence[Node], eps: float) -> _Statistics:
    """Return the running statistics as those to normalize with."""
    mean, var = running
    compute = arithmetic_dtype(var.dtype)
    rstd = pointwise(var.shape, compute, lambda c: apply("rsqrt", cast(var.at(c), compute) + eps))
    return _Statistics(mean, rstd, tuple(running))


def _normalized(x: Node, found: _Statistics, weight: Node | None, bias: Node | None) -> Node:
    """Return (x - mean) · rstd · weight + bias of each channel."""
    compute = arithmetic_dtype(x.dtype)

    def body(*indices: Index) -> Scalar:
        channel = indices[1]
        scale = cast(found.rstd.at(channel), compute)
        if weight is not None:
            scale = scale * cast(weight.at(channel), compute)
        value = (cast(x.at(*indices), compute) - cast(found.mean.at(channel), compute)) * scale
        return value if bias is None else value + cast(bias.at(channel), compute)

    return pointwise(x.shape, x.dtype, body)


def _batch_norm(
    result: Result,
    x: Node,
    affine: tuple[Node | None, Node | None],
    running: Sequence[Node],
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Node, ...]:
    """Return output, saved mean and rstd (empty in evaluation), new running mean and variance."""
    found = _measured(x, running, momentum, eps) if training else _kept(running, eps)
    output = _normalized(x, found, *affine)
    saved = zip((found.mean, found.rstd), result.shapes[1:3], result.dtypes[1:3], strict=True)
    return output, *[converted(s, d) if training else full(n, 0, d) for s, n, d in saved], *found.running


def _given(*nodes: Node | None) -> tuple[Node, ...]:
    return tuple([n for n in nodes if n is not None])


@rule("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
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
    """Normalized input, mean and 1 / deviation of each channel; running statistics are read only."""
    running = _given(running_mean, running_var)
    return _batch_norm(result, input, (weight, bias), running, training, momentum, eps)[:3]


@rule("_native_batch_norm_legit_functional")
def functional_batch_norm(
    result: Result,
    input: Node,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: float,
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """The same, with the new running mean and (unbiased) variance."""
    running = (running_mean, running_var)
    return _batch_norm(result, input, (weight, bias), running, training, momentum, eps)


@rule("_native_batch_norm_legit_no_training")
def evaluated_batch_norm(
    result: Result,
    input: Node,
    running_mean: Node,
    running_var: Node,
    momentum: float,
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """Input normalized by the running statistics."""
    return _batch_norm(result, input, (weight, bias), (running_mean, running_var), False, momentum, eps)[:3]


@rule("_batch_norm_with_update_functional")
def updating_batch_norm(
    result: Result,
    input: Node,
    running_mean: Node,
    running_var: Node,
    momentum: float,
    eps: float,
    weight: Node | None = None,
    bias: Node | None = None,
) -> tuple[Node, ...]:
    """Training's batch norm, with the empty reserve of PyTorch's own kernel."""
    running = (running_mean, running_var)
    made = _batch_norm(result, input, (weight, bias), running, True, momentum, eps)
    return *made[:3], full(result.shapes[3], 0, result.dtypes[3]), *made[3:]


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
        found = _Statistics(save_mean, save_invstd)
    else:
        found = _kept(_given(running_mean, running_var), eps)
    sums = _gradient_sums(grad_out, input, found)
    made = (
        _input_gradient(grad_out, input, found, weight, sums if train else None),
        *sums,
    )
    wanted = [node for node, on in zip(made, output_mask, strict=True) if on]
    return tuple([converted(n, d) for n, d in zip(wanted, result.dtypes, strict=True)])


@rule("batch_norm_backward")
def backward_with_reserve(
    result: Result,
    grad_out: Node,
    input: Node,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Node | None = None,
    weight: Node | None = None,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    save_mean: Node | None = None,
    save_var: Node | None = None,
) -> tuple[Node, ...]:
    """The same by the newer schema, whose saved variance is 1 / deviation too."""
    return batch_norm_backward(
        result,
        grad_out,
        input,
        update,
        eps,
        output_mask,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
    )


def _gradient_sums(gradient: Node, x: Node, found: _Statistics) -> tuple[Node, Node]:
    """Return the gradients for weight and bias: sums of gradient · x^ and of gradient over a channel."""
    builder = RowBuilder(x.shape, _all_but_channels(x), "batch_norm_backward")
    compute = arithmetic_dtype(x.dtype)

    def product(*indices: Index) -> Scalar:
        distance = cast(x.at(*indices), compute) - cast(found.mean.at(indices[1]), compute)
        return cast(gradient.at(*indices), compute) * distance

    products = builder.reduce("sum", product)
    total = builder.reduce("sum", lambda *i: cast(gradient.at(*i), compute))
    made = (
        builder.row(lambda c: products * cast(found.rstd.at(c), compute)),
        builder.row(lambda c: total),
    )
    builder.close()
    return made


def _input_gradient(
    gradient: Node, x: Node, found: _Statistics, weight: Node | None, sums: tuple[Node, Node] | None
) -> Node:
    """Return rstd · weight · (gradient - mean of gradient - x^ · mean of gradient · x^).

    In evaluation (no sums) the statistics are constants: without both means.
    """
    compute, share = arithmetic_dtype(x.dtype), x.shape[1] / max(1, x.numel)

    def body(*indices: Index) -> Scalar:
        channel = indices[1]
        rstd = cast(found.rstd.at(channel), compute)
        value = cast(gradient.at(*indices), compute)
        if sums is not None:
            of_weight, of_bias = [s.at(channel) * share for s in sums]
            distance = cast(x.at(*indices), compute) - cast(found.mean.at(channel), compute)
            value = value - of_bias - distance * (rstd * of_weight)
        return value * (rstd if weight is None else rstd * cast(weight.at(channel), compute))

    return pointwise(x.shape, x.dtype, body)
