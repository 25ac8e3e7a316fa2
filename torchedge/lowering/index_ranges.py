"""Ranges of indices: numbers with which operators of a step may index.

PyTorch raises for a class label or an index out of range. A kernel cannot raise: it reads NaN or writes
nothing. So inputs and weights that are indices are checked before a step runs. Indices that the step computes
are checked by a kernel of their own, unless the operators that compute them show that they are in range.
So are the divisors of whole numbers, which must not be zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from torchedge.graphs import Op, Step, Value
from torchedge.graphs.steps import Input
from torchedge.lowering.programs import IndexRange

__all__ = ["index_ranges", "zero_divisions"]

_SAME_VALUES = frozenset(
    ("_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "permute", "reshape", "squeeze", "t",
     "transpose", "unsqueeze", "view")
)  # fmt: skip
"""Operators whose result holds all values of their input, and no others."""

_AMONG = _SAME_VALUES | frozenset(
    ("amax", "amin", "flip", "index_select", "repeat", "roll", "select", "slice", "unfold")
)
"""Operators whose result holds no other values than their input."""

_PLACES = frozenset(("argmax", "argmin", "max", "min", "sort", "topk"))
_LOSSES = frozenset(("nll_loss_forward", "nll_loss2d_forward"))
_ALONG = frozenset(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add"))
_INTEGERS = frozenset(("int64", "int32"))
_DIVISIONS = frozenset(("div", "floor_divide", "fmod", "remainder"))

Bounds = tuple[int, int]


def index_ranges(step: Step) -> dict[int, IndexRange]:
    """Return the range of each value with which operators of a step index, by the value's index.

    A value that another one was reshaped to counts as that one. Computed values that are in range by the
    operators that compute them are omitted.
    """
    source: dict[int, int] = {}
    bounds = _all_bounds(step)
    ranges: dict[int, IndexRange] = {}
    for op in step.ops:
        if op.kind in _SAME_VALUES and op.inputs[0] is not None:
            here, there = (step.values[index].dtype for index in (op.inputs[0], op.outputs[0]))
            if {here, there} <= _INTEGERS:
                source[op.outputs[0]] = source.get(op.inputs[0], op.inputs[0])
        for position, bound in _indexed(op, step.values):
            value = op.inputs[position]
            if value is None or step.values[value].dtype not in _INTEGERS:
                continue
            low, high = bounds.get(value, (bound.low - 1, bound.high))
            if low < bound.low or high >= bound.high:
                root = source.get(value, value)
                ranges[root] = _both(ranges[root], bound) if root in ranges else bound
    return ranges


def zero_divisions(step: Step) -> dict[int, int | None]:
    """Return what whole numbers are divided by that may be zero: values by index, with themselves.

    A quotient by the number 0 counts with None. Divisors that are not zero by the operators that compute them
    are omitted.
    """
    bounds = _all_bounds(step)
    divisors: dict[int, int | None] = {}
    for op in step.ops:
        result = step.values[op.outputs[0]] if op.outputs else None
        if op.kind not in _DIVISIONS or result is None or result.dtype.startswith(("float", "bfloat")):
            continue
        item = op.attrs.get("other")
        if not prod(_shape(result)):
            continue
        if not isinstance(item, Input):
            if item == 0:
                divisors[op.outputs[0]] = None
            continue
        value = op.inputs[item.position]
        if value is not None and value not in divisors:
            low, high = bounds.get(value, (0, 0))
            if low <= 0 <= high:
                divisors[value] = value
    return divisors


def _all_bounds(step: Step) -> dict[int, Bounds]:
    """Return the least and the largest number of each computed tensor of whole numbers, where known."""
    bounds: dict[int, Bounds] = {}
    for op in step.ops:
        for index in op.outputs:
            if step.values[index].dtype in _INTEGERS and (known := _bounds(op, index, step, bounds)):
                bounds[index] = known
    return bounds


def _both(first: IndexRange, second: IndexRange) -> IndexRange:
    ignored = first.ignored if first.ignored == second.ignored else None
    return IndexRange(max(first.low, second.low), min(first.high, second.high), ignored)


def _indexed(op: Op, values: tuple[Value, ...]) -> Iterator[tuple[int, IndexRange]]:
    """Yield the inputs of an operator that are indices, by position, with their ranges."""
    if not op.inputs or op.inputs[0] is None:
        return
    shape = _shape(values[op.inputs[0]])
    if op.kind == "embedding":
        yield from _range_of(op, "indices", IndexRange(0, shape[0]))
    elif op.kind in _LOSSES:
        classes = shape[1 if len(shape) > 1 else 0]
        yield from _range_of(op, "target", IndexRange(0, classes, op.attrs["ignore_index"]))
    elif op.kind in _ALONG and shape:
        yield from _range_of(op, "index", IndexRange(0, shape[op.attrs["dim"] % len(shape)]))
    elif op.kind in ("index", "index_put"):
        for dim, item in enumerate(op.attrs["indices"]):
            if isinstance(item, Input):
                yield item.position, IndexRange(-shape[dim], shape[dim])


def _range_of(op: Op, name: str, bound: IndexRange) -> Iterator[tuple[int, IndexRange]]:
    item = op.attrs.get(name)
    if isinstance(item, Input):
        yield item.position, bound


def _shape(value: Value) -> list[int]:
    return [size for size in value.shape if isinstance(size, int)]  # of a step: all


# bounds of computed indices ---------------------------------------------------------------------------------


def _bounds(op: Op, output: int, step: Step, known: dict[int, Bounds]) -> Bounds | None:
    """Return the least and the largest number that an operator may give, None where that is not known."""

    def bounds_of(item: object) -> Bounds | None:
        if not isinstance(item, Input):
            return (item, item) if type(item) is int else None
        value = op.inputs[item.position]
        if value is None or step.values[value].dtype == "bool":
            return None if value is None else (0, 1)
        return known.get(value)

    first, other, low, high = (bounds_of(op.attrs.get(name)) for name in ("input", "other", "min", "max"))
    if op.kind in _PLACES and op.inputs[0] is not None:
        if op.kind not in ("argmax", "argmin"):
            if op.outputs[1:] != (output,):
                return None  # the values beside the places
            dim = op.attrs.get("dim", -1)
        else:
            dim = op.attrs.get("dim")
        shape = _shape(step.values[op.inputs[0]]) or [1]
        return 0, (prod(shape) if dim is None else shape[dim % len(shape)]) - 1
    if op.kind == "arange":
        start, stop, stride = op.attrs.get("start", 0), op.attrs["end"], op.attrs.get("step", 1)
        return (start, stop - 1) if {*map(type, (start, stop, stride))} == {int} and stride > 0 else None
    if op.kind == "full":
        return bounds_of(op.attrs["fill_value"])
    if op.kind == "cat":
        parts = [bounds_of(item) for item in op.attrs["tensors"]]
        ends = [part for part in parts if part is not None]
        return (min(ends)[0], max(end for _, end in ends)) if len(ends) == len(parts) > 0 else None
    if op.kind in _AMONG:
        return first
    if op.kind == "clamp":
        if (first is None and None in (low, high)) or (low is None and high is None):
            return None
        ends = [bound for bound in (first, low) if bound is not None]
        most = high[1] if high is not None else max(end for _, end in ends)
        return min((low or ends[0])[0], most), most
    if op.kind in ("remainder", "bitwise_and") and other is not None and other[0] == other[1] > 0:
        return 0, other[0] - (op.kind == "remainder")
    if first is None or other is None or op.attrs.get("alpha", 1) != 1:
        return None
    if op.kind in ("where", "maximum", "minimum"):
        return min(first[0], other[0]), max(first[1], other[1])
    if op.kind == "add":
        return first[0] + other[0], first[1] + other[1]
    if op.kind == "rsub":
        first, other = other, first
    if op.kind in ("sub", "rsub"):
        return first[0] - other[1], first[1] - other[0]
    if op.kind == "mul":
        corners = sorted(a * b for a, b in product(first, other))
        return corners[0], corners[-1]
    if op.kind == "div" and op.attrs.get("rounding_mode") == "floor" and other[0] > 0:
        corners = sorted(a // b for a, b in product(first, other))
        return corners[0], corners[-1]
    return None
