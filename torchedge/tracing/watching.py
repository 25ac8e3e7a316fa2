"""Watches a training loop up to its update: the step that user code runs, captured and not executed.

Code before the first call of a module that learns runs as it is, on the CPU: devices that it names are mapped
to the CPU. From that call on operators on the model are recorded, as `trace` records a forward pass. The
optimizer's step ends the watch, or, where other optimizers hold parameters of the modules that were called
(a GAN), the step of the last of them: nothing is trained. What the watch replaces in PyTorch is put back
then.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torchedge.errors import CaptureError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import BACKWARD, FREE_GRADIENTS, STEP_EVENTS, UPDATE, moved
from torchedge.tracing.capturing import parallel_notes, unwrapped
from torchedge.tracing.copies import forget_cached, forget_held, isolated, scoped, where
from torchedge.tracing.device_answers import Accelerator, Inert, answered, is_device_query, tensor_answer
from torchedge.tracing.interception import Interceptor, batch_of, loss_index, tensors_in
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, Token, TracedTensor, leaves_of
from torchedge.tracing.torch_calls import called_function, target_of

_ELSEWHERE = frozenset(("cuda", "mps", "xpu", "hip"))
_ATOMS = (int, float, bool, str, type(None))
_SHOWN = frozenset(("__repr__", "__str__", "__format__"))
_Module = torch.nn.Module
T = TypeVar("T")


class StepReached(BaseException):
    """Ends watched code at its first update; user code that catches exceptions does not catch it."""


@dataclass(frozen=True)
class WatchedStep:
    """A training step as user code runs it.

    graph: a forward pass with its loss, or a whole step (`ForwardGraph.is_whole_step`) where passes differ or
    gradients end inside of it. batch_size: of a micro-batch. accumulation: backward passes to an update,
    where all are alike. optimizers: those that stepped, in order. model: the modules that the step calls.
    keeps_gradients: `zero_grad(set_to_none=False)`.
    """

    graph: ForwardGraph
    batch_size: int
    accumulation: int
    optimizers: tuple[torch.optim.Optimizer, ...]
    model: _Module
    keeps_gradients: bool = False


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


class _StepRecorder(Recorder):
    """Records a step: a real tensor that is none of the model's is an input of it."""

    def __init__(self, roots: _Roots, batch_size: int, accelerator: Accelerator) -> None:
        super().__init__(leaves_of(roots), batch_size, accelerator)
        self.fed: list[int] = []
        self.returned: list[int] = []
        self.losses: list[int] = []
        self.begun = True
        self.gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Gradients without values, of no memory, each with its parameter."""

    def is_model(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor belongs to a module that the step calls."""
        return id(tensor) in self._model_tensors()

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the step's device: the model's weights, and what the code feeds."""
        return not self.is_model(tensor) or super().is_registered(tensor)

    def is_weight(self, tensor: object) -> bool:
        """Return whether an object is a parameter of the model, or lies in its storage (`.data`)."""
        if not isinstance(tensor, torch.Tensor) or type(tensor) is TracedTensor:
            return False
        parameters = [t for _, t, role in self._model_tensors().values() if role == "parameter"]
        return any(tensor is p or 0 != p.data_ptr() == tensor.data_ptr() for p in parameters)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of one of the model's tensors, nothing for another one."""
        return self._model_tensors().get(id(tensor), ("",))[0]

    def forget_names(self) -> None:
        """Name the model's tensors anew: another module is called."""
        self._named = None

    def _leaf(self, tensor: torch.Tensor) -> int:
        if id(tensor) in self.gradients:
            # A view of its parameter, which is as large: the tape has gradients of its own.
            parameter = self.index_of(self.gradients[id(tensor)][1])
            with torch.no_grad():
                (index,) = self.add_call("detach", [parameter], {}, [self._form(parameter)], parameter)
            self._leaves[id(tensor)] = index
            return index
        if tensor.device.type == "meta" or self.is_model(tensor):
            return super()._leaf(tensor)
        return self.adopt(tensor)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Add a tensor as an input, such as a batch."""
        name = f"x{len(self.fed) + 1}" if self.fed else "x"
        index = self.add_value(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], "input")
        self.fed.append(index)
        self._leaves[id(tensor)] = index
        self._alive.append(tensor)
        self.example.add(index, tensor)
        return index

    def stand_for(self, tensor: torch.Tensor, stand_in: TracedTensor) -> None:
        """Let a real tensor be a value of the graph as long as it lives."""
        key, self._leaves[id(tensor)] = id(tensor), stand_in.token.index
        finalize(tensor, self._forget, key, stand_in.token).atexit = False

    def _forget(self, key: int, token: Token) -> None:
        """Forget a real tensor that is gone; its token goes with this call."""
        self._leaves.pop(key, None)
        self._metas.pop(key, None)


@dataclass(slots=True)
class _CallsBefore:
    """Calls without gradients before a step begins.

    calls: module and shapes of each. results: what they returned. end: operators up to the last one's end.
    """

    calls: list[tuple[int, list[tuple[int, ...]]]] = field(default_factory=list)
    results: list[ref[torch.Tensor]] = field(default_factory=list)
    end: int = 0

    def is_alive(self) -> bool:
        """Whether a result is still in use."""
        return any(result() is not None for result in self.results)


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
        self._stepped: list[torch.optim.Optimizer] = []
        self._zeroed: set[int] = set()  # parameters whose gradients the code ends itself
        self._zeroed_before: set[int] = set()  # of these, before the step begins
        self._keeps_gradients = False
        self._begun = False
        self._computes = False  # a call before the step runs for real
        self._devices: dict[str | None, Any] = {}  # that the code names
        self._by_hand = False  # the code updates weights itself
        self._before = _CallsBefore()
        self._batch = 1
        self._loaded: int | None = None
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
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
        recorder = self._recording
        if error is None and self.step is None and recorder is not None and recorder.losses:
            self._finish()
        self._recording = None
        if kind is not None and not issubclass(kind, StepReached):
            return False
        if recorder is not None and recorder.leaked():
            forget_cached((TracedTensor,))
            forget_held(recorder.survivors())
        if self.step is None:
            what = "calls no module that learns" if recorder is None else "runs no backward pass"
            raise CaptureError(
                f"the watched code {what}; expected a training step: a call of the model, "
                "loss.backward() and optimizer.step()"
            )
        return True

    def _finish(self) -> None:
        """Take what was recorded as the step."""
        recorder, optimizers = self._recording, list(dict.fromkeys(self._stepped))
        assert recorder is not None
        notes = [*self._notes]
        named = [name for name in self._devices if name]
        if len(named) > 1:
            notes.append(f"the code names several devices ({', '.join(named)}): all is predicted as on one")
        if not optimizers:
            notes.append("no optimizer stepped: the update is not counted")
        stays = self._zeroed - self._zeroed_before
        implicit = [p for o in optimizers for p in _parameters_of(o) if id(p) not in stays]
        if implicit and not self._keeps_gradients:  # as code behind the update, which did not run, does
            self._end_gradients(implicit)
        roots = [
            module for name, module in self._roots.roots.items() if any(True for _ in module.parameters())
        ]
        name = " + ".join(dict.fromkeys(type(root).__name__ for root in roots)) or "step"
        copies = _copies(self._roots.roots.values())
        for copy in copies:
            self._roots.name_of(copy)
        if copies:
            kinds = ", ".join(dict.fromkeys(type(copy).__name__ for copy in copies))
            notes.append(f"other modules as the step's ({kinds}) exist: their weights are on the device, too")
        recorder.forget_names()
        losses, outputs = recorder.losses, recorder.returned or recorder.losses[-1:]
        graph = recorder.finish(recorder.fed, outputs, losses[-1], True, name, ())
        graph = without_unread_calls(graph, self._before.end)
        passes = alike_passes(graph) if len(optimizers) < 2 else ()
        if len(optimizers) > 1:
            notes.append(
                f"the step has {len(self._stepped)} updates of {len(optimizers)} optimizers: latency is that "
                "of all, each parameter updated once as by the first of them"
            )
        elif not passes and len(losses) > 1:
            notes.append(f"{len(losses)} backward passes come before the update: latency is the sum of all")
        graph = passes[0] if passes else replace(graph, outputs=tuple(dict.fromkeys(losses)))
        self.step = WatchedStep(
            replace(graph, notes=(*graph.notes, *notes)),
            self._batch,
            max(len(passes), 1),
            tuple(optimizers),
            self._roots,
            self._keeps_gradients,
        )

    def _end_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that gradients end here; names follow when all modules are known."""
        recorder = self._recording
        if recorder is None or not recorder.ops:
            return
        recorder.forget_names()
        names = [recorder.name_of(p) for p in parameters]
        recorder.add_event(FREE_GRADIENTS, names=frozenset(name for name in names if name))

    def zero(self, parameters: Iterable[torch.Tensor], keeps: bool) -> None:
        """Take note of `zero_grad` of an optimizer or a module; keeps: gradients become zeros."""
        if self._depth or threading.get_ident() != self._thread:
            return
        parameters = [*parameters]
        self._keeps_gradients = self._keeps_gradients or keeps
        if keeps:
            return
        if not self._begun:  # those of the step before, where that one ends
            self._zeroed_before.update(map(id, parameters))
            return
        self._zeroed.update(map(id, parameters))
        self._end_gradients(parameters)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record an update, which does not run; the last ends the watch. A closure runs first."""
        if threading.get_ident() != self._thread:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            with torch.enable_grad():
                closure()
        recorder = self._recording
        if recorder is None or not recorder.losses:
            raise CaptureError(
                f"{type(optimizer).__name__}.step(){where()} comes before any backward pass of a module; "
                "expected a call of the model, loss.backward() and optimizer.step()"
            )
        self._stepped.append(optimizer)
        recorder.add_event(UPDATE, optimizer=list(dict.fromkeys(self._stepped)).index(optimizer))
        if callable(closure) or len(self._stepped) == _MOST_UPDATES or not self._waiting():
            self._finish()
            raise StepReached
        return (_idle(optimizer), *args[1:]), kwargs

    def _waiting(self) -> bool:
        """Whether an optimizer that has not stepped holds parameters of modules that the step calls."""
        stepped = {id(p) for optimizer in self._stepped for p in _parameters_of(optimizer)}
        called = {id(p) for root in self._roots.roots.values() for p in root.parameters()}
        for optimizer in _alive(torch.optim.Optimizer):
            held = {id(p) for p in _parameters_of(optimizer)}
            if held & called and not held & stepped:
                return True
        return False

    # calls of modules ---------------------------------------------------------------------------------------

    def call(self, original: Callable[..., Any], module: _Module, args: Any, kwargs: Any) -> Any:
        """Run a call of a module: recorded from the first one that learns on."""
        if self._depth or self._computes or threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if self.step is None and self._by_hand:  # another pass follows the update
            passes = 0 if self._recording is None else len(self._recording.losses)
            if passes >= _MOST_UPDATES or not self._waiting():
                self._finish()
        if self.step is not None:  # else the code caught the end of the watch
            raise StepReached
        self._notes += [note for note in parallel_notes(module) if note not in self._notes]
        module = unwrapped(module)
        tensors = tensors_in((args, kwargs), torch.Tensor)
        if not any(type(t) is TracedTensor for t in tensors):
            parameters = [*module.parameters()]
            learns = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
            if not parameters or (not learns and not self._begun):
                return (
                    self._run_before(original, module, args, kwargs)
                    if parameters
                    else original(module, *args, **kwargs)
                )
        if not self._begun:
            self._begun = True
            if not self._before.is_alive():  # calls that left no result are no part of the step
                self._recording, self._before = None, _CallsBefore()
        elif self._recording is not None and not self._recording.losses and not self._recording.leaked():
            names = dict.fromkeys(type(root).__name__ for root in self._roots.roots.values())
            self._note(f"calls of modules whose results nothing reads are left out ({', '.join(names)})")
            self._recording, self._roots = None, _Roots()
        recorder = self._recorder(args, kwargs)
        with self._called(recorder, module) as twin:
            outputs = twin(*args, **kwargs)
            self._take_attributes(module, twin)
        recorder.returned += [recorder.index_of(t) for t in tensors_in(outputs)]
        return outputs

    @contextmanager
    def _called(self, recorder: _StepRecorder, module: _Module) -> Iterator[_Module]:
        """Yield the copy of a module whose call is recorded."""
        name = self._roots.name_of(module)
        recorder.forget_names()
        self._depth += 1
        try:
            with isolated(module) as twin, scoped(twin, recorder.scopes, name):
                yield twin
        finally:
            self._depth -= 1

    def _run_before(self, original: Callable[..., Any], module: _Module, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients before the step begins, such as a teacher's, for real.

        It is recorded, too: it is part of the step if the step reads its results.
        """
        self._roots.name_of(module)
        shapes = [tuple(t.shape) for t in tensors_in((args, kwargs), torch.Tensor)]
        call = (id(module), shapes)
        if not self._before.is_alive():
            self._recording, self._before = None, _CallsBefore()
        if call in self._before.calls:  # an evaluation of several batches
            return original(module, *args, **kwargs)
        recorder, traced = self._recorder(args, kwargs), list[Any]()
        try:
            with self._called(recorder, module) as twin:
                traced = tensors_in(twin(*args, **kwargs))
        except Exception:  # code that no capture follows: the step reads its results as inputs
            self._recording, self._before = None, _CallsBefore()
        self._computes = True
        try:
            outputs = original(module, *args, **kwargs)
        finally:
            self._computes = False
        results = tensors_in(outputs, torch.Tensor)
        if self._recording is recorder and len(traced) == len(results):
            self._before.calls.append(call)
            for result, stand_in in zip(results, traced, strict=True):
                recorder.stand_for(result, stand_in)
                self._before.results.append(ref(result))
        self._before.end = len(recorder.ops)
        return outputs

    def _recorder(self, args: Any, kwargs: Any) -> _StepRecorder:
        """Return the recorder of the step, to which a new part may belong."""
        if self._recording is None:
            self._batch = self._batch_size((args, kwargs))
            self.recorder = self._recording = _StepRecorder(self._roots, self._batch, self.accelerator)
            self._recording.own_autocasts = self.own_autocasts
            self._recording.scopes[:] = ["loss"]
        self._recording.begun = True
        return self._recording

    def _batch_size(self, arguments: Any) -> int:
        first = next((t for t in tensors_in(arguments, torch.Tensor) if t.dim()), None)
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
        if self._recording is None or self._computes:
            return self._run(func, args, kwargs)
        self._recording.own_autocasts = self.own_autocasts
        if self._depth:
            if func in _BACKWARDS or func is torch.autograd.grad:
                raise CaptureError(f"the forward pass differentiates{where()}; predict its parts one by one")
            return super().__torch_function__(func, types, args, kwargs)
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs)
        tensors = tensors_in((args, kwargs), torch.Tensor)
        stand_ins = [t for t in tensors if type(t) is TracedTensor]
        if func is torch.autograd.grad and stand_ins:
            raise CaptureError(
                f"the step differentiates outside of backward() (torch.autograd.grad{where()}), as a "
                "gradient penalty does; leave that term out for the prediction"
            )
        target = target_of(func)
        if not stand_ins:
            gradients = self._recording.gradients
            takes_part = any(id(t) in gradients or self._recording.is_model(t) for t in tensors)
            computes = target.role in ("op", "reshape") and target.kind not in _ACCESS
            if not (takes_part and computes):
                result = self._run(func, args, kwargs)
                if target.kind in _ACCESS and id(args[0]) in gradients:
                    gradients[id(result)] = result, gradients[id(args[0])][1]
                return result
        elif target.role == "read" or target.kind in _SHOWN:
            self._note(f"values that the code reads are zero ({target.kind}{where()}): nothing is computed")
            return func(*map(_zeros, args), **{key: _zeros(item) for key, item in kwargs.items()})
        if not self._recording.begun and target.inplace:  # on gradients, such as clipping: in no graph
            self._by_hand = self._by_hand or self._recording.is_weight(args[0])
            return args[0]
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

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call for real, on the CPU whatever device it names."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "get_device"):
            kind = target_of(func).kind
            if is_device_query(kind) and kind != "is_meta" and args[0].device.type == "cpu":
                return tensor_answer(kind, self.accelerator, self.ask, sys._getframe(2))
        self._devices.update(dict.fromkeys(map(_device_named, (*args[:2], kwargs.get("device")))))
        if name in ("cuda", "pin_memory", "xpu", "mps") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if name in ("to", "type", "_parse_to"):
            args = tuple([*args[:1], *map(on_cpu, args[1:])])
        elif any(isinstance(item, torch.device) for item in args):
            args = tuple([on_cpu(item) if isinstance(item, torch.device) else item for item in args])
        return func(*args, **kwargs)

    def _note(self, text: str) -> None:
        if not any(note.startswith(text.split(" (")[0]) for note in self._notes):
            self._notes.append(text)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record a backward pass, and give parameters gradients without values."""
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
        last = loss_index(recorder, loss)
        retains = kwargs.get("retain_graph", args[2] if len(args) > 2 else None) or kwargs.get("create_graph")
        recorder.add_event(BACKWARD, [last], retain=bool(retains))
        recorder.losses.append(last)
        recorder.begun = False
        for module in self._roots.roots.values():
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter.grad) not in recorder.gradients:
                    self._grads.setdefault(id(parameter), (parameter, parameter.grad))
                    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                    parameter.grad = gradient = zero.expand(parameter.shape)
                    recorder.gradients[id(gradient)] = gradient, parameter


def _zeros(item: Any) -> Any:
    """Return zeros in place of a stand-in, or what a condition is for them; anything else unchanged."""
    if type(item) is not TracedTensor:
        return item
    value = vars(item).get("is_true", False)
    return torch.full((), value, dtype=getattr(torch, item.dtype_name)).expand(item.sizes)


_ABSENT = object()
_MOST_UPDATES = 10
"""Updates, or passes with updates by hand, after which a watch ends although an optimizer has not stepped."""
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_ACCESS = frozenset(("detach", "data"))


def is_watched() -> bool:
    """Return whether a watch has replaced what it needs in PyTorch."""
    return hasattr(_Module.__call__, "watch")


def without_unread_calls(graph: ForwardGraph, end: int) -> ForwardGraph:
    """Return the graph without its operators up to `end` if no later one reads what they make."""
    assert graph.releases is not None
    made = {index for op in graph.ops[:end] for index in op.outputs}
    if any(index in made for op in graph.ops[end:] for index in op.inputs):
        return graph
    releases = tuple([tuple([i for i in indices if i not in made]) for indices in graph.releases[end:]])
    outputs = tuple([index for index in graph.outputs if index not in made])
    return replace(graph, ops=graph.ops[end:], releases=releases, outputs=outputs)


def alike_passes(graph: ForwardGraph) -> tuple[ForwardGraph, ...]:
    """Return the passes of a step as graphs of their own; nothing where they differ.

    They also differ where one reads what an earlier one made, or gradients end between two of them; and code
    that computes with the gradients, such as clipping, belongs to no pass: of one pass it makes a whole step,
    of several where it makes more than a number for each parameter.
    """
    bounds = [position for position, op in enumerate(graph.ops) if op.kind == BACKWARD]
    begins = [0, *[end + 1 for end in bounds[:-1]]]
    for position, op in enumerate(graph.ops):
        inside = any(op.kind not in STEP_EVENTS for op in graph.ops[:position]) and position < bounds[-1]
        if inside and op.kind in (UPDATE, FREE_GRADIENTS):
            return ()
    behind = [index for op in graph.ops[bounds[-1] :] for index in op.outputs]
    made = [graph.values[index] for index in behind if graph.values[index].alias is None]
    parameters = sum(value.role == "parameter" for value in graph.values)
    if made and (len(bounds) == 1 or max(value.numel[0] for value in made) > parameters):
        return ()
    passes = [_part(graph, begin, end) for begin, end in zip(begins, bounds, strict=True)]
    if None in passes or len({_operators(part) for part in passes if part is not None}) > 1:
        return ()
    return tuple([part for part in passes if part is not None])


def _part(graph: ForwardGraph, begin: int, end: int) -> ForwardGraph | None:
    """Return the operators up to a backward pass as a graph; None if they read results of earlier ones."""
    assert graph.releases is not None
    positions = [p for p in range(begin, end) if graph.ops[p].kind not in STEP_EVENTS]
    ops, (loss,) = [graph.ops[p] for p in positions], graph.ops[end].inputs
    made = {index for op in ops for index in op.outputs}
    read = {index for op in ops for index in op.inputs if index is not None} - made
    shared = [graph.values[index].alias for index in made]
    aliases = {index for index in shared if index is not None} - made
    if loss is None or loss not in made or any(graph.values[i].role == "activation" for i in read | aliases):
        return None
    used = sorted(made | read | aliases)
    place = {old: new for new, old in enumerate(used)}
    values = [graph.values[old] for old in used]
    unread = [v for k, v in enumerate(graph.values) if v.role in ("parameter", "buffer") and k not in place]
    return replace(
        graph,
        values=tuple([v if v.alias is None else replace(v, alias=place[v.alias]) for v in values]),
        ops=tuple([moved(op, place) for op in ops]),
        inputs=tuple([place[i] for i in graph.inputs if i in place]),
        outputs=tuple([place[i] for i in graph.outputs if i in made] or [place[loss]]),
        loss=place[loss],
        releases=tuple([tuple([place[i] for i in graph.releases[p] if i in made]) for p in positions]),
        unread=(*graph.unread, *unread),
    )


def _operators(graph: ForwardGraph) -> tuple[Any, ...]:
    """Return the operators of a graph with the shapes of what they make."""
    return tuple((op.kind, *[graph.values[index].shape for index in op.outputs]) for op in graph.ops)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copies(roots: Iterable[_Module]) -> list[_Module]:
    """Return modules of the same class and shapes as those that a step calls: averages, target networks."""

    def form(module: _Module) -> Any:
        if any(is_lazy(p) for p in module.parameters()):
            return None
        return type(module), [(tuple(p.shape), p.dtype, p.device.type) for p in module.parameters()]

    called = [root for root in roots if any(True for _ in root.parameters())]
    own = {id(p) for root in called for p in root.parameters()}
    forms = [form(root) for root in called]
    copies: dict[int, _Module] = {}
    sizes: dict[int, int] = {}
    alive = [module for module in _alive(_Module) if "_modules" in vars(module)]  # not those of captures
    for module in alive:
        if any(type(module) is kind for kind, _ in forms) and form(module) in forms:
            parameters = {id(p) for p in module.parameters()}
            if not own & parameters:
                copies[id(module)], sizes[id(module)] = module, len(parameters)
    for parent in alive if copies else ():  # a part of a larger model is no copy
        for child in parent._modules.values():
            if id(child) in copies and len({id(p) for p in parent.parameters()}) > sizes[id(child)]:
                del copies[id(child)]
    return [*copies.values()]


def _idle(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer without parameters, whose step does nothing."""
    kind = type(optimizer)
    checks = [name for name in dir(kind) if name.endswith("_capture_health_check")]  # of the device
    without_checks = dict.fromkeys(checks, lambda self: None)
    idle: torch.optim.Optimizer = object.__new__(type(kind.__name__, (kind,), without_checks))
    vars(idle).update({**vars(optimizer), "param_groups": [], "state": {}})
    return idle


