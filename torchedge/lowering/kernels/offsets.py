"""Kernels that find their tensors in buffers of the arena, with the offset of each tensor as an argument.

A launch whose arguments are parts of the arena's buffer costs NVIDIA's driver more than the launch itself.
With offsets all launches share one memory object. Like a loading slot, offsets are added to a kernel's text,
so that the form with offsets follows from the kernel of a program alone.

`restrict` stays as it is: it speaks of elements, not of buffers. The tensors of a launch do not overlap in
the arena, save in the pairs of `Kernel.in_place`, whose arguments are not `restrict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchedge.lowering.kernel_texts import BUFFER, text_of
from torchedge.lowering.programs import MAX_ARGUMENT_BYTES, Kernel, Program

UNIT_BYTES = 512
"""Unit of the offsets, a power of two: places in arenas that `lower` plans are multiples of it."""


@dataclass(frozen=True, slots=True)
class OffsetKernel:
    """A kernel with offsets: `moved` are the arguments that have one, in the order of the offsets.

    The offsets are uint arguments behind all others, in units of `UNIT_BYTES`.
    """

    kernel: Kernel
    moved: tuple[int, ...]


def with_offsets(kernel: Kernel, moved: Sequence[int], most: int = MAX_ARGUMENT_BYTES) -> OffsetKernel:
    """Return a kernel that computes the same on tensors at offsets within the memory of `moved` arguments.

    No argument has an offset in a text that this package does not write, or where offsets would take more
    than `most` bytes of arguments, by default those that every device takes.
    """
    text = text_of(kernel)
    buffers = [BUFFER.fullmatch(parameter) for parameter in text.parameters] if text else []
    nbytes = 8 * (len(kernel.access) + kernel.checks) + 4 * (kernel.sizes + len(moved))
    own = [buffers[place] for place in moved if place < len(buffers)]
    if text is None or not moved or nbytes > most or None in own:
        return OffsetKernel(kernel, ())
    lines, numbers = [], []
    for buffer in filter(None, own):
        const, kind, name = buffer.group("const", "type", "name")
        raw, kind = f"{const or ''}uchar", f"{const or ''}{kind}"
        shift = f"((ulong){name}_at << {UNIT_BYTES.bit_length() - 1})"
        lines.append(f"  {name} = (__global {kind}*)((__global {raw}*){name} + {shift});")
        numbers.append(f"const uint {name}_at")
    parameters = (*text.parameters, *numbers)
    changed = replace(text, name="", parameters=parameters, lines=(*lines, *text.lines))
    changed = changed.named(f"{kernel.name}_at", 6)
    return OffsetKernel(replace(kernel, name=changed.name, source=changed.source), tuple(moved))


def offset_kernels(program: Program, most: int = MAX_ARGUMENT_BYTES) -> list[OffsetKernel]:
    """Return the kernels of a program with an offset for each argument that lies in a buffer of the arena.

    most: as in `with_offsets`. An argument has one if it lies there in any launch; a tensor elsewhere has the
    offset 0. No kernel has offsets where images are made of the arena: a launch may not use a buffer and its
    parts at once.
    """
    if not all(in_arena(program, index) for index in program.arena.offset):
        return [OffsetKernel(kernel, ()) for kernel in program.kernels]
    moved: list[dict[int, None]] = [{} for _ in program.kernels]
    for launch in program.launches:
        for place, index in enumerate(launch.tensors):
            if in_arena(program, index):
                moved[launch.kernel][place] = None
    return [with_offsets(kernel, sorted(moved[k]), most) for k, kernel in enumerate(program.kernels)]


def in_arena(program: Program, tensor: int) -> bool:
    """Whether a tensor is no image, and lies in a buffer of the arena at a multiple of the unit."""
    arena = program.arena
    if tensor not in arena.offset or program.tensors[tensor].layout.storage != "buffer":
        return False
    return not arena.place(tensor)[1] % UNIT_BYTES
