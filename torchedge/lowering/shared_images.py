"""Images that share the arena's buffer, where a device makes images of buffers; and images of their own.

Kernels take an image2d either way: only the memory behind it differs, so that a program for a phone also runs
on a device that makes no images of buffers, at the price of more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchedge.lowering.arenas import planned
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.textures.layouts import Layout

MOST_PADDING = 1.25
"""How much larger a tensor may get by the pitch of its rows; a narrower image keeps memory of its own."""


def share_images(program: Program, pitch: int, alignment: int) -> Program:
    """Return the program with its intermediate images made of the arena's buffer, planned again.

    pitch: texels that rows are a multiple of. alignment: bytes that offsets are.
    """

    def shared(tensor: StoredTensor) -> Layout:
        layout = tensor.layout
        if tensor.role != "intermediate" or layout.storage != "image":
            return layout
        width, _ = layout.extent(tensor.shape)
        made = replace(layout, storage="image_buffer", row_texels=-(-width // pitch) * pitch)
        return made if made.row_texels <= MOST_PADDING * width else layout

    return _stored(program, shared, alignment)


def part_images(program: Program, alignment: int) -> Program:
    """Return the program with an image of its own behind each image, planned again; weights lie the same."""

    def own(tensor: StoredTensor) -> Layout:
        if tensor.layout.storage != "image_buffer":
            return tensor.layout
        return replace(tensor.layout, storage="image", row_texels=0)

    return _stored(program, own, alignment)


def _stored(program: Program, place: Callable[[StoredTensor], Layout], alignment: int) -> Program:
    tensors = tuple([replace(tensor, layout=place(tensor)) for tensor in program.tensors])
    if tensors == program.tensors:
        return program
    return planned(replace(program, tensors=tensors), alignment)
