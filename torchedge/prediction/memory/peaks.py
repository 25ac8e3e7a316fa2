"""Simulated allocator peaks of graphs and of families of graphs at any batch size.

The peak of live tensors is exact at every batch size and cheap. Blocks and segments add to it; that ratio is
replayed at four batch sizes and interpolated between them over log2(N), so that a result does not depend on
earlier batch sizes. Where the workspaces of the device's library are known, every batch size is
replayed, from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray, IntArray
from torchedge.graphs import ForwardGraph, GraphFamily
from torchedge.graphs.graph import parameters_of
from torchedge.graphs.sizes import Amount, Amounts, Poly, Size
from torchedge.prediction.memory.caching_allocator import ReplayRows
from torchedge.prediction.memory.compiled_replay import replay_all
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import multiplies, replays_first, written
from torchedge.prediction.memory.tape import ALIGNMENT, Tape
from torchedge.prediction.memory.workspaces import known_bytes

ANCHORS = (4, 16, 64, 256)
"""Batch sizes whose allocator is replayed. Chosen by cross-validation of Γ: four do as well as replaying
every row."""

_BATCH = "N"
_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Peaks:
    """Simulated figures of R rows: allocated, reserved and parameters (R,) MiB, has linear layers (R,)."""

    batch: FloatArray
    allocated: FloatArray
    reserved: FloatArray
    parameters: FloatArray
    linear: npt.NDArray[np.bool_]

    def some(self, rows: npt.NDArray[np.bool_]) -> Peaks:
        """Return the figures of some rows."""
        return Peaks(*[getattr(self, field.name)[rows] for field in fields(self)])


@dataclass(frozen=True, slots=True)
class GraphTraits:
    """Inputs of a prediction beside a graph's tape and work.

    parameters in MiB, whether the graph multiplies matrices, the dtype of most of the parameters' elements.
    """

    parameters_mib: float
    multiplies: bool
    dtype: str


def graph_traits(graph: ForwardGraph) -> GraphTraits:
    """Return the traits of a graph."""
    total, elements = sum([v.nbytes[0] for v in parameters_of(graph.unread)]), dict[str, int]()
    for value in graph.parameters:
        size, dtype = value.nbytes[0], value.dtype
        total += size
        elements[dtype] = elements.get(dtype, 0) + size // value.item_size
    most = max(elements, key=lambda dtype: elements[dtype], default="float32")
    return GraphTraits(total / 2**20, multiplies(graph), most)


def simulate_peaks(
    tapes: Sequence[Tape], traits: Sequence[GraphTraits], which: npt.NDArray[np.intp], batch: FloatArray
) -> Peaks:
    """Return the simulated peaks of rows: the graph of `tapes[which[r]]` and its traits, at `batch[r]`."""
    allocated, reserved = np.empty(len(which)), np.empty(len(which))
    for index in np.unique(which):
        rows = which == index
        allocated[rows], reserved[rows] = peaks_mib(tapes[index], batch[rows].astype(np.int64))
    parameters = np.array([t.parameters_mib for t in traits])
    linear = np.array([t.multiplies for t in traits])
    return Peaks(np.asarray(batch, dtype=float), allocated, reserved, parameters[which], linear[which])


def peaks_mib(tape: Tape, batch: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return the allocated and the reserved peak in MiB, (B,) each, at batch sizes (B,)."""
    allocated, reserved = _event_peaks(tape, batch)
    return tape.scales[0] * allocated, tape.scales[1] * reserved


