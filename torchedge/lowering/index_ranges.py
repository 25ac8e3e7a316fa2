"""Ranges of indices: what the inputs of a step may hold where operators index with them.

PyTorch raises for a class label or an index out of range. A kernel cannot raise: it would give NaN, and the
step would move weights and statistics. So the inputs that are indices are checked before the step runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchedge.graphs import Op, Step, Value
from torchedge.graphs.steps import Input
from torchedge.lowering.programs import IndexRange

__all__ = ["index_ranges"]

_SAME_VALUES = frozenset(
    ("_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "permute", "reshape", "squeeze", "t",
     "transpose", "unsqueeze", "view")
)  # fmt: skip
"""Operators whose result holds all values of their input, and no others."""

_LOSSES = frozenset(("nll_loss_forward", "nll_loss2d_forward"))
_ALONG = frozenset(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add"))


def index_ranges(step: Step) -> dict[int, IndexRange]:
    """Return the range of each input of a step that operators index with, by the value's index."""
    source = {index: index for index in step.inputs}
    ranges: dict[int, IndexRange] = {}
    for op in step.ops:
        if op.kind in _SAME_VALUES and op.inputs[0] in source:
            source[op.outputs[0]] = source[op.inputs[0]]
        for position, bound in _indexed(op, step.values):
            value = op.inputs[position]
            if value is not None and value in source and step.values[value].dtype in ("int64", "int32"):
                known = ranges.get(source[value])
                ranges[source[value]] = bound if known is None else _both(known, bound)
    return ranges


def _both(first: IndexRange, second: IndexRange) -> IndexRange:
    ignored = first.ignored if first.ignored == second.ignored else None
    return IndexRange(max(first.low, second.low), min(first.high, second.high), ignored)


def _indexed(op: Op, values: tuple[Value, ...]) -> Iterator[tuple[int, IndexRange]]:
    """Yield the inputs of an operator that are indices, by position, with their ranges."""
    if not op.inputs or op.inputs[0] is None:
        return
    shape = [size for size in values[op.inputs[0]].shape if isinstance(size, int)]  # of a step: all
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
