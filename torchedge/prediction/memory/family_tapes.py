"""The allocations of a family's graphs: one order of events for all of them, sizes by symbols."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.graphs import GraphFamily, Poly, Size
from torchedge.graphs.sizes import Amount, Amounts
from torchedge.prediction.memory.anchors import ANCHORS, anchor_weights
from torchedge.prediction.memory.compiled_pools import Task, replay_tasks
from torchedge.prediction.memory.model import Peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import multiplies, write_step
from torchedge.prediction.memory.tape import ALIGNMENT, TapeWriter
from torchedge.prediction.memory.workspaces import PHASES, WorkspaceModel

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_BATCH = "N"
_MIB = 2.0**20


def family_peaks(groups: Sequence[tuple[FamilyTape, IntArray]], batch_size: int) -> Peaks:
    """Return the simulated peaks of members of families, the rows of all groups in order.

    Each group: a tape and the values (D, C) of its symbols. The allocator is replayed for all at once.
    """
    prepared = [tape.task(values, batch_size) for tape, values in groups]
    replayed = replay_tasks([task for task, _ in prepared])
    peaks = [
        tape.peaks(values, batch_size, live, found)
        for (tape, values), (_, live), found in zip(groups, prepared, replayed, strict=True)
    ]
    return Peaks(
        *(
            np.concatenate([getattr(p, name) for p in peaks])
            for name in ("batch", "allocated", "reserved", "parameters", "linear")
        )
    )


class FamilyTape:
    """The allocations of a step of each of a family's graphs, as `memory.anchors` simulates them.

    Where the workspaces of the device's library are known, the first step comes before the steady one whose
    peaks count, and every batch size is replayed itself.
    """

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        program = _Program(family, settings)
        self.events = np.array(program.events, dtype=np.int32)
        self.persistent = np.array(program.persistent, dtype=np.int32)
        self.counted_from = program.counted_from
        self.signs = np.sign(self.events).astype(np.int64)[:, None]
        names = (*family.symbols, _BATCH)
        known: dict[Poly, Amount] = {size: _in_batch(size) for size in set(program.sizes)}
        self.sizes = Amounts([known[size] for size in program.sizes], names)
        self.workspaces = settings.workspaces if program.scratch else None
        self.scratch = np.array([storage for storage, _, _ in program.scratch], dtype=np.intp)
        self.phases = np.array([phase for _, phase, _ in program.scratch], dtype=np.intp)
        geometry = [_in_batch(entry) for _, _, entries in program.scratch for entry in entries]
        self.geometry = Amounts(geometry, names, float)
        parameters: Amount = sum((v.nbytes[0] for v in family.template.parameters), start=0)
        self.parameters = Amounts([parameters], family.symbols)
        self.multiplies = multiplies(family.template)

    def task(self, values: IntArray, batch_size: int) -> tuple[Task, FloatArray]:
        """Return what is to be replayed of candidates (D, C), and their live peaks in MiB (C, 1 + A).

        The first live peak is that at the batch size; the others, and the task's rows, are at its A anchors.
        With workspaces the task's rows are at the batch size, and no live peaks are needed.
        """
        count = values.shape[1]
        batches = np.array([batch_size, *([] if self.workspaces is not None else _anchors(batch_size)[0])])
        columns = np.concatenate([np.repeat(values, len(batches), axis=1), [np.tile(batches, count)]])
        units = -(-self._bytes(columns) // ALIGNMENT)
        if self.workspaces is not None:
            return Task(self.events, self.persistent, units.T, self.counted_from), np.zeros((count, 0))
        live = np.asarray(self._live(units) * (ALIGNMENT / _MIB)).reshape(count, -1)
        rows = units.T.reshape(count, len(batches), -1)[:, 1:].reshape(-1, len(units))
        return Task(self.events, self.persistent, rows), live

    def peaks(self, values: IntArray, batch_size: int, live: FloatArray, replayed: IntArray) -> Peaks:
        """Return the simulated peaks of candidates from what `task` gave and its rows' peaks (R, 2)."""
        count = values.shape[1]
        if self.workspaces is not None:
            allocated, reserved = replayed.T / _MIB
        else:
            ratios = replayed.reshape(count, -1, 2) / _MIB / live[:, 1:, None]
            allocated, reserved = live[:, 0] * sum(
                weight * ratios[:, place].T for place, weight in enumerate(_anchors(batch_size)[1])
            )  # not a matrix product, whose last bit depends on how many rows it has
        return Peaks(
            np.full(count, float(batch_size)),
            allocated,
            reserved,
            self.parameters.at(values)[0] / _MIB,
            np.full(count, self.multiplies),
        )

    def _bytes(self, columns: IntArray) -> IntArray:
        """Return the sizes (S, R) of all storages for columns of symbols, the batch size being the last."""
        sizes = self.sizes.at(columns)
        if self.workspaces is not None:
            geometry = self.geometry.at(columns).T.reshape(columns.shape[1], len(self.scratch), -1)
            sizes[self.scratch] = _known_bytes(self.workspaces, self.phases, geometry).T
        return sizes

    def _live(self, units: IntArray) -> IntArray:
        """Return the most units alive at once, of sizes (S, R): (R,)."""
        changes = units[np.abs(self.events) - 1] * self.signs
        rise = np.cumsum(changes, axis=0).max(axis=0, initial=0)
        return np.asarray(rise + units[self.persistent].sum(axis=0))


