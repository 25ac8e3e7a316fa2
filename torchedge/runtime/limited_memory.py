"""The programs of a Trainer within a memory limit: frozen weights are streamed from a file of their own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy.typing as npt
import torch

from torchedge.bundles.weights import read_header, write_weights
from torchedge.errors import InputError, LimitError
from torchedge.graphs import SHARED_ROLES, WEIGHT_ROLES
from torchedge.lowering.arenas import common_arena, total_bytes
from torchedge.lowering.programs import Arena, Program
from torchedge.opencl import ClDevice
from torchedge.runtime.executors import Executor
from torchedge.runtime.tensor_memory import fingerprint
from torchedge.runtime.weight_sources import FileSource
from torchedge.storage import cache_folder
from torchedge.streaming.budgets import Budgeted, in_mib
from torchedge.streaming.far_uses import whole_name
from torchedge.streaming.repeating import Fitted, fit_in_turn, least_held, plan_beside
from torchedge.streaming.schedules import StreamingSchedule

_FILE = "weights.safetensors"
_SCALARS = 1024
"""Bytes for the loss and the flags of an evaluation on a batch like the first one, beside its inputs."""


class LimitedMemory:
    """Executors of programs that run one at a time, in one arena; all that they allocate is within a limit.

    The first programs decide which weights are streamed, and whether activations are computed again. Frozen
    weights must not change afterwards.
    """

    def __init__(self, limit: int, device: ClDevice, *, profile: bool) -> None:
        self.limit, self._device, self._profile = limit, device, profile
        self._executors: list[Executor] = []
        self._arenas: list[Arena] = []
        self._source: _OpenFile | None = None
        self._streamed: dict[str, int] = {}
        self.recomputes = False

    def open(
        self, programs: Sequence[Program], tensors: Mapping[str, torch.Tensor], fitted: Fitted | None
    ) -> list[Executor]:
        """Return the executors of programs, loaded: of the first ones with their plans, or of later ones.

        Raises:
            LimitError: they do not run within the limit.
        """
        first = self._executors[0] if self._executors else None
        if first is None:
            assert fitted is not None
            plans, self.recomputes = fitted.plans, any(fitted.recomputed)
            self._arenas = [plan.schedule.program.arena for plan in plans]
            self._write(programs, tensors)
            names = {
                whole_name(p.schedule.program.tensors[i].name) for p in plans for i in p.schedule.streamed
            }
            self._streamed = {name: fingerprint(tensors[name]) for name in names}
        else:
            assert first.schedule is not None
            plans = [self._beside(program, first.schedule) for program in programs]
        opened = []
        for plan in plans:
            schedule, owner = plan.schedule, self._executors[0] if self._executors else None
            arena = schedule.program.arena
            in_turn, fits = self._in_turn(arena)
            if owner is not None:
                self._check_room(schedule.program, 0 if fits else total_bytes(arena))
            assert self._source is not None
            executor = Executor(
                schedule,
                self._device,
                source=self._source,
                profile=self._profile,
                shared=owner,
                in_turn=in_turn if fits else (),
            )
            self._executors.append(executor)
            own = {t.name for t in executor.program.tensors if t.role in ("state", "constant")}
            missing = {*executor.missing(), *(own if owner is None else own - _shared(owner.program))}
            executor.load({name: array_of(tensors[name]) for name in missing & tensors.keys()})
            opened.append(executor)
        return opened

    def fitted(self, programs: Sequence[Program]) -> Fitted:
        """Return the plans of the first programs; raises LimitError where none is within the limit."""
        inputs = [programs[0].tensors[index] for index in programs[0].inputs]
        # Each program has constants of its own, of which a plan counts those of one name once.
        first = {tensor.name for tensor in programs[0].residents if tensor.role == "constant"}
        again = [t for program in programs[1:] for t in program.residents if t.name in first]
        beside = _SCALARS + sum(tensor.nbytes for tensor in (*inputs, *again))
        return fit_in_turn(programs, self.limit, beside=beside, constants=False)

    def _beside(self, program: Program, first: StreamingSchedule) -> Budgeted:
        """Plan a later program: as it is, or if the memory at hand does not do, with activations repeated."""
        plan = plan_beside(program, first)
        if not self.recomputes or self._in_turn(plan.schedule.program.arena)[1]:
            return plan
        return plan_beside(least_held(program), first)

    def _in_turn(self, arena: Arena) -> tuple[list[Arena], bool]:
        """Return the arenas of all programs and another one, and whether it fits into what is allocated."""
        in_turn = [*self._arenas, *(() if arena in self._arenas else (arena,))]
        one, other = common_arena(in_turn), common_arena(self._arenas)
        return in_turn, (one.buffers, one.slots) == (other.buffers, other.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that all executors hold."""
        return sum(executor.own_bytes for executor in self._executors)

    def forget(self, executor: Executor) -> None:
        """Leave out an executor that is closed."""
        self._executors = [each for each in self._executors if each is not executor]

    def check_frozen(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise InputError where a weight that is streamed is not what it was."""
        for name, mark in self._streamed.items():
            if name in tensors and fingerprint(tensors[name]) != mark:
                raise InputError(
                    f"{name} has changed, and it is streamed from a file that was written before; expected a "
                    "frozen weight: make another Trainer"
                )

    def close(self) -> None:
        """Close the file; it has no name any more."""
        if self._source is not None:
            self._source.end()
        self._source, self._executors = None, []

    def _write(self, programs: Sequence[Program], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of the first programs into a file without a name."""
        stored = {t.name for p in programs for t in p.tensors if t.role in WEIGHT_ROLES}
        constants = {t.name for p in programs for t in p.tensors if t.role == "constant"}
        data = {name: array_of(tensors[name]) for name in stored & tensors.keys()}
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(dir=cache, prefix="trainer-"))
        try:
            path = folder / _FILE
            write_weights(path, programs, data)
            places = read_header(path).places
            # Other programs may have other constants of these names.
            self._source = _OpenFile(path, {n: place for n, place in places.items() if n not in constants})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _check_room(self, program: Program, arena_bytes: int) -> None:
        """Raise LimitError where a later program takes more than the others leave."""
        held = _shared(self._executors[0].program)
        own = sum(tensor.nbytes for tensor in program.residents if tensor.name not in held)
        needed = self.nbytes + own + arena_bytes
        if needed > self.limit:
            raise LimitError(
                f"{program.name} takes {needed} bytes beside the programs that are there, more than "
                f"{in_mib(self.limit)} MiB; give the largest batch as the example, pass smaller ones, or "
                "raise the memory limit",
                works_bytes=needed,
            )


class _OpenFile(FileSource):
    """A file that several executors use: none of them closes it."""

    def close(self) -> None:
        """Leave it open."""

    def end(self) -> None:
        """Close it."""
        super().close()


def _shared(program: Program) -> set[str]:
    """Return the names of the tensors of a program that later ones use."""
    return {tensor.name for tensor in program.residents if tensor.role in SHARED_ROLES}


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of any device as an array in main memory."""
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array
