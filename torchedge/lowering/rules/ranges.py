"""Facts of operators on whole numbers: which arguments are indices, and between which bounds results lie.

Rules are registered with these functions: `indexes` yields the ranges of an operator's indices, `bounds` the
least and the largest number of a result, None where that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod

from torchedge.graphs import Op
from torchedge.graphs.steps import Input
from torchedge.lowering.programs import IndexRange

Bounds = tuple[int, int]
Indexes = Callable[["Numbers"], Iterator[tuple[Input, IndexRange]]]
BoundsRule = Callable[["Numbers"], Bounds | None]


@dataclass(frozen=True, slots=True)
class Numbers:
    """An operator with the shape of its first tensor, and the bounds of an argument or number.

    output: which of its results is asked for.
    """

    op: Op
    shape: tuple[int, ...]
    bounds_of: Callable[[object], Bounds | None] = lambda _: None
    output: int = 0

    def __getitem__(self, name: str) -> Bounds | None:
        return self.bounds_of(self.op.attrs.get(name))

    def along(self, default: int | None = None) -> int:
        """Return the size of the dimension `dim`, of all dimensions without one."""
        dim = self.op.attrs.get("dim", default)
        shape = self.shape or (1,)
        return prod(shape) if dim is None else shape[dim % len(shape)]


# indices ----------------------------------------------------------------------------------------------------


def rows(numbers: Numbers) -> Iterator[tuple[Input, IndexRange]]:
    """Indices of rows."""
    yield from _argument(numbers, "indices", IndexRange(0, numbers.shape[0]))


def classes(numbers: Numbers) -> Iterator[tuple[Input, IndexRange]]:
    """Labels of classes, one of which may be ignored."""
    count = numbers.shape[1 if len(numbers.shape) > 1 else 0]
    yield from _argument(numbers, "target", IndexRange(0, count, numbers.op.attrs["ignore_index"]))


def along_dim(numbers: Numbers) -> Iterator[tuple[Input, IndexRange]]:
    """Places along one dimension."""
    if numbers.shape:
        yield from _argument(numbers, "index", IndexRange(0, numbers.along()))


def every_dim(numbers: Numbers) -> Iterator[tuple[Input, IndexRange]]:
    """Places along several dimensions, from the end where they are negative."""
    for size, item in zip(numbers.shape, numbers.op.attrs["indices"], strict=False):
        if isinstance(item, Input):
            yield item, IndexRange(-size, size)


def _argument(numbers: Numbers, name: str, bound: IndexRange) -> Iterator[tuple[Input, IndexRange]]:
    item = numbers.op.attrs.get(name)
    if isinstance(item, Input):
        yield item, bound


# bounds of results ------------------------------------------------------------------------------------------


def among(numbers: Numbers) -> Bounds | None:
    """No other numbers than the input's."""
    return numbers["input"]


def same(numbers: Numbers) -> Bounds | None:
    """All numbers of the input, and no others."""
    return numbers["input"]


def places(numbers: Numbers, output: int = 0, dim: int | None = None) -> Bounds | None:
    """Places along a dimension, in one of the results; dim: without an argument of that name."""
    return (0, numbers.along(dim) - 1) if numbers.output == output else None


def steps(numbers: Numbers) -> Bounds | None:
    """Start, start + step, ... below end."""
    attrs = numbers.op.attrs
    start, stop, stride = attrs.get("start", 0), attrs["end"], attrs.get("step", 1)
    return (start, stop - 1) if {*map(type, (start, stop, stride))} == {int} and stride > 0 else None


def filled(numbers: Numbers) -> Bounds | None:
    """One number."""
    return numbers["fill_value"]


def parts(numbers: Numbers) -> Bounds | None:
    """The numbers of several tensors."""
    return _hull([numbers.bounds_of(item) for item in numbers.op.attrs["tensors"]])


def either(numbers: Numbers) -> Bounds | None:
    """The numbers of both operands."""
    return _hull([numbers["input"], numbers["other"]])


def clamped(numbers: Numbers) -> Bounds | None:
    """The input, but not below min nor above max."""
    first, low, high = (numbers[name] for name in ("input", "min", "max"))
    if (first is None and None in (low, high)) or (low is None and high is None):
        return None
    ends = [bound for bound in (first, low) if bound is not None]
    most = high[1] if high is not None else max(end for _, end in ends)
    return min((low or ends[0])[0], most), most


def below(numbers: Numbers, included: int = 0) -> Bounds | None:
    """Numbers from 0 to a positive second operand."""
    other = numbers["other"]
    return (0, other[0] - 1 + included) if other is not None and other[0] == other[1] > 0 else None


def sums(numbers: Numbers, sign: int = 1, first: str = "input", second: str = "other") -> Bounds | None:
    """The first operand and sign times the second one."""
    a, b = numbers[first], numbers[second]
    if a is None or b is None or numbers.op.attrs.get("alpha", 1) != 1:
        return None
    return a[0] + min(sign * b[0], sign * b[1]), a[1] + max(sign * b[0], sign * b[1])


def products(numbers: Numbers) -> Bounds | None:
    """Products of both operands."""
    return _corners(numbers, lambda a, b: a * b)


def quotients(numbers: Numbers) -> Bounds | None:
    """Quotients by a positive divisor that are rounded down."""
    other = numbers["other"]
    if numbers.op.attrs.get("rounding_mode") != "floor" or other is None or other[0] <= 0:
        return None
    return _corners(numbers, lambda a, b: a // b)


differences, reversed_differences = (
    partial(sums, sign=-1),
    partial(sums, sign=-1, first="other", second="input"),
)


def _corners(numbers: Numbers, function: Callable[[int, int], int]) -> Bounds | None:
    a, b = numbers["input"], numbers["other"]
    if a is None or b is None:
        return None
    ends = [function(x, y) for x, y in product(a, b)]
    return min(ends), max(ends)


def _hull(bounds: list[Bounds | None]) -> Bounds | None:
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds):
        return None
    return min(low for low, _ in known), max(high for _, high in known)
