"""Adaptive pooling: window o of O over n elements runs from floor(o·n / O) to before ceil((o + 1)·n / O)."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Bound, Position, Scalar, guarded
from torchedge.lowering.building import RowBuilder
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.pooling import Count, Reach, chosen_sum, covering_sum, divided, largest
from torchedge.lowering.rules.registry import Result, spatial_rule


def _start(out: Index, size: int, outs: int) -> Index:
    return out * size // outs


def _end(out: Index, size: int, outs: int) -> Index:
    return ((out + 1) * size + outs - 1) // outs


def _longest(size: int, outs: int) -> int:
    """Return the most elements that one of `outs` windows over `size` elements has."""
    return max(-(-(o + 1) * size // outs) - o * size // outs for o in range(outs))


def _under(sizes: Sequence[int], outs: Sequence[int]) -> Reach:
    """Return which elements lie in a window."""

    def reach(at: Sequence[Index], taps: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        places = [_start(o, n, m) + k for o, k, n, m in zip(at, taps, sizes, outs, strict=True)]
        left = [_end(o, n, m) - p for o, p, n, m in zip(at, places, sizes, outs, strict=True)]
        return places, [(i, 1, i.range[1] + 1) for i in left]

    return reach


def _counts(at: Sequence[Index], sizes: Sequence[int], outs: Sequence[int]) -> list[Count]:
    """Return how many elements a window has in each dimension."""
    spans = [_end(o, n, m) - _start(o, n, m) for o, n, m in zip(at, sizes, outs, strict=True)]
    return [Position(s, "int32") if s.constant is None else s.constant for s in spans]


@spatial_rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(space: int, result: Result, input: Node, output_size: Sequence[int]) -> Node:
    """The mean of each window."""
    rank = len(result.shape)
    sizes, outs = input.shape[-space:], result.shape[-space:]
    under = _under(sizes, outs)
    kernel = list(map(_longest, sizes, outs))
    builder = RowBuilder((*result.shape, *kernel), range(rank, rank + space), "pool")

    def element(*indices: Index) -> Scalar:
        places, bounds = under(indices[rank - space : rank], indices[rank:])
        return guarded(bounds, input.at(*indices[: rank - space], *places))

    total = builder.reduce("sum", element)
    made = builder.row(lambda *at: divided(total, _counts(at[-space:], sizes, outs)))
    builder.close()
    return made


@spatial_rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(
    space: int, result: Result, input: Node, output_size: Sequence[int]
) -> tuple[Node, ...]:
    """The largest element of each window, and where in the plane it lies."""
    sizes, outs = input.shape[-space:], result.shape[-space:]

    def corner(at: Sequence[Index]) -> list[Index]:
        return [_start(o, n, m) for o, n, m in zip(at, sizes, outs, strict=True)]

    kernel = list(map(_longest, sizes, outs))
    return largest(result, input, kernel, _under(sizes, outs), corner, [1] * space)


def _covering(sizes: Sequence[int], outs: Sequence[int]) -> Reach:
    """Return which windows lie over an element, the first one first."""

    def reach(places: Sequence[Index], turns: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        found = [_start(i, m, n) + t for i, t, n, m in zip(places, turns, sizes, outs, strict=True)]
        left = [_end(i, m, n) - o for i, o, n, m in zip(places, found, sizes, outs, strict=True)]
        return found, [(i, 1, i.range[1] + 1) for i in left]

    return reach


@spatial_rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(space: int, result: Result, grad_output: Node, input: Node) -> Node:
    """The shares in the gradients of the windows over each element."""
    sizes, outs = input.shape[-space:], grad_output.shape[-space:]

    def value(at: Sequence[Index], windows: Sequence[Index]) -> Scalar:
        grad = grad_output.at(*at[: len(at) - space], *windows)
        return divided(grad, _counts(windows, sizes, outs))

    return covering_sum(result, list(map(_longest, outs, sizes)), _covering(sizes, outs), value)


@spatial_rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(
    space: int, result: Result, grad_output: Node, input: Node, indices: Node
) -> Node:
    """The gradients of the windows in which an element was the largest."""
    sizes, outs = input.shape[-space:], grad_output.shape[-space:]
    turns = list(map(_longest, outs, sizes))
    return chosen_sum(result, grad_output, indices, turns, _covering(sizes, outs))
