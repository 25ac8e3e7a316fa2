"""The places where PyTorch itself is changed while a model is traced, each put back afterwards.

These are the few private names the library depends on; a test traces models on every supported version of
PyTorch.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._tensor
import torch.functional
import torch.nn.functional

from torchedge.errors import CaptureError
from torchedge.tracing.binding import where
from torchedge.tracing.recorder import ACTIVE, Recorder

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_LONGEST_RANGE = 50_000_000
LOCK = threading.RLock()
"""One capture at a time in a process: patches are global."""


@contextmanager
def patched(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Apply every patch for one trace; other threads go on undisturbed, as patches look at who calls."""
    with LOCK, ExitStack() as stack:
        ACTIVE.append(recorder)
        stack.callback(ACTIVE.pop)
        stack.enter_context(_transparent_functions())
        stack.enter_context(_scopes(model, recorder))
        stack.enter_context(_bounded_ranges())
        stack.enter_context(_open_functions(recorder))
        stack.enter_context(_autocast_on_meta())
        if "torch.utils.checkpoint" in sys.modules:
            stack.enter_context(_checkpoint_regions(recorder))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
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
    """Let `torch.nn.functional` run its Python bodies, so that only PyTorch's C functions are recorded."""
    owners = (torch.nn.functional, torch.functional, torch._tensor)
    saved = [
        (owner, name, getattr(owner, name)) for owner in owners for name in _CHECKS if hasattr(owner, name)
    ]
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
    scopes, thread = recorder.scopes, threading.get_ident()

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        scopes.append(names.get(id(self), scopes[-1]))
        try:
            return original(self, *args, **kwargs)
        finally:
            scopes.pop()

    with _replaced(torch.nn.Module, "__call__", call):
        yield


@contextmanager
def _bounded_ranges() -> Iterator[None]:
    """Let a loop over the samples end in an error: at the stand-ins' batch size it would run for ever."""
    real, thread = range, threading.get_ident()

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __call__(cls, *bounds: Any) -> range:
            made = real(*bounds)
            if made.stop - made.start > _LONGEST_RANGE and threading.get_ident() == thread:
                raise CaptureError(
                    f"the forward pass loops over the samples of the batch ({made}{where()}); capture it for "
                    "one batch size with batch_size="
                )
            return made

    with _replaced(builtins, "range", Meta("range", (), {})):
        yield


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Let `torch.autocast(x.device.type)` work on stand-ins: the meta device has no autocast of its own."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with _replaced(torch.amp.autocast_mode.autocast, "__init__", init):
        yield


@contextmanager
def _open_functions(recorder: Recorder) -> Iterator[None]:
    """Run the Python source of scripted functions and the forward of custom autograd functions."""
    script_call, apply, thread = (
        torch.jit.ScriptFunction.__call__,
        torch.autograd.Function.apply,
        threading.get_ident(),
    )

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(self, "_torchdynamo_inline", None)
        if threading.get_ident() != thread or source is None:
            return script_call(self, *args, **kwargs)
        return source(*args, **kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
        recorder.note(
            f"{cls.__name__} is a custom autograd function: captured as the operators of its forward, each "
            "with its own backward"
        )
        context = _Context(args)
        if cls.setup_context is torch.autograd.function._SingleLevelFunction.setup_context:
            return cls.forward(context, *args, **kwargs)
        outputs = cls.forward(*args, **kwargs)
        cls.setup_context(context, args, outputs)
        return outputs

    with _replaced(torch.jit.ScriptFunction, "__call__", call), ExitStack() as stack:
        own = vars(torch.autograd.Function)["apply"]
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
        stack.callback(setattr, torch.autograd.Function, "apply", own)
        yield


class _Context:
    """What a custom autograd function sees as `ctx`; nothing is kept, there is no backward to run."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple([isinstance(a, torch.Tensor) for a in args])
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep nothing."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward


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
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            enter()
            try:
                return function(*args)
            finally:
                recorder.regions.pop()

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            recorder.regions.pop()

    with ExitStack() as stack:
        for name, value in (
            ("CheckpointFunction", Reentrant),
            ("_checkpoint_without_reentrant_generator", generator),
        ):
            if hasattr(module, name):
                stack.enter_context(_replaced(module, name, value))
        yield
