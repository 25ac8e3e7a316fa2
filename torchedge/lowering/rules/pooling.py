"""Pooling over windows that slide, or adapt to the output's size: maxima, means and their gradients.

Adaptive window o of O over n elements runs from floor(o·n / O) to before ceil((o + 1)·n / O).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

import numpy as np

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Bound, Position, Scalar, apply, cast, guarded, where
from torchedge.lowering.building import RowBuilder, reduction
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.registry import Result, spatial_rule
from torchedge.lowering.rules.taps import Taps, each

Count = Scalar | int
Reach = Callable[[Sequence[Index], Sequence[Index]], tuple[Sequence[Index], Sequence[Bound]]]
"""From indices of one side and places in a window to indices of the other side, and when they are there."""


def _windows(
    space: int,
    input: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> Taps:
    kernel = each(kernel_size, space)
    step = each(stride, space) if stride else kernel
    return Taps(input.shape[-space:], kernel, step, each(padding, space), each(dilation, space), 1)


@spatial_rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(
    space: int,
    result: Result,
    input: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Node, ...]:
    """The largest element of each window, and where in the plane it lies."""
    windows = _windows(space, input, kernel_size, stride, padding, dilation)

    def corner(outs: Sequence[Index]) -> list[Index]:
        return [o * s - p for o, s, p in zip(outs, windows.stride, windows.padding, strict=True)]

    return largest(result, input, windows.kernel, windows.under, corner, windows.dilation)


def largest(
    result: Result,
    x: Node,
    kernel: Sequence[int],
    under: Reach,
    corner: Callable[[Sequence[Index]], Sequence[Index]],
    dilation: Sequence[int],
) -> tuple[Node, ...]:
    """Return the largest element of each window and its position in the plane.

    under: which elements of x lie under a window's places; corner: where a window begins; dilation: from one
    of its places to the next.
    """
    space, rank = len(kernel), len(result.shape)
    lowest = -inf if x.dtype.startswith("float") else int(np.iinfo(x.dtype).min)
    builder = RowBuilder((*result.shape, *kernel), range(rank, rank + space), "pool")

    def element(*indices: Index) -> Scalar:
        places, bounds = under(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, x.at(*indices[: rank - space], *places), lowest)

    peak = builder.reduce("max", element)
    place = builder.reduce("argmax", element)

    def position(*indices: Index) -> Scalar:
        pitches = [prod(x.shape[d + 1 :]) for d in range(rank - space, rank)]
        start = sum((c * p for c, p in zip(corner(indices[-space:]), pitches, strict=True)), start=Index(()))
        return Position(start, "int64") + _offset(place, kernel, dilation, pitches)

    return builder.row(lambda *_: peak), builder.row(position)


def _offset(place: Scalar, kernel: Sequence[int], dilation: Sequence[int], pitches: Sequence[int]) -> Scalar:
    """Return how far behind a window's corner in the plane one of its places lies."""
    total: Scalar | None = None
    for dim, (size, spacing, pitch) in enumerate(zip(kernel, dilation, pitches, strict=True)):
        inner = prod(kernel[dim + 1 :])
        digit = apply("int_div", place, inner) if inner > 1 else place
        if dim:
            digit = apply("int_mod", digit, size)
        total = digit * (spacing * pitch) if total is None else total + digit * (spacing * pitch)
    return place if total is None else total


