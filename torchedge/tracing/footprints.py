"""Footprints of operators: PyTorch's own forward and backward call on meta tensors, storage by storage.

PyTorch's derivative formulas decide which tensors autograd keeps, and which temporaries a backward call
allocates. A dispatch mode follows every storage of one call while the autograd engine runs it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchedge.errors import CaptureError
from torchedge.graphs.footprints import (
    CONJUGATED,
    FILLS,
    IN_ORDER,
    LAZY,
    MISSING,
    PLAIN,
    Footprint,
    FootprintEvent,
    StorageSize,
    repeats,
)
from torchedge.graphs.sizes import LARGEST_CONSTANT, Affine, Poly, decode_dim
from torchedge.ops.strides import contiguous_strides, dense

Event = tuple[FootprintEvent, int, int, int]
_CACHED = 4096
_cache: dict[Any, Footprint | None] = {}


def footprint_of(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    needs: Sequence[bool],
    results: Sequence[int] = (),
    decoded: bool = False,
    prepare: Callable[[Any], Any] = lambda item: item,
    has_complex: bool = True,
) -> Footprint | None:
    """Return the footprint of a call on meta tensors, None where PyTorch cannot run it on them.

    prepare: puts meta tensors in place of tensors. needs: whether the gradient of each tensor argument is
    wanted, in their order. results: elements of each output. decoded: sizes at `BATCH_PRIME` stand for the
    batch size. has_complex: complex tensors occur, and with them views that stand for conjugates.

    Calls that differ in sizes alone share a replay where each of its storages has the elements of an input or
    output, and the same of them agree.
    """
    sizes = _CallSizes(has_complex)
    alike = (sizes.key(func), sizes.key(args), sizes.key(kwargs), tuple(needs), sizes.classes(results))
    if alike in _cache:
        return _cache[alike]
    exact = (alike, tuple(sizes.dimensions), decoded)
    if exact in _cache:
        return _cache[exact]
    try:
        run = _FootprintRun(needs).run(func, prepare(args), prepare(kwargs))
        result = run.footprint(decoded)
        others = [
            (arrival, _FootprintRun(needs, arrival).run(func, prepare(args), prepare(kwargs)))
            for arrival in run.other_arrivals()
        ]
        if others:
            arrivals = tuple([(arrival, other.footprint(decoded)) for arrival, other in others])
            result = replace(result, arrivals=arrivals)
        if not {*result.saved}.issubset(result.tensors):
            result = replace(result, asking=_FootprintRun(needs).asking(func, prepare(args), prepare(kwargs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, CaptureError):
        result = None
    if len(_cache) >= _CACHED:
        _cache.clear()
    general = result is not None and all(s.place >= 0 or s.elements in _FIXED for s in result.sizes)
    _cache[alike if general else exact] = result
    return result


_MOST_ALONE = 4
"""Differentiable outputs of a call whose gradients are followed one by one."""
_FIXED = ((0, 0, 0), (1, 0, 0))
"""Elements that do not depend on sizes: nothing, and a single number."""


class _CallSizes:
    """The dimensions of a call's tensors, each one's place in order of appearance in place of its size."""

    def __init__(self, has_complex: bool) -> None:
        self.has_complex = has_complex
        self.dimensions: dict[int, int] = {}
        self._elements: list[int] = []

    def key(self, item: Any) -> Any:
        """Return an argument as a key that dimensions of the same sizes make alike."""
        kind = type(item)
        if kind in _PLAIN:
            return kind, item
        if isinstance(item, torch.Tensor):
            shape, known = torch.Tensor.size(item), self.dimensions
            self._elements.append(prod(shape))
            same = tuple([d if d < 2 else known.setdefault(d, -1 - len(known)) for d in shape])
            lazy = self.has_complex and (item.is_conj(), item.is_neg())
            if item.is_contiguous():
                return same, item.dtype, lazy
            steps = item.stride()
            ordered = dense(shape, steps)
            order = tuple(sorted(range(len(shape)), key=lambda k: -steps[k])) if ordered else steps
            return same, order, () if ordered else shape, item.dtype, lazy
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, *[self.key(i) for i in item]
        if kind is dict:
            return tuple([(k, self.key(v)) for k, v in item.items()])
        if kind is slice:
            return "slice", item.start, item.stop, item.step
        return item if callable(item) else (kind, str(item))

    def classes(self, results: Sequence[int]) -> tuple[int, ...]:
        """Return for each input and output the first one with as many elements."""
        elements = [*self._elements, *results]
        return tuple([elements.index(count) for count in elements])


_PLAIN = frozenset((int, float, str, bool))


_CASTING = (torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default)
"""Operators that cast their input to the dtype of their result for the kernel alone; meta tensors do not."""


_aten = torch.ops.aten
_INTO_ZEROS = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
}
"""What derivatives write into zeros of their own: under a dispatch mode into a copy of them.

