"""Fits the latency of kinds of training steps: transformers, and half precision.

A campaign over settings (autocast, weights in bfloat16, checkpoints, frozen parameters) tells apart what the
steps of plain training leave open: how the time of a product is shared by its forward and backward passes,
and what products cost in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.prediction.analysis import analyse
from torchedge.prediction.intervals import fit_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import (
    COEFFICIENT_NAMES,
    named,
    pack,
    prior_spread,
    step_time,
    work_times,
)
from torchedge.prediction.latency.workload import Workload
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import (
    CONVOLUTIONS,
    MATRICES,
    Kind,
    complete_models,
    read_models,
    read_relative,
    under_precision,
)
from torchedge.profiling.datasets import Dataset, read_dataset
from torchedge.profiling.latency_fitting import RIDGE, fit_coefficients
from torchedge.profiling.memory_fitting import FEWEST_ROWS
from torchedge.profiling.profile_folders import PartFit, describe
from torchedge.profiling.samples import DataSource, network_groups

FloatArray = npt.NDArray[np.float64]

_HOST_SPREAD = 0.2
"""Prior of the launches' times, beside that of a device's figures: the device's own fit has measured them."""


@dataclass(frozen=True)
class _Rows:
    """Rows of one kind: network family, setting, work, batch size, ms, state of the host (R,)."""

    family: npt.NDArray[np.str_]
    setting: npt.NDArray[np.str_]
    work: list[Workload]
    batch: FloatArray
    phi: FloatArray
    host: npt.NDArray[np.intp]

    def some(self, rows: npt.NDArray[np.bool_]) -> _Rows:
        """Return some of the rows."""
        work = [w for w, chosen in zip(self.work, rows.tolist(), strict=True) if chosen]
        arrays = (self.family, self.setting, self.batch, self.phi, self.host)
        family, setting, batch, phi, host = (a[rows] for a in arrays)
        return _Rows(family, setting, work, batch, phi, host)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MeasuredKinds:
    """What a campaign measured of each kind of training steps that has enough rows for a fit."""

    source: DataSource
    device: Device
    rows: Mapping[Kind, _Rows]

    @property
    def fits(self) -> int:
        """How many fits `fit_kinds` runs."""
        return sum(1 + len(network_groups(sorted(set(r.family.tolist())))) for r in self.rows.values())


def read_kind_rows(folder: Path, device: Device) -> MeasuredKinds:
    """Read a campaign's folder; raises ProfileError where it is damaged or no kind has enough rows."""
    dataset = read_dataset(folder)
    rows = {k: r for k, r in _rows_by_kind(dataset, device).items() if len(r.phi) >= FEWEST_ROWS}
    if not rows:
        raise ProfileError(
            f"{folder}: no kind of training steps has {FEWEST_ROWS} rows with latency; expected a campaign "
            "of transformers or in half precision"
        )
    return MeasuredKinds(DataSource(dataset.name, dataset.digest, dataset.provenance), device, rows)


def fit_kinds(measured: MeasuredKinds, out: Path, step: Callable[[], Any] = lambda: None) -> PartFit:
    """Fit the latency of each kind of steps; `step` is called after each fit.

    Errors are of rows whose family of networks was left out, with the factors of the host that the other rows
    showed (campaigns that prepare networks side by side slow it down).
    """
    models, accuracy = {}, {}
    for kind, rows in measured.rows.items():
        prior = _prior(measured.device, kind)
        errors = _left_out(rows, prior, step)
        coefficients, _ = _fit(rows, prior)
        step()
        quantiles = fit_errors(errors, np.ones(len(errors)), _weights(rows))
        models[kind] = LatencyModel(coefficients, quantiles, amp=kind[1])
        accuracy[f"{kind[0]} {kind[1] or 'float32'}"] = _score(rows, errors)
    name = measured.source.name
    described = describe(
        measured.source,
        f"torchedge fit kinds {name} --device {measured.device.name} --out {out.resolve().name}",
        accuracy=accuracy,
    )
    return PartFit(models, described)


