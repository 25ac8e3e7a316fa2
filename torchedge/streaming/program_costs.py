"""What a step of a program takes on a device: memory and time, by what was measured of programs there.

A campaign with the native runner (`torchedge campaign run --runner`) times every launch of its programs. The
time of another program is the sum over its launches, each by its class's rates and a forest that corrects
them, times the share that a step takes of such a sum, plus the host's time a launch and a step. Its memory is
what it allocates, which is known, beside what the process takes. `step_fitting` fits both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from torchedge.arrays import FloatArray
from torchedge.devices import Device, Provenance, weakest
from torchedge.errors import ProfileError
from torchedge.forests.trees import Forest, evaluate, features_outside
from torchedge.lowering.arenas import allocations
from torchedge.lowering.programs import LoadClassName, Program
from torchedge.prediction.results import Estimate
from torchedge.storage.codecs import thaw
from torchedge.streaming.budgets import Budgeted
from torchedge.streaming.rates import KernelRates, class_forests, class_rates, derive_rates, kernel_rates
from torchedge.streaming.schedules import LaunchWork, works_of
from torchedge.streaming.simulation import simulate_plan

TABLE, FILE = "programs", "programs.safetensors"
"""The table of `[profile]`, and the forests beside device.toml."""

LAUNCH_FEATURES = (
    *("log2_flops", "log2_input_bytes", "log2_output_bytes", "log2_flops_per_byte"),
    *("log2_work_items", "log2_group_items", "log2_bytes_per_item"),
)
"""The features of a launch, in order; a group that the driver chooses counts as 1."""

ASSUMED = 2.2
"""The interval of a device without measured programs, to each side."""

_REBUILD = "measure with `torchedge campaign run --runner` and fit anew with `torchedge fit all`"

_Number = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes beside its launches, as fitted.

    share: of a step's time over the sum of its launches; host_us: more for each launch; fixed_ms: for each
    step. base_mib: memory of a process beside its programs, kernel_mib: for each kernel, memory_share: over
    the bytes that a program allocates. latency_error, memory_error: 90th percentile of the error on networks
    left out, as a logarithm.
    """

    share: _Number
    host_us: _Number
    base_mib: _Number
    kernel_mib: _Number
    memory_share: _Number
    latency_error: Annotated[float, Meta(ge=0, le=10)]
    memory_error: Annotated[float, Meta(ge=0, le=10)]
    fixed_ms: _Number = 0

    def memory_mib(self, nbytes: float, kernels: int) -> float:
        """Return the memory of a process that runs a program."""
        return self.base_mib + self.kernel_mib * kernels + self.memory_share * nbytes / 2**20

    def latency_ms(self, launches_ms: float, launches: int) -> float:
        """Return the time of a step, from the sum of its launches."""
        return self.fixed_ms + self.share * launches_ms + self.host_us * launches / 1e3


@dataclass(frozen=True)
class ProgramCosts:
    """A device's model of programs: rates and a forest by class of kernels, and what a step takes besides."""

    rates: Mapping[LoadClassName, KernelRates]
    forests: Mapping[LoadClassName, Forest]
    step: StepCosts

    def launches_ms(self, works: Sequence[LaunchWork]) -> FloatArray:
        """Return the time of each launch."""
        times = np.array([self.rates[work.load_class].latency_ms(work) for work in works], np.float64)
        for name, forest in self.forests.items():
            places = [place for place, work in enumerate(works) if work.load_class == name]
            if places:
                rows = launch_features([works[place] for place in places])
                times[places] *= np.exp(evaluate(forest, rows))
        return times

    def outside(self, works: Sequence[LaunchWork]) -> tuple[str, ...]:
        """Return the features in which launches lie outside what was measured."""
        names: dict[str, None] = {}
        for load_class, forest in self.forests.items():
            own = [work for work in works if work.load_class == load_class]
            if own:
                names |= dict.fromkeys(features_outside(forest, launch_features(own)))
        return tuple(names)


@dataclass(frozen=True, slots=True)
class ProgramPrediction:
    """The memory (MiB) and time (ms) of one step of a program on a device.

    device_bytes: what the program allocates. launches_ms: predicted time of each launch. provenance: the
    weakest source. notes: what was assumed, or lies outside what was measured.
    """

    program: str
    device: str
    memory: Estimate
    latency: Estimate
    device_bytes: int
    launches_ms: tuple[float, ...]
    provenance: Provenance
    notes: tuple[str, ...] = ()


