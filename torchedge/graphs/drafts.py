"""A graph in the making: values and operators are added, dead ones dropped when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.graphs.dims import Dim
from torchedge.graphs.graph import Graph, Op, Role, Value
from torchedge.graphs.steps import Input, Step


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in the attributes given to `Draft.call` for a tensor: its index among the draft's values."""

    value: int


class Draft:
    """Values and operators of a functional graph while it grows."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._used: dict[str, int] = {}
        self._called: dict[object, tuple[int, ...]] = {}
        self._makers: dict[int, Op] = {}

    def add(
        self, name: str, shape: Sequence[Dim], dtype: str, role: Role = "activation", trainable: bool = False
    ) -> int:
        """Add a value under a name that is made unique, and return its index."""
        self.values.append(Value(self._unique(name), tuple(shape), dtype, role, trainable=trainable))
        return len(self.values) - 1

    def call(
        self,
        kind: str,
        attrs: Mapping[str, Any],
        made: Sequence[tuple[Sequence[Dim], str]],
        *,
        scope: str = "",
        name: str = "",
    ) -> tuple[int, ...]:
        """Add an operator whose tensors stand as `Ref`s in its attributes; returns the values it makes.

        made: shape and dtype of each output. name: of its values, by default made from scope and kind. An
        unnamed call that was made before is not made again.
        """
        inputs: list[int] = []

        def position(ref: Ref) -> Input:
            inputs.append(ref.value)
            return Input(len(inputs) - 1)

        placed = {key: _mapped(item, position) for key, item in attrs.items()}
        key = None if name else (kind, tuple(inputs), repr(placed), repr(made))
        if key in self._called:
            return self._called[key]
        title = name or (f"{scope}/{kind}" if scope else kind)
        outputs = tuple([self.add(title, shape, dtype) for shape, dtype in made])
        self.ops.append(Op(kind, tuple(inputs), outputs, placed, scope))
        self._makers.update(dict.fromkeys(outputs, self.ops[-1]))
        if key is not None:
            self._called[key] = outputs
        return outputs

    def like(self, value: int, kind: str, attrs: Mapping[str, Any], scope: str = "", name: str = "") -> int:
        """Add an operator with one output of the shape and dtype of `value`; returns it."""
        model = self.values[value]
        return self.call(kind, attrs, [(model.shape, model.dtype)], scope=scope, name=name)[0]

    def maker(self, value: int) -> Op | None:
        """Return the operator that makes a value, None for what is given from outside."""
        return self._makers.get(value)

    def rename(self, value: int, name: str) -> None:
        """Give a value another name, made unique."""
        self.values[value] = replace(self.values[value], name=self._unique(name))

    def copy(self) -> Draft:
        """Return a draft that grows independently."""
        made = Draft()
        made.values, made.ops = list(self.values), list(self.ops)
        made._used, made._called = dict(self._used), dict(self._called)
        made._makers = dict(self._makers)
        return made

    def finish(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        updates: Iterable[tuple[int, int]] = (),
        hyperparameters: Mapping[str, int] | None = None,
        initial: Mapping[int, float] | None = None,
        loss: int | None = None,
        training: bool = False,
        batch: int | None = None,
        name: str = "model",
    ) -> Step:
        """Return the verified Step of what its outputs and updates need; all else is dropped.

        Inputs and hyperparameters stay, used or not; a value updated by itself counts as not updated.
        """
        written = [(old, new) for old, new in updates if old != new]
        alive = {*inputs, *outputs, *[i for pair in written for i in pair]}
        alive |= set((hyperparameters or {}).values()) | (set() if loss is None else {loss})
        kept: list[Op] = []
        for op in reversed(self.ops):
            if alive.intersection(op.outputs):
                kept.append(_without_unread(op, alive))
                alive.update([i for i in op.inputs if i is not None], kept[-1].outputs)
        place = {old: new for new, old in enumerate(self._ordered(alive))}
        graph = Graph(
            values=tuple([self.values[old] for old in place]),
            ops=tuple([_moved(op, place) for op in reversed(kept)]),
            inputs=tuple([place[i] for i in inputs]),
            outputs=tuple([place[i] for i in outputs]),
            loss=None if loss is None else place[loss],
            training=training,
            fixed_batch=batch or 1,
            name=name,
            captured_by="aot",
        )
        step = Step(
            graph,
            tuple([(place[old], place[new]) for old, new in written]),
            {key: place[i] for key, i in (hyperparameters or {}).items()},
            {place[i]: number for i, number in (initial or {}).items() if i in place},
        )
        step.verify()
        return step

    def _ordered(self, alive: set[int]) -> Iterator[int]:
        """What is given from outside first, then what operators make, each in order."""
        yield from [i for i in sorted(alive) if self.values[i].role != "activation"]
        yield from [i for i in sorted(alive) if self.values[i].role == "activation"]

    def _unique(self, name: str) -> str:
        while True:
            count = self._used.get(name, 0)
            self._used[name] = count + 1
            if not count:
                return name
            name = f"{name}.{count}"


def _without_unread(op: Op, alive: set[int]) -> Op:
    """Return an operator with an output mask so that it makes only what is read."""
    mask = op.attrs.get("output_mask")
    if mask is None or alive.issuperset(op.outputs):
        return op
    made = iter(op.outputs)
    wanted = tuple([bool(on) and next(made) in alive for on in mask])
    return replace(
        op,
        outputs=tuple([i for i in op.outputs if i in alive]),
        attrs={**op.attrs, "output_mask": wanted},
    )


def _moved(op: Op, place: Mapping[int, int]) -> Op:
    return replace(
        op,
        inputs=tuple([None if i is None else place[i] for i in op.inputs]),
        outputs=tuple([place[i] for i in op.outputs]),
    )


def _mapped(item: Any, position: Callable[[Ref], Input]) -> Any:  # noqa: ANN401 - attributes are plain data
    if isinstance(item, Ref):
        return position(item)
    if isinstance(item, (tuple, list)):
        return tuple([_mapped(entry, position) for entry in item])
    return item
