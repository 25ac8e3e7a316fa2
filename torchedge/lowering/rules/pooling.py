"""Pooling over windows that slide, or adapt to the output's size: maxima, means and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf, prod
from operator import add
from typing import Any

import numpy as np

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Bound, Position, Scalar, apply, cast, guarded, where
from torchedge.lowering.building import RowBuilder, reduction
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import is_floating
from torchedge.lowering.rules.registry import Result, spatial_rule
from torchedge.lowering.rules.taps import Taps, each

Count = Scalar | int
Reach = Callable[[Sequence[Index], Sequence[Index]], tuple[Sequence[Index], Sequence[Bound]]]
"""From indices of one side and places in a window to indices of the other side, and when they are there."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows lie on the spatial dimensions of an input.

    kernel: extents of the largest window; dilation: from one of its places to the next; turns: most windows
    that cover one element, by dimension. corner(outs): where windows begin; under(outs, taps): the elements
    under their places; covering(places, turns): the windows that cover elements; counts(outs): the factors by
    whose product a window's sum is divided for its mean.
    """

    kernel: Sequence[int]
    dilation: Sequence[int]
    turns: Sequence[int]
    corner: Callable[[Sequence[Index]], Sequence[Index]]
    under: Reach
    covering: Reach
    counts: Callable[[Sequence[Index]], list[Count]]


def sliding(
    space: int,
    sizes: Sequence[int],
    outs: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Windows:
    """Return the windows of a pooling operator's arguments, by the shapes of its input and output."""
    kernel, size, out = each(kernel_size, space), tuple(sizes[-space:]), tuple(outs[-space:])
    step = each(stride, space) if stride else kernel
    taps = Taps.of(size, kernel, step, padding, dilation)
    spans = [d * (k - 1) + 1 for d, k in zip(taps.dilation, kernel, strict=True)]

    def corner(at: Sequence[Index]) -> list[Index]:
        return [o * s - p for o, s, p in zip(at, step, taps.padding, strict=True)]

    def covering(places: Sequence[Index], turns: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        over: list[Index] = []
        bounds: list[Bound] = []
        for dim, (place, turn) in enumerate(zip(places, turns, strict=True)):
            moved = place + taps.padding[dim]
            over.append(moved // step[dim] - turn)  # the last window first
            bounds += [(over[-1], 0, out[dim]), (moved % step[dim] + turn * step[dim], 0, spans[dim])]
        return over, bounds

    def counts(at: Sequence[Index]) -> list[Count]:
        if divisor_override is not None:
            return [divisor_override]
        pads = [p if count_include_pad else 0 for p in taps.padding]
        return [
            _extent(start, start_of, k, -pad, n + pad)
            for start, start_of, k, pad, n in zip(corner(at), starts, kernel, pads, size, strict=True)
        ]

    starts = [[o * s - p for o in range(n)] for n, s, p in zip(out, step, taps.padding, strict=True)]
    turns = [-(-span // s) for span, s in zip(spans, step, strict=True)]
    return Windows(kernel, taps.dilation, turns, corner, taps.under, covering, counts)


def _extent(start: Index, starts: Sequence[int], kernel: int, low: int, high: int) -> Count:
    """Return how much of a window lies from `low` to `high`; starts: where it may begin."""
    seen = {min(s + kernel, high) - max(s, low) for s in starts}
    if len(seen) == 1:
        return seen.pop()
    first, end = Position(start, "int32"), Position(start + kernel, "int32")
    return apply("minimum", end, high) - apply("maximum", first, low)


def adaptive(
    space: int, sizes: Sequence[int], outs: Sequence[int], output_size: Sequence[int] = ()
) -> Windows:
    """Return windows of which o of O over n elements runs from o·n / O to before ceil((o + 1)·n / O)."""
    size, out = tuple(sizes[-space:]), tuple(outs[-space:])

    def corner(at: Sequence[Index]) -> list[Index]:
        return list(map(_start, at, size, out))

    def counts(at: Sequence[Index]) -> list[Count]:
        spans = [_end(*x) - _start(*x) for x in zip(at, size, out, strict=True)]
        return [Position(s, "int32") if s.constant is None else s.constant for s in spans]

    kernel, turns = list(map(_longest, size, out)), list(map(_longest, out, size))
    under, covering = partial(_reached, size, out), partial(_reached, out, size)
    return Windows(kernel, [1] * space, turns, corner, under, covering, counts)


def _start(out: Index, size: int, outs: int) -> Index:
    return out * size // outs


def _end(out: Index, size: int, outs: int) -> Index:
    return ((out + 1) * size + outs - 1) // outs


def _longest(size: int, outs: int) -> int:
    """Return the most elements that one of `outs` windows over `size` elements has."""
    return max(-(-(o + 1) * size // outs) - o * size // outs for o in range(outs))


def _reached(
    sizes: Sequence[int], outs: Sequence[int], at: Sequence[Index], turns: Sequence[Index]
) -> tuple[list[Index], list[Bound]]:
    places = [_start(o, n, m) + k for o, k, n, m in zip(at, turns, sizes, outs, strict=True)]
    left = [_end(o, n, m) - p for o, p, n, m in zip(at, places, sizes, outs, strict=True)]
    return places, [(i, 1, i.range[1] + 1) for i in left]


Lying = Callable[..., Windows]
"""`sliding` or `adaptive`."""


def _windowed(
    space: int, result: Result, x: Node, windows: Windows, outside: float
) -> tuple[RowBuilder, Callable[..., Scalar]]:
    """Return rows over the places of each window, and the function from an index to x there."""
    rank = len(result.shape)

    def element(*indices: Index) -> Scalar:
        places, bounds = windows.under(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, x.at(*indices[: rank - space], *places), outside)

    return RowBuilder((*result.shape, *windows.kernel), range(rank, rank + space), "pool"), element


@spatial_rule("max_pool2d_with_indices", "max_pool3d_with_indices", lying=sliding)
@spatial_rule("adaptive_max_pool2d", "adaptive_max_pool3d", lying=adaptive)
def max_pool(space: int, result: Result, input: Node, *, lying: Lying, **settings: Any) -> tuple[Node, ...]:  # noqa: ANN401 - of the windows
    """The largest element of each window, and where in the plane it lies."""
    windows, rank = lying(space, input.shape, result.shape, **settings), len(result.shape)
    lowest = -inf if input.dtype.startswith("float") else int(np.iinfo(input.dtype).min)
    builder, element = _windowed(space, result, input, windows, lowest)
    peak = builder.reduce("max", element)
    place = builder.reduce("argmax", element)
    if is_floating(input.dtype):
        last_nan = builder.reduce("max", lambda *at: _place_of_nan(element(*at), at[rank:], windows.kernel))
        place = where(last_nan < 0, place, cast(last_nan, "int64"))

    def position(*indices: Index) -> Scalar:
        pitches = [prod(input.shape[d + 1 :]) for d in range(rank - space, rank)]
        corner = windows.corner(indices[-space:])
        start = sum((c * p for c, p in zip(corner, pitches, strict=True)), start=Index(()))
        offset = _offset(place, windows.kernel, windows.dilation, pitches)
        padded = [d for d, c in enumerate(corner) if c.range[0] < 0]
        if padded:  # which is as low as the lowest element, and not to be found
            inside = [_padding(corner[d], windows.dilation[d]) * pitches[d] for d in padded]
            offset = where(peak.equals(lowest), reduce(add, inside), offset)
        return Position(start, "int64") + offset

    return builder.row(lambda *_: peak), builder.row(position)


def _padding(corner: Index, spacing: int) -> Scalar:
    """Return how far the first place of a window within the plane is from its corner."""
    before = apply("int_div", Position(corner * -1 + (spacing - 1), "int64"), spacing)
    return apply("maximum", before, 0) * spacing


def _place_of_nan(element: Scalar, turns: Sequence[Index], kernel: Sequence[int]) -> Scalar:
    """Return an element's place in its window if it is NaN, else -1: of several, PyTorch takes the last."""
    place = Index(())
    for turn, size in zip(turns, kernel, strict=True):
        place = place * size + turn
    return where(apply("isnan", element), Position(place, "int32"), -1)


def _offset(place: Scalar, kernel: Sequence[int], dilation: Sequence[int], pitches: Sequence[int]) -> Scalar:
    """Return how far behind a window's corner in the plane one of its places lies."""
    steps: list[Scalar] = []
    for dim, (size, spacing, pitch) in enumerate(zip(kernel, dilation, pitches, strict=True)):
        inner = prod(kernel[dim + 1 :])
        digit = apply("int_div", place, inner) if inner > 1 else place
        steps.append((apply("int_mod", digit, size) if dim else digit) * (spacing * pitch))
    return reduce(add, steps)


@spatial_rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", lying=sliding)
@spatial_rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", lying=adaptive)
def max_pool_backward(
    space: int,
    result: Result,
    grad_output: Node,
    input: Node,
    indices: Node,
    *,
    lying: Lying,
    **settings: Any,  # noqa: ANN401 - of the windows
) -> Node:
    """The gradients of the windows in which an element was the largest: whose index names it."""
    windows = lying(space, input.shape, grad_output.shape, **settings)

    def value(lead: Sequence[Index], places: Sequence[Index], outs: Sequence[Index]) -> Scalar:
        place = Index(())
        for index, size in zip(places, result.shape[-space:], strict=True):
            place = place * size + index
        chosen = indices.at(*lead, *outs).equals(Position(place, "int64"))
        return where(chosen, grad_output.at(*lead, *outs), 0)

    return _covering_sum(result, windows, value)


def _covering_sum(
    result: Result,
    windows: Windows,
    value: Callable[[Sequence[Index], Sequence[Index], Sequence[Index]], Scalar],
) -> Node:
    """Return for each element the sum of `value(lead, place, window)` over the windows that cover it."""
    turns, rank = windows.turns, len(result.shape)
    first = rank - len(turns)

    def term(*indices: Index) -> Scalar:
        lead, places = indices[:first], indices[first:rank]
        outs, bounds = windows.covering(places, indices[rank:])
        return guarded(bounds, value(lead, places, outs))

    return reduction((*result.shape, *turns), range(rank, rank + len(turns)), "pool", term, result.dtype)


@spatial_rule("avg_pool2d", "avg_pool3d", lying=sliding)
@spatial_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", lying=adaptive)
def avg_pool(space: int, result: Result, input: Node, *, lying: Lying, **settings: Any) -> Node:  # noqa: ANN401 - of the windows
    """The mean of each window."""
    windows = lying(space, input.shape, result.shape, **settings)
    builder, element = _windowed(space, result, input, windows, 0)
    total = builder.reduce("sum", element)
    return builder.row(lambda *at: _divided(total, windows.counts(at[-space:])))


@spatial_rule("avg_pool2d_backward", "avg_pool3d_backward", lying=sliding)
@spatial_rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", lying=adaptive)
def avg_pool_backward(
    space: int,
    result: Result,
    grad_output: Node,
    input: Node,
    *,
    lying: Lying,
    **settings: Any,  # noqa: ANN401 - of the windows
) -> Node:
    """The shares in the gradients of the windows over each element."""
    windows = lying(space, input.shape, grad_output.shape, **settings)

    def value(lead: Sequence[Index], places: Sequence[Index], outs: Sequence[Index]) -> Scalar:
        return _divided(grad_output.at(*lead, *outs), windows.counts(outs))

    return _covering_sum(result, windows, value)


def _divided(value: Scalar, counts: Sequence[Count]) -> Scalar:
    """Return a value over the product of counts, which are numbers or whole scalars."""
    number = prod(c for c in counts if isinstance(c, int))
    for count in counts:
        if not isinstance(count, int):
            value = value / cast(count, value.dtype)
    return value / number