class _Program:
    """Events of a steady step, or of the first step and a steady one that finds what it left."""

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        steady, _ = _written(family, settings, first=False)
        self.events, self.persistent, self.counted_from = steady.events, steady.persistent, 0
        self.sizes, self.scratch = steady.sizes, steady.scratch
        if settings.workspaces is None or not steady.scratch or family.template.loss is None:
            return
        before, left = _written(family, settings, first=True)
        if len(left) != len(steady.persistent):
            return
        offset = len(before.sizes)
        place = dict(zip(steady.persistent, left, strict=True))
        moved = [place.get(storage, storage + offset) for storage in range(len(steady.sizes))]
        after = [moved[e - 1] + 1 if e > 0 else -moved[-e - 1] - 1 for e in steady.events]
        self.counted_from = len(before.events)
        self.events, self.persistent = [*before.events, *after], before.persistent
        self.sizes = [*before.sizes, *steady.sizes]
        self.scratch = [
            *before.scratch,
            *((moved[s], phase, entries) for s, phase, entries in steady.scratch),
        ]


def _written(family: GraphFamily, settings: StepSettings, *, first: bool) -> tuple[TapeWriter, list[int]]:
    step = write_step(family.template, settings, first)
    left = step.remaining()
    step.tape.close(left)
    return step.tape, left


_known: WeakKeyDictionary[WorkspaceModel, dict[bytes, int]] = WeakKeyDictionary()


def _known_bytes(model: WorkspaceModel, phases: npt.NDArray[np.intp], geometry: FloatArray) -> IntArray:
    """Return (R, W) bytes of workspaces of convolutions (R, W, 8): each different one is worked out once."""
    known = _known.setdefault(model, {})
    lines = np.concatenate([geometry, np.broadcast_to(phases[:, None], (*geometry.shape[:2], 1))], axis=2)
    lines = np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]))
    keys, first, which = np.unique(
        lines.view(np.dtype((np.void, lines.dtype.itemsize * lines.shape[1])))[:, 0],
        return_index=True,
        return_inverse=True,
    )
    names = [key.tobytes() for key in keys]
    missing = np.array([place for place, name in enumerate(names) if name not in known], dtype=np.intp)
    rows = lines[first[missing]]
    for index, phase in enumerate(PHASES):
        chosen = rows[:, -1] == index
        for place, size in zip(
            missing[chosen], model.bytes_of(phase, rows[chosen, :-1]).tolist(), strict=True
        ):
            known[names[place]] = size
    return np.array([known[name] for name in names], dtype=np.int64)[which].reshape(geometry.shape[:2])


@lru_cache(maxsize=16)
def _anchors(batch_size: int) -> tuple[list[int], list[float]]:
    """Return the anchors that a batch size lies on or between, and their weights."""
    needed, weights = anchor_weights(np.array([batch_size]))
    return [ANCHORS[index] for index in needed], weights[0].tolist()


def _in_batch(coefficients: Poly) -> Amount:
    """Return an amount given by powers of the batch size as one with the batch size among its symbols."""
    batch = Size.symbol(_BATCH)
    c0, c1, c2 = coefficients
    return c0 + batch * c1 + batch * batch * c2
