"""A step: functional ATen operators and the values they update; and the builder of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchedge.errors import CaptureError
from torchedge.graphs.graph import Op, Role, Value, moved, parameters_of, verify_operators
from torchedge.graphs.sizes import Dim

UPDATES = "optimizer"
"""Scope of the operators that compute updates from gradients."""


@dataclass(frozen=True, slots=True)
class Input:
    """Stands in an operator's attributes for a tensor: its position among the operator's inputs."""

    position: int


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in the attributes given to `GraphBuilder.call` for a tensor: its index among the values."""

    value: int


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a program, for lowering and running: an inference, or a whole training step.

    values, ops: shapes are concrete, no operator works in place. An operator's attributes are its arguments
    by the names of the ATen schema (`self` is called `input`); tensors among them are `Input`s, also within
    lists. inputs: the values that the user feeds; outputs: those that come back.
    updates: (value at the start of the step, value that takes its place at the end): parameters, buffers,
    optimizer state. hyperparameters: names (`lr`, ...) of 0-d inputs that change between steps. initial: the
    number that fills a value of role "state" before the first step (zero where absent).
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...] = ()
    hyperparameters: Mapping[str, int] = field(default_factory=dict)
    initial: Mapping[int, float] = field(default_factory=dict)
    name: str = "model"

    @property
    def parameters(self) -> tuple[Value, ...]:
        """The parameters the step reads, each once."""
        return parameters_of(self.values)

    def across_samples(self, part: Step, parts: int) -> str | None:
        """Return the name of what forward or backward compute across samples, if anything: time, products.

        part: the same step on one of so many equal parts of the batch. What is computed for each sample has a
        part of the size there; what has another size, or is not there, is not.
        """
        sizes = {value.name: value.numel[0] for value in part.values}
        updated = {index for op in self.ops if op.scope == UPDATES for index in op.outputs}
        for index, value in enumerate(self.values):
            size = value.numel[0]
            if index not in updated and size not in (sizes.get(value.name), parts * sizes.get(value.name, 0)):
                return value.name
        return None

    def with_early_updates(self) -> Step:
        """Return the step with the operators of each update as soon as its gradient is there.

        Gradients and the activations that they are computed from then occupy memory for a shorter time.
        """
        made = {index for op in self.ops for index in op.outputs}
        waits = {place: made.intersection(op.inputs) for place, op in enumerate(self.ops)}
        readers: dict[int, list[int]] = {}
        updates = [place for place, op in enumerate(self.ops) if op.scope == UPDATES]
        for place in updates:
            for index in waits[place]:
                readers.setdefault(index, []).append(place)
        order: list[Op] = []
        for first in (*[place for place in updates if not waits[place]], *range(len(self.ops))):
            ready = [first] if first in waits else []
            while ready:
                place = ready.pop(0)
                del waits[place]
                order.append(self.ops[place])
                for index in self.ops[place].outputs:
                    for reader in readers.get(index, ()):
                        waits[reader].discard(index)
                        if not waits[reader]:
                            ready.append(reader)
        return replace(self, ops=tuple(order))

    def verify(self) -> None:
        """Check operators and updates; raises CaptureError that names the first fault."""
        verify_operators(self.name, self.values, self.ops, (*self.inputs, *self.outputs))
        if any(op.inplace for op in self.ops):
            raise CaptureError("a step has an operator that works in place; expected functional operators")
        written = [before for before, _ in self.updates]
        if len(set(written)) != len(written):
            raise CaptureError("a step updates one value twice; expected one update a value")
        for before, after in self.updates:
            old, new = self.values[before], self.values[after]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CaptureError(
                    f"{old.name} is {old.dtype}{list(old.shape)}, its update {new.dtype}{list(new.shape)}; "
                    "expected the same shape and dtype"
                )


