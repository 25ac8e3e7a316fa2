"""Measured steps read from a dataset folder: a campaign's, or the public Jetson TX2 data.

A campaign's folder holds `measurements.csv` (one row a point) and `networks.jsonl` (one line a network); the
public one holds `measurements.csv` with other columns and `topologies.jsonl`. The times of layers
(`layers.jsonl`, or their sums in `layer_times.csv`) are optional. Files may be compressed
(`measurements.csv.gz`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta

from torchedge.arrays import FloatArray
from torchedge.devices import Provenance
from torchedge.errors import InputError, ProfileError, check_path
from torchedge.graphs import ForwardGraph, Mode
from torchedge.graphs.training_steps import Loss
from torchedge.prediction.memory.settings import StepSettings
from torchedge.profiling.hosts import STEP_LAUNCHES
from torchedge.profiling.topologies import build_network, build_topology, example_inputs, set_up
from torchedge.storage.documents import present, read_unpacked, reading
from torchedge.storage.journals import parse_lines
from torchedge.tracing.capturing import capture
from torchedge.tracing.optimizer_replays import OptimizerReplay
from torchedge.tracing.sequence_lengths import LengthFamily, capture_lengths

MEASUREMENTS, NETWORKS, TOPOLOGIES = "measurements.csv", "networks.jsonl", "topologies.jsonl"
LAYERS, LAYER_TIMES = "layers.jsonl", "layer_times.csv"
ENVIRONMENT = "environment.json"
"""The report of a campaign's probe on the machine; public data has no such file."""

FIGURES = ("fits", "memory", "allocated", "reserved", "latency")
"""The figures of a row: 1 or 0, then MiB, MiB, MiB, ms."""

KINDS = ("product_forward", "product_backward", "depthwise", "norm", "activation", "pool")
"""Kinds of layers: dense convolutions and linear layers, forward and backward; others, both together."""

_MOST_BYTES = 256 * 2**20
_MOST_LAYER_BYTES = 512 * 2**20
_Figure = Annotated[float, Meta(ge=0, le=1e15)] | None
_Batch = Annotated[int, Meta(ge=1)]
_CAMPAIGN: Mapping[str, Any] = {
    "id": str, "mode": Mode, "batch_size": _Batch, "fits": _Figure, "memory_mib": _Figure,
    "allocated_mib": _Figure, "reserved_mib": _Figure, "latency_ms": _Figure,
}  # fmt: skip
_PUBLIC: Mapping[str, Any] = {
    "network": str, "pruning_level": int, "batch_size": _Batch, "memory_fits": _Figure, "gamma_mb": _Figure,
    "allocated_mb": _Figure, "reserved_mb": _Figure, "phi_ms": _Figure,
}  # fmt: skip
_SUMS: Mapping[str, Any] = {"id": str, "mode": Mode, "batch_size": int} | dict.fromkeys(KINDS, _Figure)
_ACTIVATIONS = ("ReLU", "ReLU6", "SiLU", "GELU", "Hardswish", "Hardsigmoid", "Sigmoid", "LeakyReLU", "Mish")

StringArray = npt.NDArray[np.str_]
LayerTimes = dict[tuple[str, str, int], FloatArray]
"""(id, mode, batch size) to ms (6,) by `KINDS`, NaN where grouped convolutions mix with the dense ones.

The probe times every layer. A step's time alone leaves open which work took it; the sums by kind are targets
of their own for the time model.
"""


@dataclass(frozen=True)
class Network:
    """One measured network: architecture, pruning level in %, how it was pruned.

    Networks of one architecture are held out together. capture: mode to the ForwardGraph of a step. job: its
    line, None in the public format. setting: how it was trained, "" in the campaigns' usual way.
    """

    architecture: str
    level: int
    strategy: str
    settings: StepSettings
    capture: Callable[[Mode], ForwardGraph]
    job: Mapping[str, Any] | None = None
    setting: str = ""

    @property
    def host(self) -> str:
        """The host that its job names, "" for none."""
        return "" if self.job is None else str(self.job.get("host", ""))


