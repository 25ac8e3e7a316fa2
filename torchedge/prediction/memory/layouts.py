"""Strides of a graph's values, worked out on demand.

They decide where a reshape is a view and where it copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torchedge.graphs import Op, Value
from torchedge.graphs.dims import Affine, symbolic
from torchedge.ops import registry
from torchedge.ops.activations import same_shape
from torchedge.ops.elementwise import broadcast

Sizes = tuple[int, ...]
_REFORMED = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "ravel",
        "unflatten",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "contiguous",
        "alias",
        "to",
        "detach",
    ]
)
_TURNED = frozenset(["transpose", "swapaxes", "swapdims"])


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


def variadic(attrs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return sizes or dimensions given as one sequence or one by one (`view(2, 3)`)."""
    first = attrs.get(name)
    if first is None:
        return ()
    if isinstance(first, (tuple, list)):
        return tuple(first)
    rest = [attrs[f"arg{k}"] for k in range(2, 2 + len(attrs)) if f"arg{k}" in attrs]
    return (first, *[r for r in rest if isinstance(r, (int, Affine))])


class Layouts:
    """Strides of the values of a graph, in elements, with `symbolic` batch size."""

    def __init__(
        self, values: Sequence[Value], ops: Sequence[Op], fused_attention: bool = False, on_cuda: bool = True
    ) -> None:
        self._values = values
        self._fused, self._on_cuda = fused_attention, on_cuda
        self._producers = {index: op for op in ops for index in op.outputs}
        self._found: dict[int, Sizes] = {}

    def shape(self, index: int) -> Sizes:
        """Return the symbolic shape of a value."""
        return symbolic(self._values[index].shape)

    def of(self, index: int) -> Sizes:
        """Return the strides of a value."""
        chain = []
        while index not in self._found:
            chain.append(index)
            op = self._producers.get(index)
            if op is None or not op.inputs or op.inputs[0] is None:
                break
            index = op.inputs[0]
        for item in reversed(chain):
            self._found[item] = self._derive(item)
        return self._found[chain[0] if chain else index]

    def _derive(self, index: int) -> Sizes:
        shape, op = self.shape(index), self._producers.get(index)
        source = op.inputs[0] if op is not None and op.inputs else None
        if op is None or source is None:
            return contiguous_strides(shape)
        old_shape, old = self.shape(source), self._found.get(source)
        if old is None:
            old = contiguous_strides(old_shape)
        if op.kind == "scaled_dot_product_attention" and self._fused and len(shape) == 4:
            if (
                self._on_cuda and self._values[source].dtype == "float32"
            ):  # memory-efficient attention: (N, L, H, E)
                return _permuted(contiguous_strides([shape[i] for i in (0, 2, 1, 3)]), (0, 2, 1, 3))
            return _filled(shape, old)  # flash attention: the query's order of dimensions
        if self._values[index].alias is not None:
            return _of_view(op, old_shape, old, shape) or contiguous_strides(shape)
        spec = registry().get(op.kind)
        if (
            spec is not None
            and spec.infer in (same_shape, broadcast)
            and old_shape == shape
            and dense(old_shape, old)
        ):
            return old
        return contiguous_strides(shape)


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


def _filled(shape: Sizes, strides: Sizes) -> Sizes:
    """Return strides without gaps in the given ones' order (`empty_like` of a tensor not dense)."""
    out, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], -a)):
        out[axis] = step
        step *= shape[axis]
    return tuple(out)


def _permuted(strides: Sizes, dims: Sequence[int]) -> Sizes:
    return tuple([strides[d] for d in dims])


def _of_view(op: Op, shape: Sizes, strides: Sizes, wanted: Sizes) -> Sizes | None:
    """Return the strides of a view's result; None for views not modelled."""
    rank, kind = len(shape), op.kind
    if op.inplace:
        return strides
    if kind in _TURNED:
        dims = list(range(rank))
        a, b = op.attrs.get("dim0", 0), op.attrs.get("dim1", 1)
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        dims[a], dims[b] = dims[b], dims[a]
        return _permuted(strides, dims)
    if kind in ("t", "mT", "T", "mH", "adjoint"):
        return (*strides[:-2], *strides[:-3:-1])
    if kind == "permute":
        dims = [d % rank for d in variadic(op.attrs, "dims")]
        return _permuted(strides, dims) if len(dims) == rank else None
    if kind in ("unbind", "select"):
        dim = op.attrs.get("dim", 0)
        return tuple(s for k, s in enumerate(strides) if k != dim % rank)
    if kind in (
        "chunk",
        "split",
        "split_with_sizes",
        "narrow",
        "tensor_split",
        "unsafe_chunk",
        "unsafe_split",
        "slice",
    ):
        return strides
    if kind == "getitem":
        return _indexed(op.attrs.get("index"), strides)
    if kind == "unsqueeze" and len(wanted) == rank + 1:
        dim = op.attrs.get("dim", 0) % (rank + 1)
        return (*strides[:dim], strides[dim] * shape[dim] if dim < rank else 1, *strides[dim:])
    if kind in ("expand", "expand_as", "broadcast_to"):
        lead = len(wanted) - rank
        return (0,) * lead + tuple(
            [0 if have != want else st for have, want, st in zip(shape, wanted[lead:], strides, strict=True)]
        )
    return viewed(shape, strides, wanted) if kind in _REFORMED or kind == "squeeze" else None


def _indexed(index: Any, strides: Sizes) -> Sizes | None:  # noqa: ANN401 - what the model indexed with
    items = index if isinstance(index, tuple) else (index,)
    taken = sum(1 for i in items if i is not None and i != "...")
    out: list[int] = []
    axis = 0
    for item in items:
        if item is None:
            out.append(0)
        elif item == "...":
            gap = len(strides) - taken
            out += strides[axis : axis + gap]
            axis += gap
        elif isinstance(item, slice):
            step = item.step if isinstance(item.step, int) else 1
            out.append(strides[axis] * step)
            axis += 1
        elif isinstance(item, int):
            axis += 1
        else:
            return None
    return (*out, *strides[axis:])
