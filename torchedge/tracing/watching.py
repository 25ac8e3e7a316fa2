"""Watches a training loop up to its first update: the step that user code runs, captured and not executed.

Code before the first call of a module that learns runs as it is, on the CPU: devices that it names are mapped
to the CPU. From that call on operators on the model are recorded, as `trace` records a forward pass. The
optimizer's step ends the watch: nothing is trained. What the watch replaces in PyTorch is put back then.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torchedge.errors import CaptureError
from torchedge.graphs import ForwardGraph
from torchedge.tracing.capturing import unwrapped
from torchedge.tracing.copies import forget_cached, isolated, scoped, where
from torchedge.tracing.device_answers import Accelerator, answered, is_device_query, tensor_answer
from torchedge.tracing.interception import Interceptor, batch_of, loss_index, tensors_in
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, TracedTensor, leaves_of
from torchedge.tracing.torch_calls import TorchCall, called_function, target_of

_ELSEWHERE = frozenset(("cuda", "mps", "xpu", "hip"))
_ATOMS = (int, float, bool, str, type(None))
_SHOWN = frozenset(("__repr__", "__str__", "__format__"))
_Module = torch.nn.Module


class StepReached(BaseException):
    """Ends watched code at its first update; user code that catches exceptions does not catch it."""


@dataclass(frozen=True)
class WatchedStep:
    """A training step as user code runs it.

    graphs: the forward pass of each backward pass that differs from the others, with its loss. batch_size: of
    a micro-batch. accumulation: backward passes to an update, where all are alike. optimizer: None where none
    stepped. model: the modules that the step calls.
    """

    graphs: tuple[ForwardGraph, ...]
    batch_size: int
    accumulation: int
    optimizer: torch.optim.Optimizer | None
    model: _Module


class _Roots(_Module):
    """The modules that a step calls, under the names that the first one has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: dict[str, _Module] = {}

    def name_of(self, module: _Module) -> str:
        """Return the name of a module that the step calls, a new one for a new module."""
        for name, root in self.roots.items():
            if root is module:
                return name
        kind = type(module).__name__.lower()
        names = chain([kind if self.roots else ""], (f"{kind}_{number}" for number in count(2)))
        name = next(name for name in names if name not in self.roots)
        self.roots[name] = module
        return name

    def named_modules(
        self, memo: set[_Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, _Module]]:
        """Yield the modules of all roots with their names."""
        seen = set() if memo is None else memo
        for name, root in self.roots.items():
            yield from root.named_modules(seen, name, remove_duplicate)


class _Scopes:
    """The scopes of a trace, to which a module's path is added under the name of its root."""

    def __init__(self, scopes: list[str], name: str) -> None:
        self._scopes, self._name = scopes, name

    def append(self, path: str) -> None:
        """Enter a module."""
        self._scopes.append(".".join(part for part in (self._name, path) if part))

    def pop(self) -> str:
        """Leave the module."""
        return self._scopes.pop()


