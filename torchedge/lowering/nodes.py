"""Lazy tensors between a Graph and its kernels: what an element is made of, not where it is computed.

Rules (`lowering.rules`) make nodes; `lowering.fusion` decides which of them are materialised; the others are
written into the kernels of their consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Literal

from torchedge.errors import LoweringError
from torchedge.expressions.indices import ZERO, Axis, Index, as_index, of
from torchedge.expressions.scalars import Read, Scalar, post_order, walk

ReduceKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin"]
ContractionRole = Literal["batch", "row", "col"]

_numbers = count()


def axes(sizes: Sequence[int], letter: str = "i") -> tuple[Axis, ...]:
    """Return fresh loop axes of the given extents."""
    return tuple([Axis(f"{letter}{next(_numbers)}", size) for size in sizes])


PACKED = ("int8", "uint8")
"""Types of integers that hold one element of a quantised weight or several."""


@dataclass(eq=False, repr=False)
class Node:
    """A tensor: logical shape and dtype. `scope` is the module path of the operator that made it."""

    shape: tuple[int, ...]
    dtype: str
    scope: str = field(default="", kw_only=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype}{list(self.shape)}>"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def at(self, *indices: Index | int) -> Read:
        """Return the element at an index, one entry a dimension.

        Raises:
            LoweringError: more or fewer entries than dimensions.
        """
        if len(indices) != len(self.shape):
            raise LoweringError(
                f"a tensor of {len(self.shape)} dimensions is read with {len(indices)} indices"
            )
        normal = tuple([ZERO if n == 1 else as_index(i) for i, n in zip(indices, self.shape, strict=True)])
        return Read(self, normal, self.dtype)

    @property
    def roots(self) -> tuple[Scalar, ...]:
        """The scalar expressions it is computed from."""
        return ()

    @property
    def operands(self) -> tuple[Node, ...]:
        """The nodes it reads, each once, in order of appearance."""
        return tuple(dict.fromkeys(s.tensor for s in walk(*self.roots) if isinstance(s, Read)))


@dataclass(eq=False, repr=False)
class Stored(Node):
    """A tensor that is in memory before the step begins: value `index` of the graph.

    frozen: a weight that the step does not update.
    """

    name: str
    index: int
    frozen: bool = False


@dataclass(eq=False, repr=False)
class Pointwise(Node):
    """Every element by itself: `body` at the index that `axes` stand for. Views are pointwise too."""

    axes: tuple[Axis, ...]
    body: Scalar

    @property
    def roots(self) -> tuple[Scalar, ...]:
        """Its body."""
        return (self.body,)


@dataclass(frozen=True)
class Stage:
    """One reduction over a row: `body` over all inner axes; later stages and outputs read it as Local `name`.

    argmax and argmin give the row-major position among the inner axes (int64), the first one of equals.
    """

    name: str
    kind: ReduceKind
    body: Scalar
    dtype: str


@dataclass(frozen=True)
class Output:
    """One result of Rows.

    axes: outer and inner axes in the order of the result's dimensions; without inner ones: one value a row.
    """

    axes: tuple[Axis, ...]
    body: Scalar
    dtype: str


@dataclass(eq=False, repr=False)
class Rows(Node):
    """Reductions over the inner axes for every row of outer axes, then outputs: sums, softmax, layer norm.

    A stage may read the Locals of the stages before it. The outputs are `RowsResult` nodes; `shape` is that
    of the outer axes.
    """

    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[Output, ...]
    name: str = "reduce"

    @property
    def roots(self) -> tuple[Scalar, ...]:
        """Bodies of stages and outputs."""
        return (*[s.body for s in self.stages], *[o.body for o in self.outputs])


@dataclass(eq=False, repr=False)
class RowsResult(Node):
    """One output of Rows as a tensor."""

    rows: Rows
    position: int

    @property
    def operands(self) -> tuple[Node, ...]:
        """The rows it comes from."""
        return (self.rows,)


@dataclass(eq=False, repr=False)
class Contraction(Node):
    """Element = sum over the inner axes of a · b: matrix products, convolutions and their gradients.

    roles: of each dimension of the result: "row" (only `a` depends on it), "col" (only `b` does), "batch"
    (both may). inner: loop axes from the outermost to the innermost one. `a` and `b` are bare accesses
    (reads, guards, casts); other expressions are nodes of their own.
    """

    axes: tuple[Axis, ...]
    roles: tuple[ContractionRole, ...]
    inner: tuple[Axis, ...]
    a: Scalar
    b: Scalar
    name: str = "matmul"

    @property
    def roots(self) -> tuple[Scalar, ...]:
        """Both factors."""
        return (self.a, self.b)

    def sizes(self, role: ContractionRole) -> tuple[int, ...]:
        """Return the extents of the dimensions of one role."""
        return tuple([n for n, r in zip(self.shape, self.roles, strict=True) if r == role])

    @property
    def flops(self) -> int:
        """Two for every product."""
        return 2 * self.numel * prod([a.extent for a in self.inner])


def indices_of(loops: Sequence[Axis]) -> tuple[Index, ...]:
    """Return loop axes as indices; an axis of extent 1 is zero."""
    return tuple([of(a) if a.extent != 1 else ZERO for a in loops])


def nodes_below(roots: Sequence[Node]) -> list[Node]:
    """Return every node that the roots need, operands before their users."""
    return post_order(roots, lambda node: node.operands)
