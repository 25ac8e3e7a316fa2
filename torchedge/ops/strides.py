"""Strides: how an operator's output lies in memory, in elements. They decide where a reshape has to copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torchedge.graphs.sizes import Affine

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strided:
    """Input 0 of a call as a stride rule sees it; `wanted` is the shape of the output."""

    shape: Sizes
    strides: Sizes
    wanted: Sizes
    attrs: Mapping[str, Any]


StrideRule = Callable[[Strided], Sizes | None]
"""Returns the output's strides, None for a contiguous output."""


def contiguous_strides(shape: Sequence[int]) -> Sizes:
    """Return the strides of a tensor that fills memory row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def viewed(shape: Sizes, strides: Sizes, wanted: Sizes) -> Sizes | None:
    """Return the strides of a reshape, None where it must copy (PyTorch's `computeStride`)."""
    if prod(shape) != prod(wanted):
        return None
    if not shape:
        return (1,) * len(wanted)
    out = [0] * len(wanted)
    position, base = len(wanted) - 1, strides[-1]
    group = seen = 1
    for axis in range(len(shape) - 1, -1, -1):
        group *= shape[axis]
        if axis == 0 or (shape[axis - 1] != 1 and strides[axis - 1] != group * base):
            while position >= 0 and (seen < group or wanted[position] == 1):
                out[position] = seen * base
                seen *= wanted[position]
                position -= 1
            if seen != group:
                return None
            if axis > 0:
                base, group, seen = strides[axis - 1], 1, 1
    return tuple(out) if position == -1 else None


def foldable(shape: Sizes, strides: Sizes) -> bool:
    """Return whether all dimensions but the last two merge without a copy, as bmm's operands need."""
    return len(shape) <= 3 or viewed(shape, strides, (prod(shape[:-2]), *shape[-2:])) is not None


def dense(shape: Sizes, strides: Sizes) -> bool:
    """Return whether the elements fill their memory without gap or overlap."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def filled(shape: Sizes, strides: Sizes) -> Sizes:
    """Return strides without gaps in the order of the given ones (`empty_like` of a tensor with gaps)."""
    out, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], -a)):
        out[axis] = step
        step *= shape[axis]
    return tuple(out)


def broadcasted(shape: Sizes, operands: Sequence[tuple[Sizes, Sizes]]) -> Sizes:
    """Return the strides of an element-wise result (`TensorIteratorBase::reorder_dimensions`).

    operands: shape and strides of each. The first one that has steps in two dimensions decides their order.
    """
    rank, steps = len(shape), []
    for sizes, strides in operands:
        ahead = rank - len(sizes)
        places = zip(sizes, strides, shape[ahead:], strict=True)
        steps.append([0] * ahead + [0 if size != wide else step for size, step, wide in places])
    order = list(reversed(range(rank)))  # the fastest dimension first
    for start in range(1, rank):
        place = start
        for other in range(start - 1, -1, -1):
            slower = _is_slower(order[other], order[place], shape, steps)
            if slower:
                order[other], order[place] = order[place], order[other]
                place = other
            elif slower is not None:
                break
    out, step = [0] * rank, 1
    for axis in order:
        out[axis] = step
        step *= shape[axis]
    return tuple(out)


def _is_slower(first: int, second: int, shape: Sizes, steps: Sequence[Sequence[int]]) -> bool | None:
    """Whether operands step farther in the first of two dimensions than in the second, None if none says."""
    for strides in steps:
        if 0 not in (strides[first], strides[second]):
            if strides[first] != strides[second]:
                return strides[first] > strides[second]
            if shape[first] > shape[second]:
                return True
    return None


def permuted(strides: Sizes, dims: Sequence[int]) -> Sizes:
    """Return strides in another order of dimensions."""
    return tuple([strides[d] for d in dims])


def variadic(attrs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return sizes or dimensions given as one sequence or one by one (`view(2, 3)`)."""
    first = attrs.get(name)
    if first is None:
        return ()
    if isinstance(first, (tuple, list)):
        return tuple(first)
    others = [attrs[f"arg{k}"] for k in range(2, 2 + len(attrs)) if f"arg{k}" in attrs]
    return (first, *[size for size in others if isinstance(size, (int, Affine))])


# rules ---------------------------------------------------------------------------------------------------


def as_input(x: Strided) -> Sizes | None:
    """An element-wise output lies as its dense input 0 of the same shape."""
    return x.strides if x.shape == x.wanted and dense(x.shape, x.strides) else None


def packed(x: Strided) -> Sizes:
    """A contiguous output, however the inputs lie."""
    return contiguous_strides(x.wanted)


_LAST = (0, 2, 3, 1)


def channels_last(shape: Sizes) -> Sizes:
    """Return the strides of an image (N, C, H, W) that lies pixel by pixel."""
    return permuted(contiguous_strides(permuted(shape, _LAST)), (0, 3, 1, 2))


def lies_last(shape: Sizes, strides: Sizes) -> bool:
    """Whether an image lies in channels_last for PyTorch: its channels next to each other, maybe with gaps.

    As `is_channels_last_strides_2d` of PyTorch.
    """
    if len(shape) != 4 or strides == contiguous_strides(shape) or strides[1] == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        if strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(shape[axis], 1)
    return True


def as_image(x: Strided) -> Sizes | None:
    """An image lies in channels_last if the first one that is read does."""
    return channels_last(x.wanted) if len(x.wanted) == 4 and lies_last(x.shape, x.strides) else None


def reshaped(x: Strided) -> Sizes | None:
    """A view in another shape."""
    return viewed(x.shape, x.strides, x.wanted)


def unchanged(x: Strided) -> Sizes:
    """A part of the input along a dimension."""
    return x.strides


def exchanged(x: Strided) -> Sizes | None:
    """Two dimensions exchanged."""
    dims = list(range(len(x.shape)))
    a, b = x.attrs.get("dim0", 0), x.attrs.get("dim1", 1)
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    dims[a], dims[b] = dims[b], dims[a]
    return permuted(x.strides, dims)


def transposed(x: Strided) -> Sizes:
    """The last two dimensions exchanged."""
    return (*x.strides[:-2], *x.strides[:-3:-1])


def reordered(x: Strided) -> Sizes | None:
    """Dimensions in the order of `dims`."""
    dims = [d % len(x.shape) for d in variadic(x.attrs, "dims")]
    return permuted(x.strides, dims) if len(dims) == len(x.shape) else None


def selected(x: Strided) -> Sizes:
    """One index of a dimension, or each."""
    dim = x.attrs.get("dim", 0) % len(x.shape)
    return tuple([s for axis, s in enumerate(x.strides) if axis != dim])


def with_new_dimension(x: Strided) -> Sizes | None:
    """A dimension of size 1 added."""
    rank = len(x.shape)
    if len(x.wanted) != rank + 1:
        return None
    dim = x.attrs.get("dim", 0) % (rank + 1)
    return (*x.strides[:dim], x.strides[dim] * x.shape[dim] if dim < rank else 1, *x.strides[dim:])


def expanded(x: Strided) -> Sizes:
    """Dimensions of size 1 repeated with stride 0."""
    lead = len(x.wanted) - len(x.shape)
    sizes = zip(x.shape, x.wanted[lead:], x.strides, strict=True)
    return (0,) * lead + tuple([0 if have != want else stride for have, want, stride in sizes])


def indexed(x: Strided) -> Sizes | None:
    """`x[...]` with numbers, slices, None and an ellipsis; None for index tensors."""
    index = x.attrs.get("index")
    items = index if isinstance(index, tuple) else (index,)
    taken = sum(1 for i in items if i is not None and i != "...")
    out: list[int] = []
    axis = 0
    for item in items:
        if item is None:
            out.append(0)
        elif item == "...":
            gap = len(x.strides) - taken
            out += x.strides[axis : axis + gap]
            axis += gap
        elif isinstance(item, slice):
            step = item.step if isinstance(item.step, int) else 1
            out.append(x.strides[axis] * step)
            axis += 1
        elif isinstance(item, int):
            axis += 1
        else:
            return None
    return (*out, *x.strides[axis:])