class _StepRecorder(Recorder):
    """Records a step: a real tensor that is none of the model's is an input of it."""

    def __init__(self, roots: _Roots, batch_size: int, accelerator: Accelerator) -> None:
        super().__init__(leaves_of(roots), batch_size, accelerator)
        self.fed: list[int] = []
        self.returned: list[int] = []
        self.begun = True

    def is_model(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor belongs to a module that the step calls."""
        return id(tensor) in self._model_tensors()

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the step's device: the model's weights, and what the code feeds."""
        return not self.is_model(tensor) or super().is_registered(tensor)

    def forget_names(self) -> None:
        """Name the model's tensors anew: another module is called."""
        self._named = None

    def _leaf(self, tensor: torch.Tensor) -> int:
        if tensor.device.type == "meta" or self.is_model(tensor):
            return super()._leaf(tensor)
        return self.adopt(tensor)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Add a tensor as an input: a batch, or a result of an earlier part of the step."""
        name = f"x{len(self.fed) + 1}" if self.fed else "x"
        index = self.add_value(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], "input")
        self.fed.append(index)
        if type(tensor) is TracedTensor:
            tensor.recorder, tensor.token = self, self.token(index)
            return index
        self._leaves[id(tensor)] = index
        self._alive.append(tensor)
        self.example.add(index, tensor)
        return index


class StepWatch(Interceptor):
    """A context in which a training step is captured in place of being run: `with StepWatch(accelerator):`.

    Afterwards `step` is the WatchedStep. Raises CaptureError at the end of code that runs no backward pass,
    and inside of code that no capture can follow.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(Recorder(tuple, 1, accelerator))
        self.accelerator = accelerator
        self.step: WatchedStep | None = None
        self._roots = _Roots()
        self._recording: _StepRecorder | None = None
        self._depth = 0
        self._graphs: list[ForwardGraph] = []
        self._batch = 1
        self._loaded: int | None = None
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._given: dict[int, torch.Tensor] = {}  # gradients without values, of no memory
        self._attributes: list[tuple[_Module, str, Any]] = []
        self._notes: list[str] = []
        self._stack = ExitStack()
        self._refusal: CaptureError | None = None
        self._thread = 0
        self.questions: list[str] = []
        self.own_autocasts = 0

    # what `answered` reports --------------------------------------------------------------------------------

    def ask(self, question: str) -> None:
        """Take note of a question about the device that the model asks."""
        if self._depth and self._recording is not None:
            self._recording.ask(question)

    def note(self, text: str) -> None:
        """Add a note to the captured step, once."""
        if self._recording is not None:
            self._recording.note(text)

    def end_autocast(self) -> None:
        """Drop the casts of weights: the outermost autocast ended."""
        if self._recording is not None:
            self._recording.end_autocast()

    def run_function(self, function: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return `apply(*args, **kwargs)`, which runs a custom autograd function."""
        if self._recording is None:
            return apply(*args, **kwargs)
        return self._recording.run_function(function, apply, args, kwargs)

    # begin and end ------------------------------------------------------------------------------------------

    def watch(self) -> StepWatch:
        """Begin the watch; `end` ends it."""
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(answered(self.accelerator, self))
            stack.enter_context(_replaced(self))
            stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            stack.enter_context(self)
            self._stack = stack.pop_all()
        return self

    def end(self, kind: type[BaseException] | None, error: BaseException | None) -> bool:
        """Put everything back; return whether the exception is the watch's own."""
        trace = None if error is None else error.__traceback__
        self._stack.__exit__(kind, error, trace)
        for parameter, gradient in self._grads.values():
            parameter.grad = gradient
        for module, name, before in reversed(self._attributes):
            if before is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before
        recorder, self._recording = self._recording, None
        if error is None and self._graphs:
            self._finish(None)
        if kind is not None and not issubclass(kind, StepReached):
            return False
        if recorder is not None and recorder.leaked():
            forget_cached((TracedTensor,))
        if self.step is None:
            what = "calls no module that learns" if recorder is None else "runs no backward pass"
            raise CaptureError(
                f"the watched code {what}; expected a training step: a call of the model, "
                "loss.backward() and optimizer.step()"
            )
        return True

    def _finish(self, optimizer: torch.optim.Optimizer | None) -> None:
        alike = len({_operators(graph) for graph in self._graphs}) == 1
        graphs = [self._graphs[0]] if alike else self._graphs
        notes = [*self._notes]
        if optimizer is None:
            notes.append("no optimizer stepped: the update is not counted")
        graphs = [replace(graph, notes=(*graph.notes, *notes)) for graph in graphs]
        passes = len(self._graphs) if alike else 1
        self.step = WatchedStep(tuple(graphs), self._batch, passes, optimizer, self._roots)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End the watch where an optimizer steps; a closure computes the loss first."""
        if threading.get_ident() != self._thread:
            return
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            with torch.enable_grad():
                closure()
        if not self._graphs:
            raise CaptureError(
                f"{type(optimizer).__name__}.step(){where()} comes before any backward pass of a module; "
                "expected a call of the model, loss.backward() and optimizer.step()"
            )
        self._finish(optimizer)
        raise StepReached

    # calls of modules ---------------------------------------------------------------------------------------

    def call(self, original: Callable[..., Any], module: _Module, args: Any, kwargs: Any) -> Any:
        """Run a call of a module: recorded from the first one that learns on."""
        if self._depth or threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if self.step is not None:  # the code caught the end of the watch
            raise StepReached
        module = unwrapped(module)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        traced = any(type(t) is TracedTensor for t in tensors)
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if not traced and not learns:
            return original(module, *args, **kwargs)
        recorder = self._recorder(args, kwargs)
        name = self._roots.name_of(module)
        recorder.forget_names()
        for tensor in tensors:
            self._follow(tensor)
        self._depth += 1
        try:
            with isolated(module) as twin, scoped(twin, _Scopes(recorder.scopes, name)):  # type: ignore[arg-type]
                outputs = twin(*args, **kwargs)
                self._take_attributes(module, twin)
        finally:
            self._depth -= 1
        recorder.returned += [recorder.index_of(t) for t in tensors_in(outputs)]
        return outputs

    def _recorder(self, args: Any, kwargs: Any) -> _StepRecorder:
        """Return the recorder of the present part of the step; a new one after a backward pass."""
        if self._recording is None or not self._recording.begun:
            if self._recording is None:
                self._batch = self._batch_size((args, kwargs))
            self.recorder = self._recording = _StepRecorder(self._roots, self._batch, self.accelerator)
            self._recording.own_autocasts = self.own_autocasts
            self._recording.scopes[:] = ["loss"]
        return self._recording

    def _batch_size(self, arguments: Any) -> int:
        first = next((t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.dim()), None)
        if first is not None and self._loaded in first.shape:
            return int(self._loaded or 1)
        return batch_of(arguments) or 1

    def _take_attributes(self, module: _Module, twin: _Module) -> None:
        """Let code after the call read what the forward pass keeps in attributes, up to the watch's end."""
        copies = dict(twin.named_modules())
        for name, original in module.named_modules():
            own, new = vars(original), vars(copies[name]) if name in copies else {}
            for key, value in new.items():
                if key in ("_compiled_call_impl", "forward") or value is own.get(key, _ABSENT):
                    continue
                kept = type(value) is TracedTensor or (isinstance(value, _ATOMS) and value != own.get(key))
                if kept or (isinstance(value, (list, tuple, dict)) and _holds_traced(value)):
                    self._attributes.append((original, key, own.get(key, _ABSENT)))
                    own[key] = value.copy() if isinstance(value, (list, dict)) else value

    # calls of PyTorch ---------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call that takes part in the step; run another one on the CPU."""
        func, kwargs = called_function(func, sys._getframe(1)), kwargs or {}
        if self._recording is None:
            return self._run(func, args, kwargs)
        self._recording.own_autocasts = self.own_autocasts
        if self._depth:
            if func in _BACKWARDS or func is torch.autograd.grad:
                raise CaptureError(f"the forward pass differentiates{where()}; predict its parts one by one")
            return super().__torch_function__(func, types, args, kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        stand_ins = [t for t in tensors if type(t) is TracedTensor]
        if func is torch.autograd.grad and stand_ins:
            raise CaptureError(
                f"the step differentiates outside of backward() (torch.autograd.grad{where()}), as a "
                "gradient penalty does; leave that term out for the prediction"
            )
        target = target_of(func)
        if not stand_ins:
            takes_part = any(id(t) in self._given or self._recording.is_model(t) for t in tensors)
            computes = target.role in ("op", "reshape") and target.kind not in _ACCESS
            if not (takes_part and computes):
                return self._run(func, args, kwargs)
        elif target.role == "read" or target.kind in _SHOWN:
            return self._read_outside(target, func, args, kwargs)
        if not self._recording.begun and target.inplace:  # on gradients, such as clipping: in no graph
            return args[0]
        for tensor in tensors:
            self._follow(tensor)
        result = super().__torch_function__(func, types, args, kwargs)
        if type(result) is TracedTensor and result.dtype_name == "bool":
            vars(result)["is_true"] = self._of_zeros(func, args, kwargs)
        return result

    def _of_zeros(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return what a condition such as `isfinite(loss)` is where all values are zero."""

        def number(item: Any) -> Any:
            return _zeros(item).flatten()[:1].squeeze() if type(item) is TracedTensor else item

        try:
            return bool(func(*map(number, args), **{key: number(item) for key, item in kwargs.items()}))
        except Exception:  # a condition on sizes, or on no single number
            return False

    def _follow(self, tensor: torch.Tensor) -> None:
        """Let a result of an earlier part of the step be an input of this one."""
        if type(tensor) is TracedTensor and tensor.recorder is not self._recording:
            assert self._recording is not None
            self._recording.adopt(tensor)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call for real, on the CPU whatever device it names."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "get_device"):
            kind = target_of(func).kind
            if is_device_query(kind) and kind != "is_meta" and args[0].device.type == "cpu":
                return tensor_answer(kind, self.accelerator, self.ask, sys._getframe(2))
        if name in ("cuda", "pin_memory", "xpu", "mps") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if name in ("to", "type", "_parse_to"):
            args = tuple([args[0], *map(on_cpu, args[1:])])
        elif any(isinstance(item, torch.device) for item in args):
            args = tuple([on_cpu(item) if isinstance(item, torch.device) else item for item in args])
        return func(*args, **kwargs)

    def _read_outside(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a read of values outside of the model, such as a loss that is printed, by zeros."""
        self._note(f"values that the code reads are zero ({target.kind}{where()}): nothing is computed")
        return func(*map(_zeros, args), **{key: _zeros(item) for key, item in kwargs.items()})

    def _note(self, text: str) -> None:
        if not any(note.startswith(text.split(" (")[0]) for note in self._notes):
            self._notes.append(text)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> None:
        """End a part of the step at its backward pass."""
        losses = args[0] if args else kwargs.get("tensors", kwargs.get("self"))
        loss = losses[0] if isinstance(losses, (list, tuple)) and len(losses) == 1 else losses
        recorder = self._recording
        if type(loss) is not TracedTensor or recorder is None:
            if isinstance(loss, torch.Tensor):  # of something else than the model
                func(*args, **kwargs)
                return
            raise CaptureError(
                f"backward(){where()} is called on {type(loss).__name__}; expected one scalar loss"
            )
        if not recorder.begun:
            raise CaptureError(
                f"a second backward pass over one forward pass{where()} cannot be captured; expected one"
            )
        self._follow(loss)
        last = loss_index(recorder, loss)
        roots = [
            module for name, module in self._roots.roots.items() if any(True for _ in module.parameters())
        ]
        name = " + ".join(dict.fromkeys(type(root).__name__ for root in roots)) or "step"
        returned = recorder.returned or [last]
        self._graphs.append(recorder.finish(recorder.fed, returned, last, True, name, ()))
        recorder.begun = False
        for module in roots:
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in self._grads:
                    self._grads[id(parameter)] = (parameter, parameter.grad)
                    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                    parameter.grad = gradient = zero.expand(parameter.shape)
                    self._given[id(gradient)] = gradient


def _zeros(item: Any) -> Any:
    """Return zeros in place of a stand-in, or what a condition is for them; anything else unchanged."""
    if type(item) is not TracedTensor:
        return item
    value = vars(item).get("is_true", False)
    return torch.full((), value, dtype=getattr(torch, item.dtype_name)).expand(item.sizes)


_ABSENT = object()
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_ACCESS = frozenset(("detach", "data"))


def _operators(graph: ForwardGraph) -> tuple[Any, ...]:
    """Return the operators of a graph with the shapes of what they make."""
    return tuple((op.kind, *[graph.values[index].shape for index in op.outputs]) for op in graph.ops)


def _holds_traced(item: Any) -> bool:
    return any(type(leaf) is TracedTensor for leaf in tree_leaves(item))


def on_cpu(item: Any) -> Any:
    """Return the CPU in place of another device, anything else unchanged."""
    if isinstance(item, torch.device):
        return torch.device("cpu") if item.type in _ELSEWHERE else item
    if isinstance(item, str) and item.partition(":")[0] in _ELSEWHERE:
        return "cpu"
    if type(item) is int:
        return "cpu"
    return item


# what is replaced in PyTorch --------------------------------------------------------------------------------


class _Nothing:
    """Stands for a stream or an event of a device: every method returns nothing, or zero."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else None


@contextmanager
def _replaced(watch: StepWatch) -> Iterator[None]:
    """Replace what a watch needs in PyTorch; put it back afterwards, also after an exception."""
    from torch.utils.data import DataLoader

    call, load, loading = _Module.__call__, torch.load, DataLoader.__iter__

    @functools.wraps(call)
    def calling(module: _Module, *args: Any, **kwargs: Any) -> Any:
        return watch.call(call, module, args, kwargs)

    @functools.wraps(load)
    def load_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and not callable(kwargs.get("map_location")):
            kwargs["map_location"] = "cpu"
        return load(*args, **kwargs)

    @functools.wraps(loading)
    def iterate(loader: Any) -> Any:
        watch._loaded = getattr(loader, "batch_size", None)
        pinned, loader.pin_memory = loader.pin_memory, False
        try:
            return loading(loader)
        finally:
            loader.pin_memory = pinned

    def keep(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        watch._note("torch.compile is left out: the figures are those of eager PyTorch")
        return model if model is not None else lambda function: function

    def keep_module(module: _Module, *args: Any, **kwargs: Any) -> None:
        keep(module)

    gone = {name: _Nothing for name in ("Event", "Stream", "ExternalStream", "stream", "device", "device_of")}
    answers: dict[str, Any] = {"current_stream": _Nothing, "default_stream": _Nothing}
    answers |= dict.fromkeys(("memory_stats", "memory_summary", "memory_snapshot"), lambda *_, **__: {})
    replacements: list[tuple[Any, str, Any]] = [
        (_Module, "__call__", calling),
        (_Module, "compile", keep_module),
        (torch, "compile", keep),
        (torch, "load", load_on_cpu),
        (DataLoader, "__iter__", iterate),
        *[(torch.cuda, name, item) for name, item in (gone | answers).items() if hasattr(torch.cuda, name)],
    ]
    originals = [(home, name, vars(home)[name]) for home, name, _ in replacements]
    try:
        for home, name, item in replacements:
            setattr(home, name, item)
        yield
    finally:
        for home, name, item in originals:
            setattr(home, name, item)
