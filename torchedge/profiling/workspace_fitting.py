"""Fits a device's convolution workspaces to measurements by `hooks/convolution_probe.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchedge.arrays import FloatArray
from torchedge.devices import Provenance
from torchedge.errors import ProfileError, needed
from torchedge.forests.trees import Forest
from torchedge.prediction.memory.workspaces import (
    KINDS,
    PHASES,
    WORKSPACE_FEATURES,
    WorkspaceModel,
    convolution_geometry,
    convolution_kind,
    tensor_bytes,
    workspace_features,
)
from torchedge.profiling.forest_fitting import convert_model
from torchedge.profiling.profile_folders import PartFit, package_versions, today
from torchedge.storage.documents import present, read_unpacked, reading
from torchedge.storage.journals import parse_lines

CONVOLUTIONS = "convolutions.jsonl"
"""The file of a dataset folder that holds measured convolutions, as the probe writes them."""


_LEAVES, _LEAST_ROWS = 8000, 200
_UNSPLIT = 1.05 * 2**20
"""The allocator does not split off a MiB: a smaller figure is the unused end of a block, not a workspace."""

_MOST_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Workspaces:
    """Measured convolutions of a kind: geometry (R, 9) as `GEOMETRY`, bytes (R,) of workspace by phase."""

    geometry: FloatArray
    measured: Mapping[str, FloatArray]


def read_workspaces(file: str | Path) -> dict[str, Workspaces]:
    """Read the probe's file (also compressed): convolutions by kind, of those with enough of them.

    Raises ProfileError for a line that is not one of its rows, and where no kind has enough.
    """
    rows: dict[str, list[tuple[tuple[Any, ...], list[float]]]] = {}
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    expected = "a line of hooks/convolution_probe.py"
    for place, row in parse_lines(file, data):
        with reading(place, "a measured convolution", expected):
            if row.get("reason"):
                continue
            kind, shape = _geometry(row)
            workspaces = [float(row[f"{phase}_workspace_mib"]) * 2**20 for phase in PHASES]
        if shape is not None:
            rows.setdefault(kind, []).append((shape, workspaces))
    most = max([len(some) for some in rows.values()], default=0)
    if most < _LEAST_ROWS:
        raise ProfileError(
            f"{file}: {most} convolutions that are not depthwise, expected at least {_LEAST_ROWS}; "
            "measure more"
        )
    return {kind: _table(file, some) for kind, some in rows.items() if len(some) >= _LEAST_ROWS}


def _table(file: str | Path, rows: Sequence[tuple[tuple[Any, ...], list[float]]]) -> Workspaces:
    geometry, measured = zip(*rows, strict=True)
    table, bytes_ = np.array(geometry, dtype=float), np.array(measured)
    bytes_ = np.where(bytes_ < _UNSPLIT, 0.0, bytes_)
    if not np.isfinite(table).all() or (table[:, :6] < 1).any() or not np.isfinite(bytes_).all():
        raise ProfileError(f"{file}: sizes are not all positive numbers; expected what the probe writes")
    return Workspaces(table, {phase: bytes_[:, i] for i, phase in enumerate(PHASES)})


def _geometry(row: Mapping[str, Any]) -> tuple[str, tuple[Any, ...] | None]:
    """Return the kind of a measured convolution and its geometry; one of height 1 is of one dimension."""
    kernel, stride, padding, dilation, size = (
        [int(n) for n in row[name]] for name in ("kernel", "stride", "padding", "dilation", "size")
    )
    after = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    inputs, outputs, groups, batch = (int(row[name]) for name in ("inputs", "outputs", "groups", "batch"))
    shapes = ((batch, inputs, *size), (outputs, inputs // groups, *kernel), (batch, outputs, *after))
    dimensions = 1 if size[0] == 1 < size[-1] else len(size)
    kind = convolution_kind(dimensions, row.get("dtype", "float32"), bool(row.get("channels_last")))
    return kind, convolution_geometry(shapes, groups, stride, padding, kind)


def fit_workspaces(measured: Mapping[str, Workspaces]) -> WorkspaceModel:
    """Fit one tree a phase and kind to the workspace as a multiple of the convolution's tensors.

    The library chooses by a rule over shapes, which a single deep tree fits better than an average of many.
    Raises MissingExtraError without scikit-learn.
    """
    forests = {}
    for kind in [kind for kind in KINDS if kind in measured]:
        table = measured[kind]
        features, tensors = workspace_features(table.geometry), tensor_bytes(table.geometry)
        for phase in PHASES:
            forests[kind + phase] = _tree(features, table.measured[phase] / tensors)
    return WorkspaceModel(forests)


def _tree(features: FloatArray, ratio: FloatArray) -> Forest:
    with needed("scikit-learn", extra="fit", purpose="fitting workspaces"):
        from sklearn.ensemble import RandomForestRegressor
    model = RandomForestRegressor(1, bootstrap=False, max_leaf_nodes=_LEAVES, random_state=0)
    model.fit(features, ratio)
    return convert_model(model, features, feature_names=WORKSPACE_FEATURES, learner="tree")


def fit_device_workspaces(folder: Path) -> PartFit | None:
    """Fit the convolution workspaces that a dataset folder holds measurements of; None where it has none."""
    file = present(folder / CONVOLUTIONS)
    if not file.exists():
        return None
    measured = read_workspaces(file)
    described = {
        "provenance": str(Provenance.MEASURED),
        "dataset": folder.resolve().name,
        "date": today(),
        "convolutions": sum(len(table.geometry) for table in measured.values()),
        "versions": package_versions(),
    }
    return PartFit(fit_workspaces(measured), described)
