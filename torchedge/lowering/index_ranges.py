"""Ranges of indices: numbers with which operators of a step may index.

PyTorch raises for a class label or an index out of range. A kernel cannot raise: it reads NaN or writes
nothing. So inputs and weights that are indices are checked before a step runs. Indices that the step computes
are checked by a kernel of their own, unless the operators that compute them show that they are in range.
So are the divisors of whole numbers, which must not be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

from torchedge.graphs import Op
from torchedge.graphs.steps import Input, Step
from torchedge.lowering.programs import IndexRange
from torchedge.lowering.rules.ranges import Bounds, Numbers, same
from torchedge.lowering.rules.registry import whole_numbers

__all__ = ["index_ranges", "zero_divisions"]

_INTEGERS = frozenset(("int64", "int32"))


def index_ranges(step: Step) -> dict[int, IndexRange]:
    """Return the range of each value with which operators of a step index, by the value's index.

    A value that another one was reshaped to counts as that one; a number to which a run of numbers was added
    counts for their sums. Computed values that are in range by the operators that compute them are omitted.
    """
    source: dict[int, int] = {}
    bounds, maker = _all_bounds(step), {index: op for op in step.ops for index in op.outputs}
    ranges: dict[int, IndexRange] = {}
    for op in step.ops:
        facts = whole_numbers(op.kind)
        if facts.bounds is same and op.inputs[0] is not None:
            here, there = (step.values[index].dtype for index in (op.inputs[0], op.outputs[0]))
            if {here, there} <= _INTEGERS:
                source[op.outputs[0]] = source.get(op.inputs[0], op.inputs[0])
        indexed = facts.indexes(Numbers(op, _shape(op, step))) if facts.indexes else ()
        for item, bound in indexed:
            value = op.inputs[item.position]
            if value is None or step.values[value].dtype not in _INTEGERS:
                continue
            low, high = bounds.get(value, (bound.low - 1, bound.high))
            if low < bound.low or high >= bound.high:
                root = source.get(value, value)
                while (below := _addend(step, maker, source, root)) is not None and bound.ignored is None:
                    root, (least, most) = below
                    bound = IndexRange(bound.low - least, bound.high - most)
                ranges[root] = _both(ranges[root], bound) if root in ranges else bound
    return ranges


def _addend(
    step: Step, maker: Mapping[int, Op], source: Mapping[int, int], index: int
) -> tuple[int, Bounds] | None:
    """Return the single number to which a value's operator adds a run of numbers, and their ends."""
    op = maker.get(index)
    if op is None or op.kind != "add" or op.attrs.get("alpha", 1) != 1 or len(op.inputs) != 2:
        return None
    roots = [source.get(i, i) for i in op.inputs if i is not None]
    for root, other in (roots, roots[::-1]):
        run, value = maker.get(other), step.values[root]
        single = prod(value.at(1)) == 1 and value.dtype in _INTEGERS
        if single and run is not None and run.kind in ("arange", "full"):
            rule = whole_numbers(run.kind).bounds
            ends = rule and rule(Numbers(run, _shape(run, step), _plain))
            if ends is not None and run.attrs.get("step", 1) == 1:
                return source.get(root, root), ends
    return None


def _plain(item: object) -> Bounds | None:
    return (item, item) if type(item) is int else None


def zero_divisions(step: Step) -> dict[int, int | None]:
    """Return what whole numbers are divided by that may be zero: values by index, with themselves.

    A quotient by the number 0 counts with None. Divisors that are not zero by the operators that compute them
    are omitted.
    """
    bounds = _all_bounds(step)
    divisors: dict[int, int | None] = {}
    for op in step.ops:
        result = step.values[op.outputs[0]] if op.outputs else None
        if not whole_numbers(op.kind).divides or result is None:
            continue
        if result.dtype.startswith(("float", "bfloat")) or not prod(result.at(1)):
            continue
        item = op.attrs.get("other")
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
    known: dict[int, Bounds] = {}

    def bounds_of(op: Op, item: object) -> Bounds | None:
        if not isinstance(item, Input):
            return _plain(item)
        value = op.inputs[item.position]
        if value is None or step.values[value].dtype == "bool":
            return None if value is None else (0, 1)
        return known.get(value)

    for op in step.ops:
        rule = whole_numbers(op.kind).bounds
        for output, index in enumerate(op.outputs if rule is not None else ()):
            if rule is not None and step.values[index].dtype in _INTEGERS:
                bounds = rule(Numbers(op, _shape(op, step), partial(bounds_of, op), output))
                if bounds is not None:
                    known[index] = bounds
    return known


def _shape(op: Op, step: Step) -> tuple[int, ...]:
    """Return the shape of an operator's first tensor."""
    first = op.inputs[0] if op.inputs else None
    return () if first is None else step.values[first].at(1)


def _both(first: IndexRange, second: IndexRange) -> IndexRange:
    ignored = first.ignored if first.ignored == second.ignored else None
    return IndexRange(max(first.low, second.low), min(first.high, second.high), ignored)
