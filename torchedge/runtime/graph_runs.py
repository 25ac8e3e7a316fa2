"""A traced graph at work: its segments on the device and in PyTorch, what is copied between, what is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchedge.errors import CaptureError, LoweringError, OpenCLError
from torchedge.lowering.translation import translate
from torchedge.runtime.kept_tensors import kept_behind, stand_in
from torchedge.runtime.open_devices import OpenDevice
from torchedge.runtime.segment_programs import Held, SegmentProgram
from torchedge.tracing.aten_graphs import step_of
from torchedge.tracing.compiled_graphs import TracedGraph
from torchedge.tracing.segments import (
    Segment,
    operator_name,
    results_of,
    single_operators,
    split_graph,
)

Node = torch.fx.Node


class GraphRun:
    """Runs one traced graph; called with the values of its placeholders, a list that it empties.

    Lowered when first called. What it keeps for the backward stays on the device, behind tensors without
    data.
    """

    def __init__(self, traced: TracedGraph, device: OpenDevice, profile: bool = False) -> None:
        self.traced, self.device, self.profile = traced, device, profile
        self.programs: list[SegmentProgram] = []
        self._results = results_of(traced.module)
        self._steps: list[Callable[[dict[str, Held]], None]] | None = None

    def __call__(self, args: list[Any]) -> list[torch.Tensor | None]:
        """Run it; returns tensors in main memory, and behind `traced.returned` stand-ins for what is kept."""
        values = {
            name: _held(arg)
            for name, arg in zip(self._results.placeholders, args, strict=True)
            if isinstance(arg, torch.Tensor)
        }
        args.clear()
        with self.device.lock, torch.no_grad():
            if self._steps is None:
                self._steps = self._prepared(values)
            else:
                for step in self._steps:
                    step(values)
            return [
                None if name is None else self._result(name, values[name], place < self.traced.returned)
                for place, name in enumerate(self._results.returned)
            ]

    def _result(self, name: str, value: Held, leaves: bool) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return self._on_host(value, self._results.forms[name]) if leaves else stand_in(value)

    def _on_host(self, value: Held, form: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return self.device.transfers.to_host(value.stored, value.memory, form)

    # preparing: the first run ------------------------------------------------------------------------------

    def _prepared(self, values: dict[str, Held]) -> list[Callable[[dict[str, Held]], None]]:
        """Run for the first time, and return how to run again."""
        self.programs.clear()
        segments = split_graph(self.traced.module, lambda node: False)
        try:
            return [self._on_device(segment, values) for segment in segments]
        except (CaptureError, LoweringError) as error:
            reasons = self._reasons() or {n: str(error) for n, _ in single_operators(self.traced.module)}
        segments = split_graph(self.traced.module, lambda node: node in reasons)
        self._warn(reasons, segments)
        return [self._placed(segment, values) for segment in segments]

    def _placed(self, segment: Segment, values: dict[str, Held]) -> Callable[[dict[str, Held]], None]:
        if segment.lowered:
            try:
                return self._on_device(segment, values)
            except (CaptureError, LoweringError) as error:
                self._warn({n: str(error) for n, _ in single_operators(segment.module)}, [])
        return self._in_pytorch(segment, values)

    def _on_device(self, segment: Segment, values: dict[str, Held]) -> Callable[[dict[str, Held]], None]:
        program = SegmentProgram(segment, self.device, values, self.traced.part, self.profile)
        self.programs.append(program)
        program.run(values)
        return program.run

    def _in_pytorch(self, segment: Segment, values: dict[str, Held]) -> Callable[[dict[str, Held]], None]:
        holders = segment.module.graph.find_nodes(op="placeholder")
        forms = dict(zip(segment.inputs, [node.meta["val"] for node in holders], strict=True))

        def run(values: dict[str, Held]) -> None:
            made = segment.module(*[self._on_host(values[name], form) for name, form in forms.items()])
            values.update(zip(segment.outputs, made, strict=True))

        run(values)
        return run

    def _reasons(self) -> dict[Node, str]:
        """Return why operators cannot be lowered, by operator, each tried on its own."""
        found: dict[Node, str] = {}
        for node, segment in single_operators(self.traced.module):
            try:
                step, _ = step_of(segment.module, [(name, "input") for name in segment.inputs])
                wrong = [v.dtype for v in step.values if not self.device.computes(v.dtype)]
                if wrong:
                    raise LoweringError(f"the device does not compute with {wrong[0]}")
                translate(step)
            except (CaptureError, LoweringError) as error:
                found[node] = str(error)
        return found

    def _warn(self, reasons: dict[Node, str], segments: list[Segment]) -> None:
        names = list(dict.fromkeys(operator_name(node) for node in reasons))
        count = sum(segment.lowered for segment in segments)
        crossing = sum(_bytes(self.traced.module, segment) for segment in segments if not segment.lowered)
        first = next(iter(reasons.values()))
        rest = (
            f"the rest is split into {count} OpenCL programs, and each call copies up to "
            f"{crossing / 2**20:.1f} MiB between them"
        )
        warnings.warn(
            f"torchedge runs {', '.join(names)} of the {self.traced.part} graph in PyTorch, as there is no "
            f"kernel ({first}); {rest if count else 'nothing is left of it for OpenCL'}",
            stacklevel=2,
        )


def _held(tensor: torch.Tensor) -> Held:
    kept = kept_behind(tensor)
    if kept is not None:
        return kept
    if tensor.is_meta:
        raise OpenCLError(
            "what the forward kept on the device for the backward came back without its data; expected the "
            "tensor itself: compile without hooks on saved tensors (save_on_cpu)"
        )
    return tensor


def _bytes(module: torch.fx.GraphModule, segment: Segment) -> int:
    """Return the bytes that go into a segment and come out of it."""
    forms = {node.name: node.meta.get("val") for node in module.graph.nodes}
    tensors = [forms[name] for name in (*segment.inputs, *segment.outputs)]
    sizes: list[Any] = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
    return sum(size for size in sizes if isinstance(size, int))
