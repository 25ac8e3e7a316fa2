"""Families: graphs of one structure that differ in sizes alone, and the edits that make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torchedge.errors import InputError
from torchedge.graphs.footprints import Footprint
from torchedge.graphs.graph import ForwardGraph, moved
from torchedge.graphs.sizes import substituted, symbols_in
from torchedge.storage.locks import cached_property

LEAST = 2
"""The smallest number a symbol may stand for: what is compared with 1 then comes out alike for all graphs."""


@dataclass(frozen=True, eq=False)
class GraphFamily:
    """Graphs of one structure.

    template: a graph whose dimensions and attributes may be `Size`s (polynomials of symbols). symbols: their
    names, in the order in which `graph` takes their values.
    """

    template: ForwardGraph
    symbols: tuple[str, ...]

    def graph(self, values: Sequence[int], name: str | None = None) -> ForwardGraph:
        """Return the graph for values of the symbols; raises InputError for fewer, more or values below 2."""
        if len(values) != len(self.symbols) or any(v < LEAST for v in values):
            raise InputError(
                f"symbols {', '.join(self.symbols)} got {list(values)}; "
                f"expected {len(self.symbols)} whole numbers from {LEAST} on"
            )
        known = dict(zip(self.symbols, values, strict=True))
        concrete = list(self.template.values)
        for index, shape in self._sized_values:
            concrete[index] = replace(concrete[index], shape=substituted(shape, known))
        ops = list(self.template.ops)
        for position in self._sized_ops:
            op = ops[position]
            ops[position] = replace(
                op, attrs=substituted(op.attrs, known), footprint=_at(op.footprint, known)
            )
        unread = tuple([replace(v, shape=substituted(v.shape, known)) for v in self.template.unread])
        name = name or self.template.name
        return replace(self.template, values=tuple(concrete), ops=tuple(ops), unread=unread, name=name)

    @cached_property
    def _sized_values(self) -> tuple[tuple[int, tuple[object, ...]], ...]:
        return tuple((i, v.shape) for i, v in enumerate(self.template.values) if symbols_in(v.shape))

    @cached_property
    def _sized_ops(self) -> tuple[int, ...]:
        return tuple(
            k
            for k, op in enumerate(self.template.ops)
            if symbols_in(op.attrs.values())
            or (op.footprint is not None and any(symbols_in(size.elements) for size in op.footprint.sizes))
        )


def _at(footprint: Footprint | None, known: Mapping[str, int]) -> Footprint | None:
    """Return a footprint with the symbols' numbers in its sizes."""
    if footprint is None:
        return None
    sizes = [replace(size, elements=substituted(size.elements, known)) for size in footprint.sizes]
    return replace(footprint, sizes=tuple(sizes))


def with_shapes(graph: ForwardGraph, shapes: Mapping[int, tuple[object, ...]]) -> ForwardGraph:
    """Return the graph with other shapes (of numbers, affine dimensions or Sizes) for some of its values."""
    values = list(graph.values)
    for index, shape in shapes.items():
        values[index] = replace(values[index], shape=shape)  # type: ignore[arg-type]
    return replace(graph, values=tuple(values))


def without_operators(
    graph: ForwardGraph, removed: Collection[int], stands_for: Mapping[int, int]
) -> ForwardGraph:
    """Return the graph as it would have been captured without some of its operators.

    removed: their positions. stands_for: for values that they made and others read, the value that takes
    their place (what went into the removed part). Values that nobody reads or makes any more go too. A value
    that takes another's place lives until that one was released.
    """
    gone = set(removed)
    remaining = [k for k in range(len(graph.ops)) if k not in gone]
    removed_values = {i for k in gone for i in graph.ops[k].outputs}

    def final(index: int) -> int:
        while index in stands_for:
            index = stands_for[index]
        return index

    alive = {i for k in remaining for i in (*graph.ops[k].inputs, *graph.ops[k].outputs) if i is not None}
    alive |= {*graph.inputs, *graph.outputs} | (set() if graph.loss is None else {graph.loss})
    order = sorted({final(i) for i in alive})
    number = {old: new for new, old in enumerate(order)}
    place = {index: number[final(index)] for index in range(len(graph.values)) if final(index) in number}
    values = [graph.values[old] for old in order]
    return replace(
        graph,
        values=tuple([v if v.alias is None else replace(v, alias=place[v.alias]) for v in values]),
        ops=tuple([moved(graph.ops[k], place) for k in remaining]),
        inputs=tuple([place[i] for i in graph.inputs]),
        outputs=tuple([place[i] for i in graph.outputs]),
        loss=None if graph.loss is None else place[graph.loss],
        releases=_releases(graph, gone, removed_values | set(stands_for.values()), place),
    )


def _releases(
    graph: ForwardGraph, gone: Collection[int], dropped: Collection[int], place: Mapping[int, int]
) -> tuple[tuple[int, ...], ...] | None:
    """Return the releases behind the operators that stay; `dropped` are not released in removed ones."""
    if graph.releases is None:
        return None
    releases: list[list[int]] = []
    for position, released in enumerate(graph.releases):
        if position not in gone:
            releases.append([])
        alive = [i for i in released if position not in gone or i not in dropped]
        if alive and releases:
            releases[-1] += [place[i] for i in alive if i in place]
    seen: set[int] = set()
    for entries in reversed(releases):  # a value lives until the last of those it stands for is released
        entries[:] = [i for i in entries if i not in seen]
        seen.update(entries)
    return tuple(map(tuple, releases))