def _alive(kind: type[T]) -> list[T]:
    """Return the objects of a class in this process."""
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]


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


def _device_named(item: object) -> str | None:
    """Return the name, with its number, of a device other than the CPU; None for anything else."""
    if not isinstance(item, (str, torch.device)):
        return None
    kind, _, number = str(item).partition(":")
    return f"{kind}:{number or 0}" if kind in _ELSEWHERE else None


# what is replaced in PyTorch --------------------------------------------------------------------------------


@contextmanager
def _replaced(watch: StepWatch) -> Iterator[None]:
    """Replace what a watch needs in PyTorch; put it back afterwards, also after an exception."""
    from torch.utils.data import DataLoader

    call, load, loading = _Module.__call__, torch.load, DataLoader.__iter__
    zero_of_module, zero_of_optimizer = _Module.zero_grad, torch.optim.Optimizer.zero_grad

    @functools.wraps(call)
    def calling(module: _Module, *args: Any, **kwargs: Any) -> Any:
        return watch.call(call, module, args, kwargs)

    calling.watch = watch  # type: ignore[attr-defined]

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

    @functools.wraps(zero_of_module)
    def zero_module(module: Any, set_to_none: bool = True) -> None:
        watch.zero(module.parameters(), keeps=not set_to_none)
        zero_of_module(module, set_to_none)

    @functools.wraps(zero_of_optimizer)
    def zero_optimizer(optimizer: Any, set_to_none: bool = True) -> None:
        watch.zero(_parameters_of(optimizer), keeps=not set_to_none)
        zero_of_optimizer(optimizer, set_to_none)

    def keep(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        watch._note("torch.compile is left out: the figures are those of eager PyTorch")
        return model if model is not None else lambda function: function

    def keep_module(module: _Module, *args: Any, **kwargs: Any) -> None:
        keep(module)

    gone = ("Event", "Stream", "ExternalStream", "stream", "device", "device_of")
    replacements: list[tuple[Any, str, Any]] = [
        (_Module, "__call__", calling),
        (_Module, "compile", keep_module),
        (_Module, "zero_grad", zero_module),
        (torch.optim.Optimizer, "zero_grad", zero_optimizer),
        (torch, "compile", keep),
        (torch, "load", load_on_cpu),
        (DataLoader, "__iter__", iterate),
        *[(torch.cuda, name, Inert) for name in gone if hasattr(torch.cuda, name)],
    ]
    originals = [(home, name, vars(home)[name]) for home, name, _ in replacements]
    try:
        for home, name, item in replacements:
            setattr(home, name, item)
        yield
    finally:
        for home, name, item in originals:
            setattr(home, name, item)
