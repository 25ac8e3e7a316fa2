"""The models of a device: fitted ones, read from files beside its `device.toml`, and stand-ins.

For each mode, memory and latency are fitted where they were measured, else derived from the other mode's
measurements, else scaled from a relative's or analytic; stand-ins are marked as transferred or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.devices import STAND_IN, Device, Provenance, find_device, transfer_error, usual_host, weakest
from torchedge.errors import InputError, ProfileError
from torchedge.forests.trees import Forest, feature_hash, read_forests, write_forests
from torchedge.graphs import Mode
from torchedge.graphs.training_steps import AMP_DTYPES
from torchedge.ops import COMPILED_PACE
from torchedge.prediction.feature_sets import find_feature_set, set_of_names
from torchedge.prediction.intervals import GRID, DistanceScale, ErrorModel, assumed_errors, joined_errors
from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel
from torchedge.prediction.latency.rates import REFERENCE_GB_S, SWEPT, CompiledRates, figure_of, norm_lanes
from torchedge.prediction.latency.roofline import (
    COEFFICIENT_NAMES,
    LAST,
    LAYER_NAMES,
    Terms,
    matrix_excess,
    prior_mean,
)
from torchedge.prediction.latency.workload import FORWARD_SHARE, Workload
from torchedge.prediction.memory.model import MEMORY_FEATURES, UNLIMITED, MemoryModel, Process
from torchedge.storage import REBUILD, file_sha256, profile_file
from torchedge.storage.tensors import read_tensors, write_tensors

_MOST_BYTES = 8 * 2**20
_MOST_MODELS = 256
"""Models in memory: those of all shipped devices in every mode and precision."""
_OWN_FEATURES = {"memory": MEMORY_FEATURES, "latency": SHARE_NAMES}
_MEMORY_ERRORS = ("memory.errors", "memory.reserved_errors", "memory.allocated_errors")
Tensors = Mapping[str, npt.NDArray[np.float64]]

MODE_TABLES: Mapping[Mode, str] = MappingProxyType({"train": "training", "infer": "inference"})
"""Mode -> the table of `[profile]` in device.toml that describes its models, and the word for it."""

_ASSUMED_CONTEXT = MappingProxyType({"gpu": 600.0, "cpu": 350.0})
_ASSUMED_MEMORY_ERROR, _ASSUMED_LATENCY_ERROR = 0.25, 0.8
_COMPILED_ALLOCATED, _COMPILED_RESERVED = 0.34, 0.29
"""Half-widths in log within which nine of ten steps under torch.compile lie around the same eager step.

As `python benchmarks/accuracy/compiled.py` prints them: 28 steps of 14 networks on an NVIDIA H100. Γ moves as
much as reserved memory does."""
_PARTITIONED_ALLOCATED, _PARTITIONED_RESERVED = 0.11, 0.20
"""The same around figures from the compiled step's own graphs: of 24 steps that these were not made
with (`--steps fresh`)."""
_COMPILED_LATENCY, _PARTITIONED_LATENCY = 0.84, 0.40
"""The same of times around `COMPILED_PACE` of eager ones, networks left out, and around those from the
compiled step's own graphs, where the speed of the host is known (`--steps blind`)."""
_PROCESSOR_LATENCY = 0.25
"""The same of times around those that a processor's fit describes: real networks differ more from drawn ones
than these do from one another, and a shared processor's speed moves by a fifth within minutes."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedModels:
    """Models fitted to measurements of one mode; None: that figure was not measured."""

    memory: MemoryModel | None
    latency: LatencyModel | None
    provenance: Provenance


@dataclass(frozen=True, slots=True, eq=False)
class StepModels:
    """Models of Γ and Φ (or γ and φ) of one device, with their provenance and notes for the user."""

    memory: MemoryModel
    latency: LatencyModel
    memory_provenance: Provenance
    latency_provenance: Provenance
    notes: tuple[str, ...] = ()

    def of_compiled(self, rates: CompiledRates | None) -> StepModels:
        """Return the models of steps under torch.compile: those of eager ones, with wider intervals.

        rates: of a step whose own graphs are known: its memory is simulated from them, its work counted.
        """
        allocated, reserved = _COMPILED_ALLOCATED, _COMPILED_RESERVED
        changes: dict[str, Any] = {"spread": _COMPILED_LATENCY, "pace": COMPILED_PACE}
        if rates is not None:
            allocated, reserved = _PARTITIONED_ALLOCATED, _PARTITIONED_RESERVED
            changes = {"spread": _PARTITIONED_LATENCY, "compiled": rates, "forest": None, "scale": None}
        memory = replace(
            self.memory,
            errors=joined_errors(self.memory.errors, reserved),
            reserved_errors=joined_errors(self.memory.reserved_errors, reserved),
            allocated_errors=joined_errors(self.memory.allocated_errors, allocated),
        )
        matrices = self.latency.matrices
        matrices = None if matrices is None else replace(matrices, **changes)
        times = replace(self.latency, matrices=matrices, **changes)
        return replace(self, memory=memory, latency=times)

    @property
    def provenance(self) -> Provenance:
        """The weaker of both, which a prediction inherits."""
        return weakest((self.memory_provenance, self.latency_provenance))


def file_names(mode: Mode) -> tuple[str, str]:
    """Return the names of a mode's files: tables and forests."""
    return f"{MODE_TABLES[mode]}.safetensors", f"{MODE_TABLES[mode]}-forests.safetensors"


