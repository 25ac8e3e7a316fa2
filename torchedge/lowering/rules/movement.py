"""Elements at other places: views, concatenation, padding, windows as columns; and new tensors.

Views only rewrite indices: they cost nothing where their readers take them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torchedge.expressions.indices import Index, flatten, unflatten
from torchedge.expressions.scalars import Bound, Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import expanded, full, permuted, pointwise, reduction, reshaped, view
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules import ranges
from torchedge.lowering.rules.promotion import arithmetic_dtype, is_floating
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.taps import Taps


@rule("view", "squeeze", "unsqueeze", bounds=ranges.same)
def view_as_result(result: Result, input: Node, **sizes: object) -> Node:
    """Input in the result's shape."""
    return reshaped(input, result.shape)


@rule("permute", bounds=ranges.same)
def permute(result: Result, input: Node, dims: Sequence[int]) -> Node:
    """Dimension k of the result is dimension dims[k] of input."""
    return permuted(input, [d % len(dims) for d in dims])


@rule("expand", bounds=ranges.same)
def expand(result: Result, input: Node, **sizes: object) -> Node:
    """Input repeated along dimensions of size 1 and new leading ones."""
    return expanded(input, result.shape)


@rule("select", bounds=ranges.among)
def select(result: Result, input: Node, dim: int, index: int) -> Node:
    """The part of input at one index of a dimension."""
    place = dim % len(input.shape)
    at = index % input.shape[place]
    return view(input, result.shape, lambda *i: (*i[:place], at, *i[place:]))