def _rows_by_kind(dataset: Dataset, device: Device) -> Mapping[Kind, _Rows]:
    """Count the work of every measured training step, by kind; channels_last is left out."""
    kinds: dict[Kind, list[tuple[Any, ...]]] = {}
    chosen = dataset.has_graph & (dataset.mode == "train") & np.isfinite(dataset["latency"])
    for row in np.flatnonzero(chosen).tolist():
        network = dataset.networks[str(dataset.id[row])]
        job = network.job or {}
        if job.get("channels_last"):
            continue
        analysis = analyse(dataset.graph_of(str(dataset.id[row]), "train"))
        settings = device_settings(device, network.settings)
        precision, work = analysis.precision(settings), analysis.work_under(settings.amp)
        kind = (MATRICES if work.of_matrices else CONVOLUTIONS, precision)
        if kind == (CONVOLUTIONS, None):  # the device's own fit
            continue
        about = (network.architecture, network.setting, work, dataset.batch[row], dataset["latency"][row])
        kinds.setdefault(kind, []).append((*about, 1 if dataset.ahead is None else int(dataset.ahead[row])))
    arrays = {}
    for kind, rows in kinds.items():
        columns = [np.array([row[i] for row in rows]) for i in (0, 1, 3, 4, 5)]
        _, host = np.unique(columns[4], return_inverse=True)
        batch, phi = columns[2].astype(float), columns[3].astype(float)
        works = [row[2] for row in rows]
        arrays[kind] = _Rows(columns[0], columns[1], works, batch, phi, host.astype(np.intp))
    return arrays


def _prior(device: Device, kind: Kind) -> FloatArray:
    """Return the coefficients that the device's fit gives for a kind, without that of kinds."""
    fitted, derived = read_models(device, "train"), read_models(device, "infer")
    models = complete_models(device, "train", fitted, derived, read_relative(device, "train"))
    latency = under_precision(models, device, kind[1]).latency
    matrix = np.array([name.startswith("matrix_") for name in COEFFICIENT_NAMES])
    return latency.coefficients + latency.excess * matrix


def _fit(rows: _Rows, prior: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the coefficients (K,) and the factors of the host's states (H,)."""
    host = np.array([name.startswith("launch_") or name == "step" for name in COEFFICIENT_NAMES])
    return fit_coefficients(
        pack(rows.work, np.arange(len(rows.phi)), rows.batch),
        rows.phi,
        _weights(rows),
        prior,
        ridge=RIDGE,
        spread=np.diag(prior_spread() * np.where(host, _HOST_SPREAD, 1.0)),
        hosts=rows.host,
    )


def _left_out(rows: _Rows, prior: FloatArray, step: Callable[[], Any]) -> FloatArray:
    """Return log(measured / predicted) of rows (R,), each predicted without its family of networks."""
    errors = np.empty(len(rows.phi))
    families = sorted(set(rows.family.tolist()))
    for group in network_groups(families):
        out = np.isin(rows.family, group)
        coefficients, factors = _fit(rows.some(~out), prior)
        left = rows.some(out)
        packed = pack(left.work, np.arange(len(left.phi)), left.batch)
        named_coefficients = named(coefficients)
        times = work_times(packed, named_coefficients)
        every = np.append(factors, np.ones(int(rows.host.max()) + 1 - len(factors)))  # unseen states: 1
        launch = times.launch * every[left.host]
        errors[out] = np.log(left.phi / step_time(times.busy, launch, named_coefficients))
        step()
    return errors


def _weights(rows: _Rows) -> FloatArray:
    """Return weights (R,) under which every family counts the same."""
    _, inverse, counts = np.unique(rows.family, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / (counts[inverse] * len(counts)))


def _score(rows: _Rows, errors: FloatArray) -> dict[str, Any]:
    """Return mean absolute errors in %, over all rows and by setting."""
    percent = 100 * np.abs(np.exp(-errors) - 1)
    settings = {
        s: round(float(percent[rows.setting == s].mean()), 2) for s in sorted(set(rows.setting.tolist()))
    }
    return {"mean": round(float(percent.mean()), 2), "rows": len(percent), "settings": settings}
