"""A segment of a traced graph as a program on a device, with memory that other programs take over."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from torchedge.errors import LoweringError
from torchedge.graphs.graph import Role
from torchedge.lowering.programs import Program
from torchedge.runtime.executors import Executor
from torchedge.runtime.kept_tensors import KeptTensor, MemoryPool
from torchedge.runtime.open_devices import OpenDevice
from torchedge.runtime.program_caches import lowered
from torchedge.textures.layouts import Layout
from torchedge.tracing.aten_graphs import step_of
from torchedge.tracing.random_numbers import COUNTER, SEED
from torchedge.tracing.segments import Segment

Held = torch.Tensor | KeptTensor
"""A value of a graph while it runs: in main memory or on the device."""


class SegmentProgram:
    """A segment lowered for a device; made from the values of its first run, whose layouts it takes over.

    Raises:
        CaptureError, LoweringError: operators or dtypes for which there are no kernels.
    """

    def __init__(
        self, segment: Segment, device: OpenDevice, values: Mapping[str, Held], title: str, profile: bool
    ) -> None:
        self.segment, self.device = segment, device
        roles = [(name, _role(values[name])) for name in segment.inputs]
        step, constants = step_of(segment.module, roles, name=title)
        for value in step.values:
            if not device.computes(value.dtype):
                raise LoweringError(f"{value.name} is {value.dtype}, which the device does not compute with")
        layouts = {name: layout for name in segment.inputs if (layout := self._layout(values[name]))}
        self.program: Program
        self.program, _ = lowered(step, device.target, layouts)
        self._pool = MemoryPool(device.context)
        self._inputs = {t.name: t for t in self.program.tensors if t.name in segment.inputs}
        self._outputs = {
            name: self.program.tensors[index]
            for name, index in zip(segment.outputs, self.program.outputs, strict=True)
        }
        self._draws = any(tensor.name == SEED for tensor in self.program.tensors)
        self.executor = Executor(
            self.program, device.context.device, profile=profile, placed=self._memory(values, self._taken())
        )
        self.executor.load({name: tensor.numpy() for name, tensor in constants.items()})

    def run(self, values: MutableMapping[str, Held]) -> None:
        """Run on `values` by name; adds the segment's results, which stay on the device."""
        made = self._taken()
        for name, memory in self._memory(values, made).items():
            self.executor.place(name, memory)
        if self._draws:
            self.executor.write(SEED, np.int64(torch.randint(1 << 31, ()).item()))
            self.executor.write(COUNTER, np.int64(0))
        self.executor.launch()
        values.update({name: made[tensor.name] for name, tensor in self._outputs.items()})

    @property
    def result_bytes(self) -> int:
        """Bytes of device memory that results have taken so far, in use or not."""
        return self._pool.nbytes

    def _taken(self) -> dict[str, KeptTensor]:
        return {tensor.name: self._pool.take(tensor) for tensor in self._outputs.values()}

    def _memory(self, values: Mapping[str, Held], made: Mapping[str, KeptTensor]) -> dict[str, Any]:
        """Return the memory of inputs (copied there if need be) and results by the program's names."""
        placed = {name: kept.memory for name, kept in made.items()}
        for name, stored in self._inputs.items():
            value = values[name]
            if isinstance(value, torch.Tensor):
                placed[name] = self.device.residents.memory(value, stored)
            else:
                assert value.stored.layout == stored.layout
                placed[name] = value.memory
        return placed

    def _layout(self, value: Held) -> Layout | None:
        if isinstance(value, KeptTensor):
            return value.stored.layout
        return self.device.residents.layout(value)


def _role(value: Held) -> Role:
    return "parameter" if isinstance(value, torch.nn.Parameter) else "input"
