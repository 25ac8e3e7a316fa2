"""Padding with what lies at the border, mirrored (reflection) or repeated (replication); its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Position, Scalar, apply, constant, guarded, where
from torchedge.lowering.building import RowBuilder, pointwise
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.registry import Result, rule


def _clamped(place: Scalar, size: int) -> Scalar:
    return apply("maximum", apply("minimum", place, size - 1), 0)


def _mirrored(place: Scalar, size: int) -> Scalar:
    last = size - 1
    return constant(last, "int32") - apply("abs_int", constant(last, "int32") - apply("abs_int", place))


def _padded(result: Result, x: Node, padding: Sequence[int], source: Callable[[Scalar, int], Scalar]) -> Node:
    """Return x where each padded index is read at `source(index before padding, size)`."""
    before = _before(padding, len(x.shape))

    def element(*indices: Index) -> Scalar:
        at = list(indices)
        for dim, start in before.items():
            place = source(Position(indices[dim] - start, "int32"), x.shape[dim])
            at[dim] = of(Fetched(place, 0, x.shape[dim] - 1))
        return x.at(*at)

    return pointwise(result.shape, result.dtype, element)


def _before(padding: Sequence[int], rank: int) -> dict[int, int]:
    """Return what is added in front of each padded dimension."""
    return {rank - 1 - k: padding[2 * k] for k in range(len(padding) // 2)}


@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(result: Result, input: Node, padding: Sequence[int]) -> Node:
    """Input mirrored at its borders."""
    return _padded(result, input, padding, _mirrored)


@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(result: Result, input: Node, padding: Sequence[int]) -> Node:
    """Input with its borders repeated."""
    return _padded(result, input, padding, _clamped)


@rule("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def reflection_pad_backward(result: Result, grad_output: Node, input: Node, padding: Sequence[int]) -> Node:
    """Each element's gradient and those of its mirror images, at most two in each dimension."""
    before = _before(padding, len(input.shape))

    def element(*indices: Index) -> Scalar:
        total: Scalar = constant(0, result.dtype)
        for images in product(*[_images(indices[d], b, input.shape[d]) for d, b in before.items()]):
            at, bounds = list(indices), []
            for dim, (place, origin) in zip(before, images, strict=True):
                at[dim] = place
                bounds += [(place, 0, grad_output.shape[dim]), origin]
            total = total + guarded(bounds, grad_output.at(*at))
        return total

    return pointwise(result.shape, result.dtype, element)


def _images(index: Index, before: int, size: int) -> list[tuple[Index, tuple[Index, int, int]]]:
    """Return where an element may lie in the padded dimension, each place with the elements that have it."""
    return [
        (index + before, (index, 0, size)),
        (before - index, (index, 1, size)),
        (before + 2 * (size - 1) - index, (index, 0, size - 1)),
    ]


@rule("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(result: Result, grad_output: Node, input: Node, padding: Sequence[int]) -> Node:
    """Each element's gradient, at the borders with those of its copies; one dimension after the other."""
    found = grad_output
    for dim, before in _before(padding, len(input.shape)).items():
        found = _gathered_copies(found, dim, before, input.shape[dim])
    return found


def _gathered_copies(grad: Node, dim: int, before: int, size: int) -> Node:
    rank, padded = len(grad.shape), grad.shape[dim]
    window = max(before, 0) + max(padded - size - before, 0) + 1
    shape = [size if d == dim else n for d, n in enumerate(grad.shape)]
    builder = RowBuilder((*shape, window), (rank,), "sum")

    def body(*indices: Index) -> Scalar:
        place = indices[dim] + indices[-1] + min(before, 0)
        origin = _clamped(Position(place - before, "int32"), size)
        value = grad.at(*indices[:dim], place, *indices[dim + 1 : -1])
        mine = where(origin.equals(Position(indices[dim], "int32")), value, 0)
        return guarded([(place, 0, padded)], mine)

    total = builder.reduce("sum", body)
    made = builder.row(lambda *_: total)
    builder.close()
    return made
