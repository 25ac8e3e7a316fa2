"""Windows laid out as dimensions or columns, and their sums back: unfold backwards, im2col and col2im."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import Index, flatten, unflatten
from torchedge.expressions.scalars import Bound, Scalar, cast, guarded
from torchedge.lowering.building import RowBuilder, pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.taps import Taps, each


@rule("unfold_backward")
def unfold_backward(
    result: Result, grad_in: Node, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Node:
    """The sum of the gradients of an element in all windows over it."""
    if not input_sizes:
        return reshaped(grad_in, result.shape)
    rank = len(input_sizes)
    place = dim % rank
    builder = RowBuilder((*input_sizes, -(-size // step)), (rank,), "window")

    def term(*indices: Index) -> Scalar:
        at, turn = list(indices[:-1]), indices[-1]
        window, inside = at[place] // step - turn, at[place] % step + turn * step
        at[place] = window
        bounds = [(window, 0, grad_in.shape[place]), (inside, 0, size)]
        return guarded(bounds, cast(grad_in.at(*at, inside), arithmetic_dtype(result.dtype)))

    total = builder.reduce("sum", term)
    made = builder.row(lambda *_: total, result.dtype)
    builder.close()
    return made


def _columns(taps: Taps) -> tuple[int, ...]:
    """Return how many windows there are along each dimension."""
    found = []
    for dim, size in enumerate(taps.sizes):
        span = taps.dilation[dim] * (taps.kernel[dim] - 1) + 1
        found.append((size + 2 * taps.padding[dim] - span) // taps.stride[dim] + 1)
    return tuple(found)


def _taps(
    sizes: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Taps:
    return Taps(
        tuple(sizes), each(kernel_size, 2), each(stride, 2), each(padding, 2), each(dilation, 2), groups=1
    )


@rule("im2col")
def im2col(
    result: Result,
    input: Node,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Node:
    """The windows of a picture, one a column: lines are (channel, place in the window)."""
    taps = _taps(input.shape[-2:], kernel_size, dilation, padding, stride)
    columns, lines = _columns(taps), (input.shape[-3], *taps.kernel)

    def element(*indices: Index) -> Scalar:
        *batch, line, column = indices
        channel, *inside = unflatten(line, lines)
        places, bounds = taps.under(unflatten(column, columns), inside)
        return guarded(bounds, input.at(*batch, channel, *places))

    return pointwise(result.shape, result.dtype, element)


@rule("col2im")
def col2im(
    result: Result,
    input: Node,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Node:
    """The picture in which each element is the sum of its places in all columns."""
    taps = _taps(result.shape[-2:], kernel_size, dilation, padding, stride)
    columns, lines = _columns(taps), (result.shape[-3], *taps.kernel)
    rank = len(result.shape)
    builder = RowBuilder((*result.shape, *taps.kernel), (rank, rank + 1), "window")

    def term(*indices: Index) -> Scalar:
        *batch, channel = indices[: rank - 2]
        outs: list[Index] = []
        bounds: list[Bound] = []
        for dim in range(2):
            moved = indices[rank - 2 + dim] + taps.padding[dim] - indices[rank + dim] * taps.dilation[dim]
            outs.append(moved // taps.stride[dim])
            bounds += [(moved % taps.stride[dim], 0, 1), (outs[-1], 0, columns[dim])]
        line = flatten((channel, *indices[rank:]), lines)
        value = input.at(*batch, line, flatten(outs, columns))
        return guarded(bounds, cast(value, arithmetic_dtype(result.dtype)))

    total = builder.reduce("sum", term)
    made = builder.row(lambda *_: total, result.dtype)
    builder.close()
    return made
