"""Checks an arena against the launches it was planned for; shares nothing with the planner."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping

from torchedge.errors import PlanError
from torchedge.lowering.programs import Program


def check_arena(program: Program, alignment: int, streamed: Mapping[int, int] | None = None) -> None:
    """Raise PlanError at the first fault of the program's arena.

    streamed: the first launch beside which each weight in the arena is loaded.

    Faults: a tensor without a place or with two, an offset that is not a multiple of `alignment` or lies
    outside the arena, an image larger than its slot, two live tensors that overlap.
    """
    arena, tensors, loads = program.arena, program.tensors, streamed or {}
    touched = _touched(program, loads)
    for index in sorted({*touched, *loads, *arena.offset, *arena.slot}):
        if not 0 <= index < len(tensors) or not (tensors[index].role == "intermediate" or index in loads):
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
    _check_contents(program, touched, loads)


def _touched(program: Program, loads: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the launches that touch each intermediate and each streamed weight."""
    touched: dict[int, list[int]] = defaultdict(list)
    for position, launch in enumerate(program.launches):
        for index in launch.tensors:
            if program.tensors[index].role == "intermediate" or index in loads:
                touched[index].append(position)
    return touched


class _Alive:
    """The tensors whose content is needed, by their place in the arena.

    Buffers are sorted by their offset. Those that are alive share no byte, but for a tensor that dies in the
    launch that writes another one over it: so a tensor overlaps only neighbours, and a step is checked in
    time that grows with its launches, not with pairs of tensors. Empty tensors overlap nothing.
    """

    def __init__(self, program: Program) -> None:
        self._arena, self._tensors = program.arena, program.tensors
        self._buffers: list[tuple[int, int]] = []
        self._images: dict[int, set[int]] = defaultdict(set)
        self.tensors: set[int] = set()

    def add(self, index: int) -> None:
        self.tensors.add(index)
        if index in self._arena.slot:
            self._images[self._arena.slot[index]].add(index)
        elif self._tensors[index].nbytes:
            insort(self._buffers, (self._arena.offset[index], index))

    def remove(self, index: int) -> None:
        self.tensors.remove(index)
        if index in self._arena.slot:
            self._images[self._arena.slot[index]].remove(index)
        elif self._tensors[index].nbytes:
            del self._buffers[bisect_left(self._buffers, (self._arena.offset[index], index))]

    def under(self, index: int) -> list[int]:
        """Return the tensors whose memory a tensor shares."""
        if index in self._arena.slot:
            return sorted(self._images[self._arena.slot[index]])
        start = self._arena.offset[index]
        end = start + self._tensors[index].nbytes
        place = bisect_left(self._buffers, (end,)) - 1 if end > start else -1
        others: list[int] = []
        before = None  # the first offset at or below the start: nothing in front of it reaches further
        while place >= 0 and before in (None, self._buffers[place][0]):
            offset, other = self._buffers[place]
            before = offset if offset <= start else None
            if offset + self._tensors[other].nbytes > start:
                others.append(other)
            place -= 1
        return sorted(others)


def _check_contents(program: Program, touched: dict[int, list[int]], loads: Mapping[int, int]) -> None:
    """Simulate the step: neither a launch nor a load beside it may overwrite a tensor that is still read."""
    unused = [index for index in loads if not touched[index]]
    if unused:
        raise PlanError(f"arena: no launch uses {program.tensors[unused[0]].name}; do not stream it")
    outputs, alive = frozenset(program.outputs), _Alive(program)
    in_place = [frozenset(kernel.in_place) for kernel in program.kernels]
    starting: dict[int, list[int]] = defaultdict(list)
    for index, first in sorted(loads.items()):
        starting[first].append(index)
    for position, launch in enumerate(program.launches):
        kernel = program.kernels[launch.kernel]
        for index in starting[position]:
            for other in alive.under(index):
                raise PlanError(
                    f"arena: {program.tensors[index].name} is loaded beside launch {position} over "
                    f"{program.tensors[other].name}, which is still needed; plan the arena again"
                )
            alive.add(index)
        here = [
            (at, index)
            for at, index in enumerate(launch.tensors)
            if program.tensors[index].role == "intermediate" or index in loads
        ]
        for at, index in here:
            if index in loads and (index not in alive.tensors or kernel.access[at] != "read"):
                raise PlanError(
                    f"launch {position}, kernel {kernel.name}, writes {program.tensors[index].name} or reads "
                    "it before it is loaded; plan the arena again"
                )
            if index in alive.tensors:
                continue
            if kernel.access[at] != "write":
                raise PlanError(f"launch {position} reads {program.tensors[index].name} before it is written")
            for other in alive.under(index):
                dies = touched[other][-1] == position and other not in outputs
                places = [(a, at) for a, i in here if i == other]
                same = program.arena.offset.get(index) == program.arena.offset.get(other)
                if not (dies and same and places and all(p in in_place[launch.kernel] for p in places)):
                    raise PlanError(
                        f"arena: launch {position}, kernel {kernel.name}, writes "
                        f"{program.tensors[index].name} over {program.tensors[other].name}, which is "
                        "still needed; plan the arena again"
                    )
            alive.add(index)
        for index in {index for _, index in here}:
            if touched[index][-1] == position and index not in outputs:
                alive.remove(index)
