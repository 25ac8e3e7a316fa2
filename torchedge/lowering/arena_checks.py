"""Checks an arena against the launches it was planned for; shares nothing with the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torchedge.errors import PlanError
from torchedge.lowering.programs import Program


def check_arena(program: Program, alignment: int, streamed: Mapping[int, int] | None = None) -> None:
    """Raise PlanError at the first fault of the program's arena.

    streamed: the first launch beside which each weight in the arena is loaded.

    Faults: a tensor without a place or with two, an offset that is not a multiple of `alignment` or lies
    outside the arena, a tensor in two pieces, an image larger than its slot, two live tensors that overlap.
    """
    arena, tensors, loads = program.arena, program.tensors, streamed or {}
    touched: dict[int, list[int]] = defaultdict(list)
    for position, launch in enumerate(program.launches):
        for index in launch.tensors:
            if tensors[index].role == "intermediate" or index in loads:
                touched[index].append(position)
    for index in sorted({*touched, *loads, *arena.offset, *arena.slot}):
        if not 0 <= index < len(tensors) or not (tensors[index].role == "intermediate" or index in loads):
            raise PlanError(
                f"arena: tensor {index} is no intermediate of {program.name}; plan the arena again"
            )
        if (index in arena.offset) == (index in arena.slot):
            raise PlanError(f"arena: {tensors[index].name} has no place, or two; plan the arena again")
    if arena.pieces and sum(arena.pieces) != arena.nbytes:
        raise PlanError(f"arena: its pieces have {sum(arena.pieces)} bytes, expected {arena.nbytes}")
    bounds = np.cumsum(arena.pieces)
    for index, offset in arena.offset.items():
        end = offset + tensors[index].nbytes
        if offset < 0 or offset % alignment or end > arena.nbytes:
            raise PlanError(
                f"arena: {tensors[index].name} lies at bytes {offset} to {end}, expected a multiple of "
                f"{alignment} within {arena.nbytes}; plan the arena again"
            )
        if ((offset < bounds) & (bounds < end)).any():
            raise PlanError(f"arena: {tensors[index].name} lies in two of its pieces; plan the arena again")
    for index, slot in arena.slot.items():
        tensor = tensors[index]
        width, height = tensor.layout.extent(tensor.shape)
        known = 0 <= slot < len(arena.slots)
        if not known or width > arena.slots[slot][0] or height > arena.slots[slot][1]:
            raise PlanError(f"arena: {tensor.name} of {width} x {height} texels does not fit slot {slot}")
        if tensor.layout.storage != "image" or tensor.dtype != arena.slots[slot][2]:
            raise PlanError(f"arena: {tensor.name} is no {arena.slots[slot][2]} image as its slot {slot} is")
    _check_contents(program, touched, loads)


def _ranges(program: Program) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first byte of each tensor and the one behind its last; slots lie behind the buffer.

    Empty tensors, and those outside the arena, share no memory: (-1, -1).
    """
    low, high = np.full((2, len(program.tensors)), -1, np.int64)
    for index, offset in program.arena.offset.items():
        if program.tensors[index].nbytes:
            low[index], high[index] = offset, offset + program.tensors[index].nbytes
    for index, slot in program.arena.slot.items():
        low[index], high[index] = program.arena.nbytes + slot, program.arena.nbytes + slot + 1
    return low, high


def _check_contents(program: Program, touched: dict[int, list[int]], loads: Mapping[int, int]) -> None:
    """Simulate the step: neither a launch nor a load beside it may overwrite a tensor that is still read."""
    unused = [index for index in loads if not touched[index]]
    if unused:
        raise PlanError(f"arena: no launch uses {program.tensors[unused[0]].name}; do not stream it")
    outputs, (low, high) = frozenset(program.outputs), _ranges(program)
    alive = np.zeros(len(program.tensors), bool)

    def under(index: int) -> list[int]:
        """Return the tensors in use whose memory a tensor shares."""
        others: list[int] = np.flatnonzero(alive & (low < high[index]) & (low[index] < high)).tolist()
        return others

    in_place = [frozenset(kernel.in_place) for kernel in program.kernels]
    starting: dict[int, list[int]] = defaultdict(list)
    for index, first in sorted(loads.items()):
        starting[first].append(index)
    for position, launch in enumerate(program.launches):
        kernel = program.kernels[launch.kernel]
        for index in starting[position]:
            for other in under(index):
                raise PlanError(
                    f"arena: {program.tensors[index].name} is loaded beside launch {position} over "
                    f"{program.tensors[other].name}, which is still needed; plan the arena again"
                )
            alive[index] = True
        here = [
            (at, index)
            for at, index in enumerate(launch.tensors)
            if program.tensors[index].role == "intermediate" or index in loads
        ]
        for at, index in here:
            if index in loads and (not alive[index] or kernel.access[at] != "read"):
                raise PlanError(
                    f"launch {position}, kernel {kernel.name}, writes {program.tensors[index].name} or reads "
                    "it before it is loaded; plan the arena again"
                )
            if alive[index]:
                continue
            if kernel.access[at] != "write":
                raise PlanError(f"launch {position} reads {program.tensors[index].name} before it is written")
            for other in under(index):
                dies = touched[other][-1] == position and other not in outputs
                places = [(a, at) for a, i in here if i == other]
                same = program.arena.offset.get(index) == program.arena.offset.get(other)
                if not (dies and same and places and all(p in in_place[launch.kernel] for p in places)):
                    raise PlanError(
                        f"arena: launch {position}, kernel {kernel.name}, writes "
                        f"{program.tensors[index].name} over {program.tensors[other].name}, which is "
                        "still needed; plan the arena again"
                    )
            alive[index] = True
        for index in {index for _, index in here}:
            if touched[index][-1] == position and index not in outputs:
                alive[index] = False
