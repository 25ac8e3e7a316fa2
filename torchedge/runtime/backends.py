"""`torch.compile(model, backend="torchedge")`: models train and infer through OpenCL kernels.

Dynamo captures graphs, AOTAutograd adds their backward, and each becomes a `GraphRun`. Segments whose
operators all have kernels run on the device, the others in PyTorch.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Any, TypeGuard, get_args

import numpy as np
import torch

from torchedge.errors import (
    CaptureError,
    InputError,
    LoweringError,
    OpenCLError,
    TorchedgeWarning,
    check_choice,
    check_flag,
    checked_call,
    did_you_mean,
    shown,
)
from torchedge.graphs.graph import Role
from torchedge.graphs.steps import Step
from torchedge.lowering.packing import check_indices
from torchedge.lowering.programs import Program
from torchedge.lowering.rules.registry import all_rules
from torchedge.lowering.targets import Tuner, target_for
from torchedge.lowering.translation import translate
from torchedge.notices import noticed
from torchedge.opencl import ClDevice, DeviceContext, open_context
from torchedge.opencl.sharing import check_process
from torchedge.runtime.executors import Executor, ProgramReport, report_on
from torchedge.runtime.kernel_times import CachedTimes
from torchedge.runtime.program_caches import lowered
from torchedge.runtime.tensor_memory import (
    KeptTensor,
    ResultPool,
    TensorMemory,
    kept_behind,
    over_storage,
    with_strides,
)
from torchedge.storage.locks import PROCESS
from torchedge.textures.layouts import Layout
from torchedge.tracing.aten_graphs import step_of
from torchedge.tracing.compiled_graphs import (
    Segment,
    TracedGraph,
    allow_recurrent_modules,
    compile_with_backward,
    fresh_tracing,
    is_symbolic,
    operator_name,
    results_of,
    seconds_in_pytorch,
    single_operators,
    split_graph,
)
from torchedge.tracing.plain_tensors import check_tensors
from torchedge.tracing.random_numbers import COUNTER, SEED

MAX_SHAPES = 16
"""Sets of sizes of one captured graph whose programs stay in memory."""

_COMPARED, _SMALL = 10, 0.01
"""Calls of a small graph before PyTorch's time is measured, and the most seconds that a call of it takes."""
_noted: weakref.WeakSet[OpenDevice] = weakref.WeakSet()
"""Devices whose calls were noted to be slower than PyTorch."""

OnDevice = torch.Tensor | KeptTensor
"""A value of a graph while it runs: in main memory or on the device."""

_OPTIONS = ("device", "profile", "tuner")
_alive: weakref.WeakKeyDictionary[GraphRun, int] = weakref.WeakKeyDictionary()
"""Graphs that can be called, with the number of the capture by Dynamo."""
_numbers = count(1)

allow_recurrent_modules()


@dataclass(frozen=True, eq=False)
class OpenDevice:
    """A device as all compiled graphs share it. lock: one graph at a time runs on it."""

    context: DeviceContext
    memory: TensorMemory
    lock: threading.RLock = field(default_factory=threading.RLock)

    def computes(self, dtype: str) -> bool:
        """Return whether kernels on the device take tensors of a dtype."""
        if dtype == "float64":
            return self.context.device.double
        return not dtype.startswith(("bfloat", "complex", "float8"))


_open: dict[int, OpenDevice] = {}


def open_device(query: ClDevice | str | int | None = None) -> OpenDevice:
    """Return this process's one `OpenDevice` of a device; raises what `open_context` raises."""
    with PROCESS:
        context = open_context(query)
        device = _open.get(context.device.index)
        if device is None or device.context is not context:
            memory = TensorMemory(context, context.queue)
            device = _open[context.device.index] = OpenDevice(context, memory)
        return device


@dataclass(frozen=True, slots=True)
class _Settings:
    device: OpenDevice
    profile: bool
    tuner: Tuner | None

    def lower(self, step: Step, layouts: Mapping[str, Layout]) -> Program:
        """Return the program of a step, from the cache where it is there."""
        context = self.device.context
        timer = CachedTimes(context) if self.tuner == "measured" else None
        target = target_for(context.device, self.tuner)
        return lowered(step, target, layouts, timer=timer, device=context.device)[0]


