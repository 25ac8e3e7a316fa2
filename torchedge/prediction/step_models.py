"""The models of one mode of one device: fitted where measured, else derived or analytic, and marked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from torchedge.devices import Device, Provenance, weakest
from torchedge.prediction.intervals import assumed_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import prior_mean
from torchedge.prediction.memory.model import UNLIMITED, MemoryModel, Process

Mode = Literal["train", "infer"]

MODE_TABLES: Mapping[Mode, str] = MappingProxyType({"train": "training", "infer": "inference"})
"""Mode -> the table of `[profile]` in device.toml that describes its models, and the word for it."""

_ASSUMED_CONTEXT = MappingProxyType({"gpu": 600.0, "cpu": 350.0})
_ASSUMED_MEMORY_ERROR, _ASSUMED_LATENCY_ERROR = 0.25, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class FittedModels:
    """What was fitted to measurements of one mode; None: that figure was not measured."""

    memory: MemoryModel | None
    latency: LatencyModel | None
    provenance: Provenance


@dataclass(frozen=True, slots=True, eq=False)
class StepModels:
    """Γ and Φ (or γ and φ) of one device, where each comes from, and what to tell the user about that."""

    memory: MemoryModel
    latency: LatencyModel
    memory_provenance: Provenance
    latency_provenance: Provenance
    notes: tuple[str, ...] = ()

    @property
    def provenance(self) -> Provenance:
        """The weaker of both: what a prediction inherits."""
        return weakest((self.memory_provenance, self.latency_provenance))


def complete_models(
    device: Device, mode: Mode, fitted: FittedModels | None, other: FittedModels | None
) -> StepModels:
    """Return both models of a mode: those fitted, else derived from the `other` mode's, else analytic."""
    memory = fitted.memory if fitted is not None else None
    latency = fitted.latency if fitted is not None else None
    provenance = fitted.provenance if fitted is not None else Provenance.ASSUMED
    origins: dict[str, str] = {}
    if memory is None:
        known = other.memory if other is not None else None
        origins["memory"] = "analytic" if known is None else "derived"
        memory = _analytic_memory(device) if known is None else _derived_memory(known)
    if latency is None:
        known_latency = other.latency if other is not None else None
        origins["latency"] = "analytic" if known_latency is None else "derived"
        coefficients = prior_mean(device) if known_latency is None else known_latency.coefficients
        amp = None if known_latency is None else known_latency.amp
        latency = LatencyModel(coefficients, assumed_errors(_ASSUMED_LATENCY_ERROR), amp=amp)
    return StepModels(
        memory,
        latency,
        Provenance.ASSUMED if "memory" in origins else provenance,
        Provenance.ASSUMED if "latency" in origins else provenance,
        _notes(device, mode, origins),
    )


def under_precision(models: StepModels, device: Device, amp: str | None) -> StepModels:
    """Return models for steps under autocast to a dtype (None: full precision), with what that assumes.

    Only what was measured under autocast is converted: its coefficients move by what the device's figures say
    of both precisions.
    """
    latency, measured = models.latency, models.latency.amp
    if measured is None and amp is not None:
        note = f"latency is that of full precision: what {amp} autocast saves is not modelled"
        return replace(models, notes=(*models.notes, note))
    if measured == amp:
        return models
    if amp is not None:
        note = f"latency was measured under {measured} autocast and taken to be the same under {amp}"
        return replace(models, notes=(*models.notes, note))
    moved = latency.coefficients + prior_mean(device) - prior_mean(device, measured)
    converted = LatencyModel(moved, assumed_errors(_ASSUMED_LATENCY_ERROR), latency.forest)
    note = (
        f"latency was measured under {measured} autocast on {device.name}: that of full precision follows "
        "from its figures for both precisions (assumed)"
    )
    return replace(
        models, latency=converted, latency_provenance=Provenance.ASSUMED, notes=(*models.notes, note)
    )


def _notes(device: Device, mode: Mode, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Say what was not measured, and what stands in for it."""
    here, there = MODE_TABLES[mode], MODE_TABLES["infer" if mode == "train" else "train"]
    notes: list[str] = []
    if list(origins.values()) == ["analytic"] * 2:
        notes.append(
            f"{device.name} has not been measured: memory is simulated, "
            "latency is an analytic estimate from its figures"
        )
    elif list(origins.values()) == ["derived"] * 2:
        notes.append(
            f"{here} was not measured on {device.name}: figures follow from its {there} measurements"
        )
    else:
        stand_in = {"memory": "is simulated", "latency": "is an analytic estimate from its figures"}
        for figure, origin in origins.items():
            says = stand_in[figure] if origin == "analytic" else f"follows from its {there} measurements"
            notes.append(f"{here} {figure} was not measured on {device.name}: it {says} (assumed)")
    missing = [n for n in ("peak_fp32_gflops", "bandwidth_gb_s") if n not in device.figures]
    if origins.get("latency") == "analytic" and missing:
        notes.append(f"{device.name} gives no {' and no '.join(missing)}: the Jetson TX2's stand in for it")
    return tuple(notes)


def _analytic_memory(device: Device) -> MemoryModel:
    """Simulation plus the device's context."""
    context = device.figures.get("context_mib")
    beside = context.value if context is not None else _ASSUMED_CONTEXT[device.kind]
    total = device.figures.get("usable_memory_mib") or device.figures.get("memory_mib")
    capacity = max(total.value - beside, 1.0) if total is not None else UNLIMITED
    return _wide(Process((beside, beside), (beside, beside), UNLIMITED, capacity))


def _derived_memory(known: MemoryModel) -> MemoryModel:
    """Constants of the process stay as they are in the other mode; its extremes and its forest go."""
    return _wide(replace(known.process, floor=(0.0, 0.0), ceiling=UNLIMITED))


def _wide(process: Process) -> MemoryModel:
    wide = assumed_errors(_ASSUMED_MEMORY_ERROR)
    return MemoryModel(process, assumed_errors(_ASSUMED_MEMORY_ERROR / 0.09), wide, wide)
