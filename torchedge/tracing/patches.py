"""The places where PyTorch itself is changed while a model is traced, each put back afterwards.

These are the few private names the library depends on; a test traces models on every supported version of PyTorch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._tensor
import torch.functional
import torch.nn.functional

from torchedge.tracing.recorder import Recorder

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_LOCK = threading.RLock()


@contextmanager
def patched(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Apply every patch for the time of one trace; one trace at a time in a process."""
    with _LOCK, ExitStack() as stack:
        stack.enter_context(_transparent_functions())
        stack.enter_context(_scopes(model, recorder))
        stack.enter_context(_attributes_restored())
        if "torch.utils.checkpoint" in sys.modules:
            stack.enter_context(_checkpoint_regions(recorder))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:  # noqa: ANN401
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _never(*args: object) -> bool:
    return False


@contextmanager
def _transparent_functions() -> Iterator[None]:
    """Let `torch.nn.functional` and its like run their Python bodies, so that only PyTorch's C functions are recorded."""
    owners = (torch.nn.functional, torch.functional, torch._tensor)
    saved = [(owner, name, getattr(owner, name)) for owner in owners for name in _CHECKS if hasattr(owner, name)]
    for owner, name, _ in saved:
        setattr(owner, name, _never)
    try:
        yield
    finally:
        for owner, name, old in saved:
            setattr(owner, name, old)


@contextmanager
def _scopes(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keep the path of the running module on the recorder's stack."""
    names = {id(module): name for name, module in model.named_modules()}
    original = torch.nn.Module.__call__
    scopes = recorder.scopes

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        scopes.append(names.get(id(self), scopes[-1]))
        try:
            return original(self, *args, **kwargs)
        finally:
            scopes.pop()

    with _replaced(torch.nn.Module, "__call__", call):
        yield


@contextmanager
def _attributes_restored() -> Iterator[None]:
    """Undo what a forward pass assigns to modules (a cached mask, a step counter)."""
    undo: list[Callable[[], None]] = []
    original = torch.nn.Module.__setattr__

    def setattr_(self: torch.nn.Module, name: str, value: object) -> None:
        for home in (self.__dict__, self._parameters, self._buffers, self._modules):
            if name in home:
                undo.append(lambda home=home, old=home[name]: home.__setitem__(name, old))  # type: ignore[misc]
                break
        else:
            undo.append(lambda: delattr(self, name))
        original(self, name, value)

    with _replaced(torch.nn.Module, "__setattr__", setattr_):
        try:
            yield
        finally:
            torch.nn.Module.__setattr__ = original  # type: ignore[method-assign]
            for step in reversed(undo):
                step()


@contextmanager
def _checkpoint_regions(recorder: Recorder) -> Iterator[None]:
    """Number the regions of activation checkpointing instead of letting it hook into autograd."""
    module = sys.modules["torch.utils.checkpoint"]

    def enter() -> None:
        recorder.region_count += 1
        recorder.regions.append(recorder.region_count)

    class Reentrant:
        """Stands for CheckpointFunction: runs the function inside a region."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: ANN401
            enter()
            try:
                return function(*args)
            finally:
                recorder.regions.pop()

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: ANN401
        enter()
        try:
            yield
        finally:
            recorder.regions.pop()

    with ExitStack() as stack:
        for name, value in (("CheckpointFunction", Reentrant), ("_checkpoint_without_reentrant_generator", generator)):
            if hasattr(module, name):
                stack.enter_context(_replaced(module, name, value))
        yield
