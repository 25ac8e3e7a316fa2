"""Contractions as kernels: matrix products, convolutions, their gradients, and what follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.expressions.indices import Axis, Index, flatten, of
from torchedge.expressions.scalars import Local, Read, reads_of
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.fusion import ACCUMULATED, Computed, FusionGroup
from torchedge.lowering.kernels.drafts import (
    KernelSource,
    arguments_of,
    fill,
    name_in,
    preamble_of,
    written_by,
)
from torchedge.lowering.kernels.panels import panel_chunks, panel_launch, panel_values
from torchedge.lowering.kernels.pointwise import traffic_of, work_of
from torchedge.lowering.kernels.products import Loops, Product, Texts, places, product_of, widest
from torchedge.lowering.kernels.registers import register_chunks, register_launch, register_values
from torchedge.lowering.kernels.tiles import local_chunks, local_launch, local_values
from torchedge.lowering.nodes import Contraction, Node
from torchedge.lowering.programs import Kernel
from torchedge.lowering.schedules import Extents, Kind, Schedule, default_schedule
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout, row_major

PART = Axis("part", 1 << 16)
"""The loop over the parts of a split contraction."""


Sizes = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A way to compute: its template, what that needs, its launch, how many chunks the inner loops make."""

    template: str
    values: Callable[[Product, Schedule, Texts], dict[str, Any]]
    launch: Callable[[Product, Schedule], tuple[Sizes, Sizes]]
    chunks: Callable[[Product, Schedule], int]


_KINDS: Mapping[Kind, _Kind] = {
    "panel": _Kind("contraction_panel.cl.jinja", panel_values, panel_launch, panel_chunks),
    "register": _Kind("contraction_register.cl.jinja", register_values, register_launch, register_chunks),
    "local": _Kind("contraction_local.cl.jinja", local_values, local_launch, local_chunks),
}


def write_contraction(
    group: FusionGroup, layouts: Mapping[Node, Layout], target: Target, schedule: Schedule | None = None
) -> tuple[KernelSource, ...]:
    """Return the kernels of a group whose host is a contraction: one, or two where its inner loops are split.

    The parts of a split contraction lie in a tensor of their own: a bare Node that the first draft writes and
    the second one reads, row-major. schedule: None for the default of the device class.
    """
    host = group.host
    assert isinstance(host, Contraction)
    arguments = arguments_of(written_by(group), list(group.reads), layouts)
    product = product_of(group, arguments)
    itemsize = max(4, ITEM_SIZES[host.dtype])  # half precision is summed in single
    chosen = schedule or default_schedule(Extents(*product.sizes, itemsize, product.run), target)
    chosen = replace(chosen, parts=_filled_parts(_KINDS[chosen.kind].chunks(product, chosen), chosen.parts))
    if chosen.parts == 1:
        return (_main(group, product, chosen, written_by(group), layouts, target.checks),)
    sizes = (chosen.parts, *product.sizes[:3])
    scratch = Node(sizes, "float32" if host.dtype == "float16" else host.dtype)
    element = (of(PART), *[_position(loops) for loops in (product.batch, product.rows, product.cols)])
    partial = replace(product, stores=((scratch, Computed(Local(ACCUMULATED, scratch.dtype), element)),))
    held = {**layouts, scratch: row_major(4)}
    return (
        _main(group, partial, chosen, [(scratch, None)], held, target.checks),
        _sum(group, product, chosen, Read(scratch, element, scratch.dtype), held, target),
    )


def _filled_parts(chunks: int, parts: int) -> int:
    """Return into how many parts, none of them empty, chunks fall."""
    return -(-chunks // -(-chunks // parts))


def _position(loops: Loops) -> Index:
    return flatten([of(x) for x in loops], [x.extent for x in loops])


def _main(
    group: FusionGroup,
    product: Product,
    schedule: Schedule,
    written: Sequence[Any],
    layouts: Mapping[Node, Layout],
    checks: bool,
) -> KernelSource:
    """Return the kernel that multiplies."""
    host = group.host
    assert isinstance(host, Contraction)
    values = [c.value for _, c in product.stores]
    read = dict.fromkeys(load.tensor for load in reads_of(product.a, product.b, *values))
    arguments = arguments_of(written, list(read), layouts, checks)
    texts = Texts(arguments, host.dtype)
    kind = _KINDS[schedule.kind]
    filled = kind.values(product, schedule, texts)
    source = fill(kind.template, preamble=preamble_of(texts.helpers), arguments=arguments.text, **filled)
    batch, rows, cols, inner = product.sizes
    kernel = Kernel(
        name_in(source),
        source,
        arguments.access,
        host.name,
        host.flops + work_of(values) * host.numel,
        traffic_of(arguments),
        f"{host.name} as {batch} x [{rows}, {inner}] @ [{inner}, {cols}]",
        arguments.checks,
    )
    return KernelSource(kernel, arguments.tensors, *kind.launch(product, schedule), group.scope)


def _sum(
    group: FusionGroup,
    product: Product,
    schedule: Schedule,
    part: Read,
    layouts: Mapping[Node, Layout],
    target: Target,
) -> KernelSource:
    """Return the kernel that adds the parts of a split contraction and does what follows."""
    values = [c.value for _, c in product.stores]
    read = dict.fromkeys(load.tensor for load in (part, *reads_of(*values)))
    arguments = arguments_of(written_by(group), list(read), layouts, target.checks)
    texts = Texts(arguments, part.dtype)
    last = product.cols[-1] if product.cols else Axis("none", 1)
    width = widest(last, target.vector)
    summand = texts.read(part, last, width)
    epilogue = replace(
        texts.write(product.stores, last, width), place=tuple(places(product.cols, "c", last, width))
    )
    batch, rows, cols, _ = product.sizes
    source = fill(
        "contraction_sum.cl.jinja",
        preamble=preamble_of(texts.helpers),
        arguments=arguments.text,
        rows=rows,
        cols=cols,
        parts=schedule.parts,
        batch_place=places(product.batch, "batch"),
        row_place=places(product.rows, "r"),
        part_lines=summand.lines,
        part_value=summand.value,
        epilogue=epilogue,
    )
    elements = batch * rows * cols
    kernel = Kernel(
        name_in(source),
        source,
        arguments.access,
        "sum of parts",
        (schedule.parts + work_of(values)) * elements,
        traffic_of(arguments),
        f"the sum of {schedule.parts} parts of {elements} elements",
        arguments.checks,
    )
    local = min(64, 1 << (cols // width).bit_length() - 1)
    return KernelSource(
        kernel,
        arguments.tensors,
        (-(-(cols // width) // local) * local, rows, batch),
        (local, 1, 1),
        group.scope,
    )
