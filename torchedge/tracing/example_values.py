"""Values that a forward pass reads, computed from the user's example where they depend on nothing else.

Masks and positions of language models decide by their own values which kernel runs (`mask.all()`). Tracing
knows no values, but the operators that lead to such a value read only the example's integers and constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from torchedge.graphs import Value
from torchedge.graphs.sizes import LARGEST_CONSTANT, Affine, NotAffineError, decode_dim

_UNKNOWN = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "rand", "randn", "randint", "dropout")
)
_CPU = torch.device("cpu")


class _Known(NamedTuple):
    """Stands for a known value among the arguments of a call."""

    value: int


class ExampleValues:
    """The values of a trace that follow from the example: its integers, constants, and what they lead to.

    values: all values of the trace, which grows. batch: the batch size of the example.
    """

    def __init__(self, values: list[Value]) -> None:
        self.batch = 1
        self._trace = values
        self._values: dict[int, Callable[[], torch.Tensor]] = {}
        self._sharing: dict[int, list[int]] = {}  # values that share the storage of a value
        self._given: set[int] = set()  # those that depend on the example

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def covers(self, inputs: Sequence[int | None]) -> bool:
        """Return whether all inputs of an operator are known."""
        return self._values.keys() >= {*inputs} - {None}

    def constant(self, index: int) -> torch.Tensor | None:
        """Return a value that does not depend on the example, which may be a stand-in; None for any other."""
        return self.value(index) if index in self._values and index not in self._given else None

    def add(self, index: int, tensor: torch.Tensor, *, given: bool = False) -> None:
        """Add a tensor that exists: one of the example's (given), or a buffer of the model."""
        if given:
            self._given.add(index)
        if tensor.device.type != "meta" and type(tensor) is torch.Tensor:
            self._put(index, lambda: tensor)

    def take(self, index: int, first: ExampleValues, old: int) -> None:
        """Add a value of a first trace of the same call, where it is known there."""
        if old in first:
            self._put(index, first._values[old])
            if old in first._given:
                self._given.add(index)

    def add_call(
        self,
        kind: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        index_of: Callable[[torch.Tensor], int],
        outputs: Sequence[int],
        many: bool = False,
    ) -> None:
        """Add the results of an operator on known values, which runs when one of them is read."""
        if kind in _UNKNOWN:
            return

        read: set[int] = set()

        def known(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            read.add(index_of(item))
            return _Known(index_of(item))

        named = {name: item for name, item in kwargs.items() if name != "device"}
        call = mapped((tuple(args), named), known)

        @cache
        def run() -> Any:
            arguments, options = mapped(call, self._real)
            return func(*arguments, **options)

        if not read.isdisjoint(self._given):
            self._given.update(outputs)
        for place, index in enumerate(outputs):
            self._put(index, partial(_pick, run, place) if many else run)

    def _put(self, index: int, value: Callable[[], torch.Tensor]) -> None:
        self._values[index] = value
        self._sharing.setdefault(_root(index, self._trace), []).append(index)

    def forget(self, index: int) -> None:
        """Drop a value that an in-place operator overwrites, and all that share its storage."""
        for other in self._sharing.pop(_root(index, self._trace), ()):
            self._values.pop(other, None)

    def value(self, index: int) -> torch.Tensor:
        """Return a value on the CPU, computed on first use."""
        return self._values[index]().to(_CPU)

    def _real(self, item: Any) -> Any:
        if isinstance(item, _Known):
            return self.value(item.value)
        if type(item) is int and item >= LARGEST_CONSTANT:
            try:
                size = decode_dim(item)
            except NotAffineError:
                return item
            return size.at(self.batch) if isinstance(size, Affine) else size
        return _CPU if isinstance(item, torch.device) else item


def mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument of a call with every entry of its lists, dicts and slices changed."""
    kind = type(item)
    if kind in (tuple, list, torch.Size):
        return (list if kind is list else tuple)([mapped(entry, change) for entry in item])
    if kind is dict:
        return {key: mapped(entry, change) for key, entry in item.items()}
    if kind is slice:
        return slice(*[mapped(bound, change) for bound in (item.start, item.stop, item.step)])
    return change(item)


def _pick(run: Callable[[], Any], place: int) -> Any:
    return run()[place]


def _root(index: int, values: list[Value]) -> int:
    alias = values[index].alias
    while alias is not None:
        index, alias = alias, values[alias].alias
    return index