def load_models(
    device: Device, mode: Mode = "train", precision: str | None = None, channels_last: bool = False
) -> StepModels:
    """Return Γ and Φ of a device (mode "infer": γ and φ), for steps whose products run in a precision.

    precision: None for float32, or a dtype of `AMP_DTYPES`. channels_last: convolutions run in that memory
    format; a note says so where they were measured in the other one only. An unmeasured figure follows from
    the other mode's measurements, a relative's or the device's figures, marked as assumed, and so does
    latency in a precision that was not measured. Raises ProfileError for files that are missing, damaged or
    made for another version.
    """
    return _loaded(device, device.folder, mode, precision, channels_last)


@lru_cache(maxsize=_MOST_MODELS)
def _loaded(
    device: Device, folder: Path, mode: Mode, precision: str | None, channels_last: bool
) -> StepModels:
    # Equal devices may lie in several folders (a copy, a user's own fit): the folder is part of the key.
    other: Mode = "infer" if mode == "train" else "train"
    fitted, derived = read_models(device, mode), read_models(device, other)
    relative = read_relative(device, mode)
    models = complete_models(device, mode, fitted, derived, relative)
    kinds = _kinds(device, mode, None if fitted is None else fitted.latency)
    word = models.latency_provenance
    if kinds:
        word = _provenance(device, KINDS_TABLE)
    elif relative is not None and not any(m is not None and m.latency is not None for m in (fitted, derived)):
        kinds = {kind: relative.scaled_to(device, model) for kind, model in relative.kinds.items()}
    convolved = _of_kind(models, word, kinds, CONVOLUTIONS, precision)
    if channels_last:
        convolved = _of_kind(convolved, word, kinds, CHANNELS_LAST, precision)
        if not any(products == CHANNELS_LAST for products, _ in kinds):
            convolved = replace(convolved, notes=(*convolved.notes, _UNMEASURED_LAYOUT))
    predicted = under_precision(convolved, device, precision)
    described = device if relative is None or device.measured_operator_us is not None else relative.device
    host, unsure = _host_in_use(device, described)
    spread = _PROCESSOR_LATENCY if device.kind == "cpu" else 0.0
    last = None
    if any(products == LAST for products, _ in kinds):
        images = under_precision(_of_kind(models, word, kinds, LAST, precision), device, precision)
        last = images.latency.coefficients

    def in_use(model: LatencyModel, last: npt.NDArray[np.float64] | None) -> LatencyModel:
        known: WeakKeyDictionary[Workload, Terms] = WeakKeyDictionary()
        return replace(model, host=host, unsure=unsure, spread=spread, last=last, known=known)

    latency = in_use(predicted.latency, None if channels_last else last)
    if any(products == MATRICES for products, _ in kinds):
        matrices = under_precision(_of_kind(models, word, kinds, MATRICES, precision), device, precision)
        latency = replace(latency, matrices=in_use(matrices.latency, last))
    return replace(predicted, latency=latency)


