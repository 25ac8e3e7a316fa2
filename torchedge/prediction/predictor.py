"""The Predictor: one device's models, applied to models and graphs, one at a time or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, weakest
from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph
from torchedge.prediction.analysis import Analysis, analyse
from torchedge.prediction.demand import Demand
from torchedge.prediction.feature_sets import feature_rows
from torchedge.prediction.latency.model import Times
from torchedge.prediction.lengths import analyse_length
from torchedge.prediction.memory.model import PredictedMemory
from torchedge.prediction.memory.peaks import Peaks, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import CATEGORIES, Tape
from torchedge.prediction.memory.workspaces import load_workspaces
from torchedge.prediction.profiles import StepModels, load_models
from torchedge.prediction.results import Estimate, Prediction, Predictions, checked_batches
from torchedge.tracing.sequence_lengths import LengthFamily

FloatArray = npt.NDArray[np.float64]
_MIB = 2.0**20


def predict_graph(
    graph: ForwardGraph, batch_size: int, device: Device, settings: StepSettings | None = None
) -> Prediction:
    """Predict one step of a captured graph. See `torchedge.predict` for the meaning of the result."""
    return _predicted(analyse(graph), batch_size, device, device_settings(device, settings))


def predict_length(
    family: LengthFamily, seq_len: int, batch_size: int, device: Device, settings: StepSettings | None = None
) -> Prediction:
    """Predict one step of a model at one sequence length; `needs` of the result serves every other one."""
    settings = device_settings(device, settings)
    return _predicted(_at_length(family, seq_len, device, settings), batch_size, device, settings, family)


def _at_length(family: LengthFamily, seq_len: int, device: Device, settings: StepSettings) -> Analysis:
    length, own = family.check_length(seq_len), analyse(family.own)
    models = _models(device, [own.graph], own.precision(settings))
    if models.memory.feature_set is None and models.latency.feature_set is None:
        return analyse_length(family, length)
    return analyse(family.graph(length))  # feature sets are computed from the graph


def _predicted(
    analysis: Analysis,
    batch_size: int,
    device: Device,
    settings: StepSettings,
    family: LengthFamily | None = None,
) -> Prediction:
    checked, graph = checked_batches(batch_size), analysis.graph
    if checked.ndim:
        raise InputError(
            f"batch_size is {batch_size!r}; expected one whole number (predict_many takes several)"
        )
    graph.check_batch_sizes([int(checked)])
    models = _models(device, [graph], analysis.precision(settings))
    job = _Graphs([graph], [analysis], models, settings)
    tape = analysis.tape(settings)
    row = np.zeros(1, dtype=np.intp)
    batch = checked.reshape(1).astype(np.float64)
    peaks = job.peaks(row, batch)
    memory, times = job.predict(peaks, row, batch)
    outside = models.memory.outside_names(memory.features) + models.latency.outside_names(times.seen)
    needed = _needed(models, memory, peaks)
    breakdown = _breakdown(_categories(tape, int(batch_size)), float(peaks.reserved[0]), needed.value)
    return Prediction(
        memory=Estimate(float(memory.value[0]), float(memory.low[0]), float(memory.high[0]), "MiB"),
        needed=needed,
        latency=Estimate(float(times.value[0]), float(times.low[0]), float(times.high[0]), "ms"),
        allocated=_around(float(peaks.allocated[0]), models.memory.allocated_errors.half_width(np.ones(1))),
        reserved=_around(float(peaks.reserved[0]), models.memory.reserved_errors.half_width(np.ones(1))),
        breakdown=MappingProxyType(breakdown),
        device=device.name,
        device_memory_mib=float(models.memory.limits(peaks.linear)[0]),
        batch_size=int(batch_size),
        mode="train" if graph.loss is not None else "infer",
        model=graph.name,
        unsupported=graph.unsupported,
        out_of_range=outside,
        provenance=models.provenance,
        notes=(*graph.notes, *models.notes, *_not_timed(settings)),
        needs=_demand(analysis, device, settings, models, family),
    )


def _demand(
    analysis: Analysis,
    device: Device,
    settings: StepSettings,
    models: StepModels,
    family: LengthFamily | None,
) -> Demand:
    def at_length(seq_len: int) -> Demand:
        assert family is not None
        return _demand(_at_length(family, seq_len, device, settings), device, settings, models, family)

    demand = Demand(analysis.graph, analysis.tape(settings), analysis.traits, models.memory)
    return demand if family is None else replace(demand, lengths=at_length, longest_length=family.most)


def predict_graphs(
    graphs: Sequence[ForwardGraph],
    batch_sizes: Any,  # noqa: ANN401 - an int or any array of ints
    device: Device,
    settings: StepSettings | None = None,
) -> Predictions:
    """Predict every graph at every batch size: (G,) graphs, (B,) batch sizes give (G, B) arrays."""
    settings = device_settings(device, settings)
    return _predicted_many([analyse(graph) for graph in graphs], batch_sizes, device, settings)


def predict_lengths(
    families: Sequence[LengthFamily],
    batch_sizes: Any,  # noqa: ANN401 - an int or any array of ints
    seq_lens: Sequence[int],
    device: Device,
    settings: StepSettings | None = None,
) -> Predictions:
    """Predict F models at B batch sizes and S sequence lengths: arrays (F, B, S)."""
    settings = device_settings(device, settings)
    tables = [
        _predicted_many(
            [_at_length(f, length, device, settings) for f in families], batch_sizes, device, settings
        )
        for length in seq_lens
    ]
    first = tables[0]
    stacked: dict[str, Any] = {
        name: np.stack([getattr(t, name) for t in tables], axis=2) for name in _arrays(first)
    }
    return replace(first, **stacked, seq_lens=np.array(seq_lens, dtype=np.int64))


def _predicted_many(
    analyses: list[Analysis],
    batch_sizes: Any,  # noqa: ANN401
    device: Device,
    settings: StepSettings,
) -> Predictions:
    batches, graphs = np.atleast_1d(checked_batches(batch_sizes)), [analysis.graph for analysis in analyses]
    if not graphs:
        raise InputError("no graphs are given; expected at least one")
    for graph in graphs:
        graph.check_batch_sizes(batches.tolist())
    precisions = [analysis.precision(settings) for analysis in analyses]
    if len(set(precisions)) > 1:
        return _joined([_predicted_many([analysis], batches, device, settings) for analysis in analyses])
    models = _models(device, graphs, precisions[0])
    job = _Graphs(graphs, analyses, models, settings)
    which = np.repeat(np.arange(len(graphs)), len(batches))
    batch = np.tile(batches, len(graphs)).astype(np.float64)
    peaks = job.peaks(which, batch)
    memory, times = job.predict(peaks, which, batch)
    shape = (len(graphs), len(batches))
    return Predictions(
        batch_sizes=batches,
        memory=memory.value.reshape(shape),
        memory_low=memory.low.reshape(shape),
        memory_high=memory.high.reshape(shape),
        needed=(memory.value + memory.beyond).reshape(shape),
        latency=times.value.reshape(shape),
        latency_low=times.low.reshape(shape),
        latency_high=times.high.reshape(shape),
        allocated=peaks.allocated.reshape(shape),
        reserved=peaks.reserved.reshape(shape),
        out_of_range=(memory.outside | times.outside).reshape(shape),
        device=device.name,
        provenance=models.provenance,
        unsupported=tuple(graph.unsupported for graph in graphs),
        notes=tuple((*graph.notes, *models.notes, *_not_timed(settings)) for graph in graphs),
    )


def _joined(parts: Sequence[Predictions]) -> Predictions:
    """Return predictions of single graphs as one table."""
    first = parts[0]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in _arrays(first)
    }
    return replace(
        first,
        **joined,
        provenance=weakest(part.provenance for part in parts),
        unsupported=tuple(kinds for part in parts for kinds in part.unsupported),
        notes=tuple(notes for part in parts for notes in part.notes),
    )


def _arrays(table: Predictions) -> list[str]:
    """Return the names of the fields (G, B)."""
    arrays = {f.name: getattr(table, f.name) for f in fields(table)}
    return [name for name, array in arrays.items() if isinstance(array, np.ndarray) and array.ndim == 2]


def _not_timed(settings: StepSettings) -> tuple[str, ...]:
    """Return notes on settings that change the memory, but not the predicted latency."""
    notes = []
    if str(settings.optimizer) not in ("none", "sgd", "sgd-momentum"):
        notes.append(f"latency holds an SGD update; {settings.optimizer} takes a little longer")
    if settings.accumulation > 1:
        notes.append("latency is that of one micro-batch with its update")
    return tuple(notes)


def _models(device: Device, graphs: Sequence[ForwardGraph], precision: str | None) -> StepModels:
    """Return a device's models of training steps, or of inference if no graph has a loss."""
    training = {g.loss is not None for g in graphs}
    if len(training) > 1:
        raise InputError(
            "some graphs are training steps and some are inferences; predict them in separate calls"
        )
    return load_models(device, "train" if training == {True} else "infer", precision)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Graphs with their analyses, on one device under one setting."""

    graphs: list[ForwardGraph]
    analyses: list[Analysis]
    models: StepModels
    settings: StepSettings

    @property
    def work(self) -> list[Any]:
        return [a.work_under(self.settings.amp) for a in self.analyses]

    def peaks(self, which: npt.NDArray[np.intp], batch: FloatArray) -> Peaks:
        tapes = [a.tape(self.settings) for a in self.analyses]
        return simulate_peaks(tapes, [a.traits for a in self.analyses], which, batch)

    def columns(
        self, feature_set: str | None, which: npt.NDArray[np.intp], batch: FloatArray
    ) -> FloatArray | None:
        """Return the columns (R, F) of a feature set for rows; None: no set."""
        return None if feature_set is None else feature_rows(self.graphs, which, batch, feature_set)

    def predict(
        self, peaks: Peaks, which: npt.NDArray[np.intp], batch: FloatArray
    ) -> tuple[PredictedMemory, Times]:
        """Return memory and latency of rows."""
        memory, latency = self.models.memory, self.models.latency
        memory_columns = self.columns(memory.feature_set, which, batch)
        latency_columns = self.columns(latency.feature_set, which, batch)
        times = latency.predict(self.work, which, batch, latency_columns)
        return memory.predict(peaks, memory_columns), times


def device_settings(device: Device, settings: StepSettings | None) -> StepSettings:
    """Return the settings of a step as the device's measured framework runs it."""
    chosen = settings if settings is not None else StepSettings()
    under = chosen.under(
        {
            "backend": "cuda" if device.kind == "gpu" else "cpu",
            "foreach": device.kind == "gpu",
            **device.runtime,
        }
    )
    return under if under.workspaces is not None else replace(under, workspaces=load_workspaces(device))


