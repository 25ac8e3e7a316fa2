"""The Predictor: one device's models, applied to models and graphs, one at a time or many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device, weakest
from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import Mode
from torchedge.graphs.training_steps import AMP_DTYPES
from torchedge.prediction.analysis import Analysis, analyse
from torchedge.prediction.demand import Demand
from torchedge.prediction.feature_sets import checked_batches, feature_rows
from torchedge.prediction.latency.lanes import StepTimeline, walk
from torchedge.prediction.latency.model import Times
from torchedge.prediction.latency.rates import compiled_rates
from torchedge.prediction.lengths import analyse_length
from torchedge.prediction.memory.model import PredictedMemory
from torchedge.prediction.memory.peaks import Peaks, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import CATEGORIES, Tape
from torchedge.prediction.memory.workspaces import load_workspaces
from torchedge.prediction.profiles import StepModels, load_models
from torchedge.prediction.results import Estimate, Prediction, Predictions
from torchedge.tracing.device_answers import PLAIN_CPU, Accelerator
from torchedge.tracing.sequence_lengths import LengthFamily

_MIB = 2.0**20
_HOST_BOUND = 0.3
"""Share of a step from which a note says that the device waits for the host."""


def predict_graph(
    graph: ForwardGraph, batch_size: int, device: Device, settings: StepSettings | None = None
) -> Prediction:
    """Predict one step of a captured graph. See `torchedge.predict` for the meaning of the result."""
    settings = device_settings(device, settings)
    return _predicted(_analysed(graph, settings), batch_size, device, settings)


def _analysed(graph: ForwardGraph, settings: StepSettings) -> Analysis:
    """Return the analysis of a graph, without the graphs of a step compiled under another autocast."""
    if graph.partition is not None and graph.partition.amp != settings.amp:
        graph = replace(graph, partition=None)
    return analyse(graph)


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
    rows = _predicted_rows([analysis], checked.reshape(1), device, settings)
    models, peaks, memory, times = rows.models, rows.peaks, rows.memory, rows.times
    tape = analysis.tape(settings)
    outside = models.memory.outside_names(memory.features) + models.latency.outside_names(times.seen)
    process, one = models.memory.process, np.ones(1)
    off = np.exp(models.memory.reserved_errors.half_width(one))
    low, high = (process.beyond(peaks.reserved * by, peaks.linear) for by in (1 / off, off))
    value = float(memory.value[0] + memory.beyond[0])
    needed = Estimate(value, float(memory.low[0] + low[0]), float(memory.high[0] + high[0]), "MiB")
    breakdown = _breakdown(_categories(tape, int(batch_size)), float(peaks.reserved[0]), needed.value)
    timeline = walk(times.phases, float(times.value[0]))
    return Prediction(
        memory=_estimate(memory, "MiB"),
        needed=needed,
        latency=_estimate(times, "ms"),
        allocated=_around(float(peaks.allocated[0]), models.memory.allocated_errors.half_width(np.ones(1))),
        reserved=_around(float(peaks.reserved[0]), models.memory.reserved_errors.half_width(np.ones(1))),
        breakdown=MappingProxyType(breakdown),
        device=device.name,
        device_kind=device.kind,
        device_memory_mib=float(models.memory.limits(peaks.linear)[0]),
        batch_size=int(batch_size),
        mode="train" if graph.loss is not None else "infer",
        model=graph.name,
        unsupported=graph.unsupported,
        out_of_range=outside,
        provenance=models.provenance,
        notes=(*_notes(analysis, device, models, settings), *_host_bound(timeline, graph, device, settings)),
        demand=_demand(analysis, device, settings, models, family),
        timeline=timeline,
    )


def _host_bound(
    timeline: StepTimeline, graph: ForwardGraph, device: Device, settings: StepSettings
) -> tuple[str, ...]:
    """Return a note with advice where a GPU waits for its host for long."""
    if device.kind != "gpu" or timeline.waits < _HOST_BOUND:
        return ()
    trains = any(span.phase == "update" for span in timeline.spans)
    fused = trains and str(settings.optimizer) != "none" and not getattr(settings.optimizer, "fused", False)
    recorded = graph.partition is not None and graph.partition.recorded
    ways = ["a larger batch", "a fused optimizer", "torch.compile", "CUDA graphs"]
    helps = [
        way for way, open_ in zip(ways, (True, fused, not graph.compiled, not recorded), strict=True) if open_
    ]
    listed = " or ".join([text for text in (", ".join(helps[:-1]), helps[-1]) if text])
    return (
        f"this step waits for the host {100 * timeline.waits:.0f} % of the time: {listed} "
        f"shorten{'s' * (len(helps) == 1)} it, a faster GPU does not",
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
    return _predicted_many([_analysed(graph, settings) for graph in graphs], batch_sizes, device, settings)


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
    stacked = _combined(tables, partial(np.stack, axis=2))
    return replace(tables[0], **stacked, seq_lens=np.array(seq_lens, dtype=np.int64))


def _predicted_many(
    analyses: list[Analysis],
    batch_sizes: Any,  # noqa: ANN401
    device: Device,
    settings: StepSettings,
) -> Predictions:
    batches = np.atleast_1d(checked_batches(batch_sizes))
    if not analyses:
        raise InputError("models is empty; expected at least one")
    alike = {
        (a.precisions(settings), _in_channels_last(a.graph), a.graph.compiled, part and part.recorded)
        for a in analyses
        for part in [a.graph.partition]
    }
    if len(alike) > 1:
        tables = [_predicted_many([analysis], batches, device, settings) for analysis in analyses]
        return replace(
            tables[0],
            **_combined(tables, np.concatenate),
            provenance=weakest(table.provenance for table in tables),
            unsupported=tuple(kinds for table in tables for kinds in table.unsupported),
            notes=tuple(notes for table in tables for notes in table.notes),
        )
    rows = _predicted_rows(analyses, batches, device, settings)
    models, peaks, memory, times = rows.models, rows.peaks, rows.memory, rows.times
    columns = {
        "memory": memory.value,
        "memory_low": memory.low,
        "memory_high": memory.high,
        "needed": memory.value + memory.beyond,
        "latency": times.value,
        "latency_low": times.low,
        "latency_high": times.high,
        "allocated": peaks.allocated,
        "reserved": peaks.reserved,
        "out_of_range": memory.outside | times.outside,
    }
    shape = (len(analyses), len(batches))
    arrays: dict[str, Any] = {name: column.reshape(shape) for name, column in columns.items()}
    return Predictions(
        batch_sizes=batches,
        **arrays,
        device=device.name,
        provenance=models.provenance,
        unsupported=tuple(analysis.graph.unsupported for analysis in analyses),
        notes=tuple(_notes(a, device, models, settings) for a in analyses),
    )


def joined_batches(tables: Sequence[Predictions]) -> Predictions:
    """Return the predictions of the same graphs at several batch sizes as one table (G, B)."""
    batches = np.concatenate([table.batch_sizes for table in tables])
    joined = _combined(tables, partial(np.concatenate, axis=1))
    return replace(tables[0], **joined, batch_sizes=batches)


def _combined(tables: Sequence[Predictions], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Return the arrays (G, B) of tables, joined."""
    arrays = {f.name: getattr(tables[0], f.name) for f in fields(tables[0])}
    names = [name for name, array in arrays.items() if isinstance(array, np.ndarray) and array.ndim == 2]
    return {name: join([getattr(table, name) for table in tables]) for name in names}


