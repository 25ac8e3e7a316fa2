"""Nodes that do no harm: they read within their tensors, and do no more work than their sizes ask for.

A rule takes the shape of its result as the step gives it. In a step that was captured, that is PyTorch's; the
source of a bundle may say anything. So every read is checked here: its indices lie within the tensor for all
values of the loop axes, or bounds around the read make sure of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Floor, Index
from torchedge.expressions.scalars import Bound, Guarded, Read, Scalar, children
from torchedge.lowering.nodes import Contraction, Node, Rows, Stored, nodes_below

MOST_WORK = 1 << 34
"""Elements that one node may walk through, however few the step's tensors have: seconds of one core."""


_WHOLE = frozenset(("int8", "int16", "int32", "int64", "uint8"))


def check_nodes(roots: Sequence[Node]) -> None:
    """Raise LoweringError for the first node below roots that reads outside of a tensor or takes too long.

    A node may walk through as many elements as there are pairs of elements of the step's tensors: a matrix
    product takes fewer.
    """
    nodes, known = nodes_below(roots), set(roots)
    elements = sum(n.numel for n in nodes if isinstance(n, Stored) or n in known)
    most = max(MOST_WORK, elements**2)
    for node in nodes:
        where = f"a result of shape {list(node.shape)}" + (f" in {node.scope}" if node.scope else "")
        work = prod(_extents(node))
        if work > most:
            raise LoweringError(
                f"{where} takes {work} steps; expected at most {most} for tensors of such sizes"
            )
        read = _outside(node.roots) if work else None
        if read is not None:
            at, sizes = ", ".join(map(str, read.indices)), list(read.tensor.shape)
            raise LoweringError(
                f"{where} reads [{at}] of a tensor of shape {sizes}; expected shapes and indices of PyTorch"
            )


def _extents(node: Node) -> Iterable[int]:
    if isinstance(node, Rows):
        return [axis.extent for axis in (*node.outer, *node.inner)]
    inner = node.inner if isinstance(node, Contraction) else ()
    return [*node.shape, *[axis.extent for axis in inner]]


def _outside(scalars: Iterable[Scalar]) -> Read | None:
    """Return a read that may lie outside of its tensor, or at a place that is no whole number."""
    seen: set[tuple[int, tuple[Bound, ...]]] = set()
    stack: list[tuple[Scalar, tuple[Bound, ...]]] = [(scalar, ()) for scalar in scalars]
    while stack:
        scalar, bounds = stack.pop()
        if (id(scalar), bounds) in seen:
            continue
        seen.add((id(scalar), bounds))
        if isinstance(scalar, Read) and not all(
            _is_within(index, size, bounds)
            for index, size in zip(scalar.indices, scalar.tensor.shape, strict=True)
        ):
            return scalar
        parts = list(children(scalar))
        if isinstance(scalar, Read) and any(part.dtype not in _WHOLE for part in parts):
            return scalar
        if isinstance(scalar, Guarded):
            stack.append((parts.pop(0), (*bounds, *scalar.bounds)))
        stack += [(part, bounds) for part in parts]
    return None


def _is_within(index: Index, size: int, bounds: tuple[Bound, ...]) -> bool:
    low, high = _range(index, bounds)
    return (low >= 0 and high < size) or low > high


def _range(index: Index, bounds: tuple[Bound, ...]) -> tuple[int, int]:
    """Return the smallest and the largest value that an index has where bounds hold."""
    low, high = index.range
    if not bounds:
        return low, high
    least = most = index.const
    for atom, factor in index.terms:
        first, last = atom.range
        if isinstance(atom, Floor):
            first, last = (end // atom.divisor for end in _range(atom.index, bounds))
        least, most = least + min(first * factor, last * factor), most + max(first * factor, last * factor)
    low, high = max(low, least), min(high, most)
    for place, (bounded, begin, end) in enumerate(bounds):
        others = (*bounds[:place], *bounds[place + 1 :])
        for factor in _factors(index, bounded):
            least, most = _range(index - bounded * factor, others)
            ends = sorted((begin * factor, (end - 1) * factor))
            low, high = max(low, least + ends[0]), min(high, most + ends[1])
    return low, high


def _factors(index: Index, part: Index) -> set[int]:
    """Return how many times a part may be in an index: as often as one of its atoms is."""
    factors = dict(index.terms)
    return {
        factors[atom] // size for atom, size in part.terms if atom in factors and not factors[atom] % size
    }
