"""`torch.compile(model, backend="torchedge")`: models train and infer through OpenCL kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from torchedge.errors import InputError
from torchedge.lowering.rules.registry import all_rules
from torchedge.runtime.graph_runs import GraphRun
from torchedge.runtime.open_devices import OpenDevice, open_device
from torchedge.runtime.reports import ProgramReport, report_on
from torchedge.tracing.compiled_graphs import TracedGraph, compile_with_backward, fresh_tracing, is_symbolic

MAX_SHAPES = 16
"""Sets of sizes of one captured graph whose programs are kept."""

_OPTIONS = ("device", "profile")
_alive: weakref.WeakKeyDictionary[GraphRun, int] = weakref.WeakKeyDictionary()
"""Graphs that can be called, with the number of what Dynamo captured."""
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class _Settings:
    device: OpenDevice
    profile: bool


def compile_graph(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo captured: the function that `torch.compile` looks up as backend "torchedge".

    options: "device", what `torchedge devices --opencl` lists, and "profile", with which `program_reports`
    tells how long kernels take. Raises DeviceError without an OpenCL device, MissingExtraError without
    pyopencl, InputError for unknown options.
    """
    settings = _settings(mode, options)
    if is_symbolic(examples):
        return _ByShape(module, settings)
    return _compiled(module, examples, settings)


def program_reports() -> tuple[ProgramReport, ...]:
    """Return what each program consists of and holds that torch.compile has made and that still is in use.

    With options={"profile": True} also how long the launches of its last run took; print the items.
    """
    found = []
    for run, number in sorted(_alive.items(), key=lambda item: item[1]):
        for program in run.programs:
            report = report_on(program.executor, profiled=run.profile)
            found.append(replace(report, name=f"graph {number}, {run.traced.part}"))
    return tuple(found)


def _settings(mode: str | None, options: Mapping[str, Any] | None) -> _Settings:
    given = dict(options or {})
    unknown = [key for key in given if key not in _OPTIONS]
    if unknown:
        raise InputError(
            f"torch.compile got the option {unknown[0]!r}; the torchedge backend takes {', '.join(_OPTIONS)}"
        )
    if mode not in (None, "default"):
        raise InputError(f"torch.compile got mode={mode!r}; the torchedge backend has no modes, leave it out")
    return _Settings(open_device(given.get("device")), bool(given.get("profile", False)))


def _compiled(
    module: torch.fx.GraphModule, examples: Sequence[Any], settings: _Settings
) -> Callable[..., Any]:
    number = next(_numbers)

    def make(traced: TracedGraph) -> GraphRun:
        run = GraphRun(traced, settings.device, settings.profile)
        _alive[run] = number
        return run

    return compile_with_backward(module, examples, make, frozenset(all_rules()))


class _ByShape:
    """What Dynamo captured with open sizes, compiled once for each set of concrete ones, the latest kept."""

    def __init__(self, module: torch.fx.GraphModule, settings: _Settings) -> None:
        self._module, self._settings = module, settings
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(
            [
                (tuple(a.shape), a.stride(), a.dtype, a.requires_grad) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
        )
        found = self._made.pop(key, None)
        if found is None:
            with fresh_tracing(args) as examples:
                found = _compiled(self._module, examples, self._settings)
        self._made[key] = found
        if len(self._made) > MAX_SHAPES:
            del self._made[next(iter(self._made))]
        return found(*args)
