"""Loop nests: axes in the order of memory, neighbouring axes joined where every access allows it.

Also the amounts that decide about a nest: offsets, strides, vector width, arithmetic of a point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchedge.expressions.dialect import offset_of
from torchedge.expressions.functions import cost_of
from torchedge.expressions.indices import ZERO, Axis, Floor, Index, Remainder, atoms_of, axes_of, of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Apply, Guarded, Position, Read, Scalar, fetched_by, walk
from torchedge.lowering.fusion import Computed
from torchedge.lowering.kernels.sources import Arguments
from torchedge.lowering.nodes import Node

Stores = Sequence[tuple[Node, Computed]]
"""What a kernel writes: tensors, and their values at a point of its loops."""


def strides_of(offset: Index) -> dict[Axis, int]:
    """Return by how much an offset grows with each axis, where that is one number."""
    return {atom: coefficient for atom, coefficient in offset.terms if isinstance(atom, Axis)}


def grain(index: Index, strides: Mapping[Axis, int]) -> int:
    """Return the smallest step in memory that changes an index; `strides`: those of the axes. 0: constant."""
    steps = []
    for atom, _ in index.terms:
        if isinstance(atom, Axis) and atom in strides:
            steps.append(strides[atom])
        elif isinstance(atom, (Floor, Remainder)):
            inner = grain(atom.index, strides)
            if inner:
                steps.append(inner * (atom.divisor if isinstance(atom, Floor) else 1))
    return min(steps, default=0)


def in_memory_order(axes: Sequence[Axis], strides: Mapping[Axis, int]) -> tuple[Axis, ...]:
    """Return axes by falling stride; those without a stride stay before their right neighbour."""
    rank: dict[Axis, float] = {}
    following = 0.5
    for axis in reversed(axes):
        following = strides.get(axis, following) if axis.extent > 1 else following
        rank[axis] = following
    place = {axis: k for k, axis in enumerate(axes)}
    return tuple(sorted(axes, key=lambda a: (-rank[a], place[a])))


def joined(
    loops: Sequence[Axis], indices: Sequence[Index], letter: str = "d"
) -> tuple[tuple[Axis, ...], dict[Axis, Index]]:
    """Join neighbouring loops wherever no index then needs a quotient or remainder more than before.

    Returns the new loops, named by the letter and their number, and what the old axes are in them.
    """
    order = [a for a in loops if a.extent != 1]
    whole: dict[Axis, Index] = {a: ZERO for a in loops if a.extent == 1}
    current = [i.substitute(whole) for i in indices]
    place = len(order) - 2
    while place >= 0:
        outer, inner = order[place], order[place + 1]
        both = Axis(f"{outer.name}_{inner.name}", outer.extent * inner.extent)
        step = {outer: of(both) // inner.extent, inner: of(both) % inner.extent}
        changed = [i.substitute(step) for i in current]
        pairs = [pair for pair in zip(current, changed, strict=True) if pair[0] is not pair[1]]
        if _quotients([after for _, after in pairs]) <= _quotients([before for before, _ in pairs]):
            whole = {a: i.substitute(step) for a, i in whole.items()} | step
            current = changed
            order[place : place + 2] = [both]
        place -= 1
    named = {axis: Axis(f"{letter}{k}", axis.extent) for k, axis in enumerate(order)}
    rename = {axis: of(new) for axis, new in named.items()}
    moved = {a: i.substitute(rename) for a, i in whole.items()}
    moved |= {a: of(named[a]) for a in loops if a in named}
    return tuple(named.values()), {a: moved[a] for a in loops}


def _quotients(indices: Sequence[Index]) -> int:
    return sum(isinstance(a, (Floor, Remainder)) for i in indices for a in atoms_of(i))


def axes_below(indices: Iterable[Index]) -> set[Axis]:
    """Return the loops on which indices depend, those of values that are themselves places included."""
    listed = list(indices)
    for scalar in walk(*fetched_by(listed)):
        if isinstance(scalar, Read):
            listed += scalar.indices
        elif isinstance(scalar, Position):
            listed.append(scalar.index)
        elif isinstance(scalar, Guarded):
            listed += [index for index, _, _ in scalar.bounds]
    return set[Axis]().union(*map(axes_of, listed))


def accessed(*bodies: Scalar) -> list[Index]:
    """Return every index of guards and positions; loads count by their offsets."""
    indices: list[Index] = []
    for scalar in walk(*bodies):
        if isinstance(scalar, Guarded):
            indices += [b[0] for b in scalar.bounds]
        elif isinstance(scalar, Position):
            indices.append(scalar.index)
    return indices


def every_offset(values: Sequence[Scalar], stores: Stores, arguments: Arguments) -> list[Index]:
    """Return all index arithmetic of a kernel: offsets of reads and writes, bounds, positions."""
    offsets = [offset_of(arguments.sites[n], c.element) for n, c in stores]
    for scalar in walk(*values):
        if isinstance(scalar, Read):
            offsets.append(offset_of(arguments.sites[scalar.tensor], scalar.indices))
    return offsets + accessed(*values)


def in_loops(stores: Stores, moved: Mapping[Axis, Index]) -> Stores:
    """Return what is stored in terms of a kernel's loops. moved: the host's axes in terms of them."""
    memo: dict[Scalar, Scalar] = {}
    return tuple([(node, item.moved(moved, known=memo)) for node, item in stores])


def write_all(renderer: Renderer, stores: Stores, arguments: Arguments) -> None:
    """Add the statements that compute and then write every stored tensor at one point of the loops."""
    for node, item in stores:  # all reads before the first write: a tensor may be overwritten in place
        renderer.prepare(arguments.sites[node], item.element, item.value)
    for node, item in stores:
        renderer.store(arguments.sites[node], item.element, item.value)


def work_of(values: Sequence[Scalar]) -> int:
    """Return the arithmetic operations of one point."""
    return sum(cost_of(s.function) for s in walk(*values) if isinstance(s, Apply))
