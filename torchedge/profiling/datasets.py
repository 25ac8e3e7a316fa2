"""Measured training steps read from a dataset folder: `measurements.csv` and `topologies.jsonl`."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torchedge.errors import ProfileError
from torchedge.graphs import Graph
from torchedge.profiling.topologies import TopologyModule
from torchedge.storage.documents import read_bytes
from torchedge.tracing.capturing import capture

_MOST_BYTES = 256 * 2**20
_COLUMNS = (
    "network",
    "pruning_level",
    "batch_size",
    "memory_fits",
    "gamma_mb",
    "allocated_mb",
    "reserved_mb",
    "latency_fits",
    "phi_ms",
)
_NUMBERS = _COLUMNS[3:]
Key = tuple[str, int]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Dataset:
    """Measured points and the graphs they were measured on.

    Columns are arrays over the R rows of `measurements.csv`; numbers are NaN where a run gave none. `graphs`
    holds a Graph of a training step for each (network, pruning level) with a topology, `digest` the sha256 of
    both files.
    """

    name: str
    network: npt.NDArray[np.str_]
    level: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    columns: Mapping[str, FloatArray]
    graphs: Mapping[Key, Graph]
    digest: str

    def __getitem__(self, column: str) -> FloatArray:
        return self.columns[column]

    @property
    def has_graph(self) -> npt.NDArray[np.bool_]:
        """(R,) whether a row's network has a topology."""
        return np.array([(n, int(v)) in self.graphs for n, v in zip(self.network, self.level, strict=True)])


def read_dataset(folder: str | Path, *, input_size: tuple[int, ...] = (3, 224, 224)) -> Dataset:
    """Read a dataset folder and capture its topologies; ProfileError says which file and line, and why."""
    root = Path(folder)
    if not root.is_dir():
        raise ProfileError(f"{root} is no folder; expected one with measurements.csv and topologies.jsonl")
    table, topologies = (
        read_bytes(root / name, max_bytes=_MOST_BYTES) for name in ("measurements.csv", "topologies.jsonl")
    )
    rows = _read_rows(root / "measurements.csv", table)
    graphs = _read_graphs(root / "topologies.jsonl", topologies, input_size)
    columns = {name: np.array([r[i] for r in rows], dtype=float) for i, name in enumerate(_NUMBERS, 3)}
    return Dataset(
        root.resolve().name,
        np.array([r[0] for r in rows]),
        np.array([r[1] for r in rows], dtype=np.int64),
        np.array([r[2] for r in rows], dtype=np.int64),
        columns,
        graphs,
        hashlib.sha256(table + topologies).hexdigest(),
    )


def _read_rows(file: Path, data: bytes) -> list[tuple[object, ...]]:
    try:
        text = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProfileError(f"{file}: not UTF-8 text ({error}); expected a CSV table") from error
    reader = csv.DictReader(text)
    missing = [c for c in _COLUMNS if c not in (reader.fieldnames or ())]
    if missing:
        raise ProfileError(f"{file}: column {missing[0]!r} is missing; expected {', '.join(_COLUMNS)}")
    rows: list[tuple[object, ...]] = []
    for number, row in enumerate(reader, 2):
        try:
            whole = (row["network"], int(row["pruning_level"]), int(row["batch_size"]))
            rows.append((*whole, *(float(row[c]) if row[c] else math.nan for c in _NUMBERS)))
        except (TypeError, ValueError) as error:
            raise ProfileError(
                f"{file} line {number}: {error}; expected numbers in {', '.join(_COLUMNS[1:])}"
            ) from error
    if not rows:
        raise ProfileError(f"{file} has no rows; expected one a measured point")
    return rows


def _read_graphs(file: Path, data: bytes, input_size: tuple[int, ...]) -> dict[Key, Graph]:
    graphs: dict[Key, Graph] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
            key = (str(row["network"]), int(row["pruning_level"]))
            nodes = row["nodes"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProfileError(
                f"{file} line {number}: not a topology ({error}); expected network, pruning_level, nodes"
            ) from error
        with torch.device("meta"):
            module = TopologyModule(nodes, f"{file.name} line {number}")
        graphs[key] = capture(
            module, input_size=input_size, mode="train", method="trace", name=f"{key[0]}-{key[1]}"
        )
    return graphs
