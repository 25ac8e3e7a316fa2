"""From a Step to nodes: each operator by its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torchedge.errors import LoweringError
from torchedge.expressions.dialect import STORED
from torchedge.graphs import RESIDENT_ROLES
from torchedge.graphs.steps import Input, Step
from torchedge.lowering.building import full
from torchedge.lowering.nodes import Node, Stored
from torchedge.lowering.rules.registry import Result, all_rules, apply_rule


@dataclass(frozen=True, slots=True)
class Translation:
    """The nodes of a step: `outputs` in the graph's order, `updates` as (stored tensor, its new content).

    stored: by index of the step's value. names: of the values that nodes are. nodes: by index of the value.
    """

    outputs: tuple[Node, ...]
    updates: tuple[tuple[Stored, Node], ...]
    stored: Mapping[int, Stored]
    names: Mapping[Node, str] = field(default_factory=dict)
    nodes: Mapping[int, Node] = field(default_factory=dict)


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
            "convert the model (.float()), and leave out torch.autocast of another dtype, in it and around it"
        )
    nodes_of: dict[int, Node] = {}
    stored: dict[int, Stored] = {}
    names: dict[Node, str] = {}
    updated = {before for before, _ in step.updates}
    for index, value in enumerate(step.values):
        if value.role != "activation":
            frozen = value.role in RESIDENT_ROLES and index not in updated
            tensor = Stored(_shape(value.shape), value.dtype, value.name, index, frozen)
            nodes_of[index] = stored[index] = tensor
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
        nodes_of,
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
