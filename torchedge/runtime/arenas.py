"""The arena on the device: one buffer for all intermediates that lie in buffers, an image for each slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchedge.errors import OpenCLError
from torchedge.lowering.programs import Program
from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.memory import allocate_buffer, allocate_image, sub_buffer
from torchedge.runtime.tensors import image_of


@dataclass(frozen=True, slots=True, eq=False)
class ArenaMemory:
    """Memory objects of the intermediates by tensor, the allocations behind them, and parts of the buffer."""

    memory: dict[int, Any]
    buffer: Any
    images: tuple[Any, ...]
    parts: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        held = [self.buffer, *self.images] if self.buffer is not None else list(self.images)
        return sum(memory.size for memory in held)

    def __del__(self) -> None:
        # In reverse: NVIDIA's driver (580.159) crashes where overlapping parts go as they came.
        self.memory.clear()
        while self.parts:
            self.parts.pop()


def allocate_arena(context: DeviceContext, program: Program) -> ArenaMemory:
    """Allocate what the program's arena plans, to the byte.

    Raises:
        DeviceMemoryError: the device has too little. OpenCLError: it gives another size than was planned.
    """
    arena, what = program.arena, f"arena of program {program.name}"
    buffer = allocate_buffer(context, arena.nbytes, what) if arena.nbytes else None
    if buffer is not None and buffer.size != arena.nbytes:
        raise OpenCLError(f"{what}: {arena.nbytes} bytes planned, the driver gave {buffer.size}; report this")
    images = tuple(
        [allocate_image(context, width, height, dtype, what) for width, height, dtype in arena.slots]
    )
    parts: list[Any] = []
    known: dict[tuple[int, int], Any] = {}
    memory: dict[int, Any] = {}
    for index, offset in arena.offset.items():
        tensor = program.tensors[index]
        place = (offset, tensor.nbytes)
        if place not in known:
            known[place] = sub_buffer(context, buffer, offset, tensor.nbytes, f"{what}: {tensor.name}")
            parts.append(known[place])
        memory[index] = known[place]
        if tensor.layout.storage == "image_buffer":
            memory[index] = image_of(context, tensor, known[place])
            parts.append(memory[index])
    memory |= {index: images[slot] for index, slot in arena.slot.items()}
    return ArenaMemory(memory, buffer, images, parts)
