"""Fits the latency of kinds of steps: transformers, and half precision.

A campaign over settings (autocast, weights in bfloat16, checkpoints, frozen parameters) tells apart what the
steps of plain training leave open: how the time of a product is shared by its forward and backward passes,
and what products cost in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.graphs import Mode
from torchedge.prediction.analysis import analyse
from torchedge.prediction.intervals import NO_ERRORS, fit_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.rates import MATRIX_OVERLAP, norm_lanes
from torchedge.prediction.latency.roofline import (
    COEFFICIENT_NAMES,
    LAYER_TERMS,
    WorkRows,
    named,
    pack,
    prior_spread,
    step_time,
    work_times,
)
from torchedge.prediction.latency.workload import Workload
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    MATRICES,
    Kind,
    complete_models,
    read_models,
    read_relative,
    swept,
    under_precision,
)
from torchedge.profiling.datasets import Dataset, read_dataset
from torchedge.profiling.latency_fitting import RIDGE, RIDGE_FEW, Steps, fit_coefficients, fit_slowness
from torchedge.profiling.layer_fitting import LayerTimes, Layout, fit_layers, read_layer_times
from torchedge.profiling.profile_folders import PartFit, describe
from torchedge.profiling.samples import FEW_FOLDS, FEW_ROWS, MOST_FOLDS, DataSource, network_groups

FEWEST_ROWS = 20
"""Fewest rows of a kind of steps that a fit needs."""

_KERNEL_START_MS, _START_SPREAD = 0.004, 0.2
"""What a GPU takes for a kernel however small, and how far it may lie from that, in log. In a step of small
kernels the host sets the pace; its time must not be explained by theirs."""
_STARTS = np.array([name.startswith("latency_") for name in COEFFICIENT_NAMES])
_OVERLAP, _OVERLAP_SPREAD = COEFFICIENT_NAMES.index("overlap"), 0.02
"""A fit to steps that wait for their host, measured once each, takes its unevenness for a soft maximum:
networks of matrices keep `MATRIX_OVERLAP`."""

_QUEUE = 1000
"""Launches that a driver queues (1,024 in CUDA): the thread of a longer step waits for the device."""

_HOST_SPREAD = {MATRICES: 1.0}
"""By kind of network: how far launches' times may lie from their prior, as a share of `prior_spread`."""
_MEASURED_SPREAD = 0.2
"""The same of other kinds. The device's own fit has measured launches in CNNs, where forward and backward
ones come in pairs: it does not separate the two."""


@dataclass(frozen=True)
class _Rows:
    """Rows of one kind: network family, setting, work, batch size, ms, slowness of the host, its name (R,).

    thread: ms of the host's thread, NaN where unknown. calls, lanes: as in `LatencyModel`. starts: kernels
    start as on a GPU.
    """

    family: npt.NDArray[np.str_]
    setting: npt.NDArray[np.str_]
    work: list[Workload]
    batch: FloatArray
    phi: FloatArray
    slowness: FloatArray
    host: npt.NDArray[np.str_]
    thread: FloatArray
    calls: bool
    starts: bool
    lanes: float

    def some(self, rows: npt.NDArray[np.bool_]) -> _Rows:
        """Return some of the rows."""
        work = [w for w, chosen in zip(self.work, rows.tolist(), strict=True) if chosen]
        arrays = ("family", "setting", "batch", "phi", "slowness", "host", "thread")
        return replace(self, work=work, **{name: getattr(self, name)[rows] for name in arrays})

    def packed(self) -> WorkRows:
        """Return the work of the rows, launches counted as many times as their host was slower."""
        rows = pack(self.work, np.arange(len(self.phi)), self.batch, calls=self.calls, lanes=self.lanes)
        return replace(rows, launches=rows.launches * self.slowness[:, None])


