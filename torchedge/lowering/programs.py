"""The Program: kernels, launches and tensors of one step, for an executor or a bundle."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta

from torchedge.graphs import ITEM_SIZES, RESIDENT_ROLES
from torchedge.lowering.targets import DeviceClass
from torchedge.storage.codecs import DERIVED, PRINTABLE, REQUIRED, Key, OneOf, OptionalText, Sha256, Text
from torchedge.storage.locks import cached_property
from torchedge.textures.layouts import MAX_EXTENT, MAX_RANK, Layout

MAX_SIZE = 2**40
"""Largest dimension, number of work-items, and number of bytes."""

MAX_ITEMS = 2**16
"""Most tensors, kernels and launches of a program."""

MAX_ARGUMENTS = 256
MAX_ARGUMENT_BYTES = 1024
"""Bytes of arguments that every OpenCL device takes; a pointer has eight."""

MAX_SOURCE = 2**20

TensorRole = Literal["input", "parameter", "buffer", "state", "constant", "output", "intermediate"]
Access = Literal["read", "write", "update"]
LoadClassName = Literal["elemental", "reusable", "hierarchical"]
"""What a kernel bears of loading beside its work (FlashMem, Table 5)."""

DType = Annotated[str, OneOf(tuple(ITEM_SIZES))]
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_RANK)]
Index = Annotated[int, Meta(ge=0, le=MAX_ITEMS - 1)]
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_ITEMS)]
Argument = Annotated[int, Meta(ge=0, le=MAX_ARGUMENTS - 1)]
WorkItems = Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_SIZE)], ...], Meta(min_length=1, max_length=3)]
Amount = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Extent = Annotated[int, Meta(ge=1, le=MAX_EXTENT)]
Places = Annotated[dict[Index, Size], REQUIRED, Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class IndexRange:
    """What a tensor of indices may hold: numbers from `low` on, below `high`, and `ignored`."""

    low: Annotated[int, Meta(ge=-MAX_SIZE, le=MAX_SIZE)]
    high: Annotated[int, Meta(ge=-MAX_SIZE, le=MAX_SIZE)]
    ignored: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    def __str__(self) -> str:
        besides = "" if self.ignored is None else f", or {self.ignored} (ignored)"
        return f"from {self.low} to {self.high - 1}{besides}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on the device: logical shape and dtype, and the layout of its bytes.

    Roles "parameter", "buffer", "state" and "constant" stay on the device from step to step; "intermediate"
    lives within a step, in the arena. `fill` is the content of a state before the first step, `indices` what
    an input that operators index with may hold. An output with `indices` or `divisor` is a flag: not 0 where
    the step has indexed with numbers out of range, or divided whole numbers by zero.
    """

    name: Text
    shape: Shape
    dtype: DType
    role: TensorRole
    layout: Layout
    fill: int | float = 0.0
    indices: IndexRange | None = None
    divisor: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding of the layout included."""
        return self.layout.nbytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One OpenCL C 1.2 kernel: `source` defines exactly one `__kernel` called `name`.

    access: use of each argument, in order. kind: the node it comes from. load_class: of its
    kind: products are reusable, other kernels over rows hierarchical, all others elemental. checks: it has
    one more argument, an int buffer of 4 elements that it writes (1 + the argument's position, index, low,
    high) when an access lies outside a tensor. sizes: number of int arguments behind all others, whose values
    a launch has (extents, strides, offsets of its tensors). in_place: (argument read, argument written) that
    may be the same memory: each work-item reads an element before it writes that one, and no other work-item
    reads it. local_bytes: local memory of a work-group.
    """

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}(?![\s\S])",
            description="an identifier of OpenCL C, of up to 128 characters",
        ),
    ]
    source: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_SOURCE,
            pattern=r"^[^\x00\ud800-\udfff]*(?![\s\S])",
            description=f"OpenCL C of 1 to {MAX_SOURCE:,} characters",
        ),
    ]
    access: Annotated[tuple[Access, ...], Meta(max_length=MAX_ARGUMENTS)]
    kind: Annotated[Text, REQUIRED] = "pointwise"
    load_class: Annotated[LoadClassName, REQUIRED] = "elemental"
    checks: bool = False
    in_place: Annotated[tuple[tuple[Argument, Argument], ...], Meta(max_length=MAX_ITEMS)] = ()
    local_bytes: Size = 0
    sizes: Argument = 0

    @property
    def digest(self) -> Annotated[Sha256, DERIVED, Key("sha256")]:
        """Content hash of the source (sha256, hex)."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Launch:
    """One enqueued kernel: its tensors (indices into `Program.tensors`) in the order of its arguments.

    sizes: the values of the kernel's last arguments, as many as `Kernel.sizes`. flops and nbytes: arithmetic
    and least traffic. reference: its computation in the words of PyTorch.
    """

    kernel: Index
    tensors: Annotated[tuple[Index, ...], Meta(max_length=MAX_ARGUMENTS)]
    global_size: WorkItems
    local_size: WorkItems | None = None
    scope: OptionalText = ""
    sizes: Annotated[tuple[Number, ...], Meta(max_length=MAX_ARGUMENTS)] = ()
    flops: Amount = 0
    nbytes: Amount = 0
    reference: Annotated[str, Meta(max_length=10_000, pattern=PRINTABLE)] = ""


@dataclass(frozen=True, slots=True)
class Arena:
    """Memory that tensors share: byte offset by tensor within `nbytes` of buffers; images by slot.

    Its tensors are the intermediates, and the streamed weights of a streaming schedule.
    slots: (width, height, channel type) of each image that tensors share; `slot` gives the slot of a
    tensor. live_bytes: the largest sum of bytes alive at once, the lower bound of `nbytes`.
    allocation_bytes: the largest allocation that it is planned for; 0: any. pieces: bytes of its buffers
    where it has several; offsets count through them, and no tensor lies in two.
    """

    nbytes: Size
    offset: Annotated[Places, Key("offsets")] = field(default_factory=dict)
    slots: Annotated[tuple[tuple[Extent, Extent, DType], ...], REQUIRED, Meta(max_length=MAX_ITEMS)] = ()
    slot: Annotated[Places, Key("slot_of")] = field(default_factory=dict)
    live_bytes: Annotated[Size, REQUIRED] = 0
    allocation_bytes: Size = 0
    pieces: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_SIZE)], ...], Meta(max_length=MAX_ITEMS)] = ()

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer."""
        return self.pieces or ((self.nbytes,) if self.nbytes else ())

    def place(self, tensor: int) -> tuple[int, int]:
        """Return the buffer of a tensor with an offset, and the byte of that buffer at which it begins."""
        begins = (0, *accumulate(self.pieces[:-1]))
        number = bisect_right(begins, self.offset[tensor]) - 1
        return number, self.offset[tensor] - begins[number]

    def holds(self, tensor: int) -> bool:
        """Whether the arena has a place for a tensor."""
        return tensor in self.offset or tensor in self.slot


