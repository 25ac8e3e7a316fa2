"""Streaming plans with the weights of their model: what `torchedge.plan` returns, and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from torchedge.arrays import Array
from torchedge.errors import InputError
from torchedge.graphs import RESIDENT_ROLES
from torchedge.lowering.kernels.loading import LoadingWay
from torchedge.lowering.packing import check_weight, pack_weight
from torchedge.opencl import ClDevice, open_context
from torchedge.runtime.executors import Executor
from torchedge.runtime.measured_runs import MeasuredRun
from torchedge.runtime.weight_sources import ArraysSource
from torchedge.streaming.planning import StreamingPlan
from torchedge.streaming.schedules import schedule_for
from torchedge.tracing.plain_tensors import check_tensors


class PlannedRun(NamedTuple):
    """What a plan's run returned, and its times and memory."""

    outputs: list[Array]
    measured: MeasuredRun


@dataclass(frozen=True)
class ModelPlan(StreamingPlan):
    """A streaming plan of a model that is in memory. tensors: its weights and folded constants by name."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, plan: StreamingPlan, tensors: Mapping[str, torch.Tensor]) -> ModelPlan:
        """Return a plan with the tensors of the captured step that it is of."""
        parts = {part.name: getattr(plan, part.name) for part in fields(StreamingPlan)}
        return cls(**parts, tensors=tensors)

    def run(
        self, *inputs: object, device: ClDevice | str | int | None = None, loading: LoadingWay = "copy"
    ) -> PlannedRun:
        """Run the planned program once in this process, its weights streamed from the model's.

        inputs: arrays or tensors in the order in which the model takes them. device: an OpenCL device; one
        of this machine runs the kernels for any device. loading: as in `Executor`. The weights are packed
        first, and take their memory on the host once more.

        Raises:
            InputError: weights are on the meta device, or an input does not fit.
            DeviceError: a limit of the OpenCL device is exceeded. OpenCLError: the driver fails.
        """
        check_tensors(inputs, "input")
        packed = self._packed()
        chosen = open_context(device).device
        schedule = schedule_for(self.schedule, chosen)
        states = [t.name for t in self.program.tensors if t.role == "state" and t.name in packed]
        source = ArraysSource(packed)
        with Executor(schedule, chosen, source=source, loading=loading, profile=True) as executor:
            executor.load_packed((name, packed[name]) for name in states)
            arrays = [x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in inputs]
            return PlannedRun(executor.run(*arrays), executor.measured())

    def _packed(self) -> dict[str, Array]:
        """Return the weights as the device keeps them; a state without a tensor begins at its fill."""
        stored = [t for t in self.program.tensors if t.role in RESIDENT_ROLES]
        stored = [t for t in stored if t.role != "state" or t.name in self.tensors]
        meta = [t.name for t in stored if t.name in self.tensors and self.tensors[t.name].is_meta]
        if meta:
            raise InputError(
                f"{self.program.name} has {len(meta)} weights on the meta device ({meta[0]}), without "
                "values; expected a model with its weights: load them, and plan it again"
            )
        data = {name: tensor.detach().cpu().numpy() for name, tensor in self.tensors.items()}
        for tensor in stored:
            check_weight(tensor, data)
        return {tensor.name: pack_weight(tensor, data[tensor.name]) for tensor in stored}