@dataclass(frozen=True)
class _Fit:
    """Rows of a kind, the prior of its coefficients (K,), and how far those of launches may move from it.

    last: as in `LatencyModel`.
    """

    rows: _Rows
    prior: FloatArray
    host_spread: float
    last: FloatArray | None = None

    def coefficients(self, rows: _Rows | None = None) -> FloatArray:
        """Return the coefficients (K,) of all rows, or of some."""
        return fit_coefficients(self.steps(rows))

    def steps(self, rows: _Rows | None = None) -> Steps:
        """Return all rows, or some, as a fit reads them."""
        rows = rows or self.rows
        spread = prior_spread() * [
            self.host_spread if name.startswith("launch_") or name == "step" else 1.0
            for name in COEFFICIENT_NAMES
        ]
        if rows.starts:
            spread = np.where(_STARTS, _START_SPREAD, spread)
            spread[_OVERLAP] = _OVERLAP_SPREAD
        if len(self.prior) > len(spread):
            spread = np.append(spread, [term.spread for term in LAYER_TERMS])
        return Steps(
            rows.packed(),
            rows.phi,
            _weights(rows),
            self.prior,
            RIDGE_FEW if len(rows.phi) < FEW_ROWS else RIDGE,
            np.diag(spread),
            thread=rows.thread if np.isfinite(rows.thread).any() else None,
            last=self.last,
        )

    def on_hosts(self, slowness: Mapping[str, float]) -> _Fit:
        """Return the fit with hosts as slow as said by name."""
        rows = self.rows
        slower = [slowness.get(h, s) for h, s in zip(rows.host.tolist(), rows.slowness.tolist(), strict=True)]
        return replace(self, rows=replace(rows, slowness=np.array(slower)))


_Key = tuple[Mode, Kind]


@dataclass(frozen=True)
class MeasuredKinds:
    """What a campaign measured of each kind of steps that has enough rows for a fit, by mode.

    layers: times of single convolutions. controls: the probe's control at the median row, by the host that
    jobs name ("": none), µs.
    """

    source: DataSource
    device: Device
    rows: Mapping[_Key, _Rows]
    layers: Mapping[Layout, LayerTimes] = field(default_factory=dict)
    controls: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> int:
        """How many fits `fit_kinds` runs."""
        return sum(1 + len(_groups(rows)) for rows in self.rows.values())


def read_kind_rows(folder: Path, device: Device, *, float32: bool = True) -> MeasuredKinds:
    """Read a campaign's folder; raises ProfileError where it is damaged or no kind has enough rows.

    float32: with kinds of steps in single precision, which a device's own fit to the same folder has.
    """
    dataset = read_dataset(folder)
    kinds = _rows_by_kind(dataset, device).items()
    rows = {k: r for k, r in kinds if len(r.phi) >= FEWEST_ROWS and (float32 or k[1][1] is not None)}
    if not rows:
        raise ProfileError(
            f"{folder}: no kind of steps has {FEWEST_ROWS} rows with latency; expected a campaign "
            "of transformers or in half precision"
        )
    source = DataSource(dataset.name, dataset.digest, dataset.provenance)
    return MeasuredKinds(source, device, rows, read_layer_times(folder), _controls(dataset))


def fit_kinds(measured: MeasuredKinds, out: Path, step: Callable[[], Any] = lambda: None) -> PartFit:
    """Fit the latency of each kind of steps; `step` is called after each fit.

    Errors are of rows whose family of networks was left out. Launches of each row count as many times as its
    host was slower than at the median row, which the profile describes: by the probe's control, but for hosts
    that jobs name ("host"), whose slowness is fitted.
    """
    models, accuracy = {}, {}
    kinds = _in_layouts({key: _prepared(measured, *key, rows) for key, rows in measured.rows.items()})
    kinds = _on_hosts(kinds)
    operator_us = _described_host(measured.controls, [fit.rows for fit in kinds.values()])
    for (mode, kind), fit in kinds.items():
        rows, coefficients = fit.rows, fit.coefficients()
        errors = _left_out(fit, step)
        step()
        quantiles = fit_errors(errors, np.ones(len(errors)), _weights(rows))
        models[mode, kind] = LatencyModel(
            coefficients, quantiles, amp=kind[1], calls=rows.calls, lanes=rows.lanes
        )
        accuracy[kind_title(mode, kind)] = _score(rows, errors)
    source = measured.source.name
    described = describe(
        measured.source,
        f"torchedge fit kinds {source} --device {measured.device.name} --out {out.resolve().name}",
        accuracy=accuracy,
        convolutions=sum(times.rows.count for times in measured.layers.values()),
        **({} if operator_us is None else {"operator_us": round(operator_us, 3)}),
    )
    return PartFit(models, described)