def _around(value: float, half: FloatArray) -> Estimate:
    factor = float(np.exp(half[0]))
    return Estimate(value, value / factor, value * factor, "MiB")


def _categories(tape: Tape, batch_size: int) -> FloatArray:
    """Return (C,) MiB by category of `CATEGORIES` at the event where most is alive."""
    sizes = tape.bytes_at(np.array([batch_size]))[:, 0]
    live = tape.live_bytes(np.array([batch_size]))[:, 0]
    alive = tape.alive_after(int(live.argmax()) if len(live) else -1)
    return np.bincount(tape.category, weights=sizes * alive, minlength=len(CATEGORIES)) / _MIB


def _needed(models: StepModels, memory: PredictedMemory, peaks: Peaks) -> Estimate:
    """Return the memory that one run asks for: Γ, and above a board's ceiling what the allocator asks for."""
    process, one = models.memory.process, np.ones(1)
    off = np.exp(models.memory.reserved_errors.half_width(one))
    low, high = (process.beyond(peaks.reserved * by, peaks.linear) for by in (1 / off, off))
    value = float(memory.value[0] + memory.beyond[0])
    return Estimate(value, float(memory.low[0] + low[0]), float(memory.high[0] + high[0]), "MiB")


_EXACT = ("weights", "gradients", "optimizer_state", "inputs")
"""Categories of `CATEGORIES` that follow from shapes alone."""


def _breakdown(categories: FloatArray, reserved: float, total: float) -> dict[str, float]:
    """Return MiB by category: tensors at the peak, the remainder of the allocator's memory, the process.

    If a forest puts the total below the simulated reserve, the other parts shrink in proportion, but no parts
    that follow from shapes alone.
    """
    parts = dict(zip(CATEGORIES, categories.tolist(), strict=True))
    parts["workspace"] += max(reserved - sum(parts.values()), 0.0)
    inside = sum(parts.values())
    exact = sum(parts[name] for name in _EXACT)
    if exact < total < inside:
        scale = (total - exact) / (inside - exact)
        return {n: part if n in _EXACT else part * scale for n, part in parts.items()} | {"context": 0.0}
    if total < inside:
        return {name: part * total / inside for name, part in parts.items()} | {"context": 0.0}
    return parts | {"context": total - inside}
