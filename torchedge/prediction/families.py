"""Predictions for many graphs of one structure: what differs between them is worked out for all at once.

The step of a family's template is written down once, its sizes being polynomials of symbols. For candidates
these are then evaluated together, and what is left to do one by one is the allocator's replay. Results are
those of `predict_graphs` for the graphs one by one, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.graphs import GraphFamily, Poly, Size
from torchedge.graphs.garbage import collection_paused
from torchedge.graphs.sizes import Amount, Amounts
from torchedge.prediction.feature_sets import feature_rows
from torchedge.prediction.latency.workload import (
    DEPTHWISE_COLUMNS,
    PRODUCT_COLUMNS,
    Workload,
    count_amounts,
)
from torchedge.prediction.memory.anchors import ANCHORS, anchor_weights
from torchedge.prediction.memory.compiled_pools import Task, replay_tasks
from torchedge.prediction.memory.model import Peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.stepping import multiplies, remaining, run_step
from torchedge.prediction.memory.tape import ALIGNMENT
from torchedge.prediction.memory.workspaces import scratch_bytes
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import load_models

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Members = tuple[GraphFamily, IntArray]
"""A family and the values (D, C) of its symbols for C of its graphs, a column each."""

_BATCH = "N"
_MIB = 2.0**20


class FamilyPredictor:
    """Predictions for members of families on one device, in one mode, under one setting of the step.

    Rows are the members of all groups in order. Families are analysed once, as long as they exist.
    """

    def __init__(
        self, device: Device, mode: Literal["train", "infer"], settings: StepSettings | None = None
    ) -> None:
        self.models = load_models(device, mode)
        self.settings = device_settings(device, settings)
        self._known: WeakKeyDictionary[GraphFamily, FamilyAnalysis | None] = WeakKeyDictionary()

    def latency(
        self, groups: Sequence[Members], batch_size: int, confidence: float | None = None
    ) -> FloatArray:
        """Return Φ or φ of each row in ms (R,), or with a confidence what it stays below."""
        model = self.models.latency
        work = [w for family, values in self._analysed(groups) for w in family.workloads(values)]
        rows, batch = np.arange(len(work)), np.full(len(work), float(batch_size))
        times = model.predict(work, rows, batch, self._columns(model.feature_set, groups, rows, batch))
        if confidence is None:
            return times.value
        one = np.ones(1)
        scale = model.errors.margin(one, confidence) / model.errors.half_width(one)
        return np.asarray(times.value * (times.high / times.value) ** scale)

    def memory(
        self, groups: Sequence[Members], batch_size: int, confidence: float | None = None
    ) -> FloatArray:
        """Return Γ or γ of each row in MiB (R,), or with a confidence what it stays below."""
        model = self.models.memory
        peaks = _peaks([(family.tape, values) for family, values in self._analysed(groups)], batch_size)
        rows = np.arange(len(peaks.batch))
        columns = self._columns(model.feature_set, groups, rows, peaks.batch)
        if confidence is None:
            return model.predict(peaks, columns).value
        return model.required(peaks, confidence, columns)

    def _columns(
        self, feature_set: str | None, groups: Sequence[Members], rows: IntArray, batch: FloatArray
    ) -> FloatArray | None:
        """Return the features (R, F) that a forest reads beside its own, None where it reads none."""
        if feature_set is None:
            return None
        graphs = [family.graph(column.tolist()) for family, values in groups for column in values.T]
        return feature_rows(graphs, rows, batch, feature_set)

    def _analysed(self, groups: Sequence[Members]) -> list[tuple[FamilyAnalysis, IntArray]]:
        """Return the groups' analyses; a family whose rules ask what depends on its sizes falls apart."""
        found = []
        for family, values in groups:
            analysis = self._analysis(family)
            if analysis is not None:
                found.append((analysis, values))
                continue
            for column in values.T:
                alone = GraphFamily(family.graph(column.tolist()), ())
                found.append((FamilyAnalysis(alone, self.settings), np.zeros((0, 1), dtype=np.int64)))
        return found

    def _analysis(self, family: GraphFamily) -> FamilyAnalysis | None:
        if family not in self._known and self.settings.workspaces is not None and family.symbols:
            self._known[family] = None  # what the library takes has to be looked up by size
        if family not in self._known:
            try:
                self._known[family] = FamilyAnalysis(family, self.settings)
            except TypeError:  # from a Size: no answer that holds for all
                if not family.symbols:
                    raise
                self._known[family] = None
        return self._known[family]


def _peaks(groups: Sequence[tuple[FamilyTape, IntArray]], batch_size: int) -> Peaks:
    """Return the simulated peaks of all rows; the allocator is replayed for all at once."""
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


