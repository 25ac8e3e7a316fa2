"""The fast path of capture: run the forward pass once on stand-ins in a mode that records every operator.

As in torch.fx, nothing is computed. Other than in torch.fx, every stand-in has a shape, so code that reads
shapes runs unchanged. One run gives operators, shapes, Python lifetimes, checkpoint regions and module paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import SequenceKey, TreeSpec, tree_flatten, tree_flatten_with_path, tree_map

from torchedge.errors import CaptureError, InputError, described, first_line
from torchedge.graphs import FLOATING, ForwardGraph
from torchedge.ops import OpSpec, Work
from torchedge.ops.strides import Strided, as_image, as_input, broadcasted, contiguous_strides, packed
from torchedge.tracing.checkpointing import Policy, is_stored
from torchedge.tracing.copies import forget_cached, forget_held, isolated, scoped, where
from torchedge.tracing.device_answers import PLAIN_CPU, Accelerator, answered, is_device_query
from torchedge.tracing.footprints import footprint_of
from torchedge.tracing.packed_sequences import PACKED
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, TracedTensor, leaves_of, without_batch_sizes
from torchedge.tracing.torch_calls import TorchCall, called_function, target_of

_NO_ATTRIBUTES = frozenset(("out", "device", "pin_memory", "layout"))
_NUMBERS = frozenset((int, float, bool, str))
_REAL_DEVICES = frozenset(("cuda", "cpu", "mps", "xpu"))


def bind(target: TorchCall, args: Any, kwargs: Any, rec: Recorder) -> tuple[list[int | None], dict[str, Any]]:
    """Split a call's arguments into tensor inputs (indices of values) and named plain attributes."""
    inputs: list[int | None] = []
    attrs: dict[str, Any] = {}
    params, slots = target.params, target.slots
    for position, arg in enumerate(args):
        if type(arg) is TracedTensor:
            inputs.append(arg.token.index)
        else:
            name = params[position] if position < len(params) else f"arg{position}"
            _place(name, arg, slots, inputs, attrs, rec)
    for name, arg in kwargs.items():
        if name not in _NO_ATTRIBUTES:
            _place(name, arg, slots, inputs, attrs, rec)
    return inputs, attrs


def _place(name: str, arg: Any, slots: frozenset[str], inputs: list[int | None], attrs: dict[str, Any],
           rec: Recorder) -> None:  # fmt: skip
    if arg is None:
        if name in slots:
            inputs.append(None)
    elif type(arg) in _NUMBERS:
        attrs[name] = arg
    elif isinstance(arg, torch.Tensor):
        inputs.append(rec.index_of(arg))
    elif isinstance(arg, (tuple, list)) and any(isinstance(a, torch.Tensor) for a in arg):
        inputs.extend(rec.index_of(a) for a in arg if isinstance(a, torch.Tensor))
        plain = tuple(a for a in arg if not isinstance(a, torch.Tensor))
        if plain:
            attrs[name] = plain
    elif type(arg) is not torch.device:
        attrs[name] = arg


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return a tensor's dtype without a detour through the tracing mode."""
    return getattr(torch, tensor.dtype_name) if type(tensor) is TracedTensor else tensor.dtype


def common_dtype(names: Collection[str], attrs: dict[str, Any]) -> str | None:
    """Return the dtype of the result if all tensors agree and no scalar promotes it, else None."""
    name, *others = {*names} or {""}
    if others or not name or attrs.get("dtype") not in (None, getattr(torch, name)):
        return None
    if name[0] != "c" and complex in map(type, attrs.values()):
        return None
    if name not in FLOATING and any(isinstance(a, float) for a in attrs.values()):
        return None
    return name


def to_meta(item: Any, rec: Recorder) -> Any:
    """Replace real tensors by meta tensors and devices by the meta device, through nested containers."""
    if isinstance(item, torch.Tensor):
        return rec.meta_of(item)
    if isinstance(item, torch.device):
        return torch.device("meta")
    if type(item) is str and item.split(":")[0] in _REAL_DEVICES:
        return "meta"
    if type(item) in (tuple, list):
        return type(item)([to_meta(i, rec) for i in item])
    if type(item) is dict:
        return {k: to_meta(v, rec) for k, v in item.items()}
    return item


_LOW = (torch.float16, torch.bfloat16)
Cast = Callable[[torch.Tensor, torch.dtype], Any]


