"""Long reductions to few results in two steps: parts of every row side by side, then the sum of the parts.

The parts and their order are fixed, so that results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchedge.expressions.indices import Index, of, unflatten
from torchedge.expressions.scalars import Local, Scalar, guarded, walk
from torchedge.lowering.expansion import substitute
from torchedge.lowering.inlining import nodes_below
from torchedge.lowering.nodes import Node, Output, ReduceKind, Rows, RowsResult, Stage, axes, indices_of
from torchedge.lowering.targets import Target

SHORTEST = 32
"""Elements below which a part is not made shorter."""


def split_reductions(roots: Sequence[Node], target: Target) -> None:
    """Rewrite, in place, the Rows below the roots whose rows are too few and too long to fill the device."""
    for node in nodes_below(roots):
        while isinstance(node, Rows) and _can_split(node):
            parts = _parts_wanted(node, target)
            if parts <= 1:
                break
            _split(node, parts)  # the sum of many parts may be long again


def _can_split(node: Rows) -> bool:
    names = {s.name for s in node.stages}
    own = any(isinstance(s, Local) and s.name in names for stage in node.stages for s in walk(stage.body))
    inner = set(node.inner)
    return (
        not own
        and not any(s.kind.startswith("arg") for s in node.stages)
        and not any(inner & set(o.axes) for o in node.outputs)
    )


def _parts_wanted(node: Rows, target: Target) -> int:
    count = prod([a.extent for a in node.inner])
    busy = max(1, node.numel // target.vector)
    if busy >= target.work_items or node.numel * count < SHORTEST * SHORTEST * target.vector:
        return 1
    return min(-(-target.work_items // busy), count // SHORTEST)


def _split(node: Rows, parts: int) -> None:
    sizes = [a.extent for a in node.inner]
    leading = 1
    while prod(sizes[:leading]) < parts and leading < len(sizes):
        leading += 1
    whole = prod(sizes[:leading])
    per = _length(whole, parts)
    chunk, step = axes((-(-whole // per), per), "p")
    position = of(chunk) * per + (of(step) if per > 1 else 0)
    place = dict(zip(node.inner[:leading], unflatten(position, sizes[:leading]), strict=True))
    rest = node.inner[leading:]
    outer = (*node.outer, chunk)
    stages = [
        Stage(s.name, s.kind, _within(position, whole, substitute(s.body, place), s.kind), s.dtype)
        for s in node.stages
    ]
    outputs = [Output(outer, Local(s.name, s.dtype), s.dtype) for s in stages]
    shape = tuple([a.extent for a in outer])
    inner = (step, *rest) if per > 1 else rest
    first = Rows(shape, node.dtype, outer, inner, tuple(stages), tuple(outputs), node.name, scope=node.scope)
    node.inner = (chunk,)
    node.stages = tuple(
        [
            Stage(s.name, s.kind, RowsResult(shape, s.dtype, first, k).at(*indices_of(outer)), s.dtype)
            for k, s in enumerate(stages)
        ]
    )


def _length(whole: int, parts: int) -> int:
    """Return how many elements a part has: a divisor of the whole where one is near."""
    wanted = -(-whole // parts)
    return next((n for n in range(wanted, 2 * wanted) if whole % n == 0), wanted)


def _within(position: Index, whole: int, body: Scalar, kind: ReduceKind) -> Scalar:
    """Return the body, and what changes nothing behind the end of the row."""
    nothing = {"sum": 0, "prod": 1, "any": False, "all": True}
    if kind in nothing:
        return guarded([(position, 0, whole)], body, nothing[kind])
    worst = float("-inf") if kind == "max" else float("inf")
    if body.dtype.startswith(("int", "uint")):
        worst = -(2**31) if kind == "max" else 2**31 - 1
    return guarded([(position, 0, whole)], body, worst)
