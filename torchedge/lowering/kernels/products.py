"""Contractions in normal form: batch, rows, columns and inner loops in the order of memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from torchedge.expressions.dialect import COMPUTE, offset_of
from torchedge.expressions.indices import Axis, Fetched, Index, atoms_of, axes_of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import (
    Bound,
    Constant,
    Guarded,
    Read,
    Scalar,
    constant,
    reads_of,
    substitute,
    walk,
)
from torchedge.expressions.sizes import digits
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loops import (
    Stores,
    accessed,
    every_offset,
    in_loops,
    in_memory_order,
    joined,
    strides_of,
    write_all,
)
from torchedge.lowering.kernels.sources import Arguments
from torchedge.lowering.nodes import Contraction
from torchedge.lowering.schedules import ContractionExtents

Loops = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """out[batch, row, col] = epilogue(sum over `inner` of a · b): `a` depends on rows, `b` on columns.

    Loops run from the outermost to the innermost; those of extent 1 are gone, neighbours that are one in
    memory are joined. stores: what is written, at which element, in terms of the loops and the local `acc`.
    a_contiguous, b_contiguous: the loops along which the operands' neighbours lie side by side in memory.
    skips: bounds outside which `b` is zero for whole runs of columns and of the innermost loop (taps that a
    phase of a strided convolution's gradient does not use). itemsize: bytes of a sum.
    """

    batch: Loops
    rows: Loops
    cols: Loops
    inner: Loops
    a: Scalar
    b: Scalar
    stores: Stores
    a_contiguous: frozenset[Axis]
    b_contiguous: frozenset[Axis]
    itemsize: int
    skips: tuple[Bound, ...] = ()

    @property
    def run(self) -> int:
        """Number of neighbouring columns that share what is skipped; 0 where nothing is."""
        used = set().union(*[axes_of(index) for index, _, _ in self.skips]) if self.skips else set()
        shared = [k for k, axis in enumerate(self.cols) if axis in used]
        return size(self.cols[shared[-1] + 1 :]) if shared else (size(self.cols) if used else 0)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of batches, rows, columns and inner points."""
        return size(self.batch), size(self.rows), size(self.cols), size(self.inner)

    @property
    def extents(self) -> ContractionExtents:
        """Sizes for schedules."""
        innermost = last_of(self.inner).extent
        return ContractionExtents(*self.sizes, self.itemsize, self.run, innermost, len(self.inner))


def size(loops: Loops) -> int:
    """Return the number of points of a loop nest."""
    return prod([axis.extent for axis in loops])


def product_of(group: FusionGroup, arguments: Arguments) -> Product:
    """Return a group around a contraction in normal form, columns along the memory of the first result."""
    host = group.host
    assert isinstance(host, Contraction)
    a, b = group.bodies
    stores = [(node, group.computed[node]) for node in group.stored]
    node, first = stores[0]
    written = strides_of(offset_of(arguments.sites[node], first.element))
    batch, rows, cols = _roles(host.axes, a, b)
    if min([written.get(x, 1 << 60) for x in rows], default=1 << 60) < min(
        [written.get(x, 1 << 60) for x in cols], default=1 << 60
    ):
        a, b, rows, cols = b, a, cols, rows
    inner = in_memory_order(host.inner, _inner_strides(host.inner, a, b, arguments))
    nest = {"b": batch, "r": rows, "c": cols}
    ordered = {letter: in_memory_order(loops, written) for letter, loops in nest.items()} | {"k": inner}
    values = [a, b, *[c.value for _, c in stores]]
    indices = every_offset(values, stores, arguments)
    renamed: dict[str, Loops] = {}
    moved: dict[Axis, Index] = {}
    for letter, loops in ordered.items():
        renamed[letter], step = joined(loops, indices, letter)
        indices = [i.substitute(step) for i in indices]
        moved |= step
    a, b = (substitute(operand, moved) for operand in (a, b))
    return Product(
        renamed["b"],
        renamed["r"],
        renamed["c"],
        renamed["k"],
        a,
        b,
        in_loops(stores, moved),
        _contiguous(a, arguments),
        _contiguous(b, arguments),
        max(4, ITEM_SIZES[host.dtype]),
        _skips(b, {*renamed["b"], *renamed["c"][:-1], *renamed["k"][:-1]}),
    )


def _skips(b: Scalar, uniform: set[Axis]) -> tuple[Bound, ...]:
    """Return those bounds of an operand that depend on some loops alone."""
    if not isinstance(b, Guarded) or not isinstance(b.other, Constant) or b.other.value != 0:
        return ()
    return tuple([bound for bound in b.bounds if axes_of(bound[0]) <= uniform and not _fetches(bound[0])])


def _fetches(index: Index) -> bool:
    return any(isinstance(atom, Fetched) for atom in atoms_of(index))


def _roles(loops: Loops, a: Scalar, b: Scalar) -> tuple[Loops, Loops, Loops]:
    """Return the loops that both operands depend on, those of `a` alone (or of none), those of `b` alone."""
    in_a, in_b = _axes_in(a), _axes_in(b)
    both = tuple([x for x in loops if x in in_a and x in in_b])
    rows = tuple([x for x in loops if x not in in_b])
    cols = tuple([x for x in loops if x in in_b and x not in in_a])
    return both, rows, cols


def _axes_in(scalar: Scalar) -> set[Axis]:
    indices = [*accessed(scalar), *[i for load in reads_of(scalar) for i in load.indices]]
    return set().union(*[axes_of(i) for i in indices]) if indices else set()


def _inner_strides(loops: Loops, a: Scalar, b: Scalar, arguments: Arguments) -> dict[Axis, int]:
    """Return strides to order the inner loops by: of the operand that has neighbours along one of them."""
    both = [_strides(operand, arguments) for operand in (a, b)]
    for strides in both:
        if any(strides.get(x) == 1 for x in loops if x.extent > 1):
            return strides
    return both[0]


def _strides(scalar: Scalar, arguments: Arguments) -> dict[Axis, int]:
    loads = [s for s in walk(scalar) if isinstance(s, Read)]
    if not loads:
        return {}
    load = max(loads, key=lambda load: load.tensor.numel)
    strides = strides_of(offset_of(arguments.sites[load.tensor], load.indices))
    return {axis: abs(stride) for axis, stride in strides.items()}


def _contiguous(scalar: Scalar, arguments: Arguments) -> frozenset[Axis]:
    return frozenset([x for x, stride in _strides(scalar, arguments).items() if stride == 1])


def last_of(loops: Loops) -> Axis:
    """Return the innermost loop; for none, a loop of one round that nothing depends on."""
    return loops[-1] if loops else Axis("none", 1)


def places(loops: Loops, position: str, lane: Axis | None = None, width: int = 1) -> list[str]:
    """Return the statements that compute loop variables from a row-major position (C text, not negative).

    lane: the loop whose variable counts blocks of `width`; the innermost one.
    """
    if not loops:
        return []
    extents = [(axis.name, axis.extent) for axis in reversed(loops)]
    if width > 1 and lane is not None and lane == loops[-1]:
        extents[0] = lane.name, lane.extent // width
        position = f"(uint)({position}) / {width}"
    return [f"const int {name} = {text};" for name, text in digits(position, extents)]


@dataclass(frozen=True, slots=True)
class OperandText:
    """An operand's value as text: `width` neighbours along a loop, statements, then `value` of type `type`.

    along_inner: the neighbours lie along the innermost of the inner loops. place, inner_place: statements
    that find the loop variables of rows (or columns) and of inner loops. axes: those that `place` finds.
    """

    lines: tuple[str, ...]
    value: str
    type: str
    width: int
    along_inner: bool
    place: tuple[str, ...] = ()
    inner_place: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


def widest(axis: Axis, *limits: int) -> int:
    """Return the widest power of two that divides a loop and all limits."""
    width = min(limits)
    while axis.extent % width or any(limit % width for limit in limits):
        width //= 2
    return width


@dataclass(slots=True)
class Texts:
    """Renders the operands and results of one kernel; the helpers they need collect in `helpers`.

    dtype: of the sum.
    """

    arguments: Arguments
    dtype: str
    helpers: dict[str, None] = field(default_factory=dict)
    scopes: int = 0

    def read(self, operand: Scalar, lane: Axis | None, width: int, along_inner: bool = False) -> OperandText:
        """Return an operand's value at `width` neighbours along a loop."""
        renderer = self._renderer(lane, width)
        value = renderer.value(operand, wide=True)
        return OperandText(tuple(renderer.lines), value, renderer.type_of(self.dtype), width, along_inner)

    @property
    def type(self) -> str:
        """OpenCL type of the sum."""
        return COMPUTE[self.dtype]

    def meets(self, product: Product, block_cols: int) -> OperandText | None:
        """Return a test for work of a block of columns at a point of the outer inner loops; None: always."""
        if not product.skips or product.run % block_cols:
            return None
        test = Guarded(product.skips, constant(1, "int32"), constant(0, "int32"))
        place = places(product.cols, "col0")
        return replace(self.read(test, None, 1), place=tuple(place))

    def write(self, stores: Stores, lane: Axis | None, width: int) -> OperandText:
        """Return the statements that store everything made of the local `acc`, `width` neighbours at once."""
        renderer = self._renderer(lane, width)
        write_all(renderer, stores, self.arguments)
        return OperandText(tuple(renderer.lines), "", renderer.type_of(self.dtype), width, False)

    def _renderer(self, lane: Axis | None, width: int) -> Renderer:
        self.scopes += 1
        prefix = f"v{self.scopes}_"
        return Renderer(self.arguments.site_of, lane if width > 1 else None, width, [], self.helpers, prefix)
