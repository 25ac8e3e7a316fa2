"""Public measurements that come as one table of networks by name, as samples to fit and to score.

Three tables, told apart by the file in their folder: `latency.csv` (inference of NAS-Bench-201's networks on
edge devices), `steps.csv` (timm training steps under autocast), `memory.csv` (timm training memory of a GPU).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from nasbench201 import CellNetwork, cell_function, parse_architecture

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance
from torchedge.errors import CaptureError, InputError
from torchedge.graphs import ForwardGraph, Mode
from torchedge.prediction.latency.workload import Workload, count_work
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.peaks import Peaks, graph_traits, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.predictor import device_settings
from torchedge.profiling.datasets import parse_table
from torchedge.profiling.samples import DataSource, Samples
from torchedge.storage.documents import read_bytes
from torchedge.tracing.capturing import capture
from torchedge.tracing.vision import prepare_torchvision

Row = Mapping[str, Any]
_Number = Annotated[float, Meta(ge=0, lt=1e9)]

EDGE_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "adreno-630": "adreno-630",
        "adreno-640": "adreno-640",
        "jetson-nano": "jetson-nano-fp32",
        "jetson-tx2": "edgegpu-tx2",
    }
)
"""Our device -> the device of `latency.csv` that its profile is fitted to."""

_RUNS_ON_ZEROS = frozenset(("edgegpu-tx2",))
"""Devices whose times show that operations on tensors of zeros run: there cells are not folded."""

STEP_SETTINGS = StepSettings(optimizer="sgd-momentum", amp="float16")
"""`steps.csv`: the script's default optimizer, under float16 autocast."""

MEMORY_SETTINGS = StepSettings(optimizer="adam")
"""`memory.csv` does not record its optimizer: of none, SGD with momentum and Adam this one errs least."""

_MOST_BYTES = 16 * 2**20
_WORDS = frozenset(("arch", "device", "model", "layout"))
_TABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "latency.csv": ("arch", "device", "latency_ms"),
        "steps.csv": ("model", "layout", "amp", "batch_size", "image_size", "step_ms", "param_count_m"),
        "memory.csv": ("model", "batch_size", "max_gpu_memory_mib", "saturated", "faketensor_peak_mib"),
    }
)


@dataclass(frozen=True)
class PublicSamples:
    """Samples of one public table on one device.

    Samples.network names what is left out together: the function of a cell, or timm's module. skipped:
    networks without a row in the samples and why; baseline: (R,) the estimate in MiB that the table has.
    """

    samples: Samples
    skipped: Mapping[str, str]
    baseline: FloatArray | None = None


def find_public_table(folder: Path) -> str | None:
    """Return which of the three tables a folder holds, None where it holds none."""
    return next((name for name in _TABLES if (folder / name).is_file()), None)


def read_public_samples(folder: Path, device: Device, *, column: str | None = None) -> PublicSamples:
    """Read a public table's rows for a device, with each network captured.

    column: another device of `latency.csv` than the profile's own, or the layout of `steps.csv` ("nchw",
    PyTorch's default, or "nhwc"). Raises ProfileError for a malformed table, InputError where it has no such
    rows.
    """
    table = find_public_table(folder)
    if table is None:
        raise InputError(
            f"{folder}: holds none of {', '.join(_TABLES)}; expected the folder of a public table"
        )
    data = read_bytes(folder / table, max_bytes=_MOST_BYTES)
    names, kinds = _TABLES[table], [str if name in _WORDS else _Number for name in _TABLES[table]]
    columns: Mapping[str, Any] = dict(zip(names, kinds, strict=True))
    rows = [
        dict(zip(names, row, strict=True))
        for row in parse_table(folder / table, data, columns, "a measured network")
    ]
    read = {"latency.csv": _edge_samples, "steps.csv": _step_samples, "memory.csv": _memory_samples}[table]
    digest = hashlib.sha256(data).hexdigest()
    return read(DataSource(folder.resolve().name, digest, Provenance.PUBLIC_DATA), rows, device, column)


# tables -----------------------------------------------------------------------------------------------------


def _edge_samples(
    source: DataSource, rows: Sequence[Row], device: Device, column: str | None
) -> PublicSamples:
    """φ at batch 1 of the cells' networks, 32 x 32 images."""
    wanted = column or EDGE_COLUMNS.get(device.name)
    chosen = [row for row in rows if row["device"] == wanted]
    if not chosen:
        known = ", ".join(sorted({row["device"] for row in rows}))
        raise InputError(
            f"{source.name} was not measured on {device.name}; it has {known}: choose one of their profiles"
        )
    folded = wanted not in _RUNS_ON_ZEROS
    graphs = []
    for row in chosen:
        graphs.append(_cell_graph(row["arch"], folded))
    functions = [cell_function(parse_architecture(row["arch"])) for row in chosen]
    phi = np.array([row["latency_ms"] for row in chosen])
    names, work = [row["arch"] for row in chosen], [count_work(g) for g in graphs]
    samples = table_samples(
        source, device, names, functions, np.ones(len(names)), work, mode="infer", graphs=graphs, phi=phi
    )
    return PublicSamples(samples, {})


@lru_cache(maxsize=4096)
def _cell_graph(architecture: str, folded: bool) -> ForwardGraph:
    """Capture a network; remembered, because one table measures each on several devices."""
    with torch.device("meta"):
        module = CellNetwork(architecture, folded=folded)
    return capture(module, input_size=(3, 32, 32), mode="infer", method="trace", name=architecture)


