"""A device's fitted models as files beside its `device.toml`, and analytic models where nobody measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, Provenance
from torchedge.errors import ProfileError
from torchedge.prediction.forest_files import read_forests, write_forests
from torchedge.prediction.forests import feature_hash
from torchedge.prediction.intervals import ErrorModel, assumed_errors, read_scale
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import COEFFICIENT_NAMES, prior_mean
from torchedge.prediction.latency.shares import SHARE_NAMES
from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel, Process
from torchedge.storage import file_sha256, resolve_inside
from torchedge.storage.tensors import read_tensors, write_tensors

TABLES, FORESTS = "training.safetensors", "training-forests.safetensors"
SCHEMA = "torchedge-training-profile-1"

_MOST_BYTES = 8 * 2**20
_EXPECTED = {"memory": MEMORY_FEATURES, "latency": SHARE_NAMES}
_REBUILD = "rebuild the profile with `torchedge fit`"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingModels:
    """Γ and Φ of one device, where they come from, and what to tell the user about that."""

    memory: MemoryModel
    latency: LatencyModel
    provenance: Provenance
    notes: tuple[str, ...] = ()


def load_models(device: Device) -> TrainingModels:
    """Return the fitted models of a device, or analytic ones from its figures, marked as assumed.

    Raises ProfileError for files that are missing, damaged or made for another version.
    """
    return _loaded(device, device.folder)


def inference_models(models: TrainingModels, device: Device) -> TrainingModels:
    """Return models for inference out of models fitted to training steps only: constants stay, forests go."""
    if models.provenance is Provenance.ASSUMED:
        return models
    wide = assumed_errors(_ASSUMED_MEMORY_ERROR)
    process = replace(models.memory.process, floor=(0.0, 0.0), ceiling=_UNLIMITED)
    memory = MemoryModel(process, assumed_errors(_ASSUMED_MEMORY_ERROR / 0.09), wide, wide)
    latency = LatencyModel(models.latency.coefficients, assumed_errors(_ASSUMED_LATENCY_ERROR))
    note = f"inference was not measured on {device.name}: figures follow from its training measurements"
    return TrainingModels(memory, latency, Provenance.ASSUMED, (*models.notes, note))


@lru_cache(maxsize=16)
def _loaded(device: Device, folder: Path) -> TrainingModels:
    # Equal devices may lie in several folders (a copy, a user's own fit): the folder is part of the key.
    described = device.profile.get("training")
    if isinstance(described, Mapping):
        return _read(device, described)
    return _analytic(device)


def write_models(folder: Path, models: TrainingModels, metadata: Mapping[str, str]) -> dict[str, str]:
    """Write fitted models into a profile's folder; return the sha256 of each file by its name."""
    memory, latency = models.memory, models.latency
    process = memory.process
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "memory.process": np.array([*process.beside, *process.floor, process.ceiling, process.capacity]),
        "latency.coefficients": latency.coefficients,
    }
    for name, errors in _error_models(models).items():
        tensors[f"{name}.size"], tensors[f"{name}.above"] = errors.size, errors.above
    if latency.scale is not None:
        tensors.update(latency.scale.tensors("latency.scale"))
    document = {"schema": SCHEMA, "coefficients": feature_hash(COEFFICIENT_NAMES), **metadata}
    write_tensors(folder / TABLES, tensors, document)
    if memory.forest is None or latency.forest is None:
        raise ProfileError("a fitted profile needs a memory and a latency forest; fit both")
    write_forests(folder / FORESTS, {"memory": memory.forest, "latency": latency.forest})
    return {name: file_sha256(folder / name, max_bytes=_MOST_BYTES) for name in (TABLES, FORESTS)}


def _error_models(models: TrainingModels) -> dict[str, ErrorModel]:
    return {
        "memory.errors": models.memory.errors,
        "memory.reserved_errors": models.memory.reserved_errors,
        "memory.allocated_errors": models.memory.allocated_errors,
        "latency.errors": models.latency.errors,
    }


