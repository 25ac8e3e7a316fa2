"""Public measurements that come as one table of networks by name, as samples to fit and to score.

Three tables, told apart by the file in their folder: `latency.csv` (inference of NAS-Bench-201's networks on
edge devices), `steps.csv` (timm training steps under autocast), `memory.csv` (timm training memory of a GPU).
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.devices import Device
from torchedge.errors import InputError, ProfileError
from torchedge.graphs import ForwardGraph
from torchedge.prediction.latency.workload import Workload, count_work
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.peaks import Peaks, graph_traits, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.step_models import Mode
from torchedge.profiling.nasbench201 import CellNetwork, cell_function, parse_architecture
from torchedge.profiling.samples import Samples
from torchedge.profiling.timm_models import load_timm_model
from torchedge.storage.documents import read_bytes
from torchedge.tracing.capturing import capture

__all__ = ["EDGE_COLUMNS", "PublicSamples", "find_public_table", "read_public_samples", "table_samples"]

FloatArray = npt.NDArray[np.float64]
Tell = Callable[[], Any]
Row = Mapping[str, str]

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

    Samples.network names what is left out together: the function of a cell, or timm's module. labels: (R,)
    the network of each row; skipped: networks without a row in the samples and why; baseline: (R,) the
    estimate in MiB that the table carries, where it does.
    """

    name: str
    digest: str
    mode: Mode
    samples: Samples
    labels: npt.NDArray[np.str_]
    skipped: Mapping[str, str]
    baseline: FloatArray | None = None


def find_public_table(folder: Path) -> str | None:
    """Return which of the three tables a folder holds, None where it holds none."""
    return next((name for name in _TABLES if (folder / name).is_file()), None)


def read_public_samples(
    folder: Path, device: Device, *, column: str | None = None, tell: Tell = lambda: None
) -> PublicSamples:
    """Read a public table's rows for a device, with each network captured; `tell` is called a network.

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
    rows = _read_rows(folder / table, data, _TABLES[table])
    read = {"latency.csv": _edge_samples, "steps.csv": _step_samples, "memory.csv": _memory_samples}[table]
    return read(folder.resolve().name, hashlib.sha256(data).hexdigest(), rows, device, column, tell)


def _read_rows(file: Path, data: bytes, columns: Sequence[str]) -> list[Row]:
    try:
        reader = csv.DictReader(data.decode("utf-8").splitlines())
        missing = [c for c in columns if c not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{file}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
        rows: list[Row] = [{c: row[c] or "" for c in columns} for row in reader]
    except (UnicodeDecodeError, csv.Error, TypeError) as error:
        raise ProfileError(f"{file}: not a table ({error}); expected CSV in UTF-8") from error
    for number, row in enumerate(rows, 2):
        for name in columns:
            if name not in ("arch", "device", "model", "layout"):
                _number(row, name, f"{file} line {number}")
    return rows


def _number(row: Row, name: str, where: str = "") -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e9:
        raise ProfileError(f"{where}: {name} is {row[name][:40]!r}; expected a number from 0 on")
    return value


# tables -----------------------------------------------------------------------------------------------------


def _edge_samples(
    name: str, digest: str, rows: Sequence[Row], device: Device, column: str | None, tell: Tell
) -> PublicSamples:
    """φ at batch 1 of the cells' networks, 32 x 32 images."""
    wanted = column or EDGE_COLUMNS.get(device.name)
    chosen = [row for row in rows if row["device"] == wanted]
    if not chosen:
        known = ", ".join(sorted({row["device"] for row in rows}))
        raise InputError(
            f"{name} was not measured on {device.name}; it has {known}: choose one of their profiles"
        )
    folded = wanted not in _RUNS_ON_ZEROS
    graphs = []
    for row in chosen:
        graphs.append(_cell_graph(row["arch"], folded))
        tell()
    functions = [cell_function(parse_architecture(row["arch"])) for row in chosen]
    phi = np.array([_number(row, "latency_ms") for row in chosen])
    samples = table_samples(
        device, functions, np.ones(len(chosen)), [count_work(g) for g in graphs], graphs=graphs, phi=phi
    )
    return PublicSamples(name, digest, "infer", samples, np.array([r["arch"] for r in chosen]), {})


@lru_cache(maxsize=4096)
def _cell_graph(architecture: str, folded: bool) -> ForwardGraph:
    """Capture a network; remembered, because one table measures each on several devices."""
    with torch.device("meta"):
        module = CellNetwork(architecture, folded=folded)
    return capture(module, input_size=(3, 32, 32), mode="infer", method="trace", name=architecture)


def _step_samples(
    name: str, digest: str, rows: Sequence[Row], device: Device, column: str | None, tell: Tell
) -> PublicSamples:
    """Φ under autocast; families are timm's modules."""
    layout = column or "nchw"
    kept, families, work, skipped = [], [], [], {}
    for row in (row for row in rows if row["layout"] == layout):
        found = load_timm_model(row["model"], int(_number(row, "image_size")), _number(row, "param_count_m"))
        tell()
        if isinstance(found, str):
            skipped[row["model"]] = found
            continue
        kept.append(row)
        families.append(found.family)
        work.append(count_work(lower_precision(found.graph, STEP_SETTINGS)))
    if not kept:
        raise InputError(f"{name} has no row in layout {layout!r}; expected nchw or nhwc")
    batch, phi = (np.array([_number(row, c) for row in kept]) for c in ("batch_size", "step_ms"))
    samples = table_samples(device, families, batch, work, settings=STEP_SETTINGS, phi=phi)
    return PublicSamples(name, digest, "train", samples, np.array([r["model"] for r in kept]), skipped)


def _memory_samples(
    name: str, digest: str, rows: Sequence[Row], device: Device, column: str | None, tell: Tell
) -> PublicSamples:
    """Γ as the peak of a whole GPU, of runs that are not saturated; the allocator's figures are not known."""
    settings = device_settings(device, MEMORY_SETTINGS)
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        if _number(row, "saturated") == 0:
            by_model.setdefault(row["model"], []).append(row)
    skipped: dict[str, str] = {}
    kept: list[Row] = []
    families: list[str] = []
    parts: list[Peaks] = []
    for model, own in by_model.items():
        found = load_timm_model(model)
        tell()
        if isinstance(found, str):
            skipped[model] = found
            continue
        batch = np.array([_number(row, "batch_size") for row in own])
        tape, here = write_tape(found.graph, settings), np.zeros(len(own), dtype=np.intp)
        parts.append(simulate_peaks([tape], [graph_traits(found.graph)], here, batch))
        kept += own
        families += [found.family] * len(own)
    if not kept:
        raise InputError(f"{name} has no row of a model that this timm knows; expected timm names")
    peaks = _joined(parts)
    gamma, baseline = (
        np.array([_number(r, c) for r in kept]) for c in ("max_gpu_memory_mib", "faketensor_peak_mib")
    )
    samples = table_samples(device, families, peaks.batch, (), settings=settings, gamma=gamma, peaks=peaks)
    labels = np.array([row["model"] for row in kept])
    return PublicSamples(name, digest, "train", samples, labels, skipped, baseline)


def _joined(parts: Sequence[Peaks]) -> Peaks:
    names = ("batch", "allocated", "reserved", "parameters", "linear")
    return Peaks(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


def table_samples(
    device: Device,
    groups: Sequence[str],
    batch: FloatArray,
    work: Sequence[Workload],
    *,
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
        network=np.array(groups),
        level=np.zeros(count, dtype=np.int64),
        strategy=np.full(count, ""),
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
