"""Fits a device's convolution workspaces to measurements by `hooks/convolution_probe.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Provenance
from torchedge.errors import ProfileError, needed
from torchedge.forests.trees import Forest
from torchedge.prediction.memory.workspaces import (
    PHASES,
    WORKSPACE_FEATURES,
    WorkspaceModel,
    convolution_geometry,
    tensor_bytes,
    workspace_features,
)
from torchedge.profiling.forest_fitting import convert_model
from torchedge.profiling.profile_folders import PartFit, package_versions, today
from torchedge.storage.documents import read_unpacked, reading
from torchedge.storage.journals import parse_lines

CONVOLUTIONS = "convolutions.jsonl"
"""The file of a dataset folder that holds measured convolutions, as the probe writes them."""

FloatArray = npt.NDArray[np.float64]

_LEAVES, _LEAST_ROWS = 8000, 200
_UNSPLIT = 1.05 * 2**20
"""The allocator does not split off a MiB: a smaller figure is the unused end of a block, not a workspace."""

_MOST_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Workspaces:
    """Measured convolutions: geometry (R, 9) as `GEOMETRY`, and by phase the workspace in bytes (R,)."""

    geometry: FloatArray
    measured: Mapping[str, FloatArray]


def read_workspaces(file: str | Path) -> Workspaces:
    """Read the probe's file (also compressed); ProfileError names a line that is not one of its rows."""
    geometry, measured = [], []
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    expected = "a line of hooks/convolution_probe.py"
    for place, row in parse_lines(file, data):
        with reading(place, "a measured convolution", expected):
            if row.get("reason"):
                continue
            shape = _geometry(row)
            workspaces = [float(row[f"{phase}_workspace_mib"]) * 2**20 for phase in PHASES]
        if shape is not None:
            geometry.append(shape)
            measured.append(workspaces)
    if len(geometry) < _LEAST_ROWS:
        raise ProfileError(
            f"{file}: {len(geometry)} convolutions that are not depthwise, expected at least {_LEAST_ROWS}; "
            "measure more"
        )
    bytes_ = np.array(measured)
    bytes_ = np.where(bytes_ < _UNSPLIT, 0.0, bytes_)
    table = np.array(geometry, dtype=float)
    if not np.isfinite(table).all() or (table[:, :6] < 1).any() or not np.isfinite(bytes_).all():
        raise ProfileError(f"{file}: sizes are not all positive numbers; expected what the probe writes")
    return Workspaces(table, {phase: bytes_[:, i] for i, phase in enumerate(PHASES)})


def _geometry(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    kernel, stride, padding, dilation, size = (
        [int(n) for n in row[name]] for name in ("kernel", "stride", "padding", "dilation", "size")
    )
    after = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    inputs, outputs, groups, batch = (int(row[name]) for name in ("inputs", "outputs", "groups", "batch"))
    shapes = ((batch, inputs, *size), (outputs, inputs // groups, *kernel), (batch, outputs, *after))
    return convolution_geometry(shapes, groups, stride, padding)


def fit_workspaces(measured: Workspaces) -> WorkspaceModel:
    """Fit one tree a phase to the workspace as a multiple of the convolution's tensors.

    The library chooses by a rule over shapes, which a single deep tree fits better than an average of many.
    Raises MissingExtraError without scikit-learn.
    """
    features, tensors = workspace_features(measured.geometry), tensor_bytes(measured.geometry)
    return WorkspaceModel({phase: _tree(features, measured.measured[phase] / tensors) for phase in PHASES})


def _tree(features: FloatArray, ratio: FloatArray) -> Forest:
    with needed("scikit-learn", extra="fit", purpose="fitting workspaces"):
        from sklearn.ensemble import RandomForestRegressor
    model = RandomForestRegressor(1, bootstrap=False, max_leaf_nodes=_LEAVES, random_state=0)
    model.fit(features, ratio)
    return convert_model(model, features, feature_names=WORKSPACE_FEATURES, learner="tree")


def fit_device_workspaces(folder: Path) -> PartFit | None:
    """Fit the convolution workspaces that a dataset folder holds measurements of; None where it has none."""
    for name in (CONVOLUTIONS, CONVOLUTIONS + ".gz"):
        if (folder / name).exists():
            measured = read_workspaces(folder / name)
            described = {
                "provenance": str(Provenance.MEASURED),
                "dataset": folder.resolve().name,
                "date": today(),
                "convolutions": len(measured.geometry),
                "versions": package_versions(),
            }
            return PartFit(fit_workspaces(measured), described)
    return None