def launch_features(works: Sequence[LaunchWork]) -> FloatArray:
    """Return the features of launches, (launches, features)."""
    columns = np.array(
        [
            [max(w.flops, 1), max(w.input_bytes, 1), max(w.output_bytes, 1), w.work_items, w.group_items or 1]
            for w in works
        ],
        np.float64,
    )
    flops, read, written, items, group = columns.T
    parts = [flops, read, written, flops / (read + written), items, group, (read + written) / items]
    return np.asarray(np.log2(np.column_stack(parts)))


def allocated_bytes(program: Program) -> int:
    """Return what a program allocates on a device, without the staging of a streaming run."""
    return sum(tensor.nbytes for tensor in program.residents) + sum(allocations(program.arena))


def predict_program(program: Program, device: Device, plan: Budgeted | None = None) -> ProgramPrediction:
    """Predict a step of a program on a device, by measured programs or, without any, by its roofline.

    plan: of the weights that it reads in every run; those that stay are there.

    Raises:
        DeviceError: nothing was measured, and the profile gives no peak rate or no bandwidth.
        ProfileError: the profile's model is damaged.
    """
    works = works_of(program)
    nbytes = allocated_bytes(program) if plan is None else plan.total_bytes
    costs = program_costs(device)

    def together(times: Sequence[float]) -> float:
        return sum(times) if plan is None else _streamed_ms(plan, times, device)

    notes: tuple[str, ...] = ()
    if costs is None:
        rates, notes = kernel_rates(device)
        times = tuple([rates[work.load_class].latency_ms(work) for work in works])
        notes += (f"no programs were measured on {device.name}: {_REBUILD}",)
        beside = device.figures.get("context_mib")
        memory = _estimate(nbytes / 2**20 + (beside.value if beside else 0.0), ASSUMED, "MiB")
        latency, provenance = _estimate(together(times), ASSUMED, "ms"), Provenance.ASSUMED
    else:
        times = tuple(costs.launches_ms(works).tolist())
        step = costs.step
        memory = _estimate(step.memory_mib(nbytes, len(program.kernels)), exp(step.memory_error), "MiB")
        latency = _estimate(step.latency_ms(together(times), len(times)), exp(step.latency_error), "ms")
        provenance = weakest([Provenance.MEASURED, Provenance(str(_table(device)["provenance"]))])
        if outside := costs.outside(works):
            notes = (f"launches lie outside what was measured in {', '.join(outside)}",)
    return ProgramPrediction(
        program.name, device.name, memory, latency, nbytes, tuple(times), provenance, notes
    )


def _streamed_ms(plan: Budgeted, launches_ms: Sequence[float], device: Device) -> float:
    """Return the time of launches, by their times alone, beside the reads and copies of a plan."""
    pairs = zip(plan.instance.layers, launches_ms, strict=True)
    layers = tuple([replace(layer, latency_ms=ms) for layer, ms in pairs])
    rates = replace(derive_rates(device), staging_bytes=plan.schedule.staging_bytes)
    return simulate_plan(replace(plan.instance, layers=layers), plan.plan, rates).execution_ms


def _estimate(value: float, factor: float, unit: str) -> Estimate:
    return Estimate(value, value / factor, value * factor, unit)


# the profile ------------------------------------------------------------------------------------------------


def _table(device: Device) -> Mapping[str, object]:
    table = device.profile.get(TABLE)
    if not isinstance(table, Mapping):
        raise ProfileError(f"{device.folder}: [profile.{TABLE}] is no table; {_REBUILD}")
    return table


def program_costs(device: Device) -> ProgramCosts | None:
    """Return a device's model of programs; None if no program was measured there.

    Raises ProfileError: its table or its file is missing, damaged or made for another version.
    """
    if TABLE not in device.profile:
        return None
    table = thaw(_table(device))
    assert isinstance(table, Mapping)
    try:
        rates = class_rates(table["kernels"])
        step = msgspec.convert(table["step"], StepCosts)
        Provenance(str(table["provenance"]))
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise ProfileError(f"{device.folder}: [profile.{TABLE}] is damaged ({error}); {_REBUILD}") from error
    forests = class_forests(device.folder, FILE, str(table.get("sha256")), LAUNCH_FEATURES)
    return ProgramCosts(rates, forests, step)
