"""The Graph: what every consumer (prediction, lowering, streaming) reads. Immutable, free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from torchedge.errors import CaptureError
from torchedge.graphs.dims import Affine, Poly, Shape, shape_at

Role = Literal["input", "parameter", "buffer", "state", "constant", "activation"]
Mode = Literal["train", "infer"]
"""What a graph is of: a training step, or an inference."""

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
        "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16, "complex32": 4,
    }
)  # fmt: skip
"""Bytes of one element of each dtype a graph may hold."""

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32"})
"""Dtypes through which a gradient can flow."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its name, shape (dimensions may be affine in the batch size N), dtype and role.

    `alias` is the index of the value whose storage it shares (a view, or the result of an in-place operator),
    else None. `trainable` says of a parameter that it receives a gradient.
    """

    name: str
    shape: Shape
    dtype: str
    role: Role = "activation"
    alias: int | None = None
    trainable: bool = False

    @property
    def numel(self) -> Poly:
        """Number of elements as a polynomial of the batch size."""
        scale, const, slope, square = 1, 1, 0, 0
        for size in self.shape:
            if type(size) is Affine:
                const, slope, square = _times(const, slope, square, size)
            else:  # a number, or the Size of a family of graphs
                scale *= size  # type: ignore[operator]
        return (const * scale, slope * scale, square * scale)

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> Poly:
        """Bytes as a polynomial of the batch size."""
        size = self.item_size
        c0, c1, c2 = self.numel
        return (c0 * size, c1 * size, c2 * size)

    def at(self, batch_size: int) -> tuple[int, ...]:
        """Return the concrete shape at one batch size."""
        return shape_at(self.shape, batch_size)


def _times(const: int, slope: int, square: int, size: Affine) -> Poly:
    """Multiply a polynomial of degree one at most by an affine dimension."""
    if square:
        raise CaptureError(
            "a tensor grows with the third power of the batch size; "
            "capture the model for one fixed batch size"
        )
    return (const * size.const, slope * size.const + const * size.slope, slope * size.slope)


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call: ATen base name, indices of the values it reads (None: an absent one) and makes.

    `scope` is the path of the module that called it; `inplace` that output 0 overwrites input 0; `grad` that
    autograd was recording; `region` numbers the activation-checkpoint region it runs in (0: none); `known`
    that `torchedge.ops` knows it.
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    inplace: bool = False
    grad: bool = True
    region: int = 0
    known: bool = True


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured forward pass (and loss): values and operators in execution order.

    `inputs` are the values the user feeds, `outputs` what the model returns, `loss` the scalar that a
    training step differentiates (None: inference). `releases[k]` lists the values whose last Python reference
    went away between operator k and k + 1: with it, memory is freed in the simulation where eager PyTorch
    frees it; None where capture cannot know. `training` is the mode the model ran in, `fixed_batch` the one
    batch size the graph is valid for (None: every).
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    loss: int | None = None
    training: bool = True
    releases: tuple[tuple[int, ...], ...] | None = None
    fixed_batch: int | None = None
    name: str = "model"
    captured_by: str = "trace"
    notes: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The parameters the graph reads, each once."""
        return tuple(v for v in self.values if v.role == "parameter")

    @cached_property
    def buffers(self) -> tuple[Value, ...]:
        """The buffers the graph reads or updates, each once."""
        return tuple(v for v in self.values if v.role == "buffer" and v.alias is None)

    @cached_property
    def unsupported(self) -> tuple[str, ...]:
        """Kinds of operators that `torchedge.ops` does not know, each once, in order of appearance."""
        return tuple(dict.fromkeys(op.kind for op in self.ops if not op.known))

    @cached_property
    def digest(self) -> str:
        """Content hash (sha256, hex): equal for graphs that compute the same, whatever the names."""
        from torchedge.graphs.hashing import digest

        return digest(self)

    def verify(self) -> None:
        """Check every invariant; raises CaptureError that names the first one broken."""
        from torchedge.graphs.verification import verify

        verify(self)

    def __str__(self) -> str:
        from torchedge.graphs.printing import print_graph

        return print_graph(self)

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.ops)} operators, {len(self.parameters)} parameters>"