class GraphBuilder:
    """Values and operators of a graph while it grows; a step drops operators that nothing needs."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._used: dict[str, int] = {}
        self._called: dict[object, tuple[int, ...]] = {}
        self._makers: dict[int, Op] = {}

    def add(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: str,
        role: Role = "activation",
        trainable: bool = False,
        alias: int | None = None,
    ) -> int:
        """Add a value under a name that is made unique, and return its index."""
        self.values.append(Value(self._unique(name), tuple(shape), dtype, role, alias, trainable))
        return len(self.values) - 1

    def call(
        self,
        kind: str,
        attrs: Mapping[str, Any],
        forms: Sequence[tuple[Sequence[Dim], str]],
        *,
        scope: str = "",
        name: str = "",
    ) -> tuple[int, ...]:
        """Add an operator whose tensors stand as `Ref`s in its attributes; returns its outputs.

        forms: shape and dtype of each output. name: of the outputs, by default scope and kind. An unnamed
        call that equals an earlier one is not added again: the earlier outputs are returned.
        """
        inputs: list[int] = []

        def position(ref: Ref) -> Input:
            inputs.append(ref.value)
            return Input(len(inputs) - 1)

        placed = {key: _mapped(item, position) for key, item in attrs.items()}
        key = None if name else (kind, tuple(inputs), repr(placed), repr(forms))
        if key in self._called:
            return self._called[key]
        title = name or (f"{scope}/{kind}" if scope else kind)
        outputs = tuple([self.add(title, shape, dtype) for shape, dtype in forms])
        self.ops.append(Op(kind, tuple(inputs), outputs, placed, scope))
        self._makers.update(dict.fromkeys(outputs, self.ops[-1]))
        if key is not None:
            self._called[key] = outputs
        return outputs

    def like(self, value: int, kind: str, attrs: Mapping[str, Any], scope: str = "", name: str = "") -> int:
        """Add an operator with one output of the shape and dtype of `value`; returns it."""
        model = self.values[value]
        return self.call(kind, attrs, [(model.shape, model.dtype)], scope=scope, name=name)[0]

    def cast(self, value: int, dtype: str, scope: str = "") -> int:
        """Return a value as another dtype: itself where it has the dtype."""
        shape, attrs = self.values[value].shape, {"input": Ref(value), "dtype": dtype}
        if self.values[value].dtype == dtype:
            return value
        return self.call("_to_copy", attrs, [(shape, dtype)], scope=scope)[0]

    def maker(self, value: int) -> Op | None:
        """Return the operator that makes a value, None for a value from outside."""
        return self._makers.get(value)

    def rename(self, value: int, name: str) -> None:
        """Give a value another name, made unique."""
        self.values[value] = replace(self.values[value], name=self._unique(name))

    def copy(self) -> GraphBuilder:
        """Return a builder that grows independently."""
        other = GraphBuilder()
        other.values, other.ops = list(self.values), list(self.ops)
        other._used, other._called = dict(self._used), dict(self._called)
        other._makers = dict(self._makers)
        return other

    def finish(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        updates: Iterable[tuple[int, int]] = (),
        hyperparameters: Mapping[str, int] | None = None,
        initial: Mapping[int, float] | None = None,
        name: str = "model",
    ) -> Step:
        """Return the verified Step of the operators that its outputs and updates need.

        Inputs and hyperparameters stay, used or not; a value updated by itself counts as not updated.
        """
        written = [(old, new) for old, new in updates if old != new]
        alive = {*inputs, *outputs, *[i for pair in written for i in pair]}
        alive |= set((hyperparameters or {}).values())
        ops: list[Op] = []
        for op in reversed(self.ops):
            if alive.intersection(op.outputs):
                ops.append(_without_unread(op, alive))
                alive.update([i for i in op.inputs if i is not None], ops[-1].outputs)
        ordered = sorted(alive, key=lambda i: (self.values[i].role == "activation", i))  # made ones last
        place = {old: new for new, old in enumerate(ordered)}
        step = Step(
            values=tuple([self.values[old] for old in place]),
            ops=tuple([moved(op, place) for op in reversed(ops)]),
            inputs=tuple([place[i] for i in inputs]),
            outputs=tuple([place[i] for i in outputs]),
            updates=tuple([(place[old], place[new]) for old, new in written]),
            hyperparameters={key: place[i] for key, i in (hyperparameters or {}).items()},
            initial={place[i]: number for i, number in (initial or {}).items() if i in place},
            name=name,
        )
        step.verify()
        return step

    def _unique(self, name: str) -> str:
        while True:
            count = self._used.get(name, 0)
            self._used[name] = count + 1
            if not count:
                return name
            name = f"{name}.{count}"


@dataclass(frozen=True, slots=True)
class Term:
    """A value of a growing graph in formulas: Python's operators add operators with a result like it."""

    builder: GraphBuilder
    value: int
    scope: str = ""

    def apply(self, kind: str, other: Term | float | None = None, **attrs: float) -> Term:
        """Add an operator on the value, and perhaps on a second one or a number."""
        second = {} if other is None else {"other": Ref(other.value) if isinstance(other, Term) else other}
        attributes = {"input": Ref(self.value), **second, **attrs}
        return replace(self, value=self.builder.like(self.value, kind, attributes, self.scope))

    def cast(self, dtype: str) -> Term:
        """Return the value as another dtype: itself where it has the dtype."""
        return replace(self, value=self.builder.cast(self.value, dtype, self.scope))

    def __add__(self, other: Term | float) -> Term:
        return self.apply("add", other)

    def __sub__(self, other: Term | float) -> Term:
        return self.apply("sub", other)

    def __rsub__(self, other: float) -> Term:
        return self.apply("rsub", other)

    def __mul__(self, other: Term | float) -> Term:
        return self.apply("mul", other)

    def __truediv__(self, other: Term | float) -> Term:
        return self.apply("div", other)

    def __neg__(self) -> Term:
        return self.apply("neg")


def _without_unread(op: Op, alive: set[int]) -> Op:
    """Return an operator with an output mask so that it makes only what is read."""
    mask = op.attrs.get("output_mask")
    if mask is None or alive.issuperset(op.outputs):
        return op
    outputs = iter(op.outputs)
    wanted = tuple([bool(on) and next(outputs) in alive for on in mask])
    return replace(
        op, outputs=tuple([i for i in op.outputs if i in alive]), attrs={**op.attrs, "output_mask": wanted}
    )


def _mapped(item: Any, position: Callable[[Ref], Input]) -> Any:  # noqa: ANN401 - attributes are plain data
    if isinstance(item, Ref):
        return position(item)
    if isinstance(item, (tuple, list)):
        return tuple([_mapped(entry, position) for entry in item])
    return item
