"""The Program: kernels, launches and tensors of one step, for an executor or a bundle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torchedge.textures.layouts import Layout

TensorRole = Literal["input", "parameter", "buffer", "state", "constant", "output", "intermediate"]
Access = Literal["read", "write", "update"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that lies on the device: logical shape and dtype, and the layout of its bytes.

    Roles "parameter", "buffer", "state" and "constant" stay on the device from step to step; "intermediate"
    lives within a step, in the arena. `fill` is what a state holds before the first step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: TensorRole
    layout: Layout
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding of the layout included."""
        return self.layout.nbytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One OpenCL C 1.2 kernel: `source` defines exactly one `__kernel` called `name`.

    access: what it does with each of its arguments, in their order. kind: the template it was made from.
    flops and nbytes: arithmetic and unavoidable traffic of one launch. reference: what it computes, in the
    words of PyTorch. A kernel made with checks has one argument more, an int buffer of 4 elements that it
    writes (1 + the argument's position, index, low, high) when an access lies outside a tensor. in_place:
    (argument read, argument written) that may be the same memory: each work-item reads an element before it
    writes that one, and no other work-item reads it.
    """

    name: str
    source: str
    access: tuple[Access, ...]
    kind: str = "pointwise"
    flops: int = 0
    nbytes: int = 0
    reference: str = ""
    checks: bool = False
    in_place: tuple[tuple[int, int], ...] = ()

    @property
    def digest(self) -> str:
        """Content hash of the source (sha256, hex)."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Launch:
    """One enqueued kernel: its tensors (indices into `Program.tensors`) in the order of its arguments."""

    kernel: int
    tensors: tuple[int, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Arena:
    """Where intermediates lie: byte offset by tensor in one allocation of `nbytes`; images by slot.

    slots: (width, height, channel type) of each image that intermediates share; `slot` gives the slot of a
    tensor. live_bytes: the largest sum of bytes alive at once, the lower bound that the plan is held against.
    """

    nbytes: int
    offset: dict[int, int] = field(default_factory=dict)
    slots: tuple[tuple[int, int, str], ...] = ()
    slot: dict[int, int] = field(default_factory=dict)
    live_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Program:
    """One step as OpenCL launches, in order.

    inputs and outputs: tensors fed and returned, in the user's order. hyperparameters: names of 0-d inputs
    (`lr`) that keep their value from call to call until set. target: the device class it was lowered for.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arena: Arena
    hyperparameters: dict[str, int] = field(default_factory=dict)
    target: str = "cpu"
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Content hash of kernels, launches and layouts (sha256, hex)."""
        state = hashlib.sha256()
        for kernel in self.kernels:
            state.update(kernel.digest.encode())
        state.update(repr((self.tensors, self.launches, self.inputs, self.outputs)).encode())
        return state.hexdigest()