`index_put` writes into zeros where it accumulates, its fourth argument.
"""


def _is_engine(frame: FrameType | None) -> bool:
    """Return whether the autograd engine itself calls an operator, not a custom function's backward."""
    while frame is not None and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and frame.f_code is torch.autograd.graph._engine_run_backward.__code__


_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
"""Modules that wrap the method of a dispatch mode."""


class StorageLog(TorchDispatchMode):
    """Numbers the storages of meta tensors, and writes down when each is allocated and freed.

    sizes: elements and dtype by number; alive: numbers by the storage's key. owned: references to a gradient
    that the engine adds to in place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[int, torch.dtype]] = []
        self.events: list[Event] = []
        self.alive: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self.owned: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.add.Tensor and _is_engine(sys._getframe(1)):
            return self.add_gradients(*args)
        if func in _INTO_ZEROS and len(args) > 3 and _is_engine(sys._getframe(1)):
            func = _INTO_ZEROS[func]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self.follow(leaf)
        if func in _CASTING and result.dtype is not args[0].dtype:
            self.follow(torch.empty_like(result))
        return result

    def follow(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; a new one is allocated now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            number = self.alive[key] = len(self.sizes)
            self.sizes.append((storage.nbytes() // tensor.element_size(), tensor.dtype))
            node: Any = torch._C._current_autograd_node()
            self.events.append((FootprintEvent.NEW, number, 0, -1 if node is None else node._sequence_nr()))
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        return self.alive[key]

    def _gone(self, key: int) -> None:
        self.events.append((FootprintEvent.DROP, self.alive.pop(key), 0, 0))
        del self._watched[key]

    def add_gradients(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the sum of two gradients, in place where the engine adds them so without a mode."""
        alike = old.shape == new.shape and old.dtype is new.dtype and dense(old.shape, old.stride())
        in_place = alike and _references(old) == self.owned
        result = old.add_(new) if in_place else old + new
        self.follow(result)
        return result


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


