"""Views: the same elements at other indices. They cost nothing where their readers take them in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from torchedge.expressions.indices import Index
from torchedge.lowering.building import expanded, permuted, reshaped, view
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.registry import Result, rule


@rule("view", "view_copy", "_unsafe_view", "reshape", "_reshape_copy", "squeeze", "unsqueeze")
def view_as_result(result: Result, input: Node, **sizes: object) -> Node:
    """Input in the result's shape."""
    return reshaped(input, result.shape)


@rule("permute", "permute_copy")
def permute(result: Result, input: Node, dims: Sequence[int]) -> Node:
    """Dimension k of the result is dimension dims[k] of input."""
    return permuted(input, [d % len(dims) for d in dims])


@rule("transpose")
def transpose(result: Result, input: Node, dim0: int, dim1: int) -> Node:
    """Input with two dimensions exchanged."""
    dims = list(range(len(input.shape)))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permuted(input, [d % len(dims) for d in dims])


@rule("t")
def t(result: Result, input: Node) -> Node:
    """A matrix transposed; fewer dimensions as they are."""
    return permuted(input, (1, 0)) if len(input.shape) == 2 else input


@rule("expand")
def expand(result: Result, input: Node, **sizes: object) -> Node:
    """Input repeated along dimensions of size 1 and new leading ones."""
    return expanded(input, result.shape)


@rule("select", "select_copy")
def select(result: Result, input: Node, dim: int, index: int) -> Node:
    """The part of input at one index of a dimension."""
    place = dim % len(input.shape)
    at = index % input.shape[place]
    return view(input, result.shape, lambda *i: (*i[:place], at, *i[place:]))


@rule("slice", "slice_copy")
def slice_(
    result: Result, input: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    """Every step-th index of a dimension from start to before end."""
    place = dim % len(input.shape)
    first = slice(start, end, step).indices(input.shape[place])[0]
    return narrowed(input, place, first, result.shape[place], step)


def narrowed(x: Node, dim: int, start: int, size: int, step: int = 1) -> Node:
    """Return `size` indices of a dimension of x, from `start` on."""
    if start == 0 and size == x.shape[dim]:
        return x
    shape = [size if d == dim else n for d, n in enumerate(x.shape)]
    return view(x, shape, lambda *i: (*i[:dim], i[dim] * step + start, *i[dim + 1 :]))


@rule("split", "split_copy", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
def split(result: Result, input: Node, dim: int = 0, **sizes: object) -> tuple[Node, ...]:
    """Input cut along a dimension."""
    place = dim % len(input.shape)
    lengths = [shape[place] for shape in result.shapes]
    starts = accumulate(lengths[:-1], initial=0)
    return tuple([narrowed(input, place, s, n) for s, n in zip(starts, lengths, strict=True)])


@rule("unbind", "unbind_copy")
def unbind(result: Result, input: Node, dim: int = 0) -> tuple[Node, ...]:
    """The part of input at each index of a dimension."""
    return tuple([select(result, input, dim, index) for index in range(len(result.shapes))])


@rule("flip")
def flip(result: Result, input: Node, dims: Sequence[int]) -> Node:
    """Input with dimensions in reverse."""
    rank = len(input.shape)
    turned = {d % rank for d in dims} if rank else set()

    def move(*indices: Index) -> list[Index]:
        return [
            input.shape[d] - 1 - i if d in turned and input.shape[d] > 1 else i for d, i in enumerate(indices)
        ]

    return view(input, result.shape, move)


@rule("roll")
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


@rule("repeat")
def repeat(result: Result, input: Node, **repeats: object) -> Node:
    """Input as often as asked along each dimension."""
    missing = len(result.shape) - len(input.shape)
    return view(
        input,
        result.shape,
        lambda *indices: [i % n for i, n in zip(indices[missing:], input.shape, strict=True)],
    )


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


@rule("unfold")
def unfold(result: Result, input: Node, dimension: int, size: int, step: int) -> Node:
    """Windows of a dimension, `step` apart; the place within them is the last dimension."""
    if not input.shape:
        return reshaped(input, result.shape)
    dim = dimension % len(input.shape)
    return view(input, result.shape, lambda *i: (*i[:dim], i[dim] * step + i[-1], *i[dim + 1 : -1]))


@rule("pixel_shuffle")
def pixel_shuffle(result: Result, input: Node, upscale_factor: int) -> Node:
    """Channels become places in squares of `upscale_factor` by `upscale_factor`."""
    *lead, _, _, _ = result.shape
    channels, high, wide = result.shape[-3:]
    r, n = upscale_factor, len(lead)
    cut = reshaped(input, (*lead, channels, r, r, high // r, wide // r))
    moved = permuted(cut, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return reshaped(moved, result.shape)


@rule("pixel_unshuffle")
def pixel_unshuffle(result: Result, input: Node, downscale_factor: int) -> Node:
    """Places in squares of `downscale_factor` by `downscale_factor` become channels."""
    *lead, channels, high, wide = input.shape
    r, n = downscale_factor, len(lead)
    cut = reshaped(input, (*lead, channels, high // r, r, wide // r, r))
    moved = permuted(cut, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return reshaped(moved, result.shape)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(result: Result, input: Node, groups: int) -> Node:
    """Channels of `groups` groups taken in turn."""
    batch, channels, *rest = input.shape
    cut = reshaped(input, (batch, groups, channels // groups, prod(rest)))
    return reshaped(permuted(cut, (0, 2, 1, 3)), result.shape)