def _read(device: Device, described: Mapping[str, object]) -> TrainingModels:
    files = described.get("files")
    if not isinstance(files, Mapping) or set(files) != {TABLES, FORESTS}:
        raise ProfileError(
            f"{device.folder / 'device.toml'}: profile.training.files must name "
            f"{TABLES} and {FORESTS}; {_REBUILD}"
        )
    for name, digest in files.items():
        path = resolve_inside(device.folder, str(name))
        if file_sha256(path, max_bytes=_MOST_BYTES) != digest:
            raise ProfileError(
                f"{path} is not the file that device.toml describes (its sha256 differs); "
                f"restore it, or {_REBUILD}"
            )
    tensors, metadata = read_tensors(device.folder / TABLES, max_bytes=_MOST_BYTES)
    source = str(device.folder / TABLES)
    if metadata.get("schema") != SCHEMA or metadata.get("coefficients") != feature_hash(COEFFICIENT_NAMES):
        raise ProfileError(f"{source} was made for another version of torchedge; {_REBUILD}")
    forests = read_forests(device.folder / FORESTS, expected=_EXPECTED, max_bytes=_MOST_BYTES)
    try:
        process = [float(x) for x in tensors["memory.process"]]
        errors = {
            name: ErrorModel(tensors[f"{name}.size"], tensors[f"{name}.above"])
            for name in (
                "memory.errors",
                "memory.reserved_errors",
                "memory.allocated_errors",
                "latency.errors",
            )
        }
        coefficients = tensors["latency.coefficients"]
    except KeyError as error:
        raise ProfileError(f"{source}: tensor {error} is missing; {_REBUILD}") from error
    if len(process) != 6 or coefficients.shape != (len(COEFFICIENT_NAMES),):
        raise ProfileError(f"{source}: tensors have wrong shapes; {_REBUILD}")
    scale = read_scale(tensors, "latency.scale")
    if len(scale.centre) != len(SHARE_NAMES):
        raise ProfileError(
            f"{source}: latency.scale has {len(scale.centre)} features, "
            f"expected {len(SHARE_NAMES)}; {_REBUILD}"
        )
    memory = MemoryModel(
        Process((process[0], process[1]), (process[2], process[3]), process[4], process[5]),
        errors["memory.errors"],
        errors["memory.reserved_errors"],
        errors["memory.allocated_errors"],
        forests["memory"],
    )
    latency = LatencyModel(coefficients, errors["latency.errors"], forests["latency"], scale)
    provenance = Provenance(str(described.get("provenance", Provenance.PUBLIC_DATA.value)))
    return TrainingModels(memory, latency, provenance)


# devices without measurements -------------------------------------------------------------------------------

_ASSUMED_CONTEXT = MappingProxyType({"gpu": 600.0, "cpu": 350.0})
_ASSUMED_MEMORY_ERROR, _ASSUMED_LATENCY_ERROR = 0.25, 0.8
_UNLIMITED = 1e9


def _analytic(device: Device) -> TrainingModels:
    """Simulation plus the device's context, and the time model with coefficients that its figures suggest."""
    context = device.figures.get("context_mib")
    beside = context.value if context is not None else _ASSUMED_CONTEXT[device.kind]
    total = device.figures.get("usable_memory_mib") or device.figures.get("memory_mib")
    capacity = max(total.value - beside, 1.0) if total is not None else _UNLIMITED
    process = Process((beside, beside), (beside, beside), _UNLIMITED, capacity)
    wide = assumed_errors(_ASSUMED_MEMORY_ERROR)
    memory = MemoryModel(process, assumed_errors(_ASSUMED_MEMORY_ERROR / 0.09), wide, wide)
    latency = LatencyModel(prior_mean(device), assumed_errors(_ASSUMED_LATENCY_ERROR))
    missing = [n for n in ("peak_fp32_gflops", "bandwidth_gb_s") if n not in device.figures]
    notes = [
        f"{device.name} has not been measured: memory is simulated, "
        "latency is an analytic estimate from its figures"
    ]
    if missing:
        notes.append(f"{device.name} gives no {' and no '.join(missing)}: the Jetson TX2's stand in for it")
    return TrainingModels(memory, latency, Provenance.ASSUMED, tuple(notes))