def _notes(analysis: Analysis, device: Device, models: StepModels, settings: StepSettings) -> tuple[str, ...]:
    graph = analysis.graph
    notes = (
        *graph.notes,
        *_other_device(graph, device),
        *models.notes,
        *_emulated(analysis, device, settings),
    )
    return (*notes, *_not_timed(analysis, settings))


def _emulated(analysis: Analysis, device: Device, settings: StepSettings) -> tuple[str, ...]:
    """Return a note where products run in a precision that a device has no units for."""
    asked = {settings.amp, analysis.precision(settings)}
    missing = sorted(p for p in asked if p is not None and p not in device.native_dtypes)
    others = [p for p in AMP_DTYPES if p in device.native_dtypes]
    instead = f"; {' or '.join(others)} is computed natively" if others else ""
    return tuple(
        f"the profile of {device.name} states no rate in {p}, which PyTorch emulates there or refuses: "
        f"latency is that of float32{instead}"
        for p in missing
    )


def _other_device(graph: ForwardGraph, device: Device) -> tuple[str, ...]:
    """Return a note where a graph holds for another device than the one that is predicted."""
    there, here = graph.captured_for, Accelerator(device)
    if there in (None, here.label) or (there == PLAIN_CPU.label and here.type == PLAIN_CPU.type):
        return ()
    note = (
        f"the graph was captured as on {there}, and its forward pass asks for the device (a query, or "
        f"autocast): predict the model itself, or capture it with device={device.name!r}"
    )
    return (note,)


