"""`Partition`: a training step as torch.compile splits it into a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Buffer = tuple[int, int]
"""An operator, by its position in its graph, and the number of its result."""

PartRole = Literal["input", "view", "pointwise", "reduction", "kernel"]


@dataclass(frozen=True, slots=True)
class PartOp:
    """One operator of a graph that torch.compile lowers.

    role: an argument of the graph, a view of a buffer, element-wise work or a reduction (which fuse), or a
    kernel of a library. reads: the buffers it reads, views resolved. sizes: bytes of each result.
    elements: the elements that it iterates over; rows: those of its first result. inner: a reduction runs
    over the last dimension. split: a reduction to few results, computed by two kernels, one after the other.
    """

    role: PartRole
    reads: tuple[Buffer, ...] = ()
    sizes: tuple[int, ...] = ()
    elements: int = 1
    rows: int = 1
    inner: bool = True
    split: bool = False


@dataclass(frozen=True, slots=True)
class PartGraph:
    """A forward or backward graph: operators in an order in which they can run; results: its outputs."""

    ops: tuple[PartOp, ...]
    results: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """The forward and the backward graph of a model at one batch size and under one autocast dtype.

    saved: for each input of the backward graph that the forward graph computes, the input and the buffer.
    tangents: bytes of the gradients that the backward graph gets, by its input. lent: inputs of
    the backward graph that others hold too, so that no output takes their place. apart: bytes that a loss
    outside of the compiled model keeps. channels_last: convolutions run in that memory format. recorded: both
    graphs are replayed as CUDA graphs.
    """

    batch_size: int
    amp: str | None
    forward: PartGraph
    backward: PartGraph
    saved: tuple[tuple[Buffer, Buffer], ...]
    tangents: tuple[tuple[Buffer, int], ...]
    lent: frozenset[Buffer]
    apart: int
    channels_last: bool = False
    recorded: bool = False