def autocast_arguments(rec: Recorder, known: OpSpec, args: Any, kwargs: Any, cast: Cast) -> tuple[Any, Any]:
    """Return the arguments after autocast; casts of parameters are cached while autocast is on."""
    low, on_cpu = rec.low_dtype(), rec.accelerator.type == "cpu"
    if known.autocast == "lower" and low is not None:
        goal, sources = low, frozenset((torch.float32, *_LOW))
    elif low is not None and (
        known.autocast == "float32" or (known.autocast == "float32_on_cuda" and not on_cpu)
    ):
        goal, sources = torch.float32, frozenset(_LOW)
        asked = (known.widens or known.casts_inside) and "dtype" in known.params
        if asked and not on_cpu and kwargs.get("dtype") is None:
            tensor = args[0] if args else kwargs.get("input")
            given = any(isinstance(a, torch.dtype) for a in args)
            if isinstance(tensor, torch.Tensor) and dtype_of(tensor) in _LOW and not given:
                return args, {**kwargs, "dtype": goal}
    else:
        joins = ("join",) if on_cpu else ("join", "join_on_cuda")
        if low is None or known.autocast not in joins:
            return args, kwargs
        tensors = [*tensors_in((args, kwargs), torch.Tensor)]
        _note_refusal(rec, known.kind, low, tensors)
        if not known.work.multiplies_matrices or torch.float32 not in map(dtype_of, tensors):
            return args, kwargs
        goal, sources = torch.float32, frozenset(_LOW)  # `dot` refuses two dtypes

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            dtype = dtype_of(item)
            return item if dtype is goal or dtype not in sources else _cast_once(rec, item, goal, cast)
        if type(item) in (tuple, list):
            return type(item)([convert(i) for i in item])
        return item

    return tuple([convert(a) for a in args]), {k: convert(v) for k, v in kwargs.items()}


def _note_refusal(rec: Recorder, kind: str, low: torch.dtype, tensors: list[torch.Tensor]) -> None:
    """Note a call that autocast refuses (`at::autocast::prioritize`): half precision that is not its own."""
    for dtype in map(dtype_of, tensors):
        if dtype is torch.float32:
            return
        if dtype in _LOW and dtype is not low:
            rec.note(
                f"autocast to {DTYPE_NAMES[low]} refuses {kind} of {DTYPE_NAMES[dtype]} tensors{where()}: "
                "PyTorch ends the step with an error there; cast them to "
                f"{DTYPE_NAMES[low]} or float32 before"
            )
            return


def _cast_once(rec: Recorder, tensor: torch.Tensor, dtype: torch.dtype, cast: Cast) -> Any:
    weight = type(tensor) is not TracedTensor and tensor.requires_grad and tensor.dtype is torch.float32
    if not (weight and dtype is rec.low_dtype() and torch.is_autocast_cache_enabled()):
        return cast(tensor, dtype)
    key = (id(tensor), dtype)
    if key not in rec.casts:
        rec.casts[key] = cast(tensor, dtype)
    return rec.casts[key]


_OWN_READS: dict[tuple[Any, str], Any] = {
    ("torch.nn.functional", "__bool__"): False,  # `gaussian_nll_loss` refuses negative variances
    ("torch.nn.modules.batchnorm", "__float__"): 1.0,  # the mean of all steps so far
}
"""Values that PyTorch's own layers read, by module and kind of read, none of which decides what runs."""
_CASTS = frozenset(("to", "type", "float", "half", "double", "bfloat16", "long", "int", "bool", "type_as"))
_COPIES = frozenset(
    ("reshape", "flatten", "contiguous", "reshape_as", "ravel", "resolve_conj", "resolve_neg")
)
_COUNTED = frozenset(("chunk", "unsafe_chunk", "tensor_split"))
_SPLITS = _COUNTED | {"unbind", "split", "unsafe_split"}
_DROPOUTS = frozenset(
    ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
)
_RANDOM = frozenset(("rand", "randn", "randint"))
_DRAWS = _RANDOM | {"bernoulli", "uniform", "normal", "exponential", "random", "multinomial"}
_MOST_PARTS = 100_000


@dataclass(slots=True)
class _Call:
    """A call of an operator: its tensor inputs are values of the graph, its attributes plain."""

    target: TorchCall
    func: Any
    args: Any
    kwargs: Any
    inputs: list[int | None]
    attrs: dict[str, Any]


