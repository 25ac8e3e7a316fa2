"""Python state that a forward pass changes itself, and random numbers that it draws in Python.

A captured step computes with these as they were. So each run of the forward pass in a trace begins with the
state before the first one, and a run that changes it calls for a rehearsal on fake tensors: that accepts a
cache which is filled once, and a tensor which the next run replaces before it reads it, and refuses the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchedge.errors import CaptureError
from torchedge.tracing.copies import Draws
from torchedge.tracing.file_reads import reading
from torchedge.tracing.interception import tensors_in
from torchedge.tracing.python_state import Change, PythonState

_EXTREMES = (0.0, 1 - 2**-53)
"""The smallest and the largest number that `random.random` returns."""


class StateChangedError(CaptureError):
    """A forward pass changed what it reads, or drew random numbers; the message lists what."""


class ForwardState:
    """The Python state that a forward pass reads, and its generators; `watched` encloses each of its runs.

    roots: the model's copy and the loss. draws: of the copy's methods. accepted: changes do not matter.
    """

    def __init__(self, roots: Mapping[str, Any], draws: Draws, *, accepted: bool = False) -> None:
        self.roots, self.draws, self.accepted = roots, draws, accepted
        self._known: PythonState | None = None
        self._state: PythonState | None = None
        self._generators: list[tuple[_Generator, Any]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the forward pass from the state before its first run, and put that back.

        Raises:
            StateChangedError: the run changed something, and that is not accepted.
        """
        self.begin()
        if self.clocks and not self.accepted:
            raise StateChangedError("the time")
        try:
            with reading() as files:
                yield
            reasons = [] if self.accepted else [*map(str, self.changes()), *self.drawn_from()]
            if not self.accepted and self.draws.count:
                reasons.append("random numbers")
            reasons += [] if self.accepted else files
        finally:
            self.restore()
        if reasons:
            raise StateChangedError(", ".join(reasons))

    def begin(self) -> None:
        """Take the state; after the first time restore it."""
        if self._state is None:
            self._state = PythonState(self.roots, tracing=True, known=self._known)
            if self._state.iterators:
                raise CaptureError(
                    f"the forward pass reads {self._state.iterators[0]}, an iterator: a captured step would "
                    "take the same item each time; pass the item as an argument"
                )
            numpy = [("numpy.random", self.draws.numpy)] if self.draws.numpy is not None else []
            named = [*_SHARED, *numpy, *self._state.generators]
            generators = {id(item): _Generator(name, item) for name, item in named if item is not self.draws}
            self._generators = [(generator, generator.get()) for generator in generators.values()]
        else:
            self.restore()
        self.draws.restart()

    def restore(self) -> None:
        """Put back what runs have changed."""
        if self._state is not None:
            self._state.restore()
        for generator, before in self._generators:
            if not _same(generator.get(), before):
                generator.put(before)

    def anew(self, *, accepted: bool) -> ForwardState:
        """Return the same with the state as it is when that begins."""
        other = ForwardState(self.roots, self.draws, accepted=accepted)
        other._known = self._state or self._known
        return other

    def check_backward(self) -> None:
        """Raise CaptureError if the backward pass has changed the state: it ran outside of `watched`."""
        reasons = [*map(str, self.changes()), *self.drawn_from()]
        self.restore()
        if reasons:
            raise _refusal(f"changes {reasons[0]}", "the backward pass")

    @property
    def clocks(self) -> list[str]:
        """Modules of clocks and of the system's random numbers that code names."""
        return [] if self._state is None else self._state.clocks

    def drawn_from(self) -> list[str]:
        """Return the generators, other than `draws`, that the runs since `begin` drew from."""
        return [each.name for each, before in self._generators if not _same(each.get(), before)]

    def changes(self) -> list[Change]:
        """Return what is different from the state before the first run."""
        return [] if self._state is None else self._state.changes()


@dataclass(frozen=True)
class _Generator:
    """A generator of random numbers, of Python or NumPy, and where it is."""

    name: str
    item: Any

    def get(self) -> Any:
        """Return its state."""
        if isinstance(self.item, np.random.Generator):
            return self.item.bit_generator.state
        return self.item.getstate() if hasattr(self.item, "getstate") else self.item.get_state()

    def put(self, state: Any) -> None:
        """Set its state."""
        if isinstance(self.item, np.random.Generator):
            self.item.bit_generator.state = state
        elif hasattr(self.item, "setstate"):
            self.item.setstate(state)
        else:
            self.item.set_state(state)


_SHARED = (("random", random), ("numpy.random", np.random))


def _same(one: Any, other: Any) -> bool:
    """Return whether states of a generator, tuples and dicts of numbers and arrays, are equal."""
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return bool(np.array_equal(one, other))


class _Operators(TorchDispatchMode):
    """Records the operators that depend on weights or arguments: what a step computes.

    dependent: storages of such tensors. read: storages that any operator reads.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dependent = {_storage(tensor) for tensor in sources}
        self.read: set[int] = set()
        self.record: list[Any] = []
        self.files: list[str] = []
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question about a tensor
            return result
        leaves = tree_leaves((args, kwargs or {}))
        storages = {*map(_storage, tensors_in(leaves, torch.Tensor))}
        self.read |= storages
        if not storages.isdisjoint(self.dependent):
            self.dependent.update(map(_storage, tensors_in(result, torch.Tensor)))
            if func._schema.is_mutable:
                self.dependent |= storages
            self.record.append((func, [_form(leaf) for leaf in leaves]))
        self.alive.append(result)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def rehearse(state: ForwardState, run: Callable[[], Any], sources: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError unless what a forward pass changes has no influence on what it computes next.

    run: the forward pass on fake tensors; sources: its weights and arguments.
    """

    def observed() -> _Operators:
        operators = _Operators(sources)
        with operators, reading() as operators.files:
            run()
        return operators

    try:
        state.begin()
        first = observed()
        if generators := state.drawn_from():
            raise _refusal(f"draws random numbers from {generators[0]}, other ones each time")
        changed, draws = state.changes(), state.draws.count
        if changed:
            after = state.anew(accepted=False)
            after.begin()
            second = observed()
            carried = {_storage(leaf) for change in changed for leaf in tensors_in(change.now, torch.Tensor)}
            again = [
                change
                for change in after.changes()
                if not change.of_tensors
                or not second.read.isdisjoint(map(_storage, tensors_in(change.before, torch.Tensor)))
            ]
            reads_results = not second.read.isdisjoint(carried & first.dependent)
            if again or reads_results or second.record != first.record:
                raise _refusal(f"changes {(again or changed)[0]}, and reads it")
        else:
            second = observed() if first.files else first
        if second.files:
            raise _refusal(f"reads {second.files[0]}")
        for extreme in _EXTREMES if draws or state.clocks else ():
            state.begin()
            state.draws.restart(extreme)
            if observed().record != first.record:
                source = "random" if draws else state.clocks[0]
                raise _refusal(f"computes with numbers from {source}, other ones each time")
    finally:
        state.restore()


def _refusal(reason: str, part: str = "the forward pass") -> CaptureError:
    return CaptureError(
        f"{part} {reason}: a captured step would use the same value each time; pass it as an "
        "argument, hold it in a buffer, or change it between steps"
    )
