"""Contractions in normal form: batch, rows, columns and inner loops in the order of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from torchedge.expressions.dialect import offset_of
from torchedge.expressions.indices import ZERO, Axis, Floor, Index, axes_of, flatten, of
from torchedge.expressions.scalars import (
    Bound,
    Constant,
    Guarded,
    Local,
    Read,
    Scalar,
    fetched_by,
    reads_of,
    substitute,
    walk,
)
from torchedge.expressions.sizes import digits
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.fusion import ACCUMULATED, Computed, FusionGroup
from torchedge.lowering.kernels.loops import (
    Stores,
    accessed,
    every_offset,
    in_loops,
    in_memory_order,
    joined,
    strides_of,
)
from torchedge.lowering.kernels.rows import PART, RowsNest, joined_slices
from torchedge.lowering.kernels.sources import Arguments
from torchedge.lowering.nodes import Contraction, Node, Stage
from torchedge.lowering.schedules import ContractionExtents

Loops = tuple[Axis, ...]

_RUN = 32
"""Neighbours in whose runs items are shared alike: twice the longest vector, the smallest usual group."""


@dataclass(frozen=True, slots=True)
class Product:
    """out[batch, row, col] = epilogue(sum over `inner` of a · b): `a` depends on rows, `b` on columns.

    Loops run from the outermost to the innermost; those of extent 1 are gone, neighbours that are one in
    memory are joined. stores: what is written, at which element, in terms of the loops and the local `acc`.
    a_contiguous, b_contiguous: the loops along which the operands' neighbours lie side by side in memory.
    b_shared: those along which several neighbours of `b` share an item, and items lie side by side (two
    weights of four bits in a byte).
    skips: bounds outside which `b` is zero for whole runs of columns and of the innermost loop (taps that a
    phase of a strided convolution's gradient does not use). dtype: of a sum. joined: the loops of results as
    few as possible, and what those of batches, rows and columns are in them.
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
    b_shared: frozenset[Axis]
    dtype: str
    joined: tuple[Loops, Mapping[Axis, Index]] = ((), {})
    skips: tuple[Bound, ...] = ()

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """All that is computed: the operands, then the results."""
        return (self.a, self.b, *[item.value for _, item in self.stores])

    @property
    def positions(self) -> tuple[Loops, ...]:
        """The loops whose positions are counted as one."""
        return self.batch, self.rows, self.cols, self.inner

    def sliced(self, parts: int) -> tuple[Product, RowsNest]:
        """Return the loops that sum each of some slices (split-K), and those that add them."""
        dtype = "float32" if self.dtype == "float16" else self.dtype
        scratch, roles = Node((parts, *self.sizes[:3]), dtype), (self.batch, self.rows, self.cols)
        rows, moved = self.joined
        own, element = (
            [flatten([place[x] for x in loops], [x.extent for x in loops]) for loops in roles]
            for place in ({x: of(x) for loops in roles for x in loops}, moved)
        )
        total = Local(ACCUMULATED, dtype)
        first = replace(self, stores=((scratch, Computed(total, (of(PART), *own))),))
        stages = (Stage(ACCUMULATED, "sum", total, dtype),)
        return first, joined_slices(rows, element, [scratch], stages, in_loops(self.stores, moved))

    @property
    def itemsize(self) -> int:
        """Bytes of a sum in a kernel."""
        return max(4, ITEM_SIZES[self.dtype])

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
    moved_stores = in_loops(stores, moved)
    results = every_offset([c.value for _, c in moved_stores], moved_stores, arguments)
    return Product(
        renamed["b"],
        renamed["r"],
        renamed["c"],
        renamed["k"],
        a,
        b,
        moved_stores,
        _contiguous(a, arguments),
        _contiguous(b, arguments),
        _shared(b, arguments),
        host.dtype,
        joined((*renamed["b"], *renamed["r"], *renamed["c"]), results, "r"),
        _skips(b, {*renamed["b"], *renamed["c"][:-1], *renamed["k"][:-1]}),
    )


def _skips(b: Scalar, uniform: set[Axis]) -> tuple[Bound, ...]:
    """Return those bounds of an operand that depend on some loops alone."""
    if not isinstance(b, Guarded) or not isinstance(b.other, Constant) or b.other.value != 0:
        return ()
    return tuple([bound for bound in b.bounds if axes_of(bound[0]) <= uniform and not fetched_by([bound[0]])])


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


def _offset(scalar: Scalar, arguments: Arguments) -> Index:
    """Return where an operand reads its largest tensor; 0 where it reads none."""
    loads = [s for s in walk(scalar) if isinstance(s, Read)]
    if not loads:
        return ZERO
    load = max(loads, key=lambda load: load.tensor.numel)
    return offset_of(arguments.sites[load.tensor], load.indices)


def _strides(scalar: Scalar, arguments: Arguments) -> dict[Axis, int]:
    strides = strides_of(_offset(scalar, arguments))
    return {axis: abs(stride) for axis, stride in strides.items()}


def _shared(scalar: Scalar, arguments: Arguments) -> frozenset[Axis]:
    offset, lane, found = _offset(scalar, arguments), Axis("lane", _RUN), set[Axis]()
    for axis in axes_of(offset):
        blocks, rest = divmod(axis.extent, lane.extent)
        if rest == 0:
            moved = offset.substitute({axis: of(Axis("block", blocks)) * lane.extent + of(lane)})
            within = [term for term in moved.terms if lane in axes_of(of(term[0]))]
            if (
                [c for _, c in within] == [1]
                and isinstance(atom := within[0][0], Floor)
                and atom.index == of(lane)
            ):
                found.add(axis)
    return frozenset(found)


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
