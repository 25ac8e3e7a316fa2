"""Copies that are launches of their own: of a tensor into another layout, or of new content into an image.

An OpenCL C 1.2 kernel cannot read and write one image. So a weight in an image is updated elsewhere and then
copied; that memory is needed for two launches, where a twin of every weight would stay for good. A reader
that gains more by another layout than a copy costs reads a copy of its own, which lives for two launches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torchedge.expressions.scalars import Read, Scalar, substitute
from torchedge.lowering.fusion import Computed, FusionGroup, copy_of
from torchedge.lowering.nodes import Node, Stored, indices_of
from torchedge.textures.layouts import Layout


def overwritten_in(groups: Sequence[FusionGroup]) -> dict[Stored, Node]:
    """Return the stored tensors that kernels overwrite, and their new content; not those of copies."""
    pairs = [(over, node) for group in groups for node, over in group.stored.items()]
    return {over: node for over, node in pairs if over is not None and over is not node}


def copied_updates(
    groups: Sequence[FusionGroup], targets: Collection[Node], layouts: dict[Node, Layout]
) -> list[FusionGroup]:
    """Return groups that write the new content of `targets` to buffers, each followed by its copy.

    layouts: gets those of the new content.
    """
    parted: list[FusionGroup] = []
    for group in groups:
        moved = {n: over for n, over in group.stored.items() if over in targets and over is not n}
        own = {node: None if node in moved else over for node, over in group.stored.items()}
        parted.append(replace(group, stored=own) if moved else group)
        for node, over in moved.items():
            assert over is not None
            layouts[node] = Layout(layouts[over].order)
            parted.append(copy_group(node, over, group.place))
    return parted


def copied_reads(
    groups: Sequence[FusionGroup],
    copies: Mapping[FusionGroup, tuple[Node, Layout]],
    layouts: dict[Node, Layout],
) -> list[FusionGroup]:
    """Return groups in which some read a copy of one tensor in another layout, made right before.

    layouts: gets those of the copies.
    """
    parted: list[FusionGroup] = []
    for group in groups:
        if group in copies:
            tensor, layout = copies[group]
            copied = Node(tensor.shape, tensor.dtype, scope=group.scope)
            layouts[copied] = layout
            parted.append(copy_group(tensor, copied, group.place))
            group = _reading(group, tensor, copied)
        parted.append(group)
    return parted


def copy_group(source: Node, copied: Node, place: int = 0) -> FusionGroup:
    """Return the kernel that copies a tensor; `copied` may be a stored tensor, which it overwrites."""
    host = copy_of(source)
    over = copied if isinstance(copied, Stored) else None
    computed = {copied: Computed(host.body, indices_of(host.axes))}
    return FusionGroup(host, computed, place, reads={source: None}, stored={copied: over})


def _reading(group: FusionGroup, tensor: Node, copied: Node) -> FusionGroup:
    """Return the group with reads of one tensor replaced by reads of its copy."""

    def moved(access: Read) -> Scalar | None:
        return Read(copied, access.indices, access.dtype) if access.tensor is tensor else None

    return replace(
        group,
        bodies=tuple([substitute(body, {}, moved) for body in group.bodies]),
        computed={node: item.moved({}, moved) for node, item in group.computed.items()},
        reads={copied if node is tensor else node: None for node in group.reads},
    )
