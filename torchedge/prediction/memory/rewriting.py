"""Rebuilds a graph operator by operator, for the pure graph passes of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchedge.graphs import ForwardGraph, Op, Value
from torchedge.graphs.graph import last_uses
from torchedge.graphs.sizes import Shape
from torchedge.ops import Call
from torchedge.ops.kernels import kernel


class Rewriter:
    """Copies a graph's values and collects a new list of operators with their releases."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.values: list[Value] = list(graph.values)
        self.ops: list[Op] = []
        self.releases: list[list[int]] = []

    def add(
        self,
        kind: str,
        inputs: tuple[int | None, ...],
        shape: Shape,
        dtype: str,
        like: Op,
        attrs: Mapping[str, Any] | None = None,
        alias: int | None = None,
        saves: tuple[int, ...] = (),
        hidden: tuple[int, ...] = (),
        passes: bool = False,
    ) -> int:
        """Append an operator with one new output in the scope and region of `like`; return the output.

        saves, hidden, passes: as of `kernel`.
        """
        index = len(self.values)
        self.values.append(Value(f"{kind}.{index}", shape, dtype, "activation", alias))
        op = Op(kind, inputs, (index,), attrs or {}, like.scope, False, like.grad, like.region, True,
                outer=like.outer)  # fmt: skip
        self.emit(self.as_kernel(op, saves, hidden, passes=passes))
        return index

    def as_kernel(
        self, op: Op, saves: tuple[int, ...] = (), hidden: tuple[int, ...] = (), *, passes: bool = False
    ) -> Op:
        """Return an operator with the footprint of one kernel, as `kernel` gives it."""
        return replace(op, footprint=kernel(Call(self.values, op), saves, hidden, passes=passes))

    def emit(self, op: Op, releases: tuple[int, ...] = ()) -> None:
        """Append an operator as it is."""
        self.ops.append(op)
        self.releases.append(list(releases))

    def release(self, *indices: int) -> None:
        """Book releases behind the operator emitted last."""
        self.releases[-1].extend(indices)

    def finish(self) -> ForwardGraph:
        """Return the rewritten graph."""
        return replace(
            self.graph,
            values=tuple(self.values),
            ops=tuple(self.ops),
            releases=tuple(map(tuple, self.releases)),
        )


def releases_of(graph: ForwardGraph) -> tuple[tuple[int, ...], ...]:
    """Return a graph's releases, or, if Python's lifetimes are unknown, releases after the last use."""
    if graph.releases is not None:
        return graph.releases
    stays = {*graph.outputs} if graph.loss is None else {graph.loss}
    return last_uses([[i for i in (*op.inputs, *op.outputs) if i is not None] for op in graph.ops], stays)


def without_bodies(graph: ForwardGraph) -> ForwardGraph:
    """Return a graph without the operators inside of custom functions: the one behind has their memory.

    Those whose results are read elsewhere stay, such as casts of weights that autocast keeps.
    """
    if not any(op.kind == "custom_function" for op in graph.ops):
        return graph
    values = list(graph.values)
    bodies = {op.attrs["body"]: op for op in graph.ops if op.kind == "custom_function"}
    made = {index for op in graph.ops if op.region in bodies for index in op.outputs}
    for op in bodies.values():
        for index in op.outputs:
            alias = values[index].alias
            while alias in made:
                alias = values[alias].alias
            values[index] = replace(values[index], alias=alias)
    read: set[int | None] = {*graph.outputs, graph.loss}
    stays = [False] * len(graph.ops)
    for position, op in reversed([*enumerate(graph.ops)]):
        stays[position] = op.region not in bodies or not read.isdisjoint(op.outputs)
        if stays[position]:
            read.update(op.inputs)
    out, waiting = Rewriter(replace(graph, values=tuple(values))), list[int]()
    for op, released, is_kept in zip(graph.ops, releases_of(graph), stays, strict=True):
        waiting += released
        if is_kept:
            body = bodies.get(op.region)
            out.emit(
                op if body is None else replace(op, region=body.region, outer=body.outer), tuple(waiting)
            )
            waiting.clear()
    return out.finish()
