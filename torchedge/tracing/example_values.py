"""Values that a forward pass reads, computed from the user's example where they depend on nothing else.

Masks and positions of language models decide by their own values which kernel runs (`mask.all()`). Tracing
knows no values, but the operators that lead to such a value read only the example's integers and constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchedge.graphs import Value
from torchedge.graphs.sizes import LARGEST_CONSTANT, Affine, NotAffineError, decode_dim

_UNKNOWN = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "rand", "randn", "randint", "dropout")
)
_CPU = torch.device("cpu")


class ExampleValues:
    """The values of a trace that follow from the example: its integers, constants, and what they lead to.

    values: all values of the trace, which grows. batch: the batch size of the example.
    """

    def __init__(self, values: list[Value]) -> None:
        self.batch = 1
        self._trace = values
        self._values: dict[int, torch.Tensor | _DeferredCall] = {}
        self._sharing: dict[int, list[int]] = {}  # values that share the storage of a value

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Add a tensor that exists: one of the example's, or a buffer of the model."""
        if tensor.device.type != "meta" and type(tensor) is torch.Tensor:
            self._put(index, tensor)

    def add_call(self, kind: str, func: Any, args: Any, kwargs: Any, outputs: list[int], many: bool) -> None:
        """Add the results of an operator, whose tensor arguments are `Known` values."""
        if kind not in _UNKNOWN:
            call = _DeferredCall(func, args, kwargs)
            for place, index in enumerate(outputs):
                self._put(index, _DeferredCall(_pick, (call, place), {}) if many else call)

    def _put(self, index: int, item: torch.Tensor | _DeferredCall) -> None:
        self._values[index] = item
        self._sharing.setdefault(_root(index, self._trace), []).append(index)

    def forget(self, index: int) -> None:
        """Drop a value that an in-place operator overwrites, and all that share its storage."""
        for other in self._sharing.pop(_root(index, self._trace), ()):
            self._values.pop(other, None)

    def value(self, index: int) -> torch.Tensor:
        """Return a value on the CPU, computed on first use."""
        item = self._values[index]
        if isinstance(item, _DeferredCall):
            item = self._values[index] = self._run(item)
        return item.to(_CPU)

    def _run(self, call: _DeferredCall) -> Any:
        if call.result is None:
            kwargs = {k: self._real(v) for k, v in call.kwargs.items() if k != "device"}
            call.result = call.func(*[self._real(a) for a in call.args], **kwargs)
        return call.result

    def _real(self, item: Any) -> Any:
        if isinstance(item, Known):
            return self.value(item.index)
        if isinstance(item, _DeferredCall):
            return self._run(item)
        if type(item) is int and item >= LARGEST_CONSTANT:
            return self._size(item)
        if type(item) in (tuple, list):
            return type(item)([self._real(i) for i in item])
        if type(item) is slice:
            return slice(self._real(item.start), self._real(item.stop), self._real(item.step))
        return _CPU if isinstance(item, torch.device) else item

    def _size(self, number: int) -> int:
        try:
            size = decode_dim(number)
        except NotAffineError:
            return number
        return size.at(self.batch) if isinstance(size, Affine) else size


class Known:
    """Stands for a known value among the arguments of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def known_in(item: Any, index_of: Callable[[torch.Tensor], int]) -> Any:
    """Return an argument of a call with `Known` in place of its tensors."""
    if isinstance(item, torch.Tensor):
        return Known(index_of(item))
    if type(item) in (tuple, list, torch.Size):
        return (list if type(item) is list else tuple)([known_in(i, index_of) for i in item])
    if type(item) is slice:
        return slice(*[known_in(i, index_of) for i in (item.start, item.stop, item.step)])
    return item


class _DeferredCall:
    """A call to run when its result is read; `result` afterwards."""

    __slots__ = ("args", "func", "kwargs", "result")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.result: Any = None


def _pick(results: Any, place: int) -> Any:
    return results[place]


def _root(index: int, values: list[Value]) -> int:
    alias = values[index].alias
    while alias is not None:
        index, alias = alias, values[alias].alias
    return index
