"""Memory and time of programs on a device, as a bundle would hold them: nothing is written or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torchedge.bundles.exporting import (
    Lowering,
    Request,
    check_example,
    check_memory,
    lower_request,
    within_limit,
)
from torchedge.bundles.manifests import TRAIN
from torchedge.devices import Device, Provenance, weakest
from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.limits import profile_limits
from torchedge.lowering.programs import residents
from torchedge.lowering.recomputing import Recomputation
from torchedge.prediction.results import Estimate
from torchedge.storage.locks import collection_paused
from torchedge.streaming.program_costs import ProgramPrediction, predict_program
from torchedge.streaming.schedules import StreamingSchedule

if TYPE_CHECKING:
    from typing_extensions import Self

_MIB = 2**20
_ACCUMULATING = "accumulating"
"""The program of the batches whose gradients are only added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlePlan:
    """What the programs of a bundle take from a device.

    Memory is what the bundle allocates there, in bytes: weights (constants included), states (of training the
    optimizer's), inputs and outputs, the arena, and staging of streamed weights. runs: the prediction of each
    program by the name of its method, "train" of a training step. streamed_bytes: read in one run of the
    program that reads most. recomputed: what a training step computes again, if anything. parts: equal parts
    of the batch that a training step takes one after the other, to stay within a memory limit.
    """

    model: str
    device: str
    weights_bytes: int
    states_bytes: int
    ports_bytes: int
    arena_bytes: int
    staging_bytes: int
    streamed_bytes: int
    runs: Mapping[str, ProgramPrediction]
    recomputed: Recomputation | None
    parts: int = 1

    @classmethod
    def of(cls, request: Request, whole: Lowering, device: Device, **more: Any) -> Self:  # noqa: ANN401
        """Plan what is asked for, by its lowering without a limit or within it.

        Raises LimitError, and DeviceError for a limit of the device that is exceeded.
        """
        lowering = within_limit(whole, request, device)
        check_memory(lowering, profile_limits(device))
        names = [TRAIN if request.train else call.method for call in request.calls]
        names += [_ACCUMULATING] * (len(lowering.programs) - len(names))
        kept = residents([plan.schedule.program for plan in lowering.plans] or lowering.programs)
        weights = sum(tensor.nbytes for tensor in kept if tensor.role in WEIGHT_ROLES)
        states = sum(tensor.nbytes for tensor in kept if tensor.role == "state")
        return cls(
            model=request.name or type(request.calls[0].model).__name__,
            device=device.name,
            weights_bytes=weights,
            states_bytes=states,
            ports_bytes=lowering.memory.resident_bytes - weights - states,
            arena_bytes=lowering.memory.arena_bytes,
            staging_bytes=lowering.memory.staging_bytes,
            streamed_bytes=max([_streamed(plan.schedule) for plan in lowering.plans], default=0),
            runs={
                name: predict_program(program, device, plan)
                for name, program, plan in zip_longest(names, lowering.programs, lowering.plans)
            },
            recomputed=lowering.recomputed,
            parts=lowering.parts,
            **more,
        )

    @property
    def total_bytes(self) -> int:
        """All that is allocated on the device."""
        resident = self.weights_bytes + self.states_bytes + self.ports_bytes
        return resident + self.arena_bytes + self.staging_bytes

    @property
    def step(self) -> Estimate | None:
        """The time of a training step on the whole batch, ms; None where none is asked for."""
        if TRAIN not in self.runs:
            return None
        before = [_ACCUMULATING] * (self.parts - 1)
        return sum_of([(self.runs[name].latency, 1) for name in (*before, TRAIN)])

    @property
    def provenance(self) -> Provenance:
        """The weakest source of the times."""
        return weakest([run.provenance for run in self.runs.values()])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, or lies outside what was measured."""
        return tuple(dict.fromkeys([note for run in self.runs.values() for note in run.notes]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: bytes, ms."""
        sizes = ("weights", "states", "ports", "arena", "staging", "total", "streamed")
        return {
            "model": self.model,
            "device": self.device,
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in sizes},
            **({} if self.step is None else {"step_ms": self.step}),
            **({"recomputed": again.to_dict()} if (again := self.recomputed) else {}),
            **({"parts": self.parts} if self.parts > 1 else {}),
            "provenance": str(self.provenance),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return "\n".join([f"{self.model} on {self.device} ({self.provenance})", *self.lines()])

    def lines(self) -> list[str]:
        """Return a line for the memory, for what is recomputed, streamed, and for a training step."""
        parts = {
            "weights": self.weights_bytes, "states": self.states_bytes, "arena": self.arena_bytes,
            "staging": self.staging_bytes, "inputs and outputs": self.ports_bytes,
        }  # fmt: skip
        described = ", ".join(f"{name} {nbytes / _MIB:,.1f}" for name, nbytes in parts.items() if nbytes)
        lines = [f"  memory       {self.total_bytes / _MIB:,.1f} MiB: {described}"]
        if self.recomputed:
            lines.append(f"  recomputed   {self.recomputed}")
        if self.streamed_bytes:
            lines.append(f"  streamed     {self.streamed_bytes / _MIB:,.1f} MiB in each run")
        if self.parts > 1:
            lines.append(f"  batch        in {self.parts} parts, whose gradients are averaged")
        return lines if self.step is None else [*lines, f"  step         {self.step}"]


@collection_paused()
def plan_request(request: Request, device: Device) -> BundlePlan:
    """Plan what `torchedge.export` would write of a request; weights may lie on the meta device.

    Raises InputError, CaptureError, LoweringError, LimitError, DeviceError.
    """
    for call in request.calls:
        check_example(call)
    lowering = lower_request(request, device)
    return BundlePlan.of(lowering.request, lowering, device)


def sum_of(parts: Sequence[tuple[Estimate, int]]) -> Estimate:
    """Return the sum of estimates, each so many times; their errors are taken to go together."""
    value, low, high = (
        sum(getattr(estimate, end) * times for estimate, times in parts) for end in ("value", "low", "high")
    )
    return Estimate(value, low, high, parts[0][0].unit)


def _streamed(schedule: StreamingSchedule) -> int:
    return sum(schedule.program.tensors[index].nbytes for index in schedule.streamed)
