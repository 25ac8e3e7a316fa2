"""The memory of an operator's forward and backward call, and of an optimizer's steps, as they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from torchedge.graphs.sizes import Poly


class FootprintEvent(IntEnum):
    """An event of a backward call: a storage is allocated or freed, or holds the gradient of an input."""

    NEW = 0
    DROP = 1
    GRADIENT = 2


FILLS, IN_ORDER, CONJUGATED = 1, 2, 4
"""How a gradient lies: it fills its storage and is no view of it; its strides are those of its input.

A view that stands for conjugates of what it shows is copied before most operators read it."""


MISSING, PLAIN, LAZY = 0, 1, 2
"""How the gradient of an output arrives."""


@dataclass(frozen=True, slots=True)
class StorageSize:
    """The size of a storage: elements of a tensor of the call where they agree, else a polynomial.

    place: the input, or behind them the output, with as many elements (-1: none). item_size: bytes of an
    element; 0: of that tensor's dtype, which autocast may change.
    """

    place: int
    elements: Poly
    item_size: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Storages of an operator's forward and backward call, by number, in order of allocation and release.

    sizes: of each storage. tensors: the storage of each input and output (-1: an absent input); an output may
    share an input's. gradients: the storage of the gradient that arrives for each output (-1: none).
    forward: k + 1 where storage k is allocated, -k - 1 where it is freed. saved: storages that autograd
    keeps. backward: events (event, storage, input, `FILLS`, `IN_ORDER` and `CONJUGATED` of a gradient).
    kept: those of `saved` that stay until the loss goes: attributes of a custom function's `ctx`.
    arrivals: the same call where other gradients arrive than plain ones of all outputs: for each output
    `MISSING`, `PLAIN` or a conjugated view, `LAZY`; then the footprint.
    repeated: inputs that get several gradients, which the engine adds, one as often as it gets another one.
    asking: events of `forward` before the last tensor is kept; a checkpoint's second run may stop there.
    """

    sizes: tuple[StorageSize, ...]
    tensors: tuple[int, ...]
    gradients: tuple[int, ...]
    forward: tuple[int, ...]
    saved: tuple[int, ...]
    backward: tuple[tuple[FootprintEvent, int, int, int], ...]
    kept: tuple[int, ...] = ()
    arrivals: tuple[tuple[tuple[int, ...], Footprint], ...] = ()
    repeated: tuple[int, ...] = ()
    asking: int | None = None

    def narrowed(self, before: int, now: int) -> Footprint:
        """Return the footprint where elements of `before` bytes, as the first input's, have `now` bytes."""
        sizes = [replace(s, item_size=now) if s.item_size == before else s for s in self.sizes]
        return replace(self, sizes=tuple(sizes), arrivals=())

    def cast_inside(self) -> Footprint:
        """Return the footprint of a call on one narrower input whose result stays as wide as it was.

        The input is cast for the kernel alone. The gradient of the result is cast before the backward call.
        """
        number, (result,) = len(self.sizes), self.tensors[-1:]
        sizes = (*self.sizes, replace(self.sizes[result], place=0), StorageSize(0, (0, 0, 0), 0))
        new, drop = FootprintEvent.NEW, FootprintEvent.DROP
        backward = ((new, number + 1, 0, 0), *self.backward, (drop, number + 1, 0, 0))
        return replace(self, sizes=sizes, forward=(*self.forward, number + 1, -number - 1), backward=backward)

    def widened(self, item_size: int, narrow: Collection[int], *, casts: bool = True) -> Footprint:
        """Return the footprint where some inputs and outputs have narrower elements than the others.

        item_size: bytes of the widest elements, which temporaries and gradients take. narrow: places of
        the narrower inputs and outputs; casts: the gradients of such inputs are cast once the call has
        returned, else they are as narrow as the input.
        """
        own = {*self.tensors}
        if not casts:
            own.update([number for event, number, _, _ in self.backward if event is FootprintEvent.GRADIENT])
        sizes = [
            size if size.item_size or number in own else replace(size, item_size=item_size)
            for number, size in enumerate(self.sizes)
        ]
        if not casts:
            return replace(self, sizes=tuple(sizes), arrivals=())
        made = {n: at for at, (event, n, _, _) in enumerate(self.backward) if event is FootprintEvent.NEW}
        drops = [at for at, event in enumerate(self.backward) if event[0] is FootprintEvent.DROP]
        readers = {p: n for event, n, p, _ in self.backward if event is FootprintEvent.GRADIENT}
        wide = {number for place, number in readers.items() if place not in narrow}
        added: dict[int, list[tuple[FootprintEvent, int, int, int]]] = {}
        for place in sorted({*narrow} & readers.keys()):
            # the engine takes one gradient after the other: sums it to the size of its input, casts it
            number = readers[place]
            sums = [made.get(n, -1) for p, n in readers.items() if p < place]
            last = (
                max(sums) if max(sums, default=-1) > made.get(number, -1) else max(made.values(), default=-1)
            )
            at = next((drop for drop in drops if drop > last), len(self.backward)) + (last in sums)
            events = added.setdefault(at, [])
            events.append((FootprintEvent.NEW, len(sizes), 0, 0))
            events.append((FootprintEvent.GRADIENT, len(sizes), place, FILLS | IN_ORDER))
            if number not in wide:
                events.append((FootprintEvent.DROP, number, 0, 0))
            sizes.append(StorageSize(place, (0, 0, 0), 0))
        cast = {number for place, number in readers.items() if place in narrow} - wide
        backward = []
        for at, event in enumerate((*self.backward, None)):
            backward += added.get(at, [])
            if event is not None:
                casts = event[0] is FootprintEvent.GRADIENT and event[2] in narrow
                if not (casts or (event[0] is FootprintEvent.DROP and event[1] in cast)):
                    backward.append(event)
        repeated = repeats(backward)
        return replace(self, sizes=tuple(sizes), backward=tuple(backward), arrivals=(), repeated=repeated)


def repeats(backward: Iterable[tuple[FootprintEvent, int, int, int]]) -> tuple[int, ...]:
    """Return `Footprint.repeated` of a backward call."""
    seen, repeated = set[int](), list[int]()
    for event, _, place, _ in backward:
        if event is FootprintEvent.GRADIENT:
            if place in seen:
                repeated.append(place)
            seen.add(place)
    return tuple(repeated)


@dataclass(frozen=True, slots=True)
class UpdateCalls:
    """Operators that an optimizer's step calls, by parameter tensor: means over those that are updated.

    single: calls on one tensor; listed: its share of calls on lists of tensors; accesses: elements read and
    written by an element of the parameter; reads: values that the host waits for (`Tensor.item()`).
    """

    single: float
    listed: float
    accesses: float
    reads: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateFootprint:
    """Storages of an optimizer's first step and of a later one, by number.

    sizes: bytes of each; owners: the parameter it belongs to, its place in the optimizer or its value in a
    graph (-1: none alone). first, later: k + 1 where storage k is allocated, -k - 1 where it is freed.
    states: names of the storages that stay after the first step; the later one starts with them. calls: of
    the later one.
    """

    sizes: tuple[Poly, ...]
    owners: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    states: Mapping[int, str]
    calls: UpdateCalls
