"""Ways to build nodes: the vocabulary in which the rules of operators are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, prod

from torchedge.errors import LoweringError
from torchedge.expressions.indices import ZERO, Axis, Fetched, Index, as_index, of, reshape
from torchedge.expressions.scalars import Bound, Local, Scalar, apply, cast, constant
from torchedge.lowering.nodes import (
    Contraction,
    ContractionRole,
    Node,
    Output,
    Pointwise,
    ReduceKind,
    Rows,
    RowsResult,
    Stage,
    axes,
    indices_of,
)

Shape = Sequence[int]
Operand = Node | int | float | bool
_ANY = 2**31 - 1


def pointwise(shape: Shape, dtype: str, body: Callable[..., Scalar]) -> Pointwise:
    """Return the tensor whose element at (i, j, ...) is `body(i, j, ...)`, converted to `dtype`."""
    loops = axes(shape)
    return Pointwise(tuple(shape), dtype, loops, cast(body(*indices_of(loops)), dtype))


def elements(x: Node, dtype: str) -> Callable[..., Scalar]:
    """Return the function from an index to x there, converted to `dtype`."""
    return lambda *indices: cast(x.at(*indices), dtype)


def clamped(number: Scalar, last: int) -> Index:
    """Return a number as an index from 0 to `last`, whichever is nearest."""
    return of(Fetched(apply("maximum", apply("minimum", number, last), 0), 0, last))


def fetched(place: Scalar, extent: int) -> tuple[Index, Bound]:
    """Return a number as an index below an extent, and the bound within which it is one."""
    inside = of(Fetched(place, 0, max(0, extent - 1)))  # what the bound promises
    return inside, (of(Fetched(place, -_ANY, _ANY)), 0, extent)


def view(x: Node, shape: Shape, move: Callable[..., Sequence[Index | int]]) -> Pointwise:
    """Return the tensor whose element at (i, j, ...) is x at `move(i, j, ...)`."""
    return pointwise(shape, x.dtype, lambda *indices: x.at(*[as_index(i) for i in move(*indices)]))


def reshaped(x: Node, shape: Shape) -> Node:
    """Return x with another shape of the same number of elements."""
    if tuple(shape) == x.shape:
        return x
    if not x.numel and not prod(shape):
        return full(shape, 0, x.dtype)
    if prod(shape) != x.numel:
        raise LoweringError(f"{list(x.shape)} is reshaped to {list(shape)}; expected as many elements")
    return view(x, shape, lambda *indices: reshape(indices, x.shape, shape))


def permuted(x: Node, dims: Sequence[int]) -> Node:
    """Return x with dimension k of the result being dimension dims[k] of x."""

    def move(*indices: Index) -> list[Index]:
        back: list[Index] = [ZERO] * len(dims)
        for place, dim in enumerate(dims):
            back[dim] = indices[place]
        return back

    return view(x, [x.shape[d] for d in dims], move)


def expanded(x: Node, shape: Shape) -> Node:
    """Return x broadcast to a shape: dimensions of size 1, and missing leading ones, repeat."""
    if tuple(shape) == x.shape:
        return x
    missing = len(shape) - len(x.shape)
    return view(x, shape, lambda *indices: indices[missing:])  # at() ignores indices of dimensions of size 1


def broadcast_shape(*shapes: Shape) -> tuple[int, ...]:
    """Return the common broadcast shape; raises LoweringError where there is none."""
    rank = max(map(len, shapes), default=0)
    common = [1] * rank
    for shape in shapes:
        for place, size in enumerate(shape, rank - len(shape)):
            if size != 1 and common[place] not in (1, size):
                raise LoweringError(f"shapes {[list(s) for s in shapes]} do not broadcast")
            common[place] = size if size != 1 else common[place]
    return tuple(common)


def elementwise(
    body: Callable[..., Scalar], *operands: Operand, dtype: str, compute: str | None = None
) -> Pointwise:
    """Return `body` of the operands' elements, broadcast; operands are converted to `compute` first.

    dtype: of the result. compute: of the arithmetic (None: the operands' own; numbers take the dtype of the
    first tensor).
    """
    nodes = [o for o in operands if isinstance(o, Node)]
    shape = broadcast_shape(*[n.shape for n in nodes])
    first = compute or (nodes[0].dtype if nodes else dtype)

    def element(*indices: Index) -> Scalar:
        scalars: list[Scalar] = []
        for operand in operands:
            if isinstance(operand, Node):
                scalar: Scalar = operand.at(*indices[len(shape) - len(operand.shape) :])
                scalars.append(cast(scalar, compute) if compute else scalar)
            else:
                scalars.append(constant(operand, first))
        return body(*scalars)

    return pointwise(shape, dtype, element)


def full(shape: Shape, value: float | int | bool, dtype: str) -> Pointwise:
    """Return a tensor of one number."""
    return pointwise(shape, dtype, lambda *_: constant(value, dtype))


def normal_dims(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Return dimensions as sorted non-negative numbers; None or none at all means every dimension."""
    if dims is None:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted({d % rank if rank else 0 for d in listed})) or tuple(range(rank))


