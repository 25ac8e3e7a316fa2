"""Footprints of library kernels, which PyTorch runs on meta tensors in another way or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchedge.graphs import FLOATING
from torchedge.graphs.footprints import FILLS, IN_ORDER, Footprint, FootprintEvent, StorageSize
from torchedge.graphs.sizes import poly
from torchedge.ops.specs import Call

BYTE = 1


def kernel(
    call: Call,
    saves: Sequence[int] = (),
    hidden: Sequence[int] = (),
    scratch: Sequence[int] = (),
    backward_scratch: Sequence[int] = (),
    *,
    passes: bool = False,
) -> Footprint:
    """Return the footprint of a call that runs as one kernel forward and one backward.

    saves: tensors that autograd keeps; i >= 0 is input i, -1 - j output j. hidden: bytes of outputs that
    autograd alone keeps. scratch, backward_scratch: bytes of temporaries of the forward and the backward
    kernel. Each input that needs a gradient gets a new one (where the call names none, all need one);
    passes: the incoming gradient itself.
    """
    places = {slot: place for place, slot in enumerate(k for k, s in enumerate(call.ins) if s is not None)}
    outputs = range(len(places), len(places) + len(call.outs))
    shared = [call.shared(output) for output in range(len(call.outs))]
    tensors = [
        *range(len(places)),
        *[n if s is None else places[s] for n, s in zip(outputs, shared, strict=True)],
    ]
    sizes = [StorageSize(place, (0, 0, 0), 0) for place in range(len(tensors))]

    def new(entry: StorageSize) -> int:
        sizes.append(entry)
        return len(sizes) - 1

    def taken(amounts: Sequence[int]) -> list[int]:
        return [new(StorageSize(-1, poly(amount), BYTE)) for amount in amounts if amount]

    kept, own, beside = taken(hidden), taken(scratch), taken(backward_scratch)
    forward = [n + 1 for n in (*[n for n, s in zip(outputs, shared, strict=True) if s is None], *kept, *own)]
    saved = [
        tensors[places[s]] if s >= 0 else tensors[outputs[-1 - s]] for s in saves if s < 0 or s in places
    ]
    arriving = [new(StorageSize(n, (0, 0, 0), 0)) for n in outputs]
    backward = [(FootprintEvent.NEW, n, 0, 0) for n in beside]
    for slot, place in places.items():
        if call.needs and not call.need(slot):
            continue
        if call.in_dtype(slot) not in FLOATING or not call.takes_gradient(slot):
            continue
        gradient, order = arriving[0], FILLS | IN_ORDER
        if passes and prod(call.ins[slot] or ()) == prod(call.outs[0]):
            order = order if call.ins[slot] == call.outs[0] else IN_ORDER
        else:
            gradient = new(StorageSize(place, (0, 0, 0), 0))
            backward.append((FootprintEvent.NEW, gradient, 0, 0))
        backward.append((FootprintEvent.GRADIENT, gradient, place, order))
    backward += [(FootprintEvent.DROP, n, 0, 0) for n in (*beside, *dict.fromkeys(saved), *kept)]
    return Footprint(
        tuple(sizes),
        tuple(tensors),
        tuple(arriving),
        tuple([*forward, *[-n - 1 for n in own]]),
        tuple(dict.fromkeys((*saved, *kept))),
        tuple(backward),
    )
