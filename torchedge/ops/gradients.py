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
    if not op.grad:
        return False
    slots = [slot for slot, index in enumerate(op.inputs) if index is not None and needs[index]]
    if not slots:
        return False
    spec = spec_of(op.kind)
    return through_stops or any(spec.grad_mode(slot) != "none" for slot in slots)