def _not_timed(analysis: Analysis, settings: StepSettings) -> tuple[str, ...]:
    """Return notes on settings that change the memory, but not the predicted latency."""
    notes = []
    if len(precisions := analysis.precisions(settings)) > 1:
        shares = ", ".join(f"{100 * share:.0f} % in {name or 'float32'}" for name, share in precisions)
        notes.append(f"products run in several precisions ({shares}): latency is the mean of them")
    if analysis.precision(settings) is None and analysis.dtype != "float32":
        notes.append(f"most weights are {analysis.dtype}: latency is predicted as that of float32")
    return tuple(notes)


def _models(device: Device, graphs: Sequence[ForwardGraph], precision: str | None) -> StepModels:
    """Return a device's models of training steps, or of inference if no graph has a loss."""
    training = {g.loss is not None for g in graphs}
    if len(training) > 1:
        raise InputError(
            "some graphs are training steps and some are inferences; predict them in separate calls"
        )
    mode: Mode = "train" if training == {True} else "infer"
    precision = precision if precision in device.native_dtypes else None
    graph = graphs[0]
    models = load_models(device, mode, precision, _in_channels_last(graph))
    if not graph.compiled:
        return models
    return models.of_compiled(None if graph.partition is None else compiled_rates(device))


def _in_channels_last(graph: ForwardGraph) -> bool:
    """Whether convolutions run in that memory format."""
    return graph.channels_last or (graph.partition is not None and graph.partition.channels_last)


class _PredictedRows(NamedTuple):
    """The figures of graphs at batch sizes: all batch sizes of the first graph, then of the next ones."""

    models: StepModels
    peaks: Peaks
    memory: PredictedMemory
    times: Times


def _predicted_rows(
    analyses: list[Analysis], batches: npt.NDArray[np.int64], device: Device, settings: StepSettings
) -> _PredictedRows:
    """Predict graphs whose products run in the same precisions and memory format at batch sizes (B,).

    Latency is the mean of those in each precision, weighted by the shares of the multiply-adds; of a step
    that accumulates, that of all its micro-batches, the last of which updates.
    """
    graphs = [analysis.graph for analysis in analyses]
    for graph in graphs:
        graph.check_batch_sizes(batches.tolist())
    timed = settings.timed_on(device)
    precisions = analyses[0].precisions(timed)
    models = _models(device, graphs, precisions[0][0])
    which = np.repeat(np.arange(len(graphs)), len(batches))
    batch = np.tile(batches, len(graphs)).astype(np.float64)

    def columns(feature_set: str | None) -> FloatArray | None:
        return None if feature_set is None else feature_rows(graphs, which, batch, feature_set)

    def times_of(step: StepSettings) -> Times:
        work = [a.work_under(step) for a in analyses]
        times = models.latency.predict(work, which, batch, columns(models.latency.feature_set))
        for precision, share in precisions[1:]:
            other = _models(device, graphs, precision).latency
            apart = other.predict(work, which, batch, columns(other.feature_set))
            done = sum(earlier for _, earlier in precisions[: precisions.index((precision, share))])
            times = times.mixed(apart, share / (done + share))
        return times

    tapes, traits = [a.tape(settings) for a in analyses], [a.traits for a in analyses]
    peaks = simulate_peaks(tapes, traits, which, batch)
    times = times_of(timed)
    if settings.accumulation > 1 and graphs[0].loss is not None:
        times = times.after(times_of(replace(timed, optimizer="none")), settings.accumulation - 1)
    return _PredictedRows(
        models, peaks, models.memory.predict(peaks, columns(models.memory.feature_set)), times
    )


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


def _estimate(row: PredictedMemory | Times, unit: str) -> Estimate:
    return Estimate(float(row.value[0]), float(row.low[0]), float(row.high[0]), unit)


def _around(value: float, half: FloatArray) -> Estimate:
    factor = float(np.exp(half[0]))
    return Estimate(value, value / factor, value * factor, "MiB")


def _categories(tape: Tape, batch_size: int) -> FloatArray:
    """Return (C,) MiB by category of `CATEGORIES` at the event where most is alive.

    A compiled step holds as much of what follows from shapes alone; the rest makes the difference.
    """
    _, alive, sizes = tape.peak_at(batch_size)
    parts = np.bincount(tape.category, weights=sizes * alive, minlength=len(CATEGORIES)) / _MIB
    whole, exact = parts.sum(), parts[: len(_EXACT)].sum()
    if tape.scales[0] != 1 and whole > exact:
        parts[len(_EXACT) :] *= max(tape.scales[0] * whole - exact, 0) / (whole - exact)
    return parts


_EXACT = ("weights", "gradients", "optimizer_state", "inputs")
"""The first of `CATEGORIES`: those that follow from shapes alone."""


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
