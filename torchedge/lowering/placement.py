"""How every tensor of a step lies in memory: activations channels last, products as kernels write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchedge.expressions.dialect import Site, offset_of
from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.scalars import Read, Scalar, reads_of
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loops import grain, strides_of
from torchedge.lowering.nodes import Contraction, Node, Rows, Stored
from torchedge.textures.layouts import Layout, row_major


def place_tensors(
    groups: Sequence[FusionGroup],
    stored: Sequence[Stored],
    inputs: Sequence[Stored],
    given: Mapping[str, Layout] | None = None,
) -> dict[Node, Layout]:
    """Return the layout of every tensor that kernels read or write.

    Parameters lie as the first product or reduction that reads them walks them; what a kernel makes lies as
    the kernel's loops run; inputs lie as PyTorch passes them. given: layouts of stored tensors that are
    settled, by name.
    """
    layouts: dict[Node, Layout] = {node: row_major(len(node.shape)) for node in inputs}
    if given is not None:
        layouts |= {node: given[node.name] for node in stored if node.name in given}
    for group in groups:
        if isinstance(group.host, Contraction):
            for body in group.bodies:
                _place_operand(group.host, body, layouts)
    for group in groups:
        strides = _loop_strides(group, layouts)
        if isinstance(group.host, Rows):
            for load in reads_of(*group.bodies):
                if isinstance(load.tensor, Stored) and load.tensor not in layouts:
                    layouts[load.tensor] = _as_written(load.tensor.shape, load.indices, strides)
        for node, target in group.stored.items():
            key = target or node
            if key not in layouts:
                layouts[key] = _as_written(key.shape, group.computed[node].element, strides)
            layouts[node] = layouts[key]
        for node in group.reads:
            if isinstance(node, Stored):
                layouts.setdefault(node, row_major(len(node.shape)))
    for node in stored:
        layouts.setdefault(node, row_major(len(node.shape)))
    return layouts


def _place_operand(host: Contraction, body: Scalar, layouts: dict[Node, Layout]) -> None:
    """Let a parameter lie in the order in which a product walks it: sums outside, results innermost."""
    for load in reads_of(body):
        node = load.tensor
        if not isinstance(node, Stored) or node in layouts or len(node.shape) < 2:
            continue
        results = [a for a, role in zip(host.axes, host.roles, strict=True) if role != "batch"]
        batches = [a for a, role in zip(host.axes, host.roles, strict=True) if role == "batch"]
        order = [*batches, *host.inner, *results]
        rank = {axis: place for place, axis in enumerate(order)}
        keys = [max((rank[a] for a, _ in i.terms if a in rank), default=-1) for i in load.indices]
        layouts[node] = Layout(tuple(sorted(range(len(keys)), key=lambda d: (keys[d], d))))


def _loop_strides(group: FusionGroup, layouts: Mapping[Node, Layout]) -> dict[Axis, int]:
    """Return strides for a host's axes that say in which order its results should lie."""
    host = group.host
    if isinstance(host, Contraction):
        for node, target in group.stored.items():
            if target in layouts and target is not None:
                site = Site("", target.shape, target.dtype, layouts[target])
                return strides_of(offset_of(site, group.computed[node].element))
        cols = [a for a, role in zip(host.axes, host.roles, strict=True) if role == "col"]
        return _dense([*[a for a in host.axes if a not in cols], *cols])
    axes = (*host.outer, *host.inner) if isinstance(host, Rows) else host.axes  # type: ignore[attr-defined]
    loads = reads_of(*group.bodies, *[c.value for c in group.computed.values()])
    known = [load for load in loads if load.tensor in layouts]
    if not known:
        return _dense(axes)
    best = max(known, key=lambda load: (_reach(load, axes), load.tensor.numel))
    strides = strides_of(offset_of(_site(best, layouts), best.indices))
    missing = [a for a in axes if a not in strides]
    return _completed(axes, {a: abs(s) for a, s in strides.items()}, missing)


def _reach(load: Read, axes: Sequence[Axis]) -> int:
    used = {a for i in load.indices for a, _ in i.terms}
    total = 1
    for axis in axes:
        total *= axis.extent if axis in used else 1
    return total


def _site(load: Read, layouts: Mapping[Node, Layout]) -> Site:
    return Site("", load.tensor.shape, load.dtype, layouts[load.tensor])


def _dense(order: Sequence[Axis]) -> dict[Axis, int]:
    """Return the strides of axes that lie in this order without gaps."""
    strides: dict[Axis, int] = {}
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= axis.extent
    return strides


def _completed(axes: Sequence[Axis], strides: Mapping[Axis, int], missing: Sequence[Axis]) -> dict[Axis, int]:
    """Return dense strides in the order of known ones; unknown axes stay beside their right neighbour."""
    rank: dict[Axis, float] = {}
    following = 0.5
    for axis in reversed(axes):
        following = strides[axis] if axis not in missing else following + 0.25
        rank[axis] = following
    return _dense(sorted(axes, key=lambda a: (-rank[a], axes.index(a))))


def _as_written(shape: Sequence[int], element: Sequence[Index], strides: Mapping[Axis, int]) -> Layout:
    """Return the layout in which the elements of a tensor follow each other as a kernel's loops make them."""
    steps = [grain(index, strides) for index in element]
    kept = [d for d in range(len(shape)) if shape[d] > 1]
    ones = [d for d in range(len(shape)) if shape[d] <= 1]
    return Layout((*ones, *sorted(kept, key=lambda d: (-steps[d], d))))
