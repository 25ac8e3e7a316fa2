"""Which tensors of a step are written to memory, and which are computed again where they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from torchedge.expressions.functions import cost_of
from torchedge.expressions.scalars import Apply, Guarded, Read, Scalar, children, walk
from torchedge.lowering.nodes import Contraction, Node, Pointwise, Rows

MOST_PIECES = 4
"""A node with more operands of its own size than this is written to memory: a concatenation of many."""
MOST_EXTRA_WORK = 24
"""Arithmetic operations an element that may be spent again to spare a tensor its way through memory."""


def nodes_below(roots: Sequence[Node]) -> list[Node]:
    """Return every node that the roots need, operands before their users."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(operand, False) for operand in reversed(node.operands)]
    return order


def choose_kept(roots: Sequence[Node]) -> set[Node]:
    """Return the pointwise nodes that are written to memory: roots, operands of contractions, costly repeats.

    A node is computed again by each reader where that moves no more bytes than writing and reading it, and
    costs little arithmetic. Contractions read memory (through views at most).
    """
    order = nodes_below(roots)
    readers: dict[Node, list[tuple[Node, float]]] = defaultdict(list)
    for node in order:
        for load, points in _reads(node):
            readers[load.tensor].append((node, points / max(1, load.tensor.numel)))
    kept: set[Node] = {n for n in roots if isinstance(n, Pointwise)}
    ratio: dict[Node, float] = {}
    for node in reversed(order):
        if not isinstance(node, Pointwise):
            continue
        ratio[node] = sum(share * (ratio.get(r, 1.0) if r not in kept else 1.0) for r, share in readers[node])
        contracted = any(isinstance(r, Contraction) for r, _ in _views_up(node, readers))
        if node not in kept and _is_kept(node, ratio[node], contracted):
            kept.add(node)
    return kept


def _views_up(node: Node, readers: dict[Node, list[tuple[Node, float]]]) -> list[tuple[Node, float]]:
    """Return the readers of a node, those of views of it included."""
    found = []
    for reader, share in readers[node]:
        found.append((reader, share))
        if isinstance(reader, Pointwise) and is_access(reader.body):
            found += _views_up(reader, readers)
    return found


def _is_kept(node: Pointwise, ratio: float, contracted: bool) -> bool:
    if is_access(node.body):
        return False
    if contracted:
        return True
    distinct = {s.tensor: s.tensor.numel for s in walk(node.body) if isinstance(s, Read)}
    traffic = sum(min(1.0, numel / max(1, node.numel)) for numel in distinct.values())
    if len([n for n in distinct.values() if 4 * n > node.numel]) > MOST_PIECES or _is_pieces(node.body):
        return True
    if ratio <= 1.0:
        return False
    work = sum(cost_of(s.function) for s in walk(node.body) if isinstance(s, Apply))
    return ratio * traffic > traffic + 1 + ratio or (ratio - 1) * work > MOST_EXTRA_WORK


def _is_pieces(body: Scalar) -> bool:
    return sum(isinstance(s, Guarded) for s in walk(body)) > MOST_PIECES


def is_access(body: Scalar) -> bool:
    """Return whether an expression only reads one tensor at an index: a view, padded or converted at most."""
    while not isinstance(body, Read):
        if isinstance(body, Guarded) and not children(body.other):
            body = body.value
        elif isinstance(body, Apply) and body.function == "cast":
            body = body.args[0]
        else:
            return False
    return not children(body)


def _reads(node: Node) -> list[tuple[Read, int]]:
    """Return every load of a node with how often it is carried out."""
    if isinstance(node, Pointwise):
        return [(s, node.numel) for s in walk(node.body) if isinstance(s, Read)]
    if isinstance(node, Rows):
        inner = prod([a.extent for a in node.inner])
        found = []
        for stage in node.stages:
            found += [(s, node.numel * inner) for s in walk(stage.body) if isinstance(s, Read)]
        for output in node.outputs:
            points = prod([a.extent for a in output.axes])
            found += [(s, points) for s in walk(output.body) if isinstance(s, Read)]
        return found
    return [(s, s.tensor.numel) for root in node.roots for s in walk(root) if isinstance(s, Read)]