def _host_in_use(device: Device, described: Device) -> tuple[float, float]:
    """Return how much slower the host of a device is than that of the `described` latencies.

    It is the host given (`Device.on_host`), else the median one that those devices were met in. Beside it the
    half-width in log of the interval that it lies in.
    """
    measured, given = described.measured_operator_us, device.figures.get("eager_operator_us")
    if measured is None:
        return 1.0, 0.0
    if given is not None:
        return given.value / measured, 0.0
    operator_us, spread = usual_host(described) or (measured, 0.0)
    return operator_us / measured, spread


def read_models(device: Device, mode: Mode) -> FittedModels | None:
    """Return the models fitted to measurements of one mode, None where its profile describes none."""
    return _read_models(device, device.folder, mode)


@lru_cache(maxsize=_MOST_MODELS)
def _read_models(device: Device, folder: Path, mode: Mode) -> FittedModels | None:
    described = device.profile.get(MODE_TABLES[mode])
    return _read(device, described, mode) if isinstance(described, Mapping) else None


# kinds of steps ---------------------------------------------------------------------------------------------

KINDS_TABLE, KINDS_FILE = "kinds", "kinds.safetensors"
CONVOLUTIONS, CHANNELS_LAST, MATRICES = "convolutions", "channels-last", "matrices"
Kind = tuple[str, str | None]
"""What most operations of a step are, one of the three above, and the precision of its products."""
_KIND_NAMES = (*COEFFICIENT_NAMES, *LAYER_NAMES)
_KIND_HASH = feature_hash((*_KIND_NAMES, "calls"))
"""Of kinds whose steps of matrices count the calls of views and modules."""
_UNMEASURED_LAYOUT = "latency in channels_last was not measured: it is that of the default memory format"


def read_kinds(device: Device, mode: Mode = "train") -> Mapping[Kind, LatencyModel]:
    """Return the latency of kinds of steps that were fitted apart (`torchedge fit kinds`)."""
    described = device.profile.get(KINDS_TABLE)
    if not isinstance(described, Mapping):
        return MappingProxyType({})
    kinds = _read_kinds(device.folder, str(described.get("sha256")))
    return {kind: model for (measured, kind), model in kinds.items() if measured == mode}


@lru_cache(maxsize=16)
def _read_kinds(folder: Path, digest: str) -> Mapping[tuple[Mode, Kind], LatencyModel]:
    path = profile_file(folder, KINDS_FILE, digest, max_bytes=_MOST_BYTES)
    tensors, metadata = read_tensors(path, max_bytes=_MOST_BYTES)
    if metadata.get("coefficients") != _KIND_HASH:
        raise ProfileError(f"{path} was made for another version of torchedge; {REBUILD}")
    kinds: list[Kind] = [
        (p, precision) for p in (CONVOLUTIONS, CHANNELS_LAST, MATRICES) for precision in (None, *AMP_DTYPES)
    ]
    return MappingProxyType(
        {
            (mode, kind): replace(
                _read_latency(str(path), tensors, _kind_name(mode, kind), kind[1]), calls=kind[0] == MATRICES
            )
            for mode in MODE_TABLES
            for kind in kinds
            if f"{_kind_name(mode, kind)}.coefficients" in tensors
        }
    )


def write_kinds(folder: Path, kinds: Mapping[tuple[Mode, Kind], LatencyModel]) -> str:
    """Write the latency of kinds of steps into a profile's folder; return the file's sha256."""
    tensors: dict[str, npt.NDArray[np.float64]] = {}
    for (mode, kind), model in kinds.items():
        tensors.update(_latency_tensors(_kind_name(mode, kind), model))
    write_tensors(folder / KINDS_FILE, tensors, {"coefficients": _KIND_HASH})
    return file_sha256(folder / KINDS_FILE, max_bytes=_MOST_BYTES)


def _kind_name(mode: Mode, kind: Kind) -> str:
    return f"{'' if mode == 'train' else 'inference.'}{kind[0]}.{kind[1] or 'float32'}"