class Interceptor(TorchFunctionMode):
    """While active, every call into PyTorch's Python API ends here and is recorded instead of run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.generator = torch.Generator().manual_seed(0)
        self.running: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call; the mode is off while this runs."""
        func = called_function(func, sys._getframe(1))
        target = target_of(func)
        kwargs = kwargs or {}
        if self.recorder.shows_batch:
            args, kwargs = without_batch_sizes(args), without_batch_sizes(kwargs)
        if target.body is not None and self.running != func:
            return self._run_body(target.body, func, args, kwargs)
        role = target.role
        if target.kind == "type" and len(args) == 1 and not kwargs:
            tensor = args[0]
            name, device = torch.empty(0, dtype=dtype_of(tensor)).type(), self.recorder.accelerator.type
            if not self._is_on_device(tensor):
                return name
            self.recorder.ask("x.type()")
            return name if device == "cpu" else name.replace("torch.", f"torch.{device}.", 1)
        if role == "op":
            policy = self.recorder.autograd.policy()
            if policy is None:
                return self._record(target, func, args, kwargs)
            return self._record_selectively(policy, target, func, args, kwargs)
        if role == "query":
            if target.kind == "_set_grad_enabled":
                self.recorder.autograd.switch(args[0])
            if is_device_query(target.kind) and self._is_on_device(args[0]):
                return self.recorder.device_answer(target.kind, sys._getframe(1))
            if target.kind in ("numel", "nelement"):
                return self.recorder.counted(func(*args, **kwargs), sys._getframe(1))
            return func(*args, **kwargs)
        if role == "move":
            if target.kind == "requires_grad_" and type(args[0]) is TracedTensor:
                self.recorder.require_gradient(args[0], *args[1:], **kwargs)
            return args[0]
        if role == "read":
            return self._read(target, func, args, kwargs)
        if role == "assign":
            return self._assign(target, func, args)
        if role == "packed":
            self.recorder.note("packed sequences are counted as if all were as long as the longest")
            with self:
                return PACKED[target.kind](*args, **kwargs)
        return None if role == "check" else self._reshape(target, func, args, kwargs)

    def _is_on_device(self, tensor: Any) -> bool:
        """Whether a tensor is on the capture's device: all but constants that the model does not register."""
        return type(tensor) is TracedTensor or self.recorder.is_registered(tensor)

    def _run_body(self, body: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a Python function of PyTorch; a C method of its name that it calls arrives as `func` too."""
        outer, self.running = self.running, func
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.running = outer

    def _read(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        own = _OWN_READS.get((sys._getframe(2).f_globals.get("__name__"), target.kind))
        if own is not None:
            return own
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if any(type(t) is TracedTensor or t.device.type == "meta" for t in tensors):
            answers = self._read_example(func, args, kwargs)
            if answers:
                return answers[0]
            raise CaptureError(
                f"the forward pass reads the value of a tensor ({target.kind}{where()}), which is not known "
                "before running; use torch.where, or make the choice an argument of the model"
            )
        return func(*args, **kwargs)

    def _read_example(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """Return what a read of values gives for the user's example, nothing where the example is unknown."""
        rec = self.recorder

        def real(item: Any) -> Any:
            return rec.example.value(rec.index_of(item)) if isinstance(item, torch.Tensor) else item

        try:
            answer = func(*map(real, args), **{k: real(v) for k, v in kwargs.items()})
        except Exception:  # a value that no example gives, or that PyTorch computes only in the model's run
            return []
        if isinstance(answer, torch.Tensor):
            return []
        rec.note("the forward pass reads values of its inputs: captured as it runs for the example's")
        return [answer]

    def _assign(self, target: TorchCall, func: Any, args: Any) -> None:
        """Record `tensor.attribute = value`: stand-ins take new data, the model's tensors do not change."""
        tensor, value = args
        if target.kind != "data":
            return
        if type(tensor) is not TracedTensor:
            raise CaptureError(
                f"the forward pass replaces the data of a tensor of the model (.data{where()})"
            )
        index, meta = self.recorder.index_of(value), self.recorder.meta_of(value)
        func(tensor, meta)
        tensor.sizes, tensor.dtype_name = meta.size(), DTYPE_NAMES[meta.dtype]
        tensor.token = value.token if type(value) is TracedTensor else self.recorder.token(index)

    def _record_selectively(
        self, policy: Policy, target: TorchCall, func: Any, args: Any, kwargs: Any
    ) -> Any:
        """Record a call inside a selective checkpoint; the policy decides whether its results are stored."""
        rec, first = self.recorder, len(self.recorder.ops)
        with _disable_current_modes():  # a selective checkpoint's would store stand-ins
            metas = to_meta(args, rec), to_meta(kwargs, rec)
            result = self._record(target, func, args, kwargs)
            if len(rec.ops) > first and not target.inplace:
                attention = target.kind == "scaled_dot_product_attention"
                if is_stored(policy, lambda: func(*metas[0], **metas[1]), attention):
                    rec.ops[first:] = [replace(op, stored=True) for op in rec.ops[first:]]
        return result

    def _record(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        rec, known = self.recorder, target.spec
        if known is not None and torch._C._is_any_autocast_enabled():
            args, kwargs = autocast_arguments(rec, known, args, kwargs, self._cast)
        if target.kind == "broadcast_tensors":
            tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            shape = torch.broadcast_shapes(*[tuple(t.shape) for t in tensors])
            expand = torch.Tensor.expand
            return tuple([self._record(target_of(expand), expand, (t, shape), {}) for t in tensors])
        if rec.folded or target.kind in _RANDOM:
            folded = self._fold(target, func, args, kwargs)
            if folded is not None:
                return folded
        if func is torch.Tensor.__setitem__ and _is_view(args[1]):
            view = self._record(target_of(torch.Tensor.__getitem__), torch.Tensor.__getitem__, args[:2], {})
            write = torch.Tensor.copy_ if isinstance(args[2], torch.Tensor) else torch.Tensor.fill_
            return self._record(target_of(write), write, (view, args[2]), {})
        call = _Call(target, func, args, kwargs, *bind(target, args, kwargs, rec))
        attrs = call.attrs
        if target.kind in _DROPOUTS and not (
            attrs.get("train", attrs.get("training", True)) and attrs.get("p", 0.5)
        ):
            return args[0]
        if "out" in kwargs:
            return self._write_out(call)
        first = len(rec.ops)
        result = self._result(call)
        if target.kind == "embedding":
            _check_positions(call, rec)
        if func is torch.Tensor.float and result is args[0]:
            index = rec.index_of(result)
            rec.values[index] = replace(rec.values[index], exact=True)
        if len(rec.ops) > first and (known is None or not known.composite):
            self._replay(first, call)
        if rec.example.covers(call.inputs):
            self._follow_example(call, result)
        return result

    def _replay(self, place: int, call: _Call) -> None:
        """Give a recorded operator its footprint."""
        rec = self.recorder
        op = rec.ops[place]
        if not op.inputs or isinstance(call.func, torch._ops.HigherOrderOperator):
            return
        needs = [op.grad and rec.needs_gradient(i) for i in op.inputs if i is not None]
        results = [prod(rec.sizes[i]) for i in op.outputs]
        footprint = footprint_of(
            call.func,
            call.args,
            call.kwargs,
            needs,
            results,
            rec.fixed_batch is None,
            lambda item: to_meta(item, rec),
            rec.has_complex,
        )
        if footprint is not None and len(footprint.tensors) == len(needs) + len(results):
            rec.ops[place] = replace(op, footprint=footprint)

    def _result(self, call: _Call) -> Any:
        """Record a call and return its results as stand-ins."""
        target, known = call.target, call.target.spec
        if target.inplace:
            rec, tensor = self.recorder, call.args[0]
            old = rec.index_of(tensor)
            rec.example.forget(old)
            results = [(tuple(tensor.shape), rec.values[old].dtype)]
            (index,) = rec.add_call(call.target.kind, call.inputs, call.attrs, results, old, inplace=True)
            if type(tensor) is TracedTensor:
                rec.overwrite(tensor, index)
            return tensor
        result = None if known is None else self._infer(call, known)
        if result is not None:
            return result
        if target.kind in _SPLITS:
            _refuse_batch_loop(target.kind, call.args, call.attrs)
        return self._collect(call, self._meta_result(call))

    def _follow_example(self, call: _Call, result: Any) -> None:
        """Let the example's values follow a call that reads nothing else."""
        rec, many = self.recorder, isinstance(result, (tuple, list))
        tensors = [t for t in (result if many else (result,)) if type(t) is TracedTensor]
        outputs = [rec.index_of(t) for t in tensors]
        if not set(outputs) & set(call.inputs):
            rec.example.add_call(
                call.target.kind, call.func, call.args, call.kwargs, rec.index_of, outputs, many
            )

    def _fold(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run operators on single random numbers for real: a stochastic layer reads the value of its draw."""
        rec = self.recorder
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if any(id(t) not in rec.folded for t in tensors) or (not tensors and target.kind not in _RANDOM):
            return None
        if not tensors:
            meta = func(*args, **{**kwargs, "device": "meta"})
            if meta.numel() != 1:
                return None
            kwargs = {**kwargs, "device": "cpu"}
        if target.kind in _DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            rec.folded[id(result)] = result
            return result
        return None

    def _infer(self, call: _Call, known: OpSpec) -> Any:
        """Take shape and strides from the operator's own rules; None if they do not apply."""
        if known.infer_many is not None:
            return self._infer_many(call, known)
        if known.infer is None:
            return None
        rec, args, inputs = self.recorder, call.args, call.inputs
        present = [i for i in inputs if i is not None]
        tensors = args[0] if known.params[:1] == ("tensors",) else (*args, *call.kwargs.values())
        if None in inputs[:1] or len(present) != sum([isinstance(t, torch.Tensor) for t in tensors]):
            return None
        names = [rec.values[i].dtype for i in present]
        name = names[0] if known.first_dtype and names else common_dtype(names, call.attrs)
        if name is None:
            return None
        shapes = [None if i is None else rec.sizes[i] for i in inputs]
        sizes = known.infer(shapes, call.attrs)
        if sizes is None:
            return None
        steps = None
        operands = [t for t in tensors if isinstance(t, torch.Tensor)]
        if not all([t.is_contiguous() for t in operands]) and not known.composite:
            if known.strides is as_input:
                steps = broadcasted(sizes, [(torch.Tensor.size(t), t.stride()) for t in operands])
            elif known.work is Work.CONVOLUTION:
                steps = as_image(Strided(tuple(operands[0].shape), operands[0].stride(), sizes, call.attrs))
            elif known.strides is not packed:
                return None
        (index,) = rec.add_call(call.target.kind, inputs, call.attrs, [(sizes, name)])
        result = torch.empty_strided(
            sizes, steps or contiguous_strides(sizes), dtype=getattr(torch, name), device="meta"
        )
        if known.hides is not None and known.hides(shapes) and args[0].is_contiguous():
            result = result.view(sizes)
        return rec.wrap(result, index)

    def _infer_many(self, call: _Call, known: OpSpec) -> tuple[TracedTensor, ...]:
        """Take the shapes of several outputs, all of input 0's dtype, from the operator's own rule."""
        rec = self.recorder
        shapes = [None if i is None else rec.sizes[i] for i in call.inputs]
        outputs = known.infer_many(shapes, call.attrs)  # type: ignore[misc]
        dtype = dtype_of(call.args[0])
        results = [(sizes, DTYPE_NAMES[dtype]) for sizes in outputs]
        indices = rec.add_call(call.target.kind, call.inputs, call.attrs, results)
        tensors = [torch.empty(sizes, dtype=dtype, device="meta") for sizes in outputs]
        return tuple([rec.wrap(tensor, index) for index, tensor in zip(indices, tensors, strict=True)])

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """Record a cast that autocast makes; on a GPU it is marked: no Python runs for it."""
        rec = self.recorder
        result = self._record(target_of(torch.Tensor.to), torch.Tensor.to, (tensor, dtype), {})
        if rec.accelerator.type != "cpu" and rec.ops and rec.ops[-1].kind == "to_copy":
            rec.ops[-1] = replace(rec.ops[-1], attrs={**rec.ops[-1].attrs, "implicit": True})
        return result

    def _reshape(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Record `unsqueeze_` and the like: from here on the tensor is a view of itself."""
        rec, tensor = self.recorder, args[0]
        if type(tensor) is not TracedTensor:
            raise CaptureError(
                f"the forward pass changes the shape of a tensor of the model ({target.kind}_{where()})"
            )
        inputs, attrs = bind(target, args, kwargs, rec)
        metas, view = (to_meta(args, rec), to_meta(kwargs, rec)), getattr(torch.Tensor, target.kind, None)
        footprint = None
        if view is not None:
            needs = [rec.needs_gradient(inputs[0])]  # type: ignore[arg-type]
            footprint = footprint_of(view, *metas, needs, decoded=rec.fixed_batch is None)
        func(*metas[0], **metas[1])
        tensor.sizes = torch.Tensor.size(tensor)
        (index,) = rec.add_call(target.kind, inputs, attrs, [(tensor.sizes, tensor.dtype_name)], inputs[0])
        rec.ops[-1] = replace(rec.ops[-1], footprint=footprint)
        tensor.token = rec.token(index)
        return tensor

    def _write_out(self, call: _Call) -> Any:
        """Record `f(..., out=tensor)`: the result is in the storage of `out`."""
        rec, out = self.recorder, call.kwargs["out"]
        options = to_meta({k: v for k, v in call.kwargs.items() if k != "out"}, rec)
        if isinstance(call.func, torch._ops.OpOverload):
            options["out"] = torch.empty(out.shape, dtype=dtype_of(out), device="meta")
        result = call.func(*to_meta(call.args, rec), **options)
        kind = call.target.kind
        if not (isinstance(result, torch.Tensor) and isinstance(out, torch.Tensor)):
            raise CaptureError(f"{kind} writes several results with out={where()}, which cannot be captured")
        shared = rec.index_of(out) if tuple(out.shape) == tuple(result.shape) else None
        results = [(tuple(result.shape), DTYPE_NAMES[dtype_of(out)])]
        (index,) = rec.add_call(kind, call.inputs, call.attrs, results, shared)
        if type(out) is not TracedTensor:
            return out
        if shared is None:
            torch.Tensor.resize_(out, tuple(result.shape))
            out.sizes = torch.Tensor.size(out)
        out.token = rec.token(index)
        return out

    def _meta_result(self, call: _Call) -> Any:
        """Take shapes and strides from PyTorch's meta kernel: for views and rare or unknown operators."""
        target = call.target
        args, kwargs = to_meta(call.args, self.recorder), to_meta(call.kwargs, self.recorder)
        creates = not call.inputs and target.spec is not None and target.spec.kind == "zeros"
        if "device" in kwargs or creates:
            kwargs["device"] = "meta"
        try:
            return call.func(*args, **kwargs)
        except RuntimeError as error:
            if target.kind == "view" and "view size is not compatible" in str(error):
                return _forced_view(*args)
            if not isinstance(error, NotImplementedError):
                raise
            if "nonzero" in str(error):
                raise CaptureError(
                    f"the forward pass takes elements by their values ({target.kind}{where()}), so that "
                    "sizes depend on data; expected sizes that do not: use torch.where, or multiply by a mask"
                ) from error
            raise CaptureError(f"{target.kind} has no meta kernel{where()}: {first_line(error)}") from error

    def _collect(self, call: _Call, result: Any) -> Any:
        """Convert the result of the meta kernel to values."""
        rec, args, inputs = self.recorder, call.args, call.inputs
        many = isinstance(result, (tuple, list))
        tensors = [t for t in (result if many else (result,)) if isinstance(t, torch.Tensor)]
        if not tensors:
            return result
        if not many and type(result) is TracedTensor:
            return result  # a no-op such as contiguous() of a contiguous tensor
        if not many and args and isinstance(args[0], torch.Tensor) and result is rec.meta_of(args[0]):
            return args[0]
        shared = self._viewed(call, tensors[0])
        kind = call.target.kind
        if shared is None and kind in _CASTS:
            kind = "to_copy"
        elif shared is None and kind in _COPIES:
            kind = "clone"
        results = [(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for tensor in tensors]
        numbers = iter(rec.add_call(kind, inputs, call.attrs, results, shared))
        if not many:
            return rec.wrap(result, next(numbers))
        return type(result)(
            [rec.wrap(t, next(numbers)) if isinstance(t, torch.Tensor) else t for t in result]
        )

    def _viewed(self, call: _Call, result: torch.Tensor) -> int | None:
        """Return the argument whose storage a result shares; some are views of what the operator made."""
        storage = result.untyped_storage()._cdata
        for argument in (*call.args, *call.kwargs.values()):
            meta = self.recorder.meta_of(argument) if isinstance(argument, torch.Tensor) else None
            if meta is not None and meta.untyped_storage()._cdata == storage:
                return self.recorder.index_of(argument)
        return None


def _is_view(index: Any) -> bool:
    """Whether indexing gives a view: no tensor, list or mask selects elements."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in entries)


def _forced_view(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    """Return a view of a tensor with other strides than at export: fused kernels choose the layout."""
    shape = tensor.new_empty(tensor.shape).view(size).shape
    strides = torch.empty(shape, device="meta").stride()
    return tensor.as_strided(shape, strides)


def _refuse_batch_loop(kind: str, args: Any, attrs: dict[str, Any]) -> None:
    """Raise CaptureError if a tensor is split into its samples."""
    first = args[0]
    if not isinstance(first, torch.Tensor) or not first.dim():
        return
    dim = attrs.get("dim", 0)
    part = 1 if kind == "unbind" else attrs.get("chunks", 1)
    if not isinstance(part, int):
        return
    size = first.shape[dim if isinstance(dim, int) else 0]
    parts = min(part, size) if kind in _COUNTED else size // max(part, 1)
    if parts > _MOST_PARTS:
        raise CaptureError(
            f"the forward pass loops over the samples of the batch ({kind}{where()}); capture it for one "
            "batch size with batch_size="
        )


@dataclass(frozen=True)
class ForwardCall:
    """A forward pass to capture: `model(*args, **kwargs)`, then `loss(outputs, *targets)` if there is a loss.

    Only shape and dtype of the tensors among the arguments count. Dimension `batch_dim` of a tensor is the
    batch if it equals that of the first tensor. fixed_batch: the one batch size to capture for, None: every.
    name, notes: of the ForwardGraph. accelerator: the device that the model seems to run on.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()
    loss: Callable[..., Any] | None = None
    training: bool = False
    fixed_batch: int | None = None
    name: str = "model"
    notes: tuple[str, ...] = ()
    batch_dim: int = 0
    accelerator: Accelerator = PLAIN_CPU


def trace(call: ForwardCall) -> ForwardGraph:
    """Run a forward pass on stand-ins and return it as a ForwardGraph; raises CaptureError if impossible.

    A model that keeps what it makes in its first call (a table of positions, a mask) runs twice: the graph is
    that of the second call.
    """
    recorders = [Recorder(leaves_of(call.model), call.fixed_batch, call.accelerator)]
    try:
        with isolated(call.model, call.training) as model:
            graph = _traced(call, model, recorders[0])
            if recorders[0].leaked():
                graph = _second(call, model, recorders) or graph
    finally:
        if recorders[-1].leaked():
            forget_cached((TracedTensor,))
            forget_held(recorders[-1].survivors())
    return graph


def _second(call: ForwardCall, model: Any, recorders: list[Recorder]) -> ForwardGraph | None:
    """Return the graph of a second call; None where it fails, or makes anew what the first one has kept."""
    (first,) = recorders
    cached = first.survivors()
    if any(first.needs_gradient(tensor.token.index) for tensor in cached):
        return None
    recorder = Recorder(leaves_of(call.model), call.fixed_batch, call.accelerator)
    recorders.append(recorder)
    recorder.inherit(cached, first)
    kept = [ref(tensor) for tensor in cached]
    cached.clear()
    try:
        graph = _traced(call, model, recorder)
    except Exception:  # of code that reads values of what it keeps, which a stand-in may not have
        return None
    replaced = len(recorder.survivors()) > len(kept) or any(tensor() is None for tensor in kept)
    return None if replaced else graph


def _traced(call: ForwardCall, model: Any, recorder: Recorder) -> ForwardGraph:
    """Run a copy of the model on stand-ins."""
    fed_args, fed_kwargs, targets = feed((call.args, call.kwargs, call.targets), recorder, call.batch_dim)
    inputs = [i for i, v in enumerate(recorder.values) if v.role == "input"]
    with (
        scoped(model, recorder.scopes),
        recorder.active(),
        answered(call.accelerator, recorder),
        Interceptor(recorder),
    ):
        outputs = model(*fed_args, **fed_kwargs)
        returned = [recorder.index_of(t) for t in returned_tensors(outputs, call.name)]
        recorder.scopes.append("loss")
        value = call.loss(outputs, *targets) if call.loss is not None else None
        if call.loss is not None:
            outputs = None  # as in `loss = criterion(model(x), y)`: only tensors that autograd saves stay
        last = loss_index(recorder, value) if call.loss is not None else None
        return recorder.finish(inputs, returned, last, call.training, call.name, call.notes)


def _check_positions(call: _Call, recorder: Recorder) -> None:
    """Raise InputError where positions that the model counts itself are beyond its table of them."""
    table, indices = call.inputs[:2]
    positions = None if indices is None else recorder.example.constant(indices)
    if positions is None or table is None or not positions.numel():
        return
    rows, most = recorder.values[table].shape[0], int(positions.max())
    if type(rows) is int and most >= rows:
        raise InputError(
            f"the model looks up position {most} in a table of {rows}; expected at most {rows} positions, "
            "by a shorter example or a smaller seq_len"
        )


def feed(tree: Any, recorder: Recorder, batch_dim: int = 0) -> Any:
    """Replace every tensor of an example by an input of the graph under construction."""
    batch = batch_of(tree, batch_dim)
    recorder.example.batch = batch or 1
    count = 0

    def stand_in(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = with_batch(tuple(leaf.shape), batch, recorder.batch, batch_dim) or tuple(leaf.shape)
        count += 1
        fed = recorder.feed("x" if count == 1 else f"x{count}", sizes, leaf.dtype)
        if not leaf.dtype.is_floating_point:
            recorder.example.add(recorder.index_of(fed), leaf, given=True)
        return fed

    return tree_map(stand_in, tree)


def loss_index(recorder: Recorder, value: Any) -> int:
    """Return the value to differentiate; raises CaptureError if the loss is no scalar of the graph."""
    if not isinstance(value, TracedTensor):
        raise CaptureError(
            f"the loss is {described(value)}; expected a scalar tensor that depends on the outputs"
        )
    if tuple(value.sizes):
        raise CaptureError(
            f"the loss has shape {tuple(value.sizes)}; expected a scalar, for example its mean"
        )
    return recorder.index_of(value)


def batch_of(tree: Any, batch_dim: int = 0) -> int | None:
    """Return the batch size of an example: a dimension of its first tensor that has it, None if none has."""
    tensors = [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.dim() > batch_dim]
    return int(tensors[0].shape[batch_dim]) if tensors else None


def with_batch(
    sizes: tuple[int, ...], old: int | None, new: int, batch_dim: int = 0
) -> tuple[int, ...] | None:
    """Return the shape of an example's tensor at another batch size, None if it does not follow the batch.

    A tensor of fewer dimensions than the batch's, such as lengths, has the batch first.
    """
    place = batch_dim if len(sizes) > batch_dim else 0
    if not sizes or sizes[place] != old:
        return None
    return (*sizes[:place], new, *sizes[place + 1 :])


def part_of(tree: Any, parts: int, place: int = 0) -> Any:
    """Return one of the equal parts into which the batch of an example is cut; what has none stays whole."""
    batch = batch_of(tree)

    def cut(leaf: Any) -> Any:
        follows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf.chunk(parts)[place] if follows else leaf

    return tree if parts == 1 else tree_map(cut, tree)


def output_names(outputs: Any, kind: type) -> list[str]:
    """Return a name for each tensor of a model's result: its path of keys and positions."""
    paths = [path for path, leaf in tree_flatten_with_path(outputs)[0] if isinstance(leaf, kind)]
    if not paths:
        paths = [(SequenceKey(place),) for place in range(len(tensors_in(outputs, kind)))]
    names = []
    for path in paths:
        steps = [
            str(getattr(step, "key", getattr(step, "name", getattr(step, "idx", step)))) for step in path
        ]
        keyed = bool(path) and not isinstance(path[0], SequenceKey)
        names.append("_".join(steps if keyed else ["output", *(steps if len(paths) > 1 else [])]))
    usable = len(set(names)) == len(names) and all(name and name.isprintable() for name in names)
    return names if usable else [f"output_{place}" for place in range(len(names))]


def tensors_in(outputs: Any, kind: type = TracedTensor) -> list[Any]:
    """Return all tensors of a model's result: pytrees, dataclass-like outputs and objects with `to_tuple`."""
    return [leaf for leaf in flat_result(outputs, kind)[0] if isinstance(leaf, kind)]


def returned_tensors(outputs: Any, name: str, kind: type = TracedTensor) -> list[Any]:
    """Return all tensors of a model's result; raises CaptureError where there is none."""
    tensors = tensors_in(outputs, kind)
    if not tensors:
        raise CaptureError(f"{name} returns no tensor; expected tensors in tuples, lists or dicts")
    return tensors


def flat_result(outputs: Any, kind: type) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of a model's result.

    Without a tensor those of its `to_tuple`, or of the fields of a dataclass.
    """
    leaves, structure = tree_flatten(outputs)
    if any(isinstance(leaf, kind) for leaf in leaves):
        return leaves, structure
    if hasattr(outputs, "to_tuple"):
        return tree_flatten(outputs.to_tuple())
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return tree_flatten({f.name: getattr(outputs, f.name) for f in fields(outputs)})
    return leaves, structure
