"""Checks an arena against the launches it was planned for; shares nothing with the planner."""

from __future__ import annotations

from collections import defaultdict

from torchedge.errors import PlanError
from torchedge.lowering.programs import Program


def check_arena(program: Program, alignment: int) -> None:
    """Raise PlanError at the first fault of the program's arena.

    Faults: a tensor without a place or with two, an offset that is not a multiple of `alignment` or lies
    outside the arena, an image larger than its slot, two live tensors that overlap.
    """
    arena, tensors = program.arena, program.tensors
    touched = _touched(program)
    for index in sorted({*touched, *arena.offset, *arena.slot}):
        if not 0 <= index < len(tensors) or tensors[index].role != "intermediate":
            raise PlanError(
                f"arena: tensor {index} is no intermediate of {program.name}; plan the arena again"
            )
        if (index in arena.offset) == (index in arena.slot):
            raise PlanError(f"arena: {tensors[index].name} has no place, or two; plan the arena again")
    for index, offset in arena.offset.items():
        end = offset + tensors[index].nbytes
        if offset < 0 or offset % alignment or end > arena.nbytes:
            raise PlanError(
                f"arena: {tensors[index].name} lies at bytes {offset} to {end}, expected a multiple of "
                f"{alignment} within {arena.nbytes}; plan the arena again"
            )
    for index, slot in arena.slot.items():
        tensor = tensors[index]
        width, height = tensor.layout.extent(tensor.shape)
        known = 0 <= slot < len(arena.slots)
        if not known or width > arena.slots[slot][0] or height > arena.slots[slot][1]:
            raise PlanError(f"arena: {tensor.name} of {width} x {height} texels does not fit slot {slot}")
        if tensor.layout.storage != "image" or tensor.dtype != arena.slots[slot][2]:
            raise PlanError(f"arena: {tensor.name} is no {arena.slots[slot][2]} image as its slot {slot} is")
    _check_contents(program, touched)


def _touched(program: Program) -> dict[int, list[int]]:
    """Return the launches that touch each intermediate."""
    touched: dict[int, list[int]] = defaultdict(list)
    for position, launch in enumerate(program.launches):
        for index in launch.tensors:
            if program.tensors[index].role == "intermediate":
                touched[index].append(position)
    return touched


def _check_contents(program: Program, touched: dict[int, list[int]]) -> None:
    """Simulate the step: a launch may not overwrite a tensor that it or a later launch reads."""
    alive: set[int] = set()
    for position, launch in enumerate(program.launches):
        kernel = program.kernels[launch.kernel]
        here = [
            (at, index)
            for at, index in enumerate(launch.tensors)
            if program.tensors[index].role == "intermediate"
        ]
        for at, index in here:
            if index in alive:
                continue
            if kernel.access[at] != "write":
                raise PlanError(f"launch {position} reads {program.tensors[index].name} before it is written")
            for other in sorted(alive):
                if other != index and _overlap(program, index, other):
                    dies = touched[other][-1] == position and other not in program.outputs
                    places = [(a, at) for a, i in here if i == other]
                    same = program.arena.offset.get(index) == program.arena.offset.get(other)
                    if not (dies and same and places and all(p in kernel.in_place for p in places)):
                        raise PlanError(
                            f"arena: launch {position}, kernel {kernel.name}, writes "
                            f"{program.tensors[index].name} over {program.tensors[other].name}, which is "
                            "still needed; plan the arena again"
                        )
            alive.add(index)
        alive = {i for i in alive if touched[i][-1] > position or i in program.outputs}


def _overlap(program: Program, first: int, second: int) -> bool:
    arena = program.arena
    if first in arena.slot or second in arena.slot:
        return arena.slot.get(first, -1) == arena.slot.get(second, -2)
    one, two = arena.offset[first], arena.offset[second]
    return one < two + program.tensors[second].nbytes and two < one + program.tensors[first].nbytes
