"""From a Step to nodes: each operator by its rule, then long reductions in two steps.

A reduction to few results from long rows is split: slices of every row are reduced side by side, then their
results. The slices and their order are fixed, so that results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torchedge.errors import LoweringError
from torchedge.expressions.dialect import STORED
from torchedge.expressions.indices import Index, of, unflatten
from torchedge.expressions.scalars import Local, Scalar, guarded, substitute, walk
from torchedge.graphs.steps import Input, Step
from torchedge.lowering.building import full
from torchedge.lowering.nodes import (
    Node,
    Output,
    ReduceKind,
    Rows,
    RowsResult,
    Stage,
    Stored,
    axes,
    indices_of,
    nodes_below,
)
from torchedge.lowering.rules.registry import Result, all_rules, apply_rule
from torchedge.lowering.targets import Target

SHORTEST = 32
"""Least number of elements of a slice."""


@dataclass(frozen=True, slots=True)
class Translation:
    """The nodes of a step: `outputs` in the graph's order, `updates` as (stored tensor, its new content).

    stored: by index of the step's value. names: of the values that nodes are.
    """

    outputs: tuple[Node, ...]
    updates: tuple[tuple[Stored, Node], ...]
    stored: Mapping[int, Stored]
    names: Mapping[Node, str] = field(default_factory=dict)


def unsupported_operators(step: Step) -> tuple[str, ...]:
    """Return the kinds of operators without a rule, each once, in order of appearance."""
    rules = all_rules()
    return tuple(dict.fromkeys(op.kind for op in step.ops if op.kind not in rules))


def translate(step: Step) -> Translation:
    """Return a step as nodes.

    Raises:
        LoweringError: operators without a rule (all are named), or arguments that a rule does not support.
    """
    missing = unsupported_operators(step)
    if missing:
        raise LoweringError(
            f"{step.name} uses operators that have no kernel: {', '.join('aten.' + m for m in missing)}; "
            "run them in PyTorch (torch.compile's backend does), or add rules in torchedge/lowering/rules"
        )
    strange = sorted({v.dtype for v in step.values} - set(STORED))
    if strange:
        raise LoweringError(
            f"{step.name} holds tensors of {', '.join(strange)}; expected {', '.join(STORED)}; "
            "convert the model, with .float() for example"
        )
    nodes_of: dict[int, Node] = {}
    stored: dict[int, Stored] = {}
    names: dict[Node, str] = {}
    for index, value in enumerate(step.values):
        if value.role != "activation":
            nodes_of[index] = stored[index] = Stored(_shape(value.shape), value.dtype, value.name, index)
    for op in step.ops:
        inputs = [None if i is None else nodes_of[i] for i in op.inputs]
        values = [step.values[i] for i in op.outputs]
        result = Result(tuple([_shape(v.shape) for v in values]), tuple([v.dtype for v in values]))
        arguments = {name: _filled(item, inputs) for name, item in op.attrs.items()}
        try:
            nodes = _nothing(result) or apply_rule(op.kind, result, arguments)
        except LoweringError as error:
            where = f" in {op.scope}" if op.scope else ""
            raise LoweringError(f"{error}{where}") from error
        for index, node in zip(op.outputs, nodes, strict=True):
            if node is not None:
                node.scope = node.scope or op.scope
                nodes_of[index] = node
                names.setdefault(node, step.values[index].name)
    return Translation(
        tuple([_node_of(nodes_of, i, step) for i in step.outputs]),
        tuple([(stored[before], _node_of(nodes_of, after, step)) for before, after in step.updates]),
        stored,
        names,
    )


def _nothing(result: Result) -> tuple[Node, ...]:
    """Return the results of an operator whose results all have no elements; () for other operators."""
    if any(map(prod, result.shapes)):
        return ()
    return tuple([full(shape, 0, dtype) for shape, dtype in zip(result.shapes, result.dtypes, strict=True)])


def _node_of(nodes_of: Mapping[int, Node], index: int, step: Step) -> Node:
    if index not in nodes_of:
        raise LoweringError(f"value {step.values[index].name} is returned, but no rule computes it")
    return nodes_of[index]


def _shape(shape: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(d, int) for d in shape):
        raise LoweringError(f"a shape {shape} depends on the batch size; expected a step of one batch size")
    return tuple(shape)


def _filled(item: Any, inputs: Sequence[Node | None]) -> Any:  # noqa: ANN401 - any plain argument
    """Return an argument with tensors in place of `Input`s."""
    if isinstance(item, Input):
        return inputs[item.position]
    if isinstance(item, (list, tuple)):
        return [_filled(i, inputs) for i in item]
    return item


def split_reductions(roots: Sequence[Node], target: Target) -> None:
    """Split, in place, the Rows below the roots whose rows are too few and too long to fill the device."""
    for node in nodes_below(roots):
        while isinstance(node, Rows) and _can_split(node):
            slices = _slices_wanted(node, target)
            if slices <= 1:
                break
            _split(node, slices)  # the sum of many slices may be long again


def _can_split(node: Rows) -> bool:
    names = {s.name for s in node.stages}
    own = any(isinstance(s, Local) and s.name in names for stage in node.stages for s in walk(stage.body))
    inner = set(node.inner)
    return (
        not own
        and not any(s.kind.startswith("arg") for s in node.stages)
        and not any(inner & set(o.axes) for o in node.outputs)
    )


def _slices_wanted(node: Rows, target: Target) -> int:
    count = prod([a.extent for a in node.inner])
    busy = max(1, node.numel // target.vector)
    if busy >= target.work_items or node.numel * count < SHORTEST * SHORTEST * target.vector:
        return 1
    return min(-(-target.work_items // busy), count // SHORTEST)


def _split(node: Rows, slices: int) -> None:
    sizes = [a.extent for a in node.inner]
    leading = 1
    while prod(sizes[:leading]) < slices and leading < len(sizes):
        leading += 1
    whole = prod(sizes[:leading])
    per = _length(whole, slices)
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


def _length(whole: int, slices: int) -> int:
    """Return the length of a slice: a divisor of the whole where one is near."""
    wanted = -(-whole // slices)
    return next((n for n in range(wanted, 2 * wanted) if whole % n == 0), wanted)


def _within(position: Index, whole: int, body: Scalar, kind: ReduceKind) -> Scalar:
    """Return the body, and the neutral element of the reduction behind the end of the row."""
    nothing = {"sum": 0, "prod": 1, "any": False, "all": True}
    if kind in nothing:
        return guarded([(position, 0, whole)], body, nothing[kind])
    worst = float("-inf") if kind == "max" else float("inf")
    if body.dtype.startswith(("int", "uint")):
        worst = -(2**31) if kind == "max" else 2**31 - 1
    return guarded([(position, 0, whole)], body, worst)
