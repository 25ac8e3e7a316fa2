"""Which tensors lie in textures: a choice for each tensor, after the device class.

On a phone's GPU an image read is the fast one, on a CPU it costs ten buffer reads: the target says which
storage is tried. A tensor whose kernel cannot write whole texels, and one that is overwritten, stays in a
buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torchedge.errors import DeviceError
from torchedge.expressions.texels import LANES, TexelError
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.drafts import KernelSource
from torchedge.lowering.nodes import Node, RowsResult, Stored
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout, fitted

SMALLEST = 1024
"""Elements from which on a tensor is worth an image, or half precision."""

Drafter = Callable[[FusionGroup, Mapping[Node, Layout]], Sequence[KernelSource]]


def store_half(groups: Sequence[FusionGroup], outputs: Collection[Node]) -> None:
    """Let large intermediates of floats lie in half precision; arithmetic stays in single precision."""
    for group in groups:
        for node, target in group.stored.items():
            by_row = isinstance(node, RowsResult) and len(group.computed[node].element) == len(
                node.rows.outer
            )
            own = target is None and node not in outputs
            if own and node.dtype == "float32" and not by_row and node.numel >= SMALLEST:
                node.dtype = "float16"


def choose_storages(
    groups: Sequence[FusionGroup],
    layouts: Mapping[Node, Layout],
    fixed: Collection[Node],
    target: Target,
    draft: Drafter,
) -> dict[Node, Layout]:
    """Return layouts in which tensors lie in images where the target prefers them and kernels can write them.

    fixed: tensors that stay as they are (inputs and outputs, which PyTorch passes as buffers).
    """
    found = dict(layouts)
    if target.storage == "buffer":
        return found
    overwritten: set[Node] = set()
    for group in groups:
        for node, over in group.stored.items():
            overwritten |= set() if over is None else {node, over}
    for node in layouts:
        if node not in fixed and node not in overwritten:
            found[node] = _as_image(node, layouts[node], target)
    for group in groups:
        while any(found[n].storage != "buffer" for n in group.stored if n in found):
            try:
                draft(group, found)
                break
            except TexelError as error:
                blamed = [n for n in group.stored if found[n] is error.site.layout]
                for node in blamed or list(group.stored):
                    found[node] = layouts[node]
    return found


def _as_image(node: Node, layout: Layout, target: Target) -> Layout:
    """Return the layout as an image, or as it is where it would be too small, odd or too large for one."""
    rank = len(node.shape)
    plain = not isinstance(node, Stored) or node.dtype == "float32"
    if rank < 2 or node.numel < SMALLEST or not plain or node.dtype not in ("float32", "float16"):
        return layout
    if node.shape[layout.order[-1]] % LANES:
        return layout
    split = rank - 2 if rank > 3 else rank - 1
    image = replace(layout, storage=target.storage, split=split, pattern=target.pattern)
    try:
        image = fitted(image, node.shape, target.image_width, target.image_height)
    except DeviceError:
        return layout
    if target.storage == "image_buffer":
        width, _ = image.extent(node.shape)
        image = replace(image, row_texels=-(-width // target.pitch) * target.pitch)
    return image
