"""Predictions for families: many graphs of one structure, predicted together.

The step of a family's template is written once, with sizes that are polynomials of symbols. The polynomials
are evaluated for all candidates together; only the allocator is replayed one by one. Results are those of
`predict_graphs` for single graphs, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from torchedge.arrays import FloatArray, IntArray
from torchedge.devices import Device
from torchedge.graphs import GraphFamily, Mode
from torchedge.graphs.sizes import Amounts, UndecidedError
from torchedge.prediction.feature_sets import feature_rows
from torchedge.prediction.latency.workload import DEPTHWISE_COLUMNS, PRODUCT_COLUMNS, Workload, count_amounts
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.peaks import FamilyTape, family_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import load_models

Members = tuple[GraphFamily, IntArray]
"""A family and the values (D, C) of its symbols for C of its graphs, a column each."""


class FamilyPredictor:
    """Predictions for members of families on one device, in one mode, under one setting of the step.

    Rows are the members of all groups in order. Families are analysed once, as long as they exist.
    """

    def __init__(self, device: Device, mode: Mode, settings: StepSettings | None = None) -> None:
        self.settings = device_settings(device, settings)
        self.models = load_models(device, mode, self.settings.timed_on(device).amp)
        self._analyses: WeakKeyDictionary[GraphFamily, FamilyAnalysis | None] = WeakKeyDictionary()

    def latency(
        self, groups: Sequence[Members], batch_size: int, confidence: float | None = None
    ) -> FloatArray:
        """Return Φ or φ of each row in ms (R,), or an upper bound that holds with a confidence."""
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
        """Return the needed memory of each row in MiB (R,), or an upper bound that holds with a confidence.

        It is Γ or γ, and on a board that saturates the part above its ceiling (`Prediction.needed`).
        """
        model = self.models.memory
        peaks = family_peaks([(family.tape, values) for family, values in self._analysed(groups)], batch_size)
        rows = np.arange(len(peaks.batch))
        columns = self._columns(model.feature_set, groups, rows, peaks.batch)
        if confidence is None:
            return model.needed(peaks, columns)
        return model.required(peaks, confidence, columns)

    def _columns(
        self, feature_set: str | None, groups: Sequence[Members], rows: IntArray, batch: FloatArray
    ) -> FloatArray | None:
        """Return the columns (R, F) of a feature set for rows; None: no set."""
        if feature_set is None:
            return None
        graphs = [family.graph(column.tolist()) for family, values in groups for column in values.T]
        return feature_rows(graphs, rows, batch, feature_set)

    def _analysed(self, groups: Sequence[Members]) -> list[tuple[FamilyAnalysis, IntArray]]:
        """Return the groups' analyses; split a family whose rules depend on its sizes into single graphs."""
        analysed = []
        for family, values in groups:
            if family not in self._analyses:
                try:
                    self._analyses[family] = FamilyAnalysis(family, self.settings)
                except UndecidedError:
                    if not family.symbols:
                        raise
                    self._analyses[family] = None
            analysis = self._analyses[family]
            if analysis is not None:
                analysed.append((analysis, values))
                continue
            for column in values.T:
                single = GraphFamily(family.graph(column.tolist()), ())
                analysed.append((FamilyAnalysis(single, self.settings), np.zeros((0, 1), dtype=np.int64)))
        return analysed


class FamilyAnalysis:
    """The work and the allocations of a family's graphs under one setting.

    Raises UndecidedError where an operator's rule depends on a size that differs between the graphs.
    """

    def __init__(self, family: GraphFamily, settings: StepSettings) -> None:
        self._tiled = settings.backend == "cuda"
        lowered = lower_precision(family.template, StepSettings(amp=settings.amp, backend=settings.backend))
        work = count_amounts(lowered)
        numbers = [n for line in (*work.products, *work.depthwise, *work.passes) for n in line]
        self._work = Amounts([*numbers, *work.launches], family.symbols, float)
        lengths = [len(work.products) * len(PRODUCT_COLUMNS), len(work.depthwise) * len(DEPTHWISE_COLUMNS)]
        self._ends: list[int] = np.cumsum([*lengths, 2 * len(work.passes)]).tolist()
        self._training = family.template.loss is not None
        self.tape = FamilyTape(family, settings)

    def workloads(self, values: IntArray) -> list[Workload]:
        """Return the work of each candidate; values: (D, C), a column of symbols' values a candidate."""
        one, two, three = self._ends
        table = np.ascontiguousarray(self._work.at(values).T)
        dense = table[:, :one].reshape(len(table), -1, len(PRODUCT_COLUMNS))
        deep = table[:, one:two].reshape(len(table), -1, len(DEPTHWISE_COLUMNS))
        passes = table[:, two:three].reshape(len(table), -1, 2)
        return [
            Workload(
                dense[row], deep[row], passes[row], table[row, three:], self._training, tiled=self._tiled
            )
            for row in range(len(table))
        ]
