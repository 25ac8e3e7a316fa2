"""Measured steps read from a dataset folder: what a campaign leaves, or the public Jetson TX2 data.

A campaign's folder holds `measurements.csv` (one row a point) and `networks.jsonl` (one line a network); the
public one holds `measurements.csv` with columns of its own and `topologies.jsonl`. Files may be compressed
(`measurements.csv.gz`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.errors import InputError, ProfileError
from torchedge.graphs import ForwardGraph
from torchedge.prediction.step_models import Mode
from torchedge.profiling.layer_times import LAYER_TIMES, LAYERS, LayerTimes, read_layer_times, sum_layers
from torchedge.profiling.topologies import TopologyModule
from torchedge.storage.documents import read_unpacked
from torchedge.tracing.capturing import capture

__all__ = ["MEASUREMENTS", "NETWORKS", "Dataset", "Network", "read_dataset"]

MEASUREMENTS, NETWORKS, TOPOLOGIES = "measurements.csv", "networks.jsonl", "topologies.jsonl"
FIGURES = ("fits", "memory", "allocated", "reserved", "latency")
"""What a row measures: 1 or 0, then MiB, MiB, MiB, ms."""

_MOST_BYTES = 256 * 2**20
_CAMPAIGN = ("id", "mode", "batch_size", "fits", "memory_mib", "allocated_mib", "reserved_mib", "latency_ms")
_PUBLIC = (
    "network",
    "pruning_level",
    "batch_size",
    "memory_fits",
    "gamma_mb",
    "allocated_mb",
    "reserved_mb",
    "phi_ms",
)
FloatArray = npt.NDArray[np.float64]
StringArray = npt.NDArray[np.str_]
_Row = tuple[str, str, int, list[float]]


@dataclass(frozen=True)
class Network:
    """One measured network: architecture (what is left out together), pruning level in %, how it was pruned.

    capture: mode to the ForwardGraph of a step. recipe: how it is built, where the file tells that.
    """

    architecture: str
    level: int
    strategy: str
    optimizer: str
    capture: Callable[[Mode], ForwardGraph]
    recipe: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Dataset:
    """Measured points and the networks they were measured on.

    Arrays are over the R rows of the table: which network (`id`), mode ("train" or "infer"), batch size, and
    `FIGURES`, NaN where a run gave none. `networks` holds those of which the dataset tells the topology,
    `digest` the sha256 of both files, `probed` whether our probes measured them, `layers` the times of layers
    summed by kind, of the points that have them.
    """

    name: str
    id: StringArray
    mode: StringArray
    batch: npt.NDArray[np.int64]
    columns: Mapping[str, FloatArray]
    networks: Mapping[str, Network]
    digest: str
    probed: bool = True
    layers: LayerTimes = field(default_factory=dict, repr=False)
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
        """(R,) whether the dataset tells the topology of a row's network."""
        return np.isin(self.id, list(self.networks))

    def graph_of(self, name: str, mode: Mode) -> ForwardGraph:
        """Return the ForwardGraph of a network's step, captured when first asked for."""
        found = self.known.get((name, mode))
        if found is None:
            found = self.known[name, mode] = self.networks[name].capture(mode)
        return found