def compile_graph(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the function that `torch.compile` looks up as backend "torchedge".

    options: "device", as in `torchedge devices --opencl`; "profile", to measure the times that
    `program_reports` returns; "tuner", what chooses the schedules of kernels, as in `Trainer`. Raises
    DeviceError without an OpenCL device, MissingExtraError without pyopencl, InputError for unknown options.
    """
    allow_recurrent_modules()  # in this thread too
    settings = _settings(mode, options)
    if is_symbolic(examples):
        return _ByShape(module, settings)
    return _compiled(module, examples, settings)


@checked_call()
def program_reports() -> tuple[ProgramReport, ...]:
    """Return a report on each program of torch.compile that is in use, to be printed.

    With options={"profile": True} it has the times of the last run's launches.
    """
    reports = []
    with PROCESS:
        runs = sorted(_alive.items(), key=lambda item: item[1])
    for run, number in runs:
        with run.device.lock:
            programs = list(run.programs)
        for program in programs:
            report = report_on(program.executor, profiled=run.settings.profile)
            reports.append(replace(report, name=f"graph {number}, {run.traced.part}"))
    return tuple(reports)


def _settings(mode: str | None, options: Mapping[str, Any] | None) -> _Settings:
    if not isinstance(options, Mapping | None):
        raise InputError(f"options is {shown(options)}; expected a dict with any of {', '.join(_OPTIONS)}")
    chosen = dict(options or {})
    unknown = [key for key in chosen if key not in _OPTIONS]
    if unknown:
        hint = did_you_mean(unknown[0], _OPTIONS, "leave it out")
        raise InputError(
            f"torch.compile got the option {unknown[0]!r}; the torchedge backend takes "
            f"{', '.join(_OPTIONS)}: {hint}"
        )
    if mode not in (None, "default"):
        raise InputError(f"torch.compile got mode={mode!r}; the torchedge backend has no modes, leave it out")
    tuner = chosen.get("tuner")
    if tuner is not None:
        check_choice("the option tuner", tuner, get_args(Tuner))
    profile = check_flag("the option profile", chosen.get("profile", False))
    return _Settings(open_device(chosen.get("device")), profile, tuner)


def _compiled(
    module: torch.fx.GraphModule, examples: Sequence[Any], settings: _Settings
) -> Callable[..., Any]:
    number = next(_numbers)

    def make(traced: TracedGraph) -> GraphRun:
        run = GraphRun(traced, settings)
        with PROCESS:
            _alive[run] = number
        return run

    with noticed("tracing a compiled graph"):
        return compile_with_backward(module, examples, make, frozenset(all_rules()))


class _ByShape:
    """A graph with symbolic sizes, compiled for each set of concrete sizes; the latest ones stay."""

    def __init__(self, module: torch.fx.GraphModule, settings: _Settings) -> None:
        self._module, self._settings = module, settings
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(
            [
                (tuple(a.shape), a.stride(), a.dtype, a.requires_grad) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
        )
        run = self._compiled.pop(key, None)
        if run is None:
            with fresh_tracing(args) as examples:
                run = _compiled(self._module, examples, self._settings)
        self._compiled[key] = run
        if len(self._compiled) > MAX_SHAPES:
            del self._compiled[next(iter(self._compiled))]
        return run(*args)


class GraphRun:
    """Runs one traced graph; called with the values of its placeholders, a list that it empties.

    Lowered when first called. Values for the backward stay on the device, behind tensors without data.
    """

    def __init__(self, traced: TracedGraph, settings: _Settings) -> None:
        self.traced, self.settings, self.device = traced, settings, settings.device
        self.programs: list[SegmentProgram] = []
        self._results = results_of(traced.module)
        self._numbers = {  # Dynamo passes a number that Python draws as float64, whatever it was traced as
            node.name: form.dtype
            for node in traced.module.graph.find_nodes(op="placeholder")
            if isinstance(form := node.meta.get("val"), torch.Tensor) and not form.dim()
        }
        self._steps: list[Callable[[dict[str, OnDevice]], None]] | None = None
        self._calls, self._fastest = 0, math.inf

    def __call__(self, args: list[Any]) -> list[torch.Tensor | None]:
        """Run it; returns `traced.returned` tensors in main memory, then stand-ins for kept values."""
        values: dict[str, OnDevice] = {
            name: _value_of(name, arg)
            for name, arg in zip(self._results.placeholders, args, strict=True)
            if isinstance(arg, torch.Tensor)
        }
        for name, dtype in self._numbers.items():
            if isinstance(number := values[name], torch.Tensor):
                values[name] = number.to(dtype)
        args.clear()
        check_process()
        with self.device.lock, torch.no_grad():
            if self._steps is None:
                with noticed(f"making the {self.traced.part} programs of a compiled graph"):
                    self._steps = self._prepared(values)
                return self._returned(values)
            begun = perf_counter()
            for step in self._steps:
                step(values)
            results = self._returned(values)
            if self._calls < _COMPARED:
                self._calls += 1
                self._fastest = min(self._fastest, perf_counter() - begun)
                if self._calls == _COMPARED:
                    self._compare(values)
            return results

    def _compare(self, values: Mapping[str, OnDevice]) -> None:
        """Warn once a device where PyTorch takes less than half the time of a small graph's calls."""
        inputs = [value for name in self._results.placeholders if _in_pytorch(value := values.get(name))]
        if self._fastest > _SMALL or len(inputs) < len(self._results.placeholders) or self.device in _noted:
            return
        seconds = seconds_in_pytorch(self.traced.module, inputs)
        if seconds is None or 2 * seconds > self._fastest:
            return
        _noted.add(self.device)
        launches = sum(len(program.program.launches) for program in self.programs)
        trains = self.traced.part == "forward"
        warnings.warn(
            f"a call of the compiled {self.traced.part} graph takes {1000 * self._fastest:.2g} ms (launches: "
            f"{launches}, copies: up to {len(inputs)} inputs), and PyTorch's own operators take "
            f"{1000 * seconds:.2g} ms: this model is likely faster without torch.compile; use "
            f"{'torchedge.Trainer, which copies the batch alone, or ' * trains}a larger batch",
            TorchedgeWarning,
            stacklevel=2,
        )

    def _returned(self, values: Mapping[str, OnDevice]) -> list[torch.Tensor | None]:
        """Return the results: a tensor that is returned twice is one object, views share its storage."""
        hosts: dict[str, torch.Tensor] = {}
        results: list[torch.Tensor | None] = []
        self.device.memory.settle()  # in a way that Ctrl-C ends: drivers may block in a copy
        for place, name in enumerate(self._results.returned):
            value = None if name is None else values[name]
            if name is not None and value is not None and place < self.traced.returned:
                form, view = self._results.forms[name], self.traced.views[place]
                if name not in hosts:
                    hosts[name] = self._on_host(value, form, later=True)
                if view is not None and view != (tuple(form.shape), form.stride(), 0):
                    hosts[name] = base = with_strides(hosts[name], form.stride())
                    if self.traced.part == "inference":
                        value = base.as_strided(*view[:2], base.storage_offset() + view[2])
                    else:
                        value = over_storage(base, view)
                else:
                    value = hosts[name]
            results.append(value.stand_in() if isinstance(value, KeptTensor) else value)
        if hosts:
            self.device.memory.settle()
        return results

    def _on_host(self, value: OnDevice, form: torch.Tensor, *, later: bool = False) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return self.device.memory.to_host(value.stored, value.memory, form, later=later)

    # preparing: the first run ------------------------------------------------------------------------------

    def _prepared(self, values: dict[str, OnDevice]) -> list[Callable[[dict[str, OnDevice]], None]]:
        """Run for the first time, and return the functions that run the segments again."""
        self.programs.clear()
        segments = split_graph(self.traced.module, lambda node: False)
        try:
            return [self._on_device(segment, values) for segment in segments]
        except (CaptureError, LoweringError) as error:
            reasons = self._reasons() or {n: str(error) for n, _ in single_operators(self.traced.module)}
        segments = split_graph(self.traced.module, lambda node: node in reasons)
        self._warn(reasons, segments)
        return [self._placed(segment, values) for segment in segments]

    def _placed(self, segment: Segment, values: dict[str, OnDevice]) -> Callable[[dict[str, OnDevice]], None]:
        if segment.lowered:
            try:
                return self._on_device(segment, values)
            except (CaptureError, LoweringError) as error:
                self._warn({n: str(error) for n, _ in single_operators(segment.module)}, [])
        return self._in_pytorch(segment, values)

    def _on_device(
        self, segment: Segment, values: dict[str, OnDevice]
    ) -> Callable[[dict[str, OnDevice]], None]:
        program = SegmentProgram(segment, self.settings, values, self.traced.part)
        self.programs.append(program)
        program.run(values)
        return program.run

    def _in_pytorch(
        self, segment: Segment, values: dict[str, OnDevice]
    ) -> Callable[[dict[str, OnDevice]], None]:
        holders = segment.module.graph.find_nodes(op="placeholder")
        forms = dict(zip(segment.inputs, [node.meta["val"] for node in holders], strict=True))

        def run(values: dict[str, OnDevice]) -> None:
            results = segment.module(*[self._on_host(values[name], form) for name, form in forms.items()])
            values.update(zip(segment.outputs, results, strict=True))

        run(values)
        return run

    def _reasons(self) -> dict[torch.fx.Node, str]:
        """Return why operators cannot be lowered, by operator, each tried on its own."""
        reasons: dict[torch.fx.Node, str] = {}
        for node, segment in single_operators(self.traced.module):
            try:
                step, _ = step_of(segment.module, [(name, "input") for name in segment.inputs])
                wrong = [v.dtype for v in step.values if not self.device.computes(v.dtype)]
                if wrong:
                    raise LoweringError(f"the device does not compute with {wrong[0]}")
                translate(step)
            except (CaptureError, LoweringError) as error:
                reasons[node] = str(error)
        return reasons

    def _warn(self, reasons: dict[torch.fx.Node, str], segments: list[Segment]) -> None:
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


def _in_pytorch(value: OnDevice | None) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _value_of(name: str, tensor: torch.Tensor) -> OnDevice:
    result = kept_behind(tensor)
    if result is not None:
        return result
    if tensor.layout is not torch.strided:
        check_tensors(tensor, name)
    if tensor.is_meta:
        raise OpenCLError(
            "a tensor that the forward saved on the device came back without its data; expected the tensor "
            "itself: compile without hooks on saved tensors (save_on_cpu)"
        )
    return tensor


def _bytes(module: torch.fx.GraphModule, segment: Segment) -> int:
    """Return the bytes that go into a segment and come out of it."""
    forms = {node.name: node.meta.get("val") for node in module.graph.nodes}
    tensors = [forms[name] for name in (*segment.inputs, *segment.outputs)]
    sizes: list[Any] = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
    return sum(size for size in sizes if isinstance(size, int))


class SegmentProgram:
    """A segment lowered for a device, with the layouts of the values of its first run.

    Raises:
        CaptureError, LoweringError: operators or dtypes for which there are no kernels.
    """

    def __init__(
        self, segment: Segment, settings: _Settings, values: Mapping[str, OnDevice], title: str
    ) -> None:
        self.segment, self.device, self._measured = segment, settings.device, settings.profile
        roles: list[tuple[str, Role]] = [
            (name, "parameter" if isinstance(values[name], torch.nn.Parameter) else "input")
            for name in segment.inputs
        ]
        step, constants = step_of(segment.module, roles, name=title)
        for value in step.values:
            if not self.device.computes(value.dtype):
                raise LoweringError(f"{value.name} is {value.dtype}, which the device does not compute with")
        layouts = {name: layout for name in segment.inputs if (layout := self._layout(values[name]))}
        self.program = settings.lower(step, layouts)
        self._pool = ResultPool(self.device.memory)
        self._inputs = {t.name: t for t in self.program.tensors if t.name in segment.inputs}
        self._indices = {name: t for name, t in self._inputs.items() if t.indices is not None}
        self._outputs = {
            name: self.program.tensors[index]
            for name, index in zip(segment.outputs, self.program.outputs, strict=True)
        }
        self._draws = any(tensor.name == SEED for tensor in self.program.tensors)
        self.executor = Executor(
            self.program,
            self.device.context.device,
            profile=settings.profile,
            placed=self._memory(values, self._taken()),
        )
        self.executor.load({name: tensor.numpy() for name, tensor in constants.items()})

    def run(self, values: MutableMapping[str, OnDevice]) -> None:
        """Run on `values` by name; adds the segment's results, which stay on the device."""
        for name, tensor in self._indices.items():
            value = values[name]
            if isinstance(value, torch.Tensor):
                check_indices(tensor, value.numpy())
        results = self._taken()
        for name, memory in self._memory(values, results).items():
            self.executor.place(name, memory)
        if self._draws:
            self.executor.write(SEED, np.int64(torch.randint(1 << 31, ()).item()))
            self.executor.write(COUNTER, np.int64(0))
        if self._measured:  # in a queue of its own, which does not wait for that of copies
            self.device.memory.settle()
        self.executor.launch()
        if self._measured:
            self.executor.finish()
        values.update({name: results[tensor.name] for name, tensor in self._outputs.items()})

    @property
    def result_bytes(self) -> int:
        """Bytes of device memory allocated for results so far, in use or not."""
        return self._pool.nbytes

    def _taken(self) -> dict[str, KeptTensor]:
        return {tensor.name: self._pool.take(tensor) for tensor in self._outputs.values()}

    def _memory(self, values: Mapping[str, OnDevice], results: Mapping[str, KeptTensor]) -> dict[str, Any]:
        """Return the memory of inputs (copied there if need be) and results by the program's names."""
        placed = {name: result.memory for name, result in results.items()}
        for name, stored in self._inputs.items():
            value = values[name]
            if isinstance(value, torch.Tensor):
                placed[name] = self.device.memory.copy_of(value, stored)
            else:
                assert value.stored.layout == stored.layout
                placed[name] = value.memory
        return placed

    def _layout(self, value: OnDevice) -> Layout | None:
        if isinstance(value, KeptTensor):
            return value.stored.layout
        return self.device.memory.layout_of(value)