@dataclass(frozen=True)
class Dataset:
    """Measured points and the networks they were measured on.

    Arrays are over the R rows of the table: which network (`id`), mode ("train" or "infer"), batch size, and
    `FIGURES`, NaN where a run gave none. `launch_us` is the host's time for a launch just before a row was
    measured (`measure_operator_us`), `host_ms` that of its thread for the step, NaN where unknown. `networks`
    holds those with a known topology, `digest` the sha256 of both files, `probed` whether the folder is a
    campaign's.
    """

    name: str
    id: StringArray
    mode: StringArray
    batch: npt.NDArray[np.int64]
    columns: Mapping[str, FloatArray]
    networks: Mapping[str, Network]
    digest: str
    probed: bool = True
    provenance: Provenance = Provenance.MEASURED
    layers: LayerTimes = field(default_factory=dict, repr=False)
    launch_us: FloatArray | None = field(default=None, repr=False)
    host_ms: FloatArray | None = field(default=None, repr=False)
    known: dict[tuple[str, Mode], ForwardGraph] = field(default_factory=dict, repr=False)

    def __getitem__(self, column: str) -> FloatArray:
        return self.columns[column]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that rows with a network were measured in."""
        present = set(self.mode[self.has_graph].tolist())
        modes: tuple[Mode, ...] = ("train", "infer")
        return tuple(mode for mode in modes if mode in present)

    @property
    def has_graph(self) -> npt.NDArray[np.bool_]:
        """(R,) whether the topology of a row's network is known."""
        return np.isin(self.id, list(self.networks))

    def graph_of(self, name: str, mode: Mode) -> ForwardGraph:
        """Return the ForwardGraph of a network's step, captured on first use."""
        if (name, mode) not in self.known:
            self.known[name, mode] = self.networks[name].capture(mode)
        return self.known[name, mode]


def is_dataset(folder: Path) -> bool:
    """Whether a folder holds a table of measurements."""
    return present(folder / MEASUREMENTS).is_file()


def read_dataset(folder: str | Path, *, input_size: tuple[int, ...] = (3, 224, 224)) -> Dataset:
    """Read a dataset folder; a ProfileError names the file, the line and the reason.

    input_size: of the public format's networks, which that format does not record.
    """
    root = check_path("dataset", folder)
    if not root.is_dir():
        raise ProfileError(
            f"{root} is no folder; expected one with {MEASUREMENTS} and {NETWORKS} (or {TOPOLOGIES})"
        )
    if not is_dataset(root):
        raise ProfileError(
            f"{root}: holds no {MEASUREMENTS}; expected the folder of a campaign: `torchedge campaign run "
            "NAME --plan quick --out FOLDER` measures one"
        )
    known = [name for name in (NETWORKS, TOPOLOGIES) if present(root / name).exists()]
    if not known:
        raise ProfileError(
            f"{root}: holds no {NETWORKS}; expected it, or {TOPOLOGIES}, beside {MEASUREMENTS}: "
            "`torchedge campaign run` writes both"
        )
    public = known == [TOPOLOGIES]
    files = (present(root / MEASUREMENTS), present(root / (TOPOLOGIES if public else NETWORKS)))
    table, described = (read_unpacked(file, max_bytes=_MOST_BYTES) for file in files)
    rows = list(parse_table(files[0], table, _PUBLIC if public else _CAMPAIGN, "a measured point"))
    if not rows:
        raise ProfileError(f"{files[0]} has no rows; expected one a measured point")
    networks = (
        _read_topologies(files[1], described, input_size) if public else _read_networks(files[1], described)
    )
    figures = np.array([row[3:] for row in rows], dtype=float)
    measured_by_us = (root / ENVIRONMENT).is_file()
    return Dataset(
        root.resolve().name,
        np.array([f"{row[0]}-{row[1]}" if public else row[0] for row in rows]),
        np.array(["train" if public else row[1] for row in rows]),
        np.array([row[2] for row in rows], dtype=np.int64),
        {name: figures[:, i] for i, name in enumerate(FIGURES)},
        networks,
        hashlib.sha256(table + described).hexdigest(),
        not public,
        Provenance.MEASURED if measured_by_us else Provenance.PUBLIC_DATA,
        _read_layers(root, networks),
        _read_launches(files[0], table, len(rows)),
        _read_column(files[0], table, len(rows), "host_ms"),
    )