def _prepared(measured: MeasuredKinds, mode: Mode, kind: Kind, rows: _Rows) -> _Fit:
    device = measured.device
    prior = _prior(device, mode, kind)
    if rows.starts:
        if mode == "train":  # what batch norms take says little of softmaxes
            prior = swept(LatencyModel(prior, NO_ERRORS), device, mode).coefficients
        prior = np.where(_STARTS, np.log(_KERNEL_START_MS), prior)
        prior[_OVERLAP] = MATRIX_OVERLAP
    if mode == "train":
        prior = _informed(prior, kind, measured.layers)
    spread = _HOST_SPREAD.get(kind[0], _MEASURED_SPREAD) if device.kind == "gpu" else 1.0
    return _Fit(rows, prior, spread)


def _in_layouts(kinds: Mapping[_Key, _Fit]) -> Mapping[_Key, _Fit]:
    """Return fits in which convolutions of images in channels_last take what they take in such networks."""
    last = {
        precision: fit.coefficients()
        for (mode, (products, precision)), fit in kinds.items()
        if mode == "train" and products == CHANNELS_LAST
    }
    return {
        key: fit if key[1][0] == CHANNELS_LAST else replace(fit, last=last.get(key[1][1]))
        for key, fit in kinds.items()
    }


def kind_title(mode: Mode, kind: Kind) -> str:
    """Return a kind of steps as tables name it."""
    return f"{kind[0]} {kind[1] or 'float32'}{'' if mode == 'train' else ', inference'}"


def _rows_by_kind(dataset: Dataset, device: Device) -> Mapping[_Key, _Rows]:
    """Count the work of every measured step, by mode and kind; products of matrices in channels_last not."""
    kinds: dict[_Key, list[tuple[Any, ...]]] = {}
    chosen = dataset.has_graph & np.isfinite(dataset["latency"])
    slowness = _slowness(dataset)
    for row in np.flatnonzero(chosen).tolist():
        network = dataset.networks[str(dataset.id[row])]
        if network.settings.accumulation > 1:
            continue  # of several forward and backward passes
        mode: Mode = "train" if dataset.mode[row] == "train" else "infer"
        graph = dataset.graph_of(str(dataset.id[row]), mode)
        analysis = analyse(graph)
        settings = device_settings(device, network.settings)
        precision, work = analysis.precision(settings), analysis.work_under(settings)
        convolutions = CHANNELS_LAST if graph.channels_last else CONVOLUTIONS
        kind = (MATRICES if work.of_matrices else convolutions, precision)
        if kind == (CONVOLUTIONS, None) or (work.of_matrices and graph.channels_last):
            continue  # the device's own fit; the same kernels as without
        about = (network.architecture, network.setting, network.host, work)
        waits = work.launches[:-1].sum() > _QUEUE
        thread = np.nan if waits or dataset.host_ms is None else dataset.host_ms[row]
        figures = (dataset.batch[row], dataset["latency"][row], slowness[row], thread)
        kinds.setdefault((mode, kind), []).append((*about, *figures))
    arrays = {}
    for key, rows in kinds.items():
        family, setting, host, works, batches, phi, slower, thread = zip(*rows, strict=True)
        arrays[key] = _Rows(
            np.array(family),
            np.array(setting),
            list(works),
            np.array(batches, dtype=float),
            np.array(phi, dtype=float),
            np.array(slower, dtype=float),
            np.array(host),
            np.array(thread, dtype=float),
            key[1][0] == MATRICES,
            key[1][0] == MATRICES and device.kind == "gpu",
            0.0 if key[1][0] == CHANNELS_LAST else norm_lanes(device),
        )
    return arrays


def _slowness(dataset: Dataset) -> FloatArray:
    """Return how much longer than at the median row the host took for a launch (R,); 1 where unknown."""
    launch, median = dataset.launch_us, _controls(dataset).get("")
    if launch is None or median is None:
        return np.ones(len(dataset.id))
    return np.where(np.isfinite(launch), launch / median, 1.0)


