"""Tensors put together from pieces: concatenation, padding, slices written into others, triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Bound, Position, Scalar, cast, constant, guarded, where
from torchedge.lowering.building import pointwise, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.registry import Result, rule


@rule("cat")
def cat(result: Result, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Tensors one after the other along a dimension; each is read only where it lies."""
    rank = len(result.shape)
    place = dim % max(rank, 1)
    pieces = [x for x in tensors if len(x.shape) == rank and x.shape[place]]
    starts = list(accumulate([x.shape[place] for x in pieces[:-1]], initial=0))

    def element(*indices: Index) -> Scalar:
        found: Scalar = constant(0, result.dtype)
        for x, start in reversed(list(zip(pieces, starts, strict=True))):
            at = indices[place] - start
            value = cast(x.at(*indices[:place], at, *indices[place + 1 :]), result.dtype)
            found = guarded([(at, 0, x.shape[place])], value, found)
        return found

    return pointwise(result.shape, result.dtype, element)


@rule("stack")
def stack(result: Result, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Tensors side by side along a new dimension."""
    place = dim % len(result.shape)
    shape = [1 if d == place else n for d, n in enumerate(result.shape)]
    return cat(result, [reshaped(x, shape) for x in tensors], place)


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


def _inside(index: Index, start: int, size: int, step: int) -> tuple[list[Bound], Index]:
    """Return the bounds within which an index is start + k · step with 0 <= k < size, and k."""
    moved = index - start
    bounds: list[Bound] = [(moved, 0, (size - 1) * step + 1)]
    if step > 1:
        bounds.append((moved % step, 0, 1))
    return bounds, moved // step


def _written(result: Result, base: Node | None, src: Node, dim: int, start: int, step: int) -> Node:
    """Return `base` (None: zero) with `src` written at every step-th index of a dimension from `start` on."""
    size = src.shape[dim]

    def element(*indices: Index) -> Scalar:
        bounds, at = _inside(indices[dim], start, size, step)
        value = src.at(*indices[:dim], at, *indices[dim + 1 :])
        return guarded(bounds, value, 0 if base is None else base.at(*indices))

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
    return _written(result, input, src, place, first, step)


@rule("select_scatter")
def select_scatter(result: Result, input: Node, src: Node, dim: int, index: int) -> Node:
    """Input with src in place of one index of a dimension."""
    place = dim % len(input.shape)
    wide = reshaped(src, (*src.shape[:place], 1, *src.shape[place:]))
    return _written(result, input, wide, place, index % input.shape[place], 1)


@rule("slice_backward")
def slice_backward(
    result: Result, grad_output: Node, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Node:
    """The gradient where the slice was taken, zero elsewhere."""
    place = dim % len(input_sizes)
    first = _first(start, end, step, input_sizes[place])
    return _written(result, None, grad_output, place, first, step)


@rule("select_backward")
def select_backward(
    result: Result, grad_output: Node, input_sizes: Sequence[int], dim: int, index: int
) -> Node:
    """The gradient where the part was taken, zero elsewhere."""
    place = dim % len(input_sizes)
    wide = reshaped(grad_output, [1 if d == place else n for d, n in enumerate(input_sizes)])
    return _written(result, None, wide, place, index % input_sizes[place], 1)


def _on_diagonal(result: Result, base: Node | None, src: Node, offset: int, dim1: int, dim2: int) -> Node:
    rank = len(result.shape)
    first, second = dim1 % rank, dim2 % rank

    def element(*indices: Index) -> Scalar:
        others = [i for d, i in enumerate(indices) if d not in (first, second)]
        ahead = indices[second] - indices[first] - offset
        along = indices[first] - max(0, -offset)
        bounds = [(ahead, 0, 1), (along, 0, src.shape[-1])]
        return guarded(bounds, src.at(*others, along), 0 if base is None else base.at(*indices))

    return pointwise(result.shape, result.dtype, element)


@rule("diagonal_scatter")
def diagonal_scatter(
    result: Result, input: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Node:
    """Input with src on a diagonal."""
    return _on_diagonal(result, input, src, offset, dim1, dim2)


@rule("diagonal_backward")
def diagonal_backward(
    result: Result, grad_output: Node, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Node:
    """The gradient on the diagonal it was taken from, zero elsewhere."""
    return _on_diagonal(result, None, grad_output, offset, dim1, dim2)


def _triangle(result: Result, input: Node, keep: Callable[[Scalar], Scalar]) -> Node:
    """Return input where `keep` holds of (column - row), zero elsewhere."""

    def element(*indices: Index) -> Scalar:
        ahead = Position(indices[-1] - indices[-2], "int32")
        return where(keep(ahead), input.at(*indices), 0)

    return pointwise(result.shape, result.dtype, element)


@rule("tril")
def tril(result: Result, input: Node, diagonal: int = 0) -> Node:
    """The matrix on and below a diagonal, zero above."""
    return _triangle(result, input, lambda ahead: ahead <= diagonal)


@rule("triu")
def triu(result: Result, input: Node, diagonal: int = 0) -> Node:
    """The matrix on and above a diagonal, zero below."""
    return _triangle(result, input, lambda ahead: ahead >= diagonal)