@rule("slice", bounds=ranges.among)
def slice_(
    result: Result, input: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    """Every step-th index of a dimension from start to before end."""
    place = dim % len(input.shape)
    first = _first(start, end, step, input.shape[place])
    return narrowed(input, place, first, result.shape[place], step)


def narrowed(x: Node, dim: int, start: int, size: int, step: int = 1) -> Node:
    """Return `size` indices of a dimension of x, from `start` on."""
    if start == 0 and size == x.shape[dim]:
        return x
    shape = [size if d == dim else n for d, n in enumerate(x.shape)]
    return view(x, shape, lambda *i: (*i[:dim], i[dim] * step + start, *i[dim + 1 :]))


@rule("flip", bounds=ranges.among)
def flip(result: Result, input: Node, dims: Sequence[int]) -> Node:
    """Input with dimensions in reverse."""
    rank = len(input.shape)
    reversed_dims = {d % rank for d in dims} if rank else set()

    def move(*indices: Index) -> list[Index]:
        return [
            input.shape[d] - 1 - i if d in reversed_dims and input.shape[d] > 1 else i
            for d, i in enumerate(indices)
        ]

    return view(input, result.shape, move)


@rule("roll", bounds=ranges.among)
def roll(result: Result, input: Node, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Node:
    """Input moved along dimensions; what leaves at the end comes back at the start."""
    steps = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [dims] if isinstance(dims, int) else list(dims)
    if not along:
        return reshaped(roll(result, reshaped(input, [input.numel]), steps, [0]), result.shape)
    moved = dict.fromkeys(range(len(input.shape)), 0)
    for step, dim in zip(steps, along, strict=True):
        moved[dim % max(1, len(input.shape))] += step

    def move(*indices: Index) -> list[Index]:
        sizes = input.shape
        return [(i - moved[d] % sizes[d]) % sizes[d] if moved[d] else i for d, i in enumerate(indices)]

    return view(input, input.shape, move) if input.shape else input


@rule("diagonal")
def diagonal(result: Result, input: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """The elements where dimension dim2 is `offset` ahead of dim1, as the last dimension."""
    rank = len(input.shape)
    first, second = dim1 % rank, dim2 % rank

    def move(*indices: Index) -> list[Index]:
        others = iter(indices[:-1])
        along = {first: indices[-1] + max(0, -offset), second: indices[-1] + max(0, offset)}
        return [along[d] if d in along else next(others) for d in range(rank)]

    return view(input, result.shape, move)


@rule("unfold", bounds=ranges.among)
def unfold(result: Result, input: Node, dimension: int, size: int, step: int) -> Node:
    """Windows of a dimension, `step` apart; the place within them is the last dimension."""
    if not input.shape:
        return reshaped(input, result.shape)
    dim = dimension % len(input.shape)
    return view(input, result.shape, lambda *i: (*i[:dim], i[dim] * step + i[-1], *i[dim + 1 : -1]))


@rule("cat", bounds=ranges.parts)
def cat(result: Result, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Tensors one after the other along a dimension; each is read only where it lies."""
    rank = len(result.shape)
    place = dim % max(rank, 1)
    pieces = [x for x in tensors if len(x.shape) == rank and x.shape[place]]
    starts = list(accumulate([x.shape[place] for x in pieces[:-1]], initial=0))

    def element(*indices: Index) -> Scalar:
        joined: Scalar = constant(0, result.dtype)
        for x, start in reversed(list(zip(pieces, starts, strict=True))):
            at = indices[place] - start
            value = cast(x.at(*indices[:place], at, *indices[place + 1 :]), result.dtype)
            joined = guarded([(at, 0, x.shape[place])], value, joined)
        return joined

    return pointwise(result.shape, result.dtype, element)


@rule("constant_pad_nd")
def constant_pad_nd(result: Result, input: Node, pad: Sequence[int], value: float = 0) -> Node:
    """Input with a border of one value, from the last dimension on; a negative border cuts off."""
    before = [0] * len(input.shape)
    for place, size in enumerate(pad[::2]):
        before[-1 - place] = size

    def element(*indices: Index) -> Scalar:
        at = [i - b for i, b in zip(indices, before, strict=True)]
        return guarded([(i, 0, n) for i, n in zip(at, input.shape, strict=True)], input.at(*at), value)

    return pointwise(result.shape, result.dtype, element)


def _first(start: int | None, end: int | None, step: int, size: int) -> int:
    return slice(start, end, step).indices(size)[0]


@rule("slice_scatter")
def slice_scatter(
    result: Result,
    input: Node,
    src: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node:
    """Input with src in place of a slice."""
    place = dim % len(input.shape)
    first = _first(start, end, step, input.shape[place])

    def element(*indices: Index) -> Scalar:
        moved = indices[place] - first
        bounds: list[Bound] = [(moved, 0, (src.shape[place] - 1) * step + 1)]
        if step > 1:
            bounds.append((moved % step, 0, 1))
        value = src.at(*indices[:place], moved // step, *indices[place + 1 :])
        return guarded(bounds, value, input.at(*indices))

    return pointwise(result.shape, result.dtype, element)


@rule("diagonal_scatter")
def diagonal_scatter(
    result: Result, input: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Node:
    """Input with src on a diagonal."""
    rank = len(result.shape)
    first, second = dim1 % rank, dim2 % rank

    def element(*indices: Index) -> Scalar:
        others = [i for d, i in enumerate(indices) if d not in (first, second)]
        ahead = indices[second] - indices[first] - offset
        along = indices[first] - max(0, -offset)
        bounds = [(ahead, 0, 1), (along, 0, src.shape[-1])]
        return guarded(bounds, src.at(*others, along), input.at(*indices))

    return pointwise(result.shape, result.dtype, element)


@rule("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(result: Result, grad_output: Node, input: Node, padding: Sequence[int]) -> Node:
    """Each element's gradient, at the borders with those of its copies; one dimension after the other."""
    gradient, last = grad_output, len(input.shape) - 1
    for place, before in enumerate(padding[::2]):
        gradient = _gathered_copies(gradient, last - place, before, input.shape[last - place])
    return gradient


def _gathered_copies(grad: Node, dim: int, before: int, size: int) -> Node:
    rank, padded = len(grad.shape), grad.shape[dim]
    window = max(before, 0) + max(padded - size - before, 0) + 1
    shape = [size if d == dim else n for d, n in enumerate(grad.shape)]

    def body(*indices: Index) -> Scalar:
        place = indices[dim] + indices[-1] + min(before, 0)
        origin = apply("maximum", apply("minimum", Position(place - before, "int32"), size - 1), 0)
        value = grad.at(*indices[:dim], place, *indices[dim + 1 : -1])
        mine = where(origin.equals(Position(indices[dim], "int32")), value, 0)
        return guarded([(place, 0, padded)], mine)

    return reduction((*shape, window), (rank,), "sum", body)


@rule("unfold_backward")
def unfold_backward(
    result: Result, grad_in: Node, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Node:
    """The sum of the gradients of an element in all windows over it."""
    if not input_sizes:
        return reshaped(grad_in, result.shape)
    rank = len(input_sizes)
    place = dim % rank

    def term(*indices: Index) -> Scalar:
        at, turn = list(indices[:-1]), indices[-1]
        window, inside = at[place] // step - turn, at[place] % step + turn * step
        at[place] = window
        bounds = [(window, 0, grad_in.shape[place]), (inside, 0, size)]
        return guarded(bounds, cast(grad_in.at(*at, inside), arithmetic_dtype(result.dtype)))

    return reduction((*input_sizes, -(-size // step)), (rank,), "window", term, result.dtype)


def _columns(taps: Taps) -> tuple[int, ...]:
    """Return how many windows there are along each dimension."""
    counts = []
    for dim, size in enumerate(taps.sizes):
        span = taps.dilation[dim] * (taps.kernel[dim] - 1) + 1
        counts.append((size + 2 * taps.padding[dim] - span) // taps.stride[dim] + 1)
    return tuple(counts)


@rule("im2col")
def im2col(result: Result, input: Node, kernel_size: Sequence[int], **settings: Any) -> Node:  # noqa: ANN401
    """The windows of a picture, one a column: lines are (channel, place in the window)."""
    taps = Taps.of(input.shape[-2:], kernel_size, **settings)
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
    **settings: Any,  # noqa: ANN401
) -> Node:
    """The picture in which each element is the sum of its places in all columns."""
    taps = Taps.of(result.shape[-2:], kernel_size, **settings)
    columns, lines = _columns(taps), (result.shape[-3], *taps.kernel)
    rank = len(result.shape)

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

    return reduction((*result.shape, *taps.kernel), (rank, rank + 1), "window", term, result.dtype)


@rule("full", bounds=ranges.filled)
def filled(result: Result, fill_value: float | int | bool, **sizes: object) -> Node:
    """One number everywhere."""
    return full(result.shape, fill_value, result.dtype)


@rule("empty", "empty_strided", "empty_permuted", "new_empty_strided")
def empty(result: Result, **arguments: object) -> Node:
    """Zero everywhere, where PyTorch leaves the elements undefined."""
    return full(result.shape, 0, result.dtype)


@rule("arange", bounds=ranges.steps)
def arange(result: Result, end: float, start: float = 0, step: float = 1, dtype: str | None = None) -> Node:
    """Start, start + step, ... below end."""
    compute = result.dtype if is_floating(result.dtype) else "int64"
    if compute == "int64" and isinstance(start, int) and isinstance(step, int) and max(start, end) < 1 << 31:
        return pointwise(result.shape, result.dtype, lambda i: Position(i * step + start, result.dtype))
    return pointwise(
        result.shape, result.dtype, lambda i: Position(i, compute) * step + constant(start, compute)
    )


@rule("random_uniform")
def random_uniform(result: Result, seed: Node, counter: Node, shape: object, offset: int = 0) -> Node:
    """Numbers in [0, 1) by a counter: the same for the same seed, counter, offset and place."""

    def body(*indices: Index) -> Scalar:
        place = Position(flatten(indices, result.shape), "int64")
        return apply(
            "uniform", cast(seed.at(), "int64"), cast(counter.at(), "int64"), offset, place, dtype="float32"
        )

    return pointwise(result.shape, result.dtype, body)
