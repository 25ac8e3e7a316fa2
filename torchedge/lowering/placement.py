"""How every tensor of a step lies in memory: the order of its dimensions, in a buffer or in a texture.

A result lies in the order in which its kernel's loops run, a parameter in the order in which its first reader
walks it. Textures are a choice for each tensor by device class: on a phone's GPU an image read is the fast
one, on a processor it costs ten buffer reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from torchedge.expressions.dialect import Site, offset_of
from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.scalars import Read, Scalar, fetched_by, reads_of
from torchedge.lowering.arenas import Lifetime, allocations, planned
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loops import axes_below, grain, in_memory_order, strides_of
from torchedge.lowering.nodes import Contraction, Node, Rows, RowsResult, Stored, nodes_below
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.lowering.targets import Target
from torchedge.opencl.platforms import ClDevice
from torchedge.textures.layouts import LANES, Layout, image_layouts, row_major

SMALLEST = 1024
"""Least number of elements of a tensor in an image or in half precision."""
MOST_PADDING = 1.25
"""Largest growth of a tensor by the pitch of its rows; a narrower image gets memory of its own."""


def place_tensors(
    groups: Sequence[FusionGroup],
    stored: Sequence[Stored],
    inputs: Sequence[Stored],
    known: Mapping[str, Layout] | None = None,
) -> dict[Node, Layout]:
    """Return the layout of every tensor that kernels read or write.

    Inputs lie as PyTorch passes them. known: layouts of stored tensors that other programs have settled, by
    name.
    """
    layouts: dict[Node, Layout] = {node: row_major(len(node.shape)) for node in inputs}
    if known is not None:
        layouts |= {node: known[node.name] for node in stored if node.name in known}
    for group in groups:
        if isinstance(group.host, Contraction):
            for body in group.bodies:
                _place_operand(group.host, body, layouts)
    for group in groups:
        strides = _loop_strides(group, layouts)
        if isinstance(group.host, Rows):
            for read in reads_of(*group.bodies):
                if isinstance(read.tensor, Stored) and read.tensor not in layouts:
                    layouts[read.tensor] = _as_written(read.tensor.shape, read.indices, strides)
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
    """Lay out a parameter in the order in which a product walks it: sums outermost, results innermost."""
    for read in reads_of(body):
        node = read.tensor
        if not isinstance(node, Stored) or node in layouts or len(node.shape) < 2:
            continue
        results = [a for a, role in zip(host.axes, host.roles, strict=True) if role != "batch"]
        batches = [a for a, role in zip(host.axes, host.roles, strict=True) if role == "batch"]
        order = [*batches, *host.inner, *results]
        rank = {axis: place for place, axis in enumerate(order)}
        keys = [max((rank[a] for a, _ in i.terms if a in rank), default=-1) for i in read.indices]
        layouts[node] = Layout(tuple(sorted(range(len(keys)), key=lambda d: (keys[d], d))))


def _loop_strides(group: FusionGroup, layouts: Mapping[Node, Layout]) -> dict[Axis, int]:
    """Return strides of a host's axes; their order is the order in which its results should lie."""
    host = group.host
    if isinstance(host, Contraction):
        for node, target in group.stored.items():
            if target in layouts and target is not None:
                site = Site("", target.shape, target.dtype, layouts[target])
                return strides_of(offset_of(site, group.computed[node].element))
        cols = [a for a, role in zip(host.axes, host.roles, strict=True) if role == "col"]
        return _dense([*[a for a in host.axes if a not in cols], *cols])
    axes = (*host.outer, *host.inner) if isinstance(host, Rows) else host.axes  # type: ignore[attr-defined]
    reads = reads_of(*group.bodies, *[c.value for c in group.computed.values()])
    known = [read for read in reads if read.tensor in layouts]
    if not known:
        return _dense(axes)
    best = max(known, key=lambda read: (_reach(read, axes), read.tensor.numel))
    site = Site("", best.tensor.shape, best.dtype, layouts[best.tensor])
    strides = strides_of(offset_of(site, best.indices))
    return _dense(in_memory_order(axes, {axis: abs(stride) for axis, stride in strides.items()}))


def _reach(read: Read, axes: Sequence[Axis]) -> int:
    used = axes_below(read.indices)
    return prod([axis.extent for axis in axes if axis in used])


def _dense(order: Sequence[Axis]) -> dict[Axis, int]:
    """Return the strides of axes that lie in this order without gaps."""
    strides: dict[Axis, int] = {}
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= axis.extent
    return strides