_OF_NOTHING = {"sum": 0, "prod": 1, "any": False, "all": True, "max": -inf, "min": inf}


class RowBuilder:
    """Collects the stages and outputs of one Rows node over a domain with reduced `dims`.

    `reduce(kind, body)` adds a stage and returns its result for later stages and outputs; `row(body)` and
    `element(body)` add outputs of one value a row, or one an element. Bodies take the whole index of the
    domain (in stages and elements) or that of the kept dimensions (in rows).
    """

    def __init__(self, domain: Shape, dims: Sequence[int], name: str) -> None:
        self.domain, self.dims = tuple(domain), tuple(dims)
        self._loops = axes(domain)
        self._kept = tuple([a for d, a in enumerate(self._loops) if d not in self.dims])
        self._inner = tuple([a for d, a in enumerate(self._loops) if d in self.dims])
        self._node = Rows(
            tuple([a.extent for a in self._kept]), "float32", self._kept, self._inner, (), (), name
        )

    @property
    def count(self) -> int:
        """Number of elements in a row."""
        return prod([a.extent for a in self._inner])

    def reduce(self, kind: ReduceKind, body: Callable[..., Scalar]) -> Scalar:
        """Add a stage; returns its result, the same for the whole row."""
        scalar = body(*indices_of(self._loops))
        dtype = "int64" if kind in ("argmax", "argmin") else scalar.dtype
        if not prod(self.domain):
            value = _OF_NOTHING.get(kind, 0)
            # PyTorch has no extreme of no whole numbers: a check of no indices has nothing to report.
            return constant(value if isfinite(value) or "int" not in dtype else 0, dtype)
        stage = Stage(f"s{len(self._node.stages)}", kind, scalar, dtype)
        self._node.stages += (stage,)
        return Local(stage.name, stage.dtype)

    def row(self, body: Callable[..., Scalar], dtype: str | None = None, keepdim: bool = False) -> Node:
        """Add an output of one value a row; `keepdim` leaves the reduced dimensions with size 1."""
        scalar = body(*indices_of(self._kept))
        part = self._output(self._kept, scalar, dtype)
        if not keepdim:
            return part
        return reshaped(part, [1 if d in self.dims else n for d, n in enumerate(self.domain)])

    def element(self, body: Callable[..., Scalar], dtype: str | None = None) -> Node:
        """Add an output of the domain's shape."""
        return self._output(self._loops, body(*indices_of(self._loops)), dtype)

    def _output(self, loops: tuple[Axis, ...], scalar: Scalar, dtype: str | None) -> Node:
        kind = dtype or scalar.dtype
        if not prod(self.domain):  # nothing to walk through: no node of rows
            return Pointwise(tuple([a.extent for a in loops]), kind, loops, cast(scalar, kind))
        self._node.outputs += (Output(loops, cast(scalar, kind), kind),)
        return RowsResult(tuple([a.extent for a in loops]), kind, self._node, len(self._node.outputs) - 1)


def reduction(
    domain: Shape,
    dims: Sequence[int],
    name: str,
    body: Callable[..., Scalar],
    dtype: str | None = None,
    kind: ReduceKind = "sum",
) -> Node:
    """Return the reduction of `body(*index)` over the dimensions `dims` of a domain."""
    builder = RowBuilder(domain, dims, name)
    total = builder.reduce(kind, body)
    return builder.row(lambda *_: total, dtype)


def reduced(
    kind: ReduceKind,
    x: Node,
    dims: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    body: Callable[[Scalar], Scalar] = lambda a: a,
    finish: Callable[[Scalar], Scalar] = lambda a: a,
    dtype: str | None = None,
) -> Node:
    """Return the reduction of `body(x)` over dimensions, then `finish` of each result."""
    if not x.shape:
        x, dims, keepdim = reshaped(x, (1,)), 0, False
    over = normal_dims(dims, len(x.shape))
    builder = RowBuilder(x.shape, over, kind)
    total = builder.reduce(kind, lambda *indices: body(x.at(*indices)))
    return builder.row(lambda *_: finish(total), dtype, keepdim)


def contraction(
    shape: Shape,
    roles: Sequence[ContractionRole],
    inner: Shape,
    a: Callable[[Sequence[Index], Sequence[Index]], Scalar],
    b: Callable[[Sequence[Index], Sequence[Index]], Scalar],
    dtype: str,
    name: str = "matmul",
) -> Contraction | Pointwise:
    """Return sum over `inner` of a(out, inner) · b(out, inner) for every index `out` of `shape`."""
    if not prod(inner):
        return full(shape, 0, dtype)
    loops, sums = axes(shape), axes(inner, "k")
    out, over = indices_of(loops), indices_of(sums)
    return Contraction(tuple(shape), dtype, loops, tuple(roles), sums, a(out, over), b(out, over), name)