@cache
def _references_of_engine() -> tuple[int, int]:
    """Return the references to a gradient that the engine alone holds, as a dispatch mode sees them."""
    seen: list[tuple[int, int]] = []

    class Probe(StorageLog):
        def add_gradients(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            seen.append(_references(old))
            return old + new

    with _disable_current_modes(), torch.enable_grad(), _own_hooks(), Probe():
        tensor = torch.empty(4, 4, device="meta", requires_grad=True) * 1.0
        total = (tensor * 2 + tensor * 3).sum()
        del tensor
        total.backward()
    (references,) = seen
    return references


@dataclass(frozen=True, slots=True)
class _Part:
    """A gradient of an input or a part of it: its storage, how it lies, the events before it is added."""

    at: int
    number: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    contiguous: bool
    flags: int

    @classmethod
    def of(cls, gradient: torch.Tensor, number: int, at: int) -> _Part:
        """Return a gradient as a part."""
        shape, steps, contiguous = tuple(gradient.shape), gradient.stride(), gradient.is_contiguous()
        fills = not gradient._is_view() and (contiguous or dense(shape, steps))
        flags = FILLS * fills + CONJUGATED * gradient.is_conj()
        return cls(at, number, shape, steps, contiguous, flags)

    def order(self, steps: tuple[int, ...]) -> int:
        """Return how it lies, for an input with these strides."""
        same = self.steps == steps or (self.contiguous and steps == contiguous_strides(self.shape))
        return self.flags + IN_ORDER * same


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of gradients: its parts, and the storages of the sums before it; tensor: its address."""

    tensor: int
    parts: tuple[_Part, ...]
    storages: frozenset[int]


class _FootprintRun(StorageLog):
    """Runs one call forward and backward. arrival: as in `Footprint.arrivals`, empty for all plain."""

    def __init__(self, needs: Sequence[bool], arrival: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.needs, self.arrival = needs, arrival
        self.inputs: list[tuple[int, int, torch.dtype]] = []
        self.outputs: list[tuple[int, int, torch.dtype]] = []
        self.gradients: list[int] = []
        self._sums: dict[int, _Sum] = {}
        self._given: list[tuple[int, Event]] = []
        self._split = set[int]()
        self._started = self.returned = 0
        self.saved: tuple[int, ...] = ()
        self.kept: tuple[int, ...] = ()

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> _FootprintRun:
        """Run the call and, where it is differentiable, its backward call."""
        self.owned = _references_of_engine()
        anchor = torch.zeros((), device="meta", requires_grad=True)
        with _disable_current_modes(), torch.enable_grad(), _own_hooks(), self:
            loss = self._forward(func, args, kwargs, anchor)
            if loss is not None:
                own = self.follow(loss)
                self.saved = tuple([k for k in self.alive.values() if k != own])
                loss.backward()
                alive = {*self.alive.values()}
                self.kept = tuple([k for k in self.saved if k in alive])
        for at, event in sorted(self._given, key=itemgetter(0), reverse=True):
            self.events.insert(at, event)  # the gradients of inputs
        self.events = [event for event in self.events if event[1] not in self._split]
        return self

    def asking(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Return how many events of the forward call come before autograd keeps the last tensor."""
        last = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal last
            last = len(self.events)
            return tensor.detach()

        anchor = torch.zeros((), device="meta", requires_grad=True)
        with _disable_current_modes(), torch.enable_grad(), saved_tensors_hooks(keep, lambda t: t), self:
            self._forward(func, args, kwargs, anchor)
        return last - self._started

    def _forward(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], anchor: torch.Tensor) -> Any:
        positional = [self._fresh(a, anchor) for a in args]
        named = {k: self._fresh(v, anchor) for k, v in kwargs.items()}
        self._started = len(self.events)
        result = func(*positional, **named)
        results = result if isinstance(result, (tuple, list)) else [result]
        outputs = [t for t in results if isinstance(t, torch.Tensor)]
        self.outputs = [(self.follow(t), t.numel(), t.dtype) for t in outputs]
        self.events = self.events[self._started :]
        self.returned = len(self.events)
        differentiable = [t for t in outputs if t.requires_grad]
        return _outputs(self, [t.requires_grad for t in outputs], *differentiable) if differentiable else None

    def _fresh(self, item: Any, anchor: torch.Tensor) -> Any:
        """Return an argument with new meta tensors in place of its tensors."""
        if isinstance(item, torch.Tensor):
            place = len(self.inputs)
            needs = self.needs[place]
            tensor = _input(anchor, self, place, partial(valueless, item)) if needs else valueless(item)
            self.inputs.append((self.follow(tensor), item.numel(), item.dtype))
            return tensor
        if type(item) in (tuple, list):
            return type(item)([self._fresh(i, anchor) for i in item])
        return item

    def add_gradients(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Add two gradients; an input may get the parts of their sum one by one."""
        sums = [self._as_sum(old), self._as_sum(new)]
        result = super().add_gradients(old, new)
        number = self.follow(result)
        parts = (*sums[0].parts, *sums[1].parts)
        storages = sums[0].storages | sums[1].storages | {number}
        self._sums[number] = _Sum(result._cdata, parts, storages)
        return result

    def _as_sum(self, gradient: torch.Tensor) -> _Sum:
        number = self.follow(gradient)
        known = self._sums.get(number)
        if known is not None and known.tensor == gradient._cdata:
            return known
        return _Sum(gradient._cdata, (_Part.of(gradient, number, len(self.events)),), frozenset())

    def give(self, place: int, gradient: torch.Tensor, steps: tuple[int, ...]) -> None:
        """Write down that an input gets its gradient: the parts of a sum when they are added.

        What waits outside of the call takes the first of them, where there is something.
        """
        whole = self._as_sum(gradient)
        for part in whole.parts:
            event = (FootprintEvent.GRADIENT, part.number, place, part.order(steps))
            self._given.append((part.at, event))
        self._split |= whole.storages - {part.number for part in whole.parts}

    def other_arrivals(self) -> Iterator[tuple[int, ...]]:
        """Yield what else may arrive: conjugated views, and a gradient of one of several outputs alone."""
        if not self.gradients:
            return
        differentiable = [number >= 0 for number in self.gradients]
        kinds = [LAZY if dtype.is_complex else PLAIN for _, _, dtype in self.outputs]
        if LAZY in kinds:
            yield tuple([kind * d for kind, d in zip(kinds, differentiable, strict=True)])
        if self.saved and 1 < sum(differentiable) <= _MOST_ALONE:
            for place, d in enumerate(differentiable):
                if d:
                    yield tuple([PLAIN * (k == place) for k in range(len(kinds))])

    def footprint(self, decoded: bool) -> Footprint:
        """Return what was written down."""
        tensors = [*self.inputs, *self.outputs]
        own = {n: place for event, n, place, _ in self.events if event is FootprintEvent.GRADIENT}
        own |= {number: len(self.inputs) + k for k, (number, _, _) in enumerate(self.outputs)}
        own |= {number: place for place, (number, _, _) in enumerate(self.inputs)}

        def size(number: int) -> StorageSize:
            numel, dtype = self.sizes[number]
            places = [own[number]] if number in own else []
            like = [k for k in (*places, *range(len(tensors))) if tensors[k][1] == numel]
            same = next((k for k in like if tensors[k][2] is dtype), None)
            if same is not None:
                return StorageSize(same, (0, 0, 0), 0)
            if like:
                return StorageSize(like[0], (0, 0, 0), dtype.itemsize)
            return StorageSize(-1, _elements(numel, decoded), dtype.itemsize)

        forward = [
            k + 1 if event is FootprintEvent.NEW else -k - 1
            for event, k, _, _ in self.events[: self.returned]
        ]
        later = self.events[self.returned :]
        start = next((at for at, event in enumerate(later) if event[1] in self.gradients), len(later))
        backward = _handed_over(
            [e for e in later[start:] if not (e[0] is FootprintEvent.NEW and e[1] in self.gradients)]
        )
        known = {
            *self.saved,
            *self.gradients,
            *[k for event, k, _, _ in backward if event is FootprintEvent.NEW],
        }
        return Footprint(
            tuple([size(number) for number in range(len(self.sizes))]),
            tuple([number for number, _, _ in tensors]),
            tuple(self.gradients),
            tuple(forward),
            self.saved,
            tuple([e for e in backward if e[1] in known]),
            self.kept,
            repeated=repeats(backward),
        )


def _handed_over(events: list[Event]) -> list[Event]:
    """Return a backward call where each gradient is handed over once the node that made it has run.

    The replay's inputs, recorded first, get theirs last; a node before them would not wait.
    """
    readers: dict[int, list[Event]] = {}
    for event in events:
        if event[0] is FootprintEvent.GRADIENT:
            readers.setdefault(event[1], []).append(event)
    made = {number: node for event, number, _, node in events if event is FootprintEvent.NEW}
    waiting: list[int] = []
    result: list[Event] = []
    for event in events:
        kind, number, place, node = event
        if kind is FootprintEvent.NEW:
            for ready in [n for n in waiting if made[n] != node]:
                waiting.remove(ready)
                result += [*readers[ready], (FootprintEvent.DROP, ready, 0, 0)]
            waiting += [number] * (number in readers)
            result.append((kind, number, place, 0))
        elif number not in made or number not in readers:
            result.append(event)
    for ready in waiting:
        result += [*readers[ready], (FootprintEvent.DROP, ready, 0, 0)]
    return result


def _elements(numel: int, decoded: bool) -> Poly:
    """Return elements as a polynomial of the batch size; raises NotAffineError where they are none."""
    if not decoded or numel < LARGEST_CONSTANT:
        return (numel, 0, 0)
    size = decode_dim(numel)
    return (size.const, size.slope, 0) if isinstance(size, Affine) else (size, 0, 0)


def valueless(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new meta tensor that lies as another one does.

    It is a conjugated or negated view as that one, which most operators copy.
    """
    fresh = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if tensor.is_conj():
        torch._C._set_conj(fresh, True)
    if tensor.is_neg():
        torch._C._set_neg(fresh, True)
    return fresh


class _Input(torch.autograd.Function):
    """A tensor that the call reads; its backward call gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, replay: _FootprintRun, place: int, make: Callable[[], torch.Tensor]
    ) -> Any:
        tensor = make()
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.place, ctx.steps = replay, place, tensor.stride()
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            ctx.replay.give(ctx.place, gradient, ctx.steps)
        return None, None, None, None


class _Outputs(torch.autograd.Function):
    """The step behind a call: its backward call allocates the gradients that arrive."""

    @staticmethod
    def forward(ctx: Any, replay: _FootprintRun, differentiable: list[bool], *outputs: torch.Tensor) -> Any:
        ctx.replay, ctx.differentiable = replay, differentiable
        ctx.arrival = replay.arrival or [PLAIN] * len(differentiable)
        ctx.like = [(tuple(t.shape), t.dtype) for t in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        like, replay, fresh = iter(ctx.like), ctx.replay, []
        for kind, differentiable in zip(ctx.arrival, ctx.differentiable, strict=True):
            gradient = None
            if differentiable:
                shape, dtype = next(like)
                if kind != MISSING:
                    gradient = torch.empty(shape, dtype=dtype, device="meta")
                    torch._C._set_conj(gradient, kind == LAZY)
                fresh.append(gradient)
            replay.gradients.append(-1 if gradient is None else replay.follow(gradient))
        return None, None, *fresh


_input: Callable[..., torch.Tensor] = _Input.apply
_outputs: Callable[..., torch.Tensor] = _Outputs.apply


@contextmanager
def _own_hooks() -> Iterator[None]:
    """Keep the hooks of an activation checkpoint that runs away from the tensors of a replay."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        yield