def _of_kind(
    models: StepModels,
    provenance: Provenance,
    kinds: Mapping[Kind, LatencyModel],
    products: str,
    precision: str | None,
) -> StepModels:
    """Return models with the latency measured nearest to a kind: in its precision, else in another."""
    halves = [] if precision is None else AMP_DTYPES
    for known in (precision, *halves, None):
        if (products, known) in kinds:
            return replace(models, latency=kinds[products, known], latency_provenance=provenance)
        if known == models.latency.amp:
            break
    return models


# writing ----------------------------------------------------------------------------------------------------


def write_models(
    folder: Path, models: FittedModels, metadata: Mapping[str, str], mode: Mode = "train"
) -> dict[str, str]:
    """Write one mode's models into a profile's folder; return the sha256 of each file by its name.

    Raises ProfileError where there is neither a memory nor a latency model.
    """
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    forests: dict[str, Forest] = {}
    if models.memory is not None:
        tensors.update(_memory_tensors(models.memory))
        if models.memory.forest is not None:
            forests["memory"] = models.memory.forest
    if models.latency is not None:
        if models.latency.scale is None:
            raise ProfileError("a fitted latency model needs the distance scale of its errors; fit it again")
        tensors.update(_latency_tensors("latency", models.latency))
        if models.latency.forest is not None:
            forests["latency"] = models.latency.forest
    if not tensors:
        raise ProfileError("a fitted profile needs a memory or a latency model; fit one")
    document = {"schema": _schema(mode), "coefficients": feature_hash(COEFFICIENT_NAMES), **metadata}
    if models.latency is not None and models.latency.amp is not None:
        document["latency.amp"] = models.latency.amp
    for name, forest in forests.items():
        document[f"{name}.features"] = _feature_set(name, forest)
    tables, forests_file = file_names(mode)
    write_tensors(folder / tables, tensors, document)
    written = [tables]
    if forests:
        write_forests(folder / forests_file, forests)
        written.append(forests_file)
    return {name: file_sha256(folder / name, max_bytes=_MOST_BYTES) for name in written}


def _schema(mode: Mode) -> str:
    return f"torchedge-{MODE_TABLES[mode]}-profile-1"


def _feature_set(figure: str, forest: Forest) -> str:
    """Return the features of a forest: "own" or the name of a feature set."""
    name = "own" if forest.feature_names == _OWN_FEATURES[figure] else set_of_names(forest.feature_names)
    if name is None:
        raise ProfileError(
            f"the {figure} forest reads features of no registered set; fit it on one, or register the set"
        )
    return name


def _memory_tensors(model: MemoryModel) -> dict[str, npt.NDArray[np.float64]]:
    process = model.process
    figures = [*process.beside, *process.floor, process.ceiling, process.capacity]
    tensors = {"memory.process": np.array(figures)}
    errors = (model.errors, model.reserved_errors, model.allocated_errors)
    for name, model_errors in zip(_MEMORY_ERRORS, errors, strict=True):
        tensors.update(_error_tensors(name, model_errors))
    return tensors


def _latency_tensors(name: str, model: LatencyModel) -> dict[str, npt.NDArray[np.float64]]:
    more = {} if model.scale is None else model.scale.tensors(f"{name}.scale")
    if model.lanes:
        more[f"{name}.lanes"] = np.array([model.lanes])
    errors = _error_tensors(f"{name}.errors", model.errors)
    return {f"{name}.coefficients": model.coefficients, **errors, **more}


def _error_tensors(name: str, errors: ErrorModel) -> dict[str, npt.NDArray[np.float64]]:
    return {f"{name}.size": errors.size, f"{name}.above": errors.above}


# reading ----------------------------------------------------------------------------------------------------