def _read_launches(file: Path, table: bytes, rows: int) -> FloatArray:
    """Return the host's µs a launch at each row (R,), by a step of tiny layers where the probe ran one."""
    launch, step = (_read_column(file, table, rows, name) for name in ("launch_us", "step_us"))
    return np.where(np.isfinite(step), step / STEP_LAUNCHES, launch)


def _read_column(file: Path, table: bytes, rows: int, name: str) -> FloatArray:
    """Return a column of numbers (R,), NaN where there is none."""
    if name.encode() not in table.split(b"\n", 1)[0].strip().split(b","):
        return np.full(rows, np.nan)
    column = parse_table(file, table, {name: float | None}, "a measured point")
    return np.array([row[0] for row in column], dtype=float)


# the networks -----------------------------------------------------------------------------------------------


def _read_networks(file: Path, data: bytes) -> dict[str, Network]:
    """Read a campaign's networks: its job lines without points."""
    networks: dict[str, Network] = {}
    families: dict[str, LengthFamily] = {}
    graphs: dict[str, ForwardGraph] = {}
    for place, row in parse_lines(file, data):
        with reading(
            place, "a network", "id, network, pruning_level, strategy, input_size, optimizer, build"
        ):
            size = tuple(int(n) for n in row.get("input_size", (1, 1, 1)))
            if len(size) != 3 or not all(0 < n <= 1 << 14 for n in size):
                raise ValueError(f"input_size is {row['input_size']!r}")
            optimizer = str(row.get("optimizer", "sgd-momentum"))
            decay = {"sgd-momentum": 5e-4, "sgd": 5e-4, "adamw": 1e-2}.get(optimizer, 0.0)
            networks[str(row["id"])] = Network(
                str(row.get("family", row["network"])),
                round(float(row.get("pruning_level", 0))),
                str(row.get("strategy", "")),
                StepSettings(
                    optimizer=_optimizer(optimizer, row),
                    weight_decay=decay,
                    amp=row.get("amp"),
                    accumulation=row.get("accumulation", 1),
                ),
                partial(_captured, {**row, "build": dict(row["build"])}, place, families, graphs),
                dict(row),
                str(row.get("setting", "")),
            )
    return networks


def _optimizer(name: str, row: Mapping[str, Any]) -> str | OptimizerReplay:
    """Return the optimizer of a job; Adam and AdamW may be fused."""
    if name in ("adam", "adamw") and dict(row.get("optimizer_options", {})).get("fused"):
        return OptimizerReplay(name, (("fused", True),))
    return name


def _captured(
    job: dict[str, Any],
    label: str,
    families: dict[str, LengthFamily],
    graphs: dict[str, ForwardGraph],
    mode: Mode,
) -> ForwardGraph:
    """Capture a network; families: of those at several sequence lengths; graphs: of others."""
    length = job.get("seq_len")
    settings = ["dtype", "channels_last", "checkpointing", "frozen", "inputs_require_grads"]
    settings += ["input_size", "inputs", "loss"] if length is None else []
    key = json.dumps([mode, job["build"], *map(job.get, settings)])
    if length is not None and key in families:
        return families[key].graph(length)
    if key in graphs:
        return graphs[key]
    try:
        module = set_up(build_network(job["build"]), job)
    except InputError as error:
        raise ProfileError(f"{label}: {error}") from error
    if "inputs" not in job:
        graphs[key] = capture(module, input_size=tuple(job["input_size"]), mode=mode, name=job["network"])
        return graphs[key]
    example = example_inputs(job, 2)
    loss: Loss = (lambda output: output.loss) if job.get("loss") == "model" else "default"
    if length is None:
        graphs[key] = capture(module, example, mode=mode, loss=loss, name=job["network"])
        return graphs[key]
    families[key] = capture_lengths(module, example, mode=mode, loss=loss)
    return families[key].graph(length)


