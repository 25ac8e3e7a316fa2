"""Writing nodes that are not materialised into the expressions of those that are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torchedge.expressions.indices import Atom, Axis, Fetched, Index, of, rewrite
from torchedge.expressions.scalars import Apply, Guarded, Position, Read, Scalar, guarded
from torchedge.lowering.nodes import Node, Pointwise


def substitute(
    scalar: Scalar,
    axes: Mapping[Axis, Index],
    change: Callable[[Read], Scalar | None] = lambda load: None,
    known: dict[Scalar, Scalar] | None = None,
) -> Scalar:
    """Return an expression with axes replaced, then loads where `change` gives something."""
    memo = {} if known is None else known

    def index(item: Index) -> Index:
        def atom(a: Atom) -> Index | None:
            if isinstance(a, Axis):
                return axes.get(a)
            if isinstance(a, Fetched):
                return of(Fetched(again(a.value), a.low, a.high))
            return None

        return rewrite(item, atom)

    def again(item: Scalar) -> Scalar:
        if item not in memo:
            memo[item] = build(item)
        return memo[item]

    def build(item: Scalar) -> Scalar:
        if isinstance(item, Read):
            load = Read(item.tensor, tuple(map(index, item.indices)), item.dtype)
            return change(load) or load
        if isinstance(item, Apply):
            return Apply(item.function, tuple(map(again, item.args)), item.dtype)
        if isinstance(item, Guarded):
            bounds = [(index(i), low, high) for i, low, high in item.bounds]
            return guarded(bounds, again(item.value), again(item.other))
        return Position(index(item.index), item.dtype) if isinstance(item, Position) else item

    return again(scalar)


@dataclass(slots=True)
class Expander:
    """Expands expressions: loads of pointwise nodes outside `kept` become what those nodes compute."""

    kept: Collection[Node]
    bodies: dict[Node, Scalar] = field(default_factory=dict)

    def expand(self, scalar: Scalar) -> Scalar:
        """Return the expression over materialised tensors alone."""
        return substitute(scalar, {}, self._inline)

    def body(self, node: Pointwise) -> Scalar:
        """Return a pointwise node's body over materialised tensors, in its own axes."""
        if node not in self.bodies:
            self.bodies[node] = self.expand(node.body)
        return self.bodies[node]

    def _inline(self, load: Read) -> Scalar | None:
        node = load.tensor
        if not isinstance(node, Pointwise) or node in self.kept:
            return None
        return substitute(self.body(node), dict(zip(node.axes, load.indices, strict=True)))