def _read(device: Device, described: Mapping[str, object], mode: Mode) -> FittedModels:
    tables, forests_file = file_names(mode)
    files = described.get("files")
    if not isinstance(files, Mapping) or not {tables} <= set(files) <= {tables, forests_file}:
        raise ProfileError(
            f"{device.folder / 'device.toml'}: profile.{MODE_TABLES[mode]}.files must name "
            f"{tables} and, where there are forests, {forests_file}; {REBUILD}"
        )
    paths = {
        name: profile_file(device.folder, str(name), digest, max_bytes=_MOST_BYTES)
        for name, digest in files.items()
    }
    tensors, metadata = read_tensors(paths[tables], max_bytes=_MOST_BYTES)
    source = str(device.folder / tables)
    if metadata.get("schema") != _schema(mode) or metadata.get("coefficients") != feature_hash(
        COEFFICIENT_NAMES
    ):
        raise ProfileError(f"{source} was made for another version of torchedge; {REBUILD}")
    expected = _expected_forests(source, metadata) if forests_file in files else {}
    forests: Mapping[str, Forest] = {}
    if expected:
        forests = read_forests(paths[forests_file], expected=expected, max_bytes=_MOST_BYTES)
    memory = _read_memory(source, tensors, forests.get("memory")) if "memory.process" in tensors else None
    latency = None
    if "latency.coefficients" in tensors:
        latency = _read_latency(
            source, tensors, "latency", metadata.get("latency.amp"), forests.get("latency")
        )
    if memory is None and latency is None:
        raise ProfileError(f"{source} holds neither memory.process nor latency.coefficients; {REBUILD}")
    return FittedModels(memory, latency, _provenance(device, MODE_TABLES[mode]))


def _provenance(device: Device, table: str) -> Provenance:
    described = device.profile[table]
    assert isinstance(described, Mapping)
    word = described.get("provenance", Provenance.PUBLIC_DATA.value)
    try:
        return Provenance(word)
    except ValueError as error:
        words = ", ".join(item.value for item in Provenance)
        raise ProfileError(
            f"{device.folder / 'device.toml'}: profile.{table}.provenance is "
            f"{str(word)[:40]!r}, expected one of: {words}; correct the file"
        ) from error