def _read_topologies(file: Path, data: bytes, size: tuple[int, ...]) -> dict[str, Network]:
    networks: dict[str, Network] = {}
    for place, row in parse_lines(file, data):
        with reading(place, "a topology", "network, pruning_level, nodes"):
            architecture, level, nodes = str(row["network"]), int(row["pruning_level"]), row["nodes"]
        name = f"{architecture}-{level}"
        with torch.device("meta"):
            module = build_topology(nodes, place)

        def captured(mode: Mode, module: torch.nn.Module = module, name: str = name) -> ForwardGraph:
            return capture(module, input_size=size, mode=mode, method="trace", name=name)

        networks[name] = Network(architecture, level, "random", StepSettings(), captured)
    return networks


# the times of layers ----------------------------------------------------------------------------------------


def _read_layers(root: Path, networks: Mapping[str, Network]) -> LayerTimes:
    """Read the sums of layer times by kind if the folder has them, else sum the layers it has."""
    table, layers = present(root / LAYER_TIMES), present(root / LAYERS)
    if table.exists():
        data = read_unpacked(table, max_bytes=_MOST_LAYER_BYTES)
        rows = parse_table(table, data, _SUMS, "a row of layer times")
        return {(name, mode, batch): np.array(sums, dtype=float) for name, mode, batch, *sums in rows}
    recipes = {name: n.job["build"] for name, n in networks.items() if n.job is not None}
    return _sum_layers(layers, recipes) if recipes and layers.exists() else {}


def _sum_layers(file: Path, recipes: Mapping[str, Mapping[str, Any]]) -> LayerTimes:
    """Sum the layers of every point by kind; recipes: how to build each network, by its id."""
    kinds: dict[str, dict[str, str]] = {}
    times: LayerTimes = {}
    for place, row in parse_lines(file, read_unpacked(file, max_bytes=_MOST_LAYER_BYTES)):
        with reading(place, "the layers of a point", "id, mode, batch_size, layers"):
            name, layers = str(row["id"]), row["layers"]
            if layers is None or name not in recipes:
                continue
            if name not in kinds:
                modules = build_network(recipes[name]).named_modules()
                kinds[name] = {path: _kind(module) for path, module in modules if not list(module.children())}
            times[name, str(row["mode"]), int(row["batch_size"])] = _sums(layers, kinds[name])
    return times


def _sums(layers: list[tuple[str, float, float | None]], kinds: Mapping[str, str]) -> FloatArray:
    names = ("product", "grouped", "depthwise", "norm", "activation", "pool", "other")
    forward, backward = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for path, fore, back in layers:
        kind = kinds.get(path, "other")
        forward[kind] += float(fore or 0.0)
        backward[kind] += float(back or 0.0)
    both = [forward[k] + backward[k] for k in ("depthwise", "norm", "activation", "pool")]
    products = [forward["product"], backward["product"]] if forward["grouped"] == 0 else [math.nan] * 2
    return np.array([*products, *both])


def _kind(module: Any) -> str:  # noqa: ANN401 - a module
    name = type(module).__name__
    if name == "Conv2d" and module.groups > 1:
        return "depthwise" if module.groups == module.in_channels else "grouped"
    if name in ("Conv2d", "Linear"):
        return "product"
    if "Norm" in name:
        return "norm"
    if "Pool" in name:
        return "pool"
    return "activation" if name in _ACTIVATIONS else "other"


def parse_table(source: object, data: bytes, columns: Mapping[str, Any], what: str) -> Iterator[Any]:
    """Yield the values of some columns of each row of a CSV table with a head; an empty cell is None.

    columns: names with the types of their values. what: the kind of row; errors name it and `source`.
    Raises ProfileError: the data is no such table; the message names the line.
    """
    row_type: Any = tuple.__class_getitem__(tuple(columns.values()))
    expected = ", ".join(columns)
    try:
        reader = csv.DictReader(data.decode("utf-8").splitlines(), restval="(cut off)")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{source}: not UTF-8 text ({error}); expected a CSV table") from error
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{source}: column {missing[0]!r} is missing; expected {expected}")
        for row in reader:
            yield msgspec.convert([row[name] or None for name in columns], row_type, strict=False)
    except (msgspec.ValidationError, csv.Error) as error:
        reason = re.sub(r"\$\[(\d+)\]", lambda match: list(columns)[int(match[1])], str(error))
        raise ProfileError(
            f"{source} line {reader.line_num}: not {what} ({reason}); expected {expected}"
        ) from error