def _as_written(shape: Sequence[int], element: Sequence[Index], strides: Mapping[Axis, int]) -> Layout:
    """Return the layout in which the elements of a tensor follow each other as a kernel's loops make them."""
    steps = [grain(index, strides) for index in element]
    for place in range(len(element) - 2, -1, -1):  # rows that are found in a tensor lie as in the shape
        steps[place] = steps[place] or (steps[place + 1] if fetched_by([element[place]]) else 0)
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    ones = [d for d in range(len(shape)) if shape[d] <= 1]
    return Layout((*ones, *sorted(wide, key=lambda d: (-steps[d], d))))


def store_half(groups: Sequence[FusionGroup], outputs: Sequence[Node]) -> None:
    """Store large intermediates that outputs depend on in half precision; arithmetic stays in single.

    No output depends on gradients: they stay in single precision, since half precision rounds those below
    6e-8 to zero and nothing would show it.
    """
    forward = set(nodes_below(outputs))
    for group in groups:
        for node, target in group.stored.items():
            by_row = isinstance(node, RowsResult) and len(group.computed[node].element) == len(
                node.rows.outer
            )
            own = target is None and node in forward and node not in outputs
            if own and node.dtype == "float32" and not by_row and node.numel >= SMALLEST:
                node.dtype = "float16"


def store_weights_half(stored: Collection[Stored]) -> None:
    """Store matrices of floats in half precision; vectors take little memory and stay as they are."""
    for node in stored:
        if node.dtype == "float32" and len(node.shape) >= 2 and node.numel >= SMALLEST:
            node.dtype = "float16"


def as_images(
    groups: Sequence[FusionGroup], layouts: Mapping[Node, Layout], fixed: Collection[Node], target: Target
) -> dict[Node, Layout]:
    """Return layouts in which tensors lie in images where the target prefers images.

    Overwritten tensors stay in buffers, as do `fixed` ones: inputs and outputs, which PyTorch passes as
    buffers.
    """
    if target.storage == "buffer":
        return dict(layouts)
    buffers = set(fixed)
    for group in groups:
        for node, overwritten in group.stored.items():
            buffers |= set() if overwritten is None else {node, overwritten}
    return {
        node: layout if node in buffers else _as_image(node, layout, target)
        for node, layout in layouts.items()
    }


def _as_image(node: Node, layout: Layout, target: Target) -> Layout:
    """Return the layout as an image; unchanged where the tensor is too small, too large or of an odd size."""
    rank = len(node.shape)
    plain = not isinstance(node, Stored) or node.dtype == "float32" or target.half_weights
    if rank < 2 or node.numel < SMALLEST or not plain or not target.has_images_of(node.dtype):
        return layout
    if node.shape[layout.order[-1]] % LANES:
        return layout
    wanted = replace(layout, storage=target.storage, pattern=target.pattern)
    images = image_layouts(wanted, node.shape, target.image_width, target.image_height)
    if not images:
        return layout
    image = images[0]
    if target.storage == "image_buffer":
        width, _ = image.extent(node.shape)
        image = replace(image, row_texels=-(-width // target.pitch) * target.pitch)
    return image


def share_images(program: Program, pitch: int) -> Program:
    """Return the program with its intermediate images made from the arena's buffer, which is still to plan.

    Saves memory on devices that make images from buffers. pitch: rows are multiples of so many texels; 0: the
    device makes none.
    """

    def shared(tensor: StoredTensor) -> StoredTensor:
        layout = tensor.layout
        if tensor.role != "intermediate" or layout.storage != "image":
            return tensor
        width, _ = layout.extent(tensor.shape)
        texels = -(-width // pitch) * pitch
        if texels > MOST_PADDING * width:
            return tensor
        return replace(tensor, layout=replace(layout, storage="image_buffer", row_texels=texels))

    return replace(program, tensors=tuple(map(shared, program.tensors))) if pitch else program


def placed_for(
    program: Program, device: ClDevice, alignment: int, streamed: Mapping[int, Lifetime] | None = None
) -> Program:
    """Return the program with an arena that an OpenCL device takes, planned again where its own is none.

    Images have memory of their own on devices that make none from buffers, and no allocation is larger than
    the device's largest. Kernels and packed weights stay the same. streamed: as `planned` takes them.
    """

    def apart(tensor: StoredTensor) -> StoredTensor:
        if tensor.layout.storage != "image_buffer" or device.image_from_buffer:
            return tensor
        return replace(tensor, layout=replace(tensor.layout, storage="image", row_texels=0))

    arena, tensors = program.arena, tuple(map(apart, program.tensors))
    if max(allocations(arena), default=0) > device.allocation_bytes:
        arena = replace(arena, allocation_bytes=device.allocation_bytes)
    if arena is program.arena and tensors == program.tensors:
        return program
    return planned(replace(program, tensors=tensors, arena=arena), alignment, streamed)