def read_dataset(folder: str | Path, *, input_size: tuple[int, ...] = (3, 224, 224)) -> Dataset:
    """Read a dataset folder; ProfileError says which file and line, and why.

    input_size: of the public format's networks, whose file does not tell it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ProfileError(
            f"{root} is no folder; expected one with {MEASUREMENTS} and {NETWORKS} (or {TOPOLOGIES})"
        )
    public = not _found(root / NETWORKS).exists() and _found(root / TOPOLOGIES).exists()
    files = (_found(root / MEASUREMENTS), _found(root / (TOPOLOGIES if public else NETWORKS)))
    table, described = (read_unpacked(file, max_bytes=_MOST_BYTES) for file in files)
    rows = _read_rows(files[0], table, _PUBLIC if public else _CAMPAIGN, _public_row if public else _row)
    networks = (
        _read_topologies(files[1], described, input_size) if public else _read_networks(files[1], described)
    )
    figures = np.array([row[3] for row in rows], dtype=float)
    return Dataset(
        root.resolve().name,
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows], dtype=np.int64),
        {name: figures[:, i] for i, name in enumerate(FIGURES)},
        networks,
        hashlib.sha256(table + described).hexdigest(),
        not public,
        _read_layers(root, networks),
    )


def _read_layers(root: Path, networks: Mapping[str, Network]) -> LayerTimes:
    """Read the sums of layer times by kind where the folder has them, else sum up the layers it has."""
    table, layers = _found(root / LAYER_TIMES), _found(root / LAYERS)
    if table.exists():
        return read_layer_times(table)
    recipes = {name: n.recipe for name, n in networks.items() if n.recipe is not None}
    return sum_layers(layers, recipes) if recipes and layers.exists() else {}


def _found(file: Path) -> Path:
    """Return the file, or its compressed form where only that is there."""
    packed = file.with_name(file.name + ".gz")
    return packed if packed.exists() and not file.exists() else file


# the table --------------------------------------------------------------------------------------------------


def _read_rows(
    file: Path, data: bytes, columns: tuple[str, ...], read: Callable[[dict[str, str]], _Row]
) -> list[_Row]:
    try:
        text = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProfileError(f"{file}: not UTF-8 text ({error}); expected a CSV table") from error
    reader = csv.DictReader(text)
    rows: list[_Row] = []
    try:
        missing = [c for c in columns if c not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{file}: column {missing[0]!r} is missing; expected {', '.join(columns)}")
        for row in reader:
            rows.append(read(row))
    except (TypeError, ValueError, csv.Error) as error:
        raise ProfileError(
            f"{file} line {reader.line_num}: {error}; expected values for {', '.join(columns)}"
        ) from error
    if not rows:
        raise ProfileError(f"{file} has no rows; expected one a measured point")
    return rows


def _row(row: dict[str, str]) -> _Row:
    mode, batch = row["mode"], int(row["batch_size"])
    if mode not in ("train", "infer"):
        raise ValueError(f"mode is {mode!r}, expected train or infer")
    return row["id"], mode, _positive(batch), [_number(row[c]) for c in _CAMPAIGN[3:]]


def _public_row(row: dict[str, str]) -> _Row:
    name = f"{row['network']}-{int(row['pruning_level'])}"
    return name, "train", _positive(int(row["batch_size"])), [_number(row[c]) for c in _PUBLIC[3:]]


def _positive(batch: int) -> int:
    if batch < 1:
        raise ValueError(f"batch_size is {batch}, expected at least 1")
    return batch


def _number(text: str | None) -> float:
    if text is None:
        raise ValueError("the line is cut off")
    number = float(text) if text else math.nan
    if math.isinf(number) or number < 0:
        raise ValueError(f"{text} is no measured figure")
    return number


# the networks -----------------------------------------------------------------------------------------------


def _lines(file: Path, data: bytes, expected: str) -> list[tuple[int, dict[str, Any]]]:
    lines = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no table")
        except (ValueError, RecursionError) as error:
            raise ProfileError(
                f"{file} line {number}: not a network ({error}); expected {expected}"
            ) from error
        lines.append((number, row))
    return lines


def _read_networks(file: Path, data: bytes) -> dict[str, Network]:
    """Read a campaign's networks: its job lines without points."""
    expected = "id, network, pruning_level, strategy, input_size, optimizer, build"
    networks: dict[str, Network] = {}
    for number, row in _lines(file, data, expected):
        try:
            size = tuple(int(n) for n in row["input_size"])
            if len(size) != 3 or not all(0 < n <= 1 << 14 for n in size):
                raise ValueError(f"input_size is {row['input_size']!r}")
            networks[str(row["id"])] = Network(
                str(row["network"]),
                round(float(row.get("pruning_level", 0))),
                str(row.get("strategy", "")),
                str(row.get("optimizer", "sgd-momentum")),
                _capture_recipe(dict(row["build"]), size, str(row["id"]), f"{file.name} line {number}"),
                dict(row["build"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProfileError(
                f"{file} line {number}: not a network ({error}); expected {expected}"
            ) from error
    return networks


def _capture_recipe(
    recipe: dict[str, Any], size: tuple[int, ...], name: str, label: str
) -> Callable[[Mode], ForwardGraph]:
    def captured(mode: Mode) -> ForwardGraph:
        from torchedge.profiling.campaigns.networks import build_network

        try:
            module = build_network(recipe)
        except InputError as error:
            raise ProfileError(f"{label}: {error}") from error
        return capture(module, input_size=size, mode=mode, name=name)

    return captured


def _read_topologies(file: Path, data: bytes, size: tuple[int, ...]) -> dict[str, Network]:
    networks: dict[str, Network] = {}
    expected = "network, pruning_level, nodes"
    for number, row in _lines(file, data, expected):
        try:
            architecture, level, nodes = str(row["network"]), int(row["pruning_level"]), row["nodes"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"{file} line {number}: not a topology ({error}); expected {expected}"
            ) from error
        name = f"{architecture}-{level}"
        with torch.device("meta"):
            module = TopologyModule(nodes, f"{file.name} line {number}")

        def captured(mode: Mode, module: TopologyModule = module, name: str = name) -> ForwardGraph:
            return capture(module, input_size=size, mode=mode, method="trace", name=name)

        networks[name] = Network(architecture, level, "random", "sgd-momentum", captured)
    return networks