class FamilyAnalysis:
    """The work and the allocations of a family's graphs under one setting.

    Raises TypeError where an operator's rule asks of a size what not all graphs of the family answer alike.
    """

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        found = count_amounts(family.template)
        numbers = [n for line in (*found.products, *found.depthwise) for n in line]
        self._work = Amounts([*numbers, *found.passes, *found.launches], family.symbols, float)
        lengths = [len(found.products) * len(PRODUCT_COLUMNS), len(found.depthwise) * len(DEPTHWISE_COLUMNS)]
        self._ends: list[int] = np.cumsum([*lengths, len(found.passes)]).tolist()
        self._training = family.template.loss is not None
        with collection_paused():
            self._tape = FamilyTape(family, settings)

    def workloads(self, values: IntArray) -> list[Workload]:
        """Return the work of each candidate; values: (D, C), a column of symbols' values a candidate."""
        one, two, three = self._ends
        table = np.ascontiguousarray(self._work.at(values).T)
        dense = table[:, :one].reshape(len(table), -1, len(PRODUCT_COLUMNS))
        deep = table[:, one:two].reshape(len(table), -1, len(DEPTHWISE_COLUMNS))
        return [
            Workload(dense[row], deep[row], table[row, two:three], table[row, three:], self._training)
            for row in range(len(table))
        ]

    @property
    def tape(self) -> FamilyTape:
        """The allocations of a step."""
        return self._tape


class FamilyTape:
    """The allocations of a step of each of a family's graphs: one order of events, sizes by symbols."""

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        step = run_step(family.template, settings)
        writer = step.tape
        writer.close(remaining(step))
        self.events = np.array(writer.events, dtype=np.int32)
        self.persistent = np.array(writer.persistent, dtype=np.int32)
        self.signs = np.sign(self.events).astype(np.int64)[:, None]
        parameters: Amount = sum((v.nbytes[0] for v in family.template.parameters), start=0)
        known: dict[Poly, Amount] = {size: _in_batch(size) for size in set(writer.sizes)}
        names = (*family.symbols, _BATCH)
        self.sizes = Amounts([known[size] for size in writer.sizes], names)
        self.scratch = np.array([storage for storage, _, _ in writer.scratch], dtype=np.intp)
        self.scratch_phases = np.array([phase for _, phase, _ in writer.scratch], dtype=np.intp)
        geometry = [_in_batch(entry) for _, _, entries in writer.scratch for entry in entries]
        self.geometry = Amounts(geometry, names, float)
        self.workspaces = settings.workspaces
        self.parameters = Amounts([parameters], family.symbols)
        self.multiplies = multiplies(family.template)

    def task(self, values: IntArray, batch_size: int) -> tuple[Task, FloatArray]:
        """Return what is to be replayed of candidates (D, C), and their live peaks in MiB (C, 1 + A).

        The first live peak is that at the batch size; the others, and the task's rows, are at its A anchors.
        """
        batches = np.array([batch_size, *_anchors(batch_size)[0]])
        count = values.shape[1]
        columns = np.concatenate([np.repeat(values, len(batches), axis=1), [np.tile(batches, count)]])
        units = -(-self._bytes(columns) // ALIGNMENT)
        live = np.asarray(self._live(units) * (ALIGNMENT / _MIB)).reshape(count, -1)
        rows = units.T.reshape(count, len(batches), -1)[:, 1:].reshape(-1, len(units))
        return Task(self.events, self.persistent, rows), live

    def peaks(self, values: IntArray, batch_size: int, live: FloatArray, replayed: IntArray) -> Peaks:
        """Return the simulated peaks of candidates from what `task` gave and its rows' peaks (C · A, 2)."""
        weights = _anchors(batch_size)[1]
        count = values.shape[1]
        ratios = replayed.reshape(count, -1, 2) / _MIB / live[:, 1:, None]
        allocated, reserved = live[:, 0] * sum(
            weight * ratios[:, place].T for place, weight in enumerate(weights)
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
        if self.workspaces is not None and len(self.scratch):
            count = columns.shape[1]
            geometry = self.geometry.at(columns).T.reshape(count, len(self.scratch), -1)
            sizes[self.scratch] = scratch_bytes(self.workspaces, self.scratch_phases, geometry).T
        return sizes

    def _live(self, units: IntArray) -> IntArray:
        """Return the most units alive at once, of sizes (S, R): (R,)."""
        changes = units[np.abs(self.events) - 1] * self.signs
        rise = np.cumsum(changes, axis=0).max(axis=0, initial=0)
        return np.asarray(rise + units[self.persistent].sum(axis=0))


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
