"""The values of a graph that need a gradient, for tracing, memory simulation and the time model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchedge.graphs import FLOATING, ForwardGraph, Op, Value
from torchedge.ops.specs import spec_of


def gradient_needs(graph: ForwardGraph, *, through_stops: bool = False) -> list[bool]:
    """Return for each value of a graph whether the backward pass computes its gradient.

    through_stops: follow operators that pass no gradient on (comparisons, `zeros_like`) as if they did. The
    time models of the profiles were fitted to work counted that way.
    """
    needs: list[bool] = []
    extend_needs(needs, graph.values, graph.ops, through_stops=through_stops)
    return needs


def record_ends(
    graph: ForwardGraph, needs: Sequence[bool], releases: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Return which operators autograd forgets in the forward pass, by the operator after which it does.

    No gradient of an output or of the loss reaches them: what they compute ends in `detach` or a comparison,
    and what autograd keeps of them goes with the last Python reference to a result. What is written into a
    tensor reaches all that reads it later. needs: `gradient_needs`. releases: as in the graph.
    """
    storages = list(range(len(graph.values)))  # for each value the one whose storage it shares
    for index, value in enumerate(graph.values):
        if value.alias is not None:
            storages[index] = storages[value.alias]
    reached = {*graph.outputs, *(() if graph.loss is None else (graph.loss,))}
    read = {storages[index] for index in reached}
    ends: dict[int, int] = {}
    forgotten: dict[int, list[int]] = {}
    for position in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[position]
        if True not in [needs[index] for index in op.outputs]:
            continue
        passes = spec_of(op.kind).differentiates
        slots = [i for k, i in enumerate(op.inputs) if i is not None and needs[i] and passes(k)]
        if not reached.isdisjoint(op.outputs) or (op.inplace and storages[op.outputs[0]] in read):
            reached.update(op.outputs)
            reached.update(slots)
            read.update([storages[index] for index in slots])
            continue
        ends = ends or {index: end for end, indices in enumerate(releases) for index in indices}
        end = max([ends.get(index, len(graph.ops) - 1) for index in op.outputs])
        ends.update([(index, max(end, ends.get(index, end))) for index in slots])
        forgotten.setdefault(end, []).append(position)
    return forgotten


def extend_needs(
    needs: list[bool], values: Sequence[Value], ops: Iterable[Op], *, through_stops: bool = False
) -> None:
    """Append the values that `needs` does not cover yet, then follow further operators of the graph."""
    needs.extend(value.trainable for value in values[len(needs) :])
    for op in ops:
        differentiated = is_differentiated(op, needs, through_stops=through_stops)
        for output in op.outputs:
            needs[output] = (differentiated or makes_leaf(op)) and values[output].dtype in FLOATING


def makes_leaf(op: Op) -> bool:
    """Whether a model makes an operator's results require gradients: `requires_grad_()` and the like.

    They are leaves, whose gradients autograd stores: nothing before the operator runs backward because of it.
    """
    return op.attrs.get("requires_grad") is True


def is_differentiated(op: Op, needs: Sequence[bool], *, through_stops: bool = False) -> bool:
    """Whether autograd records an operator: gradients are on, and one reaches an input that needs it.

    An operator without a specification is taken to pass gradients to all of its inputs.
    """
    if op.grad:
        spec = spec_of(op.kind)
        for slot, index in enumerate(op.inputs):
            if index is not None and needs[index] and (through_stops or spec.differentiates(slot)):
                return True
    return False
