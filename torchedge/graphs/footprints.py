"""The memory of an operator's forward and backward call, and of an optimizer's steps, as they run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torchedge.graphs.sizes import Poly


class FootprintEvent(IntEnum):
    """An event of a backward call: a storage is allocated or freed, or holds the gradient of an input."""

    NEW = 0
    DROP = 1
    GRADIENT = 2


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
    keeps. backward: events (event, storage, input, 1 if a gradient fills its storage in order).
    """

    sizes: tuple[StorageSize, ...]
    tensors: tuple[int, ...]
    gradients: tuple[int, ...]
    forward: tuple[int, ...]
    saved: tuple[int, ...]
    backward: tuple[tuple[FootprintEvent, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class UpdateFootprint:
    """Storages of an optimizer's first step and of a later one, by number; sizes: bytes of each.

    first, later: k + 1 where storage k is allocated, -k - 1 where it is freed. states: storages that stay
    after the first step; the later one starts with them.
    """

    sizes: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    states: tuple[int, ...]