def _step_samples(
    source: DataSource, rows: Sequence[Row], device: Device, column: str | None
) -> PublicSamples:
    """Φ under autocast; families are timm's modules."""
    layout = column or "nchw"
    kept, families, work, skipped = [], [], [], {}
    for row in (row for row in rows if row["layout"] == layout):
        found = load_timm_model(row["model"], int(row["image_size"]), row["param_count_m"])
        if isinstance(found, str):
            skipped[row["model"]] = found
            continue
        kept.append(row)
        families.append(found.family)
        work.append(count_work(lower_precision(found.graph, STEP_SETTINGS)))
    if not kept:
        raise InputError(f"{source.name} has no row in layout {layout!r}; expected nchw or nhwc")
    batch, phi = (np.array([row[c] for row in kept]) for c in ("batch_size", "step_ms"))
    names = [row["model"] for row in kept]
    samples = table_samples(source, device, names, families, batch, work, settings=STEP_SETTINGS, phi=phi)
    return PublicSamples(samples, skipped)


def _memory_samples(
    source: DataSource, rows: Sequence[Row], device: Device, column: str | None
) -> PublicSamples:
    """Γ as the peak of a whole GPU, of runs that are not saturated; the allocator's figures are not known."""
    settings = device_settings(device, MEMORY_SETTINGS)
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        if row["saturated"] == 0:
            by_model.setdefault(row["model"], []).append(row)
    skipped: dict[str, str] = {}
    kept: list[Row] = []
    families: list[str] = []
    parts: list[Peaks] = []
    for model, own in by_model.items():
        found = load_timm_model(model)
        if isinstance(found, str):
            skipped[model] = found
            continue
        batch = np.array([row["batch_size"] for row in own])
        tape, here = write_tape(found.graph, settings), np.zeros(len(own), dtype=np.intp)
        parts.append(simulate_peaks([tape], [graph_traits(found.graph)], here, batch))
        kept += own
        families += [found.family] * len(own)
    if not kept:
        raise InputError(f"{source.name} has no row of a model that this timm knows; expected timm names")
    peaks = _joined(parts)
    gamma, baseline = (np.array([r[c] for r in kept]) for c in ("max_gpu_memory_mib", "faketensor_peak_mib"))
    names = [row["model"] for row in kept]
    samples = table_samples(
        source, device, names, families, peaks.batch, (), settings=settings, gamma=gamma, peaks=peaks
    )
    return PublicSamples(samples, skipped, baseline)


def _joined(parts: Sequence[Peaks]) -> Peaks:
    names = ("batch", "allocated", "reserved", "parameters", "linear")
    return Peaks(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


def table_samples(
    source: DataSource,
    device: Device,
    names: Sequence[str],
    groups: Sequence[str],
    batch: FloatArray,
    work: Sequence[Workload],
    *,
    mode: Mode = "train",
    graphs: Sequence[ForwardGraph] = (),
    settings: StepSettings | None = None,
    phi: FloatArray | None = None,
    gamma: FloatArray | None = None,
    peaks: Peaks | None = None,
) -> Samples:
    """Return samples of one network a row; figures that were not measured are NaN."""
    count = len(batch)
    none = np.full(count, np.nan)
    blank = Peaks(batch, none, none, none, np.zeros(count, dtype=np.bool_))
    return Samples(
        mode=mode,
        source=source,
        network=np.array(groups),
        level=np.zeros(count, dtype=np.int64),
        strategy=np.full(count, ""),
        label=np.array(names),
        batch=batch,
        gamma=none if gamma is None else gamma,
        allocated=none,
        reserved=none,
        phi=none if phi is None else phi,
        fits=np.ones(count),
        which=np.arange(count),
        work=work,
        peaks=blank if peaks is None else peaks,
        device=device,
        graphs=graphs,
        settings=device_settings(device, settings),
    )


# timm's networks --------------------------------------------------------------------------------------------

_SAME_SIZE = 0.01
"""Largest relative difference of parameters under which a name is taken to mean the same architecture."""


@dataclass(frozen=True, slots=True)
class TimmModel:
    """A training step of one architecture; `family` is the timm module of its class, such as "resnet"."""

    graph: ForwardGraph
    family: str


def load_timm_model(
    name: str, image_size: int | None = None, parameters_m: float | None = None
) -> TimmModel | str:
    """Build and capture an architecture without memory for its weights, or say why it cannot be.

    name: of today or deprecated (timm maps it to its successor). image_size: by default the architecture's
    own. parameters_m: its parameters in millions as measured: another number means that the name has changed
    its meaning.
    """
    prepare_torchvision()
    import timm

    if not timm.is_model(name):
        return "unknown to this timm"
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = timm.create_model(name)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"cannot be built ({type(error).__name__})"
    count = sum(p.numel() for p in model.parameters()) / 1e6
    if parameters_m is not None and abs(count / parameters_m - 1) > _SAME_SIZE:
        return "another network under that name today"
    side = image_size if image_size is not None else model.default_cfg.get("input_size", (3, 224, 224))[-1]
    try:
        graph = capture(model, input_size=(3, side, side), mode="train", name=name)
    except CaptureError:
        return f"cannot be captured at {side} x {side}"
    return TimmModel(graph, type(model).__module__.rsplit(".", 1)[-1])