def _controls(dataset: Dataset) -> Mapping[str, float]:
    """Return the control at the median row of each host with one, µs."""
    if dataset.launch_us is None:
        return {}
    known = np.isfinite(dataset.launch_us)
    networks = [dataset.networks.get(name) for name in dataset.id.tolist()]
    hosts = np.array(["" if network is None else network.host for network in networks])
    return {
        h: float(np.median(dataset.launch_us[known & (hosts == h)])) for h in sorted({*hosts[known].tolist()})
    }


def _described_host(controls: Mapping[str, float], kinds: Sequence[_Rows]) -> float | None:
    """Return the control of the host that the coefficients describe: the one whose slowness is one.

    By the mean in log of the hosts whose slowness was fitted: the control of each is one measurement, however
    many steps follow it. A loop of launches, which is all that rows of older probes say of their hosts, says
    too little of one.
    """
    slowness = {
        h: s for rows in kinds for h, s in zip(rows.host.tolist(), rows.slowness.tolist(), strict=True)
    }
    fitted = [controls[host] / slower for host, slower in slowness.items() if host and host in controls]
    return float(np.exp(np.mean(np.log(fitted)))) if fitted else controls.get("")


def _on_hosts(kinds: Mapping[_Key, _Fit]) -> Mapping[_Key, _Fit]:
    """Return fits with the slowness of each host that jobs name: the same for every kind of steps."""
    hosts = [fit.rows.host for fit in kinds.values()]
    named_hosts = sorted({*np.concatenate(hosts).tolist()} - {""})
    if not named_hosts or not any((host == "").any() for host in hosts):
        return kinds  # nothing to compare them with
    plain = dict.fromkeys(named_hosts, 1.0)
    steps = [
        replace(fit.on_hosts(plain).steps(), hosts=np.searchsorted(["", *named_hosts], fit.rows.host) - 1)
        for fit in kinds.values()
    ]
    slowness = dict(zip(named_hosts, fit_slowness(steps, len(named_hosts)).tolist(), strict=True))
    return {key: fit.on_hosts(slowness) for key, fit in kinds.items()}


def _prior(device: Device, mode: Mode, kind: Kind) -> FloatArray:
    """Return the coefficients that the device's fit gives for a kind, without that of kinds."""
    other: Mode = "infer" if mode == "train" else "train"
    fitted, derived = read_models(device, mode), read_models(device, other)
    models = complete_models(device, mode, fitted, derived, read_relative(device, mode))
    latency = under_precision(models, device, kind[1]).latency
    matrix = np.array([name.startswith("matrix_") for name in COEFFICIENT_NAMES])
    return latency.coefficients + latency.excess * matrix


def _informed(prior: FloatArray, kind: Kind, layers: Mapping[Layout, LayerTimes]) -> FloatArray:
    """Return the prior of a kind with what times of single convolutions say, where there are any.

    In channels_last all coefficients of convolutions come from them, with terms (`LAYER_TERMS`) for what the
    library's kernels there depend on. In the default layout single convolutions depend little on these,
    and only depthwise ones, for which PyTorch has kernels of its own, come from them; float32 has the
    device's own fit there.
    """
    products, precision = kind
    times = layers.get((precision, products == CHANNELS_LAST))
    if times is None or kind in ((CONVOLUTIONS, None), (MATRICES, None)):
        return prior
    if products == CHANNELS_LAST:
        return fit_layers(times, prior)
    depthwise = np.array([name.startswith("depthwise") for name in COEFFICIENT_NAMES])
    return np.where(depthwise, fit_layers(times, prior, terms=False), prior)


def _left_out(fit: _Fit, step: Callable[[], Any]) -> FloatArray:
    """Return log(measured / predicted) of rows (R,), each predicted without its family of networks."""
    rows, errors = fit.rows, np.empty(len(fit.rows.phi))
    for group in _groups(rows):
        out = np.isin(rows.family, group)
        coefficients = named(fit.coefficients(rows.some(~out)), last=fit.last)
        left = rows.some(out)
        times = work_times(left.packed(), coefficients)
        errors[out] = np.log(left.phi / step_time(times.busy, times.launch, coefficients))
        step()
    return errors


def _groups(rows: _Rows) -> list[list[str]]:
    """Return the families in the groups that are left out in turn."""
    most = MOST_FOLDS if len(rows.phi) >= FEW_ROWS else FEW_FOLDS
    return network_groups(sorted(set(rows.family.tolist())), most)


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