@dataclass(frozen=True, eq=False)
class Program:
    """One step as OpenCL launches, in order.

    inputs and outputs: tensors fed and returned, in the user's order. hyperparameters: names of 0-d inputs
    (`lr`) that keep their value from call to call until set. target: the device class it was lowered for.
    """

    name: Text
    tensors: Annotated[tuple[StoredTensor, ...], Meta(max_length=MAX_ITEMS)]
    kernels: Annotated[tuple[Kernel, ...], Meta(max_length=MAX_ITEMS)]
    launches: Annotated[tuple[Launch, ...], Meta(max_length=MAX_ITEMS)]
    inputs: Indices
    outputs: Indices
    arena: Arena
    hyperparameters: Annotated[dict[Text, Index], REQUIRED] = field(default_factory=dict)
    target: Annotated[DeviceClass, REQUIRED] = "cpu"
    notes: Annotated[tuple[OptionalText, ...], REQUIRED, Meta(max_length=1000)] = ()

    @property
    def residents(self) -> list[StoredTensor]:
        """The tensors with memory of their own, outside of the arena."""
        tensors = enumerate(self.tensors)
        return [t for index, t in tensors if t.role != "intermediate" and not self.arena.holds(index)]

    @cached_property
    def digest(self) -> str:
        """Content hash of kernels, launches and layouts (sha256, hex)."""
        state = hashlib.sha256()
        for kernel in self.kernels:
            state.update(kernel.digest.encode())
        state.update(repr((self.tensors, self.launches, self.inputs, self.outputs)).encode())
        return state.hexdigest()


def residents(programs: Sequence[Program]) -> Collection[StoredTensor]:
    """Return the residents of programs, those that stay from run to run once for each name."""
    kept: dict[str, StoredTensor] = {}
    for number, program in enumerate(programs):
        for tensor in program.residents:
            own = "" if tensor.role in RESIDENT_ROLES else f"{number} "
            kept[own + tensor.name] = tensor
    return kept.values()