def _event_peaks(tape: Tape, batch: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    if tape.scratch is not None or tape.from_start is not None:  # workspaces leap with the batch size
        pairs = _replayed(tape, batch.tolist()) / _MIB
        return pairs[:, 0], pairs[:, 1]
    live = tape.peak_bytes(batch) / _MIB
    needed, weights = anchor_weights(batch)
    ratios = _ratios(tape, [ANCHORS[index] for index in needed])
    allocated, reserved = (
        live * sum(weights[:, place] * pair[which] for place, pair in enumerate(ratios)) for which in (0, 1)
    )
    return allocated, reserved


def anchor_weights(batch: npt.NDArray[np.int64]) -> tuple[list[int], FloatArray]:
    """Return the A anchors that batch sizes (B,) lie on or between, as indices, and their weights (B, A)."""
    position = np.log2(np.clip(batch, ANCHORS[0], ANCHORS[-1]))
    knots = np.log2(ANCHORS)
    weights = np.stack([np.interp(position, knots, row) for row in np.eye(len(ANCHORS))], axis=1)
    needed: list[int] = np.flatnonzero(weights.any(axis=0)).tolist()
    return needed, weights[:, needed]


def _replayed(tape: Tape, batches: Sequence[int]) -> IntArray:
    """Return both replayed peaks in bytes (B, 2); each batch size is replayed once."""
    missing = [batch for batch in dict.fromkeys(batches) if batch not in tape.replayed]
    if missing:
        (peaks,) = replay_all([step_rows(tape, np.array(missing))])
        for batch, (allocated, reserved) in zip(missing, peaks.tolist(), strict=True):
            tape.replayed[batch] = allocated, reserved
    return np.array([tape.replayed[batch] for batch in batches], dtype=np.int64)


def step_rows(tape: Tape, batches: npt.NDArray[np.int64]) -> ReplayRows:
    """Return the rows to replay for batch sizes (B,): the first step, if there is one, and a steady one."""
    run = tape if tape.from_start is None else tape.from_start
    units = (run.bytes_at(batches) // ALIGNMENT).T
    return ReplayRows(run.events, run.persistent, units, run.counted_from)


def _ratios(tape: Tape, batches: Sequence[int]) -> list[tuple[float, float]]:
    """Return both replayed peaks over the live peak at anchors; each is computed once."""
    missing = [batch for batch in batches if batch not in tape.ratios]
    if missing:
        lives = tape.peak_bytes(np.array(missing)).tolist()
        for batch, live, peaks in zip(missing, lives, _replayed(tape, missing).tolist(), strict=True):
            tape.ratios[batch] = peaks[0] / live, peaks[1] / live
    return [tape.ratios[batch] for batch in batches]


# families of graphs ---------------------------------------------------------------------------------------


def family_peaks(groups: Sequence[tuple[FamilyTape, IntArray]], batch_size: int) -> Peaks:
    """Return the simulated peaks of members of families, the rows of all groups in order.

    Each group: a tape and the values (D, C) of its symbols. The allocator is replayed for all at once.
    """
    prepared = [tape.rows(values, batch_size) for tape, values in groups]
    replayed = replay_all([rows for rows, _ in prepared])
    peaks = [
        tape.peaks(values, batch_size, live, bytes_of_rows)
        for (tape, values), (_, live), bytes_of_rows in zip(groups, prepared, replayed, strict=True)
    ]
    return Peaks(*[np.concatenate([getattr(p, field.name) for p in peaks]) for field in fields(Peaks)])


class FamilyTape:
    """The allocations of a step of each of a family's graphs: one order of events, sizes by symbols.

    Every batch size is replayed itself where the first step comes before the steady one, and where there are
    workspaces, which leap with it.
    """

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        program, _ = written(family.template, settings, first=False)
        from_start = replays_first(family.template, settings)
        if from_start:
            program = program.after(*written(family.template, settings, first=True))
        self.events = np.array(program.events, dtype=np.int32)
        self.persistent = np.array(program.persistent, dtype=np.int32)
        self.counted_from = program.counted_from
        self.signs = np.sign(self.events).astype(np.int64)[:, None]
        names = (*family.symbols, _BATCH)
        known: dict[Poly, Amount] = {size: _in_batch(size) for size in set(program.sizes)}
        self.sizes = Amounts([known[size] for size in program.sizes], names)
        self.workspaces = settings.workspaces if program.scratch else None
        self.each_batch = from_start or self.workspaces is not None
        self.scratch = np.array([storage for storage, _, _ in program.scratch], dtype=np.intp)
        self.names = np.array([name for _, name, _ in program.scratch], dtype=np.intp)
        geometry = [_in_batch(entry) for _, _, entries in program.scratch for entry in entries]
        self.geometry = Amounts(geometry, names, float)
        weights = (*family.template.parameters, *parameters_of(family.template.unread))
        parameters: Amount = sum((v.nbytes[0] for v in weights), start=0)
        self.parameters = Amounts([parameters], family.symbols)
        self.multiplies = multiplies(family.template)

    def rows(self, values: IntArray, batch_size: int) -> tuple[ReplayRows, FloatArray]:
        """Return the rows to replay for candidates (D, C), and live peaks in MiB (C, 1 + A).

        The first live peak is that at the batch size; the others, and the rows, are at its A anchors. Where
        each batch size is replayed, the rows are at the batch size, and no live peaks are needed.
        """
        count = values.shape[1]
        batches = np.array([batch_size, *([] if self.each_batch else _anchors(batch_size)[0])])
        columns = np.concatenate([np.repeat(values, len(batches), axis=1), [np.tile(batches, count)]])
        units = -(-self._bytes(columns) // ALIGNMENT)
        if self.each_batch:
            return ReplayRows(self.events, self.persistent, units.T, self.counted_from), np.zeros((count, 0))
        changes = units[np.abs(self.events) - 1] * self.signs
        rise = np.cumsum(changes, axis=0).max(axis=0, initial=0)
        live = (rise + units[self.persistent].sum(axis=0)) * (ALIGNMENT / _MIB)
        live = np.asarray(live).reshape(count, -1)
        at_anchors = units.T.reshape(count, len(batches), -1)[:, 1:].reshape(-1, len(units))
        return ReplayRows(self.events, self.persistent, at_anchors), live

    def peaks(self, values: IntArray, batch_size: int, live: FloatArray, replayed: IntArray) -> Peaks:
        """Return the simulated peaks of candidates from the live peaks and the peaks (R, 2) of `rows`."""
        count = values.shape[1]
        if self.each_batch:
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
            sizes[self.scratch] = known_bytes(self.workspaces, self.names, geometry).T
        return sizes


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
