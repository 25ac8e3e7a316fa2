"""The memory of a long run: its first step, later steps, and an evaluation between them, in one allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchedge.prediction.memory.caching_allocator import CachingAllocator
from torchedge.prediction.memory.tape import ALIGNMENT, CATEGORIES, Tape

_MIB = 2.0**20
Places = dict[int, tuple[int, int]]
"""Address and block of storages."""
_INPUTS = CATEGORIES.index("inputs")


@dataclass(frozen=True, slots=True)
class RunStage:
    """A part of a run: peaks of allocated and reserved memory, and what is reserved at its end, MiB."""

    name: str
    allocated_mib: float
    reserved_mib: float
    left_mib: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An inference between steps: its tape, its batch size, whether the cache is emptied around it."""

    tape: Tape
    batch_size: int
    empty_cache: bool = False


def run_stages(first: Tape, steady: Tape, batch_size: int, evaluation: Evaluation) -> tuple[RunStage, ...]:
    """Replay a first step, two later ones, an evaluation and a step after it.

    The evaluation reads the run's own weights and allocates its inputs.
    """
    run = _LongRun()
    remaining = run.step("first step", first, batch_size, [])
    for name in ("second step", "later steps"):
        remaining = run.step(name, steady, batch_size, remaining)
    tape = evaluation.tape
    own = [(steady.labels[k], steady.category[k]) for k in steady.persistent.tolist()]
    places = {label: place for (label, kind), place in zip(own, remaining, strict=True) if kind != _INPUTS}
    shared = {k: places[tape.labels[k]] for k in tape.persistent.tolist() if tape.labels[k] in places}
    if evaluation.empty_cache:
        run.allocator.empty_cache()
    after = run.stage("evaluation", tape, evaluation.batch_size, shared)
    run.free(tape, evaluation.batch_size, {k: place for k, place in after.items() if k not in shared})
    if evaluation.empty_cache:
        run.allocator.empty_cache()
    run.step("step after it", steady, batch_size, remaining)
    return tuple(run.stages)


class _LongRun:
    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.stages: list[RunStage] = []

    def step(
        self, name: str, tape: Tape, batch_size: int, remaining: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Replay a later step, whose storages lie at `remaining`; return where the next one's lie."""
        after = self.stage(
            name, tape, batch_size, dict(zip(tape.persistent.tolist(), remaining, strict=bool(remaining)))
        )
        return [after[k] for k in tape.remaining.tolist()]

    def stage(self, name: str, tape: Tape, batch_size: int, places: Places) -> Places:
        """Replay a tape; persistent storages without a place are allocated. Return where its storages lie."""
        allocator, sizes = self.allocator, _units(tape, batch_size)
        address, block = [0] * len(sizes), [0] * len(sizes)
        for storage, place in places.items():
            address[storage], block[storage] = place
        allocator.reset_peaks()
        allocator.run([k + 1 for k in tape.persistent.tolist() if k not in places], sizes, address, block)
        allocator.run(tape.event_list, sizes, address, block)
        peaks = (allocator.peak, allocator.peak_reserved, allocator.reserved)
        self.stages.append(RunStage(name, *[units * ALIGNMENT / _MIB for units in peaks]))
        return dict(enumerate(zip(address, block, strict=True)))

    def free(self, tape: Tape, batch_size: int, places: Places) -> None:
        """Free the persistent storages of a tape that were allocated for it."""
        sizes = _units(tape, batch_size)
        address, block = [0] * len(sizes), [0] * len(sizes)
        storages = [k for k in tape.persistent.tolist() if k in places]
        for storage in storages:
            address[storage], block[storage] = places[storage]
        self.allocator.run([-k - 1 for k in storages], sizes, address, block)


def _units(tape: Tape, batch_size: int) -> list[int]:
    units: list[int] = (tape.bytes_at(np.array([batch_size]))[:, 0] // ALIGNMENT).tolist()
    return units