def _expected_forests(source: str, metadata: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the feature order of each forest that the tables name; files of old name none and have both."""
    named = [figure for figure in _OWN_FEATURES if f"{figure}.features" in metadata]
    if not named:
        return dict(_OWN_FEATURES)
    expected = {}
    for figure in named:
        chosen = metadata[f"{figure}.features"]
        try:
            expected[figure] = _OWN_FEATURES[figure] if chosen == "own" else find_feature_set(chosen).names
        except InputError as error:
            raise ProfileError(f"{source}: {figure}.features: {error}; or {REBUILD}") from error
    return expected


def _tensor(source: str, tensors: Tensors, name: str, *shape: int) -> npt.NDArray[np.float64]:
    """Return a tensor of a file; raises ProfileError unless it is there and has this shape (none: any)."""
    array = tensors.get(name)
    if array is None or (shape and array.shape != shape):
        has = "is missing" if array is None else f"has shape {array.shape}, expected {shape}"
        raise ProfileError(f"{source}: tensor {name} {has}; {REBUILD}")
    return np.asarray(array, dtype=np.float64)


def _read_memory(source: str, tensors: Tensors, forest: Forest | None) -> MemoryModel:
    process: list[float] = _tensor(source, tensors, "memory.process", 6).tolist()
    if min(process) < 0:
        raise ProfileError(f"{source}: memory.process is not six numbers from 0 on; {REBUILD}")
    gamma, reserved, allocated = (_read_errors(source, tensors, name) for name in _MEMORY_ERRORS)
    constants = Process((process[0], process[1]), (process[2], process[3]), process[4], process[5])
    return MemoryModel(constants, gamma, reserved, allocated, forest)


def _read_latency(
    source: str, tensors: Tensors, name: str, amp: str | None, forest: Forest | None = None
) -> LatencyModel:
    """Return the latency model under a name; a mode's has a distance scale, a kind's has none."""
    if amp not in (None, *AMP_DTYPES):
        raise ProfileError(
            f"{source}: latency.amp is {str(amp)[:40]!r}, expected {' or '.join(AMP_DTYPES)}; {REBUILD}"
        )
    scale = None
    if name == "latency":
        count = len(SHARE_NAMES)
        law = _tensor(source, tensors, f"{name}.scale.law", 2)
        centre, spread = (_tensor(source, tensors, f"{name}.scale.{p}", count) for p in ("centre", "spread"))
        reference = _tensor(source, tensors, f"{name}.scale.reference")
        scale = DistanceScale(float(law[0]), float(law[1]), centre, spread, reference)
    stored = tensors.get(f"{name}.coefficients")
    of_layers = name != "latency" and stored is not None and stored.size == len(_KIND_NAMES)
    count = len(_KIND_NAMES if of_layers else COEFFICIENT_NAMES)
    coefficients = _tensor(source, tensors, f"{name}.coefficients", count)
    errors, lanes = _read_errors(source, tensors, f"{name}.errors"), f"{name}.lanes"
    side_by_side = float(_tensor(source, tensors, lanes, 1)[0]) if lanes in tensors else 0.0
    return LatencyModel(coefficients, errors, forest, scale, amp, lanes=side_by_side)


def _read_errors(source: str, tensors: Tensors, name: str) -> ErrorModel:
    return ErrorModel(*[_tensor(source, tensors, f"{name}.{part}", len(GRID)) for part in ("size", "above")])


# models of unmeasured figures ----------------------------------------------------------------------------


def complete_models(
    device: Device,
    mode: Mode,
    fitted: FittedModels | None,
    other: FittedModels | None,
    relative: Relative | None = None,
) -> StepModels:
    """Return both models of a mode: those fitted, else derived, else analytic.

    A figure that was not measured follows from the `other` mode's measurements; latency otherwise from those
    of a `relative`, a device of the same kind, by the figures of both.
    """
    memory = fitted.memory if fitted is not None else None
    latency = fitted.latency if fitted is not None else None
    provenance = fitted.provenance if fitted is not None else Provenance.ASSUMED
    unmeasured = Provenance.ASSUMED
    origins: dict[str, str] = {}
    if memory is None:
        known = other.memory if other is not None else None
        origins["memory"] = "analytic" if known is None else "derived"
        if known is None:
            # Simulation plus the device's context, and what libraries take on a relative.
            figure = device.figures.get("context_mib")
            context = figure.value if figure is not None else _ASSUMED_CONTEXT[device.kind]
            without, with_linear = (0.0, 0.0) if relative is None else relative.libraries
            beside = context + without, context + with_linear
            total = device.figures.get("usable_memory_mib") or device.figures.get("memory_mib")
            capacity = max(total.value - beside[1], 1.0) if total is not None else UNLIMITED
            memory = _wide(Process(beside, beside, UNLIMITED, capacity))
        else:  # the constants of the process, without its floor, its ceiling and the forest
            memory = _wide(replace(known.process, floor=(0.0, 0.0), ceiling=UNLIMITED))
    if latency is None:
        known_latency = other.latency if other is not None else None
        if known_latency is not None:
            origins["latency"] = "derived"
            latency = _assumed_latency(known_latency.coefficients, known_latency.amp)
        elif relative is not None:
            origins["latency"] = "relative"
            if relative.error is not None:
                unmeasured = Provenance.TRANSFERRED
            latency = relative.scaled_to(device, relative.latency)
        else:
            origins["latency"] = "analytic"
            latency = _assumed_latency(prior_mean(device), excess=matrix_excess(device))
    return StepModels(
        memory,
        latency,
        Provenance.ASSUMED if "memory" in origins else provenance,
        unmeasured if "latency" in origins else provenance,
        _notes(device, mode, origins, relative),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Relative:
    """A measured device of the same kind, from whose latency an unmeasured device's is scaled.

    libraries: MiB that a process takes beside its context and its allocator, without and with linear layers.
    kinds: its latency of kinds of steps in float32, and of `LAST` in each precision, by which libraries have
    kernels for depthwise convolutions. Others in half precision say little about other devices: there
    libraries fill another part of the matrix units. error: the half-width of 90 % intervals of what
    is scaled, in log, where it is known from devices left out.
    """

    device: Device
    latency: LatencyModel
    kinds: Mapping[Kind, LatencyModel]
    error: float | None = None
    libraries: tuple[float, float] = (0.0, 0.0)

    def scaled_to(self, device: Device, latency: LatencyModel) -> LatencyModel:
        """Return one of its models for a device by the ratio of both devices' figures, without the forest.

        The model stays that of its own host where that was measured: `load_models` scales it to another one.
        """
        precision = latency.amp
        if self.device.measured_operator_us is not None:
            hosts = ("eager_operator_us", "launch_overhead_us")
            figures = {name: f for name, f in device.figures.items() if name not in hosts}
            own = {name: f for name, f in self.device.figures.items() if name in hosts}
            device = replace(device, figures=figures | own)
        coefficients, excess = _scaled(latency, (self.device, precision), (device, precision))
        error = _ASSUMED_LATENCY_ERROR if self.error is None else self.error
        errors = assumed_errors(error)
        lanes = norm_lanes(device) if latency.lanes else 0.0
        return LatencyModel(
            coefficients, errors, amp=precision, excess=excess, calls=latency.calls, lanes=lanes
        )


def _scaled(
    latency: LatencyModel, there: tuple[Device, str | None], here: tuple[Device, str | None]
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the coefficients and the excess of a model by the figures of both devices and precisions."""
    shift = prior_mean(*here) - prior_mean(*there)
    units = [figure_of(device, "compute_units", 0.0) for device, _ in (there, here)]
    if all(units):  # lanes that idle are a part of those of the device
        idle = np.array([name.startswith("parallel_") for name in COEFFICIENT_NAMES])
        shift = shift + np.log(units[1] / units[0]) * idle
    shift = np.pad(shift, (0, len(latency.coefficients) - len(shift)))  # kinds have terms of layers
    return latency.coefficients + shift, matrix_excess(*here) - matrix_excess(*there)


def read_relative(device: Device, mode: Mode) -> Relative | None:
    """Return the device that `[profile] relative` of a device names, with its latency of this mode, if any.

    Raises ProfileError where it names no device with measured latency.
    """
    name = device.profile.get("relative")
    if name is None:
        return None
    source = find_device(str(name))
    other: Mode = "infer" if mode == "train" else "train"
    for models in (read_models(source, mode), read_models(source, other)):
        if models is not None and models.latency is not None:
            kinds = {
                kind: swept(_even(model), source, mode) if kind[0] == MATRICES else model
                for kind, model in _kinds(source, mode, models.latency).items()
                if kind[1] is None or kind[0] == LAST
            }
            libraries, context = (0.0, 0.0), source.figures.get("context_mib")
            if models.memory is not None and context is not None:
                without, with_linear = models.memory.process.beside
                libraries = (max(without - context.value, 0.0), max(with_linear - context.value, 0.0))
            return Relative(source, models.latency, kinds, transfer_error(source), libraries)
    raise ProfileError(
        f"{device.folder / 'device.toml'}: profile.relative is {str(name)[:40]!r}, whose latency was not "
        "measured; name a device with a fitted latency"
    )


def _kinds(device: Device, mode: Mode, latency: LatencyModel | None) -> Mapping[Kind, LatencyModel]:
    """Return the latency of kinds of steps; of matrices in inference, where not measured, by training's.

    latency: that of the device in this mode. Training's in channels_last are those of `LAST` as well.
    """
    kinds, trained = dict(read_kinds(device, mode)), read_kinds(device)
    if mode == "infer" and latency is not None:
        matrices = {kind: model for kind, model in trained.items() if kind[0] == MATRICES}
        kinds = {k: swept(_inferred(m, latency), device, mode) for k, m in matrices.items()} | kinds
    return kinds | {(LAST, p): model for (products, p), model in trained.items() if products == CHANNELS_LAST}


def _even(kind: LatencyModel) -> LatencyModel:
    """Return a kind without what uneven channels change: its own library's kernels for a few such layers."""
    even = [not name.startswith("odd_") for name in COEFFICIENT_NAMES] + [True] * len(LAYER_NAMES)
    coefficients = kind.coefficients * even[: len(kind.coefficients)]
    return replace(kind, coefficients=coefficients, known=WeakKeyDictionary())


def _inferred(kind: LatencyModel, inference: LatencyModel) -> LatencyModel:
    """Return a kind of training steps as inference: its products, the rest from inference."""
    coefficients = kind.coefficients.copy()
    for place, name in enumerate(COEFFICIENT_NAMES):
        if name.startswith(("launch_", "pass_")) or name in ("step", "overlap"):
            coefficients[place] = inference.coefficients[place]
    return replace(kind, coefficients=coefficients, calls=inference.calls, known=WeakKeyDictionary())


def swept(kind: LatencyModel, device: Device, mode: Mode) -> LatencyModel:
    """Return a kind with sweeps over memory as long as single kernels of other GPUs take (`SWEPT`)."""
    coefficients = kind.coefficients.copy()
    access = 4e-6 / figure_of(device, "bandwidth_gb_s", REFERENCE_GB_S)  # ms
    share = 1.0 if mode == "train" else FORWARD_SHARE
    for name, accesses in SWEPT[mode].items():
        coefficients[COEFFICIENT_NAMES.index(f"pass_{name}")] = np.log(accesses * access / share)
    return replace(kind, coefficients=coefficients, known=WeakKeyDictionary())


def _assumed_latency(
    coefficients: npt.NDArray[np.float64], amp: str | None = None, excess: float = 0.0
) -> LatencyModel:
    return LatencyModel(coefficients, assumed_errors(_ASSUMED_LATENCY_ERROR), amp=amp, excess=excess)


def under_precision(models: StepModels, device: Device, precision: str | None) -> StepModels:
    """Return models for steps whose products run in a precision (None: float32), with notes on assumptions.

    Latency measured in another precision is converted: its coefficients shift by the ratio of the device's
    rates in both. float16 and bfloat16 take the same time where the device has the same rate for both.
    """
    latency, measured = models.latency, models.latency.amp
    if measured == precision:
        return models
    coefficients, excess = _scaled(latency, (device, measured), (device, precision))
    if None not in (measured, precision) and np.array_equal(coefficients, latency.coefficients):
        note = f"latency was measured in {measured} and taken to be the same in {precision}"
        return replace(models, notes=(*models.notes, note))
    scaled = models.latency_provenance is Provenance.TRANSFERRED  # left-out errors are of all precisions
    converted = replace(
        latency,
        coefficients=coefficients,
        errors=latency.errors if scaled else assumed_errors(_ASSUMED_LATENCY_ERROR),
        scale=None,
        amp=precision,
        excess=latency.excess + excess,
        known=WeakKeyDictionary(),
    )
    if scaled or models.latency_provenance is Provenance.ASSUMED:
        return replace(models, latency=converted)
    here, there = (word or "float32" for word in (precision, measured))
    note = (
        f"latency was measured in {there} on {device.name}: that in {here} follows from its rates (assumed)"
    )
    return replace(
        models, latency=converted, latency_provenance=Provenance.ASSUMED, notes=(*models.notes, note)
    )


def _notes(
    device: Device, mode: Mode, origins: Mapping[str, str], relative: Relative | None
) -> tuple[str, ...]:
    """Return notes that name unmeasured figures and their stand-ins."""
    here, there = MODE_TABLES[mode], MODE_TABLES["infer" if mode == "train" else "train"]
    simple = {"memory": "is simulated", "latency": "is an analytic estimate from its figures"}
    notes = [str(device.profile[STAND_IN])] if STAND_IN in device.profile else []
    for figure, origin in origins.items():
        word = Provenance.ASSUMED
        says = simple[figure] if origin == "analytic" else f"follows from its {there} measurements"
        if origin == "relative" and relative is not None:
            says = f"is scaled from {relative.device.name}'s by both devices' figures"
            word = Provenance.ASSUMED if relative.error is None else Provenance.TRANSFERRED
        notes.append(f"{here} {figure} was not measured on {device.name}: it {says} ({word})")
    missing = [n for n in ("peak_fp32_gflops", "bandwidth_gb_s") if n not in device.figures]
    if origins.get("latency") in ("analytic", "relative") and missing:
        notes.append(f"{device.name} gives no {' and no '.join(missing)}: the Jetson TX2's stand in for it")
    return tuple(notes)


def _wide(process: Process) -> MemoryModel:
    wide = assumed_errors(_ASSUMED_MEMORY_ERROR)
    return MemoryModel(process, assumed_errors(_ASSUMED_MEMORY_ERROR / 0.09), wide, wide)
