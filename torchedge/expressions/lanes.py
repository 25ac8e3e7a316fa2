"""Expressions over vectors as a single lane computes them."""

from __future__ import annotations

from collections.abc import Callable

from torchedge.expressions.indices import Atom, Axis, Fetched, Index, constant, of, rewrite
from torchedge.expressions.scalars import Apply, Guarded, Local, Position, Read, Scalar, guarded


def at_one_lane(
    scalar: Scalar, lane: int, widened: Callable[[Index], Index], is_uniform: Callable[[Local], bool]
) -> Scalar:
    """Return an expression as one lane computes it; variables that are vectors become their component.

    widened: splits the lane's axis into block and lane. is_uniform: whether a variable is no vector.
    """

    def index_at(index: Index) -> Index:
        def change(atom: Atom) -> Index | None:
            if isinstance(atom, Axis) and atom.name == "lane":
                return constant(lane)
            if isinstance(atom, Fetched):
                return of(Fetched(again(atom.value), atom.low, atom.high))
            return None

        return rewrite(widened(index), change)

    def again(item: Scalar) -> Scalar:
        if isinstance(item, Read):
            return Read(item.tensor, tuple(map(index_at, item.indices)), item.dtype)
        if isinstance(item, Position):
            return Position(index_at(item.index), item.dtype)
        if isinstance(item, Apply):
            return Apply(item.function, tuple(map(again, item.args)), item.dtype)
        if isinstance(item, Guarded):
            bounds = [(index_at(i), low, high) for i, low, high in item.bounds]
            return guarded(bounds, again(item.value), again(item.other))
        if isinstance(item, Local) and not is_uniform(item):
            return Local(f"{item.name}.s{lane:x}", item.dtype, True)
        return item

    return again(scalar)
