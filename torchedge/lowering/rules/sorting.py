"""Whole numbers in order, by nodes alone: blocks sorted by counting, then merged two by two.

Every result looks for its own element, by bisection, so that no kernel writes to a place that depends on
data. The work grows as n log² n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import clamped, pointwise, reduction, reshaped
from torchedge.lowering.nodes import Node

BLOCK = 256
"""Elements that are sorted by counting, for each, how many are smaller."""
_BITS = 32


@dataclass(frozen=True, slots=True)
class Order:
    """The positions 0 to `count` - 1 in the order of their keys, equal keys in the order of positions.

    packed: (at least `count`,) of int64, key · 2³² + position, rising; behind the end the largest key.
    """

    packed: Node
    count: int

    def key(self, place: Index) -> Scalar:
        """Return the key of a place in the order (int32)."""
        return cast(apply("shift_right", self.packed.at(place), _BITS), "int32")

    def position(self, place: Index) -> Index:
        """Return the position that stands at a place in the order."""
        position = cast(apply("bit_and", self.packed.at(place), 2**_BITS - 1), "int32")
        return of(Fetched(position, 0, self.count - 1))

    def first(self, key: Index) -> Scalar:
        """Return the first place (int32) whose key is not below a number: the count where there is none."""
        wanted = Position(key, "int32")
        start, end = constant(0, "int32"), constant(self.count, "int32")
        return _bisected(
            start, end, self.count, lambda place: self.key(clamped(place, self.count - 1)) < wanted
        )


def in_order(key: Callable[[Index], Scalar], count: int) -> Order:
    """Return positions in the order of their keys. key(position): a whole number within 32 bits."""
    block = min(BLOCK, 1 << (count - 1).bit_length())
    size = block
    while size < count:
        size *= 2

    def packed(position: Index) -> Scalar:
        number = cast(key(position), "int64") * 2**_BITS + Position(position, "int64")
        return guarded([(position, 0, count)], number, ((2**31 - 1) << _BITS) + count - 1)

    runs = _sorted_blocks(pointwise((size,), "int64", packed), block)
    while block < size:
        runs, block = _merged(runs, block), 2 * block
    return Order(reshaped(runs, (size,)), count)


def _sorted_blocks(x: Node, block: int) -> Node:
    """Return x in blocks, each sorted. Its elements differ, or are all that is behind the end."""
    blocks = reshaped(x, (x.numel // block, block))
    domain = (*blocks.shape, block)

    def is_before(b: Index, i: Index, other: Index) -> Scalar:
        mine, theirs = blocks.at(b, i), blocks.at(b, other)
        earlier = theirs.equals(mine) & (Position(other, "int32") < Position(i, "int32"))
        return cast((theirs < mine) | earlier, "int32")

    rank = reduction(domain, (2,), "sort", is_before)

    def here(b: Index, i: Index, other: Index) -> Scalar:
        return where(rank.at(b, other).equals(Position(i, "int32")), blocks.at(b, other), 0)

    return reduction(domain, (2,), "sort", here)


def _merged(runs: Node, length: int) -> Node:
    """Return sorted runs twice as long."""
    count = runs.numel // (2 * length)
    halves = reshaped(runs, (count, 2, length))

    def element(pair: Index, place: Index) -> Scalar:
        at = Position(place, "int32")

        def left(i: Scalar) -> Scalar:
            return halves.at(pair, 0, clamped(i, length - 1))

        def right(i: Scalar) -> Scalar:
            return halves.at(pair, 1, clamped(i, length - 1))

        taken = _bisected(
            apply("maximum", at - length, 0),
            apply("minimum", at, length),
            length,
            lambda i: left(i) < right(at - i - 1),
        )
        other = at - taken
        of_left = (taken < length) & ((other >= length) | (left(taken) < right(other)))
        return where(of_left, left(taken), right(other))

    return pointwise((count, 2 * length), "int64", element)


def _bisected(low: Scalar, high: Scalar, most: int, is_below: Callable[[Scalar], Scalar]) -> Scalar:
    """Return the first number from `low` to `high` that is not below what is sought, at most `most` apart."""
    for _ in range(most.bit_length()):
        middle = apply("shift_right", low + high, 1)
        below = (low < high) & is_below(middle)
        low, high = where(below, middle + 1, low), where(below, high, middle)
    return low