@spatial_rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_with_indices_backward(
    space: int,
    result: Result,
    grad_output: Node,
    input: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Node,
) -> Node:
    """The gradients of the windows in which an element was the largest."""
    windows = _windows(space, input, kernel_size, stride, padding, dilation)
    reach = [d * (k - 1) + 1 for d, k in zip(windows.dilation, windows.kernel, strict=True)]
    turns = [-(-r // s) for r, s in zip(reach, windows.stride, strict=True)]
    return chosen_sum(result, grad_output, indices, turns, _covering(windows, grad_output.shape[-space:]))


def chosen_sum(
    result: Result, grad_output: Node, indices: Node, turns: Sequence[int], covering: Reach
) -> Node:
    """Return for each element the sum of the gradients, of the windows over it, whose index names it."""
    rank, space = len(result.shape), len(turns)
    plane = result.shape[-space:]

    def value(at: Sequence[Index], outs: Sequence[Index]) -> Scalar:
        place = Index(())
        for index, size in zip(at[-space:], plane, strict=True):
            place = place * size + index
        lead = at[: rank - space]
        chosen = indices.at(*lead, *outs).equals(Position(place, "int64"))
        return where(chosen, grad_output.at(*lead, *outs), 0)

    return covering_sum(result, turns, covering, value)


def covering_sum(
    result: Result,
    turns: Sequence[int],
    covering: Reach,
    value: Callable[[Sequence[Index], Sequence[Index]], Scalar],
) -> Node:
    """Return for each element the sum of `value(element, window)` over the windows that cover it."""
    rank, space = len(result.shape), len(turns)

    def term(*indices: Index) -> Scalar:
        outs, bounds = covering(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, value(indices[:rank], outs))

    return reduction((*result.shape, *turns), range(rank, rank + space), "pool", term, result.dtype)


def _covering(windows: Taps, out: Sequence[int]) -> Reach:
    """Return which windows lie over an element, the last one first."""

    def reach(places: Sequence[Index], turns: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        outs: list[Index] = []
        bounds: list[Bound] = []
        for dim, (place, turn) in enumerate(zip(places, turns, strict=True)):
            moved, step = place + windows.padding[dim], windows.stride[dim]
            span = windows.dilation[dim] * (windows.kernel[dim] - 1) + 1
            outs.append(moved // step - turn)
            bounds += [(outs[-1], 0, out[dim]), (moved % step + turn * step, 0, span)]
        return outs, bounds

    return reach


@spatial_rule("avg_pool2d", "avg_pool3d")
def avg_pool(
    space: int,
    result: Result,
    input: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Node:
    """The mean of each window."""
    windows = _windows(space, input, kernel_size, stride, padding)
    rank = len(result.shape)
    builder = RowBuilder((*result.shape, *windows.kernel), range(rank, rank + space), "pool")

    def element(*indices: Index) -> Scalar:
        places, bounds = windows.under(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, input.at(*indices[: rank - space], *places))

    def mean(*indices: Index) -> Scalar:
        outs = indices[-space:]
        return divided(total, _counts(windows, outs, result.shape, count_include_pad, divisor_override))

    total = builder.reduce("sum", element)
    return builder.row(mean)


@spatial_rule("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    space: int,
    result: Result,
    grad_output: Node,
    input: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Node:
    """The shares in the gradients of the windows over each element."""
    windows = _windows(space, input, kernel_size, stride, padding)
    turns = [-(-k // s) for k, s in zip(windows.kernel, windows.stride, strict=True)]

    def value(at: Sequence[Index], outs: Sequence[Index]) -> Scalar:
        counts = _counts(windows, outs, grad_output.shape, count_include_pad, divisor_override)
        return divided(grad_output.at(*at[: len(at) - space], *outs), counts)

    return covering_sum(result, turns, _covering(windows, grad_output.shape[-space:]), value)


def divided(value: Scalar, counts: Sequence[Count]) -> Scalar:
    """Return a value over the product of counts, which are numbers or whole scalars."""
    number = prod(c for c in counts if isinstance(c, int))
    for count in counts:
        if not isinstance(count, int):
            value = value / cast(count, value.dtype)
    return value / number


def _counts(
    windows: Taps, outs: Sequence[Index], shape: Sequence[int], with_padding: bool, override: int | None
) -> list[Count]:
    """Return by what a window's sum is divided, one factor a dimension (`override`: one alone)."""
    if override is not None:
        return [override]
    counts: list[Count] = []
    for dim, (out, count) in enumerate(zip(outs, shape[-len(outs) :], strict=True)):
        size, padding = windows.sizes[dim], windows.padding[dim]
        kernel, step = windows.kernel[dim], windows.stride[dim]
        low, high = (-padding, size + padding) if with_padding else (0, size)
        seen = {min(o * step - padding + kernel, high) - max(o * step - padding, low) for o in range(count)}
        if len(seen) == 1:
            counts.append(seen.pop())
            continue
        start = Position(out * step - padding, "int32")
        end = Position(out * step - padding + kernel, "int32")
        counts.append(apply("minimum", end, high) - apply("maximum", start, low))
    return counts


def _adaptive_start(out: Index, size: int, outs: int) -> Index:
    return out * size // outs


def _adaptive_end(out: Index, size: int, outs: int) -> Index:
    return ((out + 1) * size + outs - 1) // outs


def _longest(size: int, outs: int) -> int:
    """Return the most elements that one of `outs` windows over `size` elements has."""
    return max(-(-(o + 1) * size // outs) - o * size // outs for o in range(outs))


def _adaptive_under(sizes: Sequence[int], outs: Sequence[int]) -> Reach:
    """Return which elements lie in a window."""

    def reach(at: Sequence[Index], taps: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        places = [_adaptive_start(o, n, m) + k for o, k, n, m in zip(at, taps, sizes, outs, strict=True)]
        left = [_adaptive_end(o, n, m) - p for o, p, n, m in zip(at, places, sizes, outs, strict=True)]
        return places, [(i, 1, i.range[1] + 1) for i in left]

    return reach


def _adaptive_counts(at: Sequence[Index], sizes: Sequence[int], outs: Sequence[int]) -> list[Count]:
    """Return how many elements a window has in each dimension."""
    spans = [
        _adaptive_end(o, n, m) - _adaptive_start(o, n, m) for o, n, m in zip(at, sizes, outs, strict=True)
    ]
    return [Position(s, "int32") if s.constant is None else s.constant for s in spans]


@spatial_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(space: int, result: Result, input: Node, output_size: Sequence[int]) -> Node:
    """The mean of each window."""
    rank = len(result.shape)
    sizes, outs = input.shape[-space:], result.shape[-space:]
    under = _adaptive_under(sizes, outs)
    kernel = list(map(_longest, sizes, outs))
    builder = RowBuilder((*result.shape, *kernel), range(rank, rank + space), "pool")

    def element(*indices: Index) -> Scalar:
        places, bounds = under(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, input.at(*indices[: rank - space], *places))

    total = builder.reduce("sum", element)
    return builder.row(lambda *at: divided(total, _adaptive_counts(at[-space:], sizes, outs)))


@spatial_rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(
    space: int, result: Result, input: Node, output_size: Sequence[int]
) -> tuple[Node, ...]:
    """The largest element of each window, and where in the plane it lies."""
    sizes, outs = input.shape[-space:], result.shape[-space:]

    def corner(at: Sequence[Index]) -> list[Index]:
        return [_adaptive_start(o, n, m) for o, n, m in zip(at, sizes, outs, strict=True)]

    kernel = list(map(_longest, sizes, outs))
    return largest(result, input, kernel, _adaptive_under(sizes, outs), corner, [1] * space)


def _adaptive_covering(sizes: Sequence[int], outs: Sequence[int]) -> Reach:
    """Return which windows lie over an element, the first one first."""

    def reach(places: Sequence[Index], turns: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        at = [_adaptive_start(i, m, n) + t for i, t, n, m in zip(places, turns, sizes, outs, strict=True)]
        left = [_adaptive_end(i, m, n) - o for i, o, n, m in zip(places, at, sizes, outs, strict=True)]
        return at, [(i, 1, i.range[1] + 1) for i in left]

    return reach


@spatial_rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(space: int, result: Result, grad_output: Node, input: Node) -> Node:
    """The shares in the gradients of the windows over each element."""
    sizes, outs = input.shape[-space:], grad_output.shape[-space:]

    def value(at: Sequence[Index], windows: Sequence[Index]) -> Scalar:
        grad = grad_output.at(*at[: len(at) - space], *windows)
        return divided(grad, _adaptive_counts(windows, sizes, outs))

    return covering_sum(result, list(map(_longest, outs, sizes)), _adaptive_covering(sizes, outs), value)


@spatial_rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(
    space: int, result: Result, grad_output: Node, input: Node, indices: Node
) -> Node:
    """The gradients of the windows in which an element was the largest."""
    sizes, outs = input.shape[-space:], grad_output.shape[-space:]
    turns = list(map(_longest, outs, sizes))
    return chosen_sum(result, grad_output, indices, turns, _adaptive_covering(sizes, outs))
