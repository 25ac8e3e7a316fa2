"""The torch-function mode that turns each call into PyTorch into an operator of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchedge.errors import CaptureError
from torchedge.graphs.sizes import shape_at
from torchedge.ops import OpSpec, registry
from torchedge.tracing.autocasting import autocast_arguments
from torchedge.tracing.binding import bind, common_dtype, dtype_of, to_meta
from torchedge.tracing.copies import where
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, TracedTensor
from torchedge.tracing.targets import TorchCall, target_of

_CASTS = frozenset(("to", "type", "float", "half", "double", "bfloat16", "long", "int", "bool", "type_as"))
_COPIES = frozenset(("reshape", "flatten", "contiguous", "reshape_as", "ravel"))
_SPLITS = frozenset(("unbind", "split", "unsafe_split"))
_DROPOUTS = frozenset(
    ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
)
_RANDOM = frozenset(("rand", "randn", "randint"))
_DRAWS = _RANDOM | {"bernoulli", "uniform", "normal", "exponential", "random", "multinomial"}
_MOST_PARTS = 1_000_000


class Interceptor(TorchFunctionMode):
    """While active, every call into PyTorch's Python API ends here and is recorded instead of run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.generator = torch.Generator().manual_seed(0)
        self.running: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call; the mode is off while this runs."""
        target = target_of(func)
        kwargs = kwargs or {}
        if target.body is not None and self.running != func:
            return self._run_body(target.body, func, args, kwargs)
        role = target.role
        if role == "op":
            return self._record(target, func, args, kwargs)
        if role == "query":
            if target.kind == "_set_grad_enabled":
                self.recorder.autograd.switch(args[0])
            return func(*args, **kwargs)
        if role == "move":
            return args[0]
        if role == "read":
            return self._read(target, func, args, kwargs)
        if role == "assign":
            return self._assign(target, func, args)
        return None if role == "check" else self._reshape(target, func, args, kwargs)

    def _run_body(self, body: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a Python function of PyTorch; a C method of its name that it calls arrives as `func` too."""
        outer, self.running = self.running, func
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.running = outer

    def _read(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if any(type(t) is TracedTensor or t.device.type == "meta" for t in tensors):
            raise CaptureError(
                f"the forward pass reads the value of a tensor ({target.kind}{where()}), which is not known "
                "before running"
            )
        return func(*args, **kwargs)

    def _assign(self, target: TorchCall, func: Any, args: Any) -> None:
        """`tensor.attribute = value`: stand-ins take new data, nothing that belongs to the model changes."""
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

    def _record(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        rec, known = self.recorder, target.spec
        if torch._C._is_any_autocast_enabled():
            if known is not None:
                args, kwargs = autocast_arguments(rec, known, args, kwargs, self._cast)
        elif rec.casts:
            rec.casts.clear()
        if rec.folded or target.kind in _RANDOM:
            folded = self._fold(target, func, args, kwargs)
            if folded is not None:
                return folded
        inputs, attrs = bind(target, args, kwargs, rec)
        if target.kind in _DROPOUTS and not (
            attrs.get("train", attrs.get("training", True)) and attrs.get("p", 0.5)
        ):
            return args[0]
        if "out" in kwargs:
            return self._write_out(target, func, args, kwargs, inputs, attrs)
        if known is not None and (known.infer is not None or known.infer_many is not None):
            infer = self._infer if known.infer is not None else self._infer_many
            made = infer(target, known, inputs, attrs, args)
            if made is not None:
                return made
        return self._run_on_meta(target, func, args, kwargs, inputs, attrs)

    def _fold(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run for real what only handles single random numbers: the coin of a stochastic layer is read."""
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

    def _infer(
        self,
        target: TorchCall,
        known: OpSpec,
        inputs: list[int | None],
        attrs: dict[str, Any],
        args: Any,
    ) -> TracedTensor | None:
        """Take the shape from the operator's own rule; None where it does not apply."""
        rec = self.recorder
        tensors = (
            args[0] if known.params[:1] == ("tensors",) else [a for a in args if isinstance(a, torch.Tensor)]
        )
        dtype = dtype_of(tensors[0]) if known.first_dtype and tensors else common_dtype(tensors, attrs)
        if dtype is None or None in inputs[:1]:
            return None
        if len(tensors) != sum([i is not None for i in inputs]):
            return None
        found = iter(tensors)
        sizes = known.infer([None if i is None else tuple(next(found).shape) for i in inputs], attrs)  # type: ignore[misc]
        if sizes is None:
            return None
        first = tensors[0]
        if target.inplace:
            return self._overwrite(target, first, inputs, attrs) if type(first) is TracedTensor else None
        index = rec.add_value(f"{target.kind}_{len(rec.values)}", sizes, DTYPE_NAMES[dtype], "activation")
        rec.add_op(target.kind, inputs, (index,), attrs, False, True)
        return rec.wrap(torch.empty(sizes, dtype=dtype, device="meta"), index)

    def _infer_many(
        self,
        target: TorchCall,
        known: OpSpec,
        inputs: list[int | None],
        attrs: dict[str, Any],
        args: Any,
    ) -> tuple[TracedTensor, ...] | None:
        """Take the shapes of several outputs, all of input 0's dtype, from the operator's own rule."""
        rec = self.recorder
        shapes = [None if i is None else shape_at(rec.values[i].shape, rec.batch) for i in inputs]
        found = known.infer_many(shapes, attrs)  # type: ignore[misc]
        if found is None:
            return None
        dtype, first = dtype_of(args[0]), len(rec.values)
        for offset, sizes in enumerate(found):
            rec.add_value(f"{target.kind}_{first + offset}", sizes, DTYPE_NAMES[dtype], "activation")
        rec.add_op(target.kind, inputs, tuple(range(first, len(rec.values))), attrs, False, True)
        made = [torch.empty(sizes, dtype=dtype, device="meta") for sizes in found]
        return tuple([rec.wrap(tensor, first + offset) for offset, tensor in enumerate(made)])

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return self._record(target_of(torch.Tensor.to), torch.Tensor.to, (tensor, dtype), {})

    def _overwrite(
        self,
        target: TorchCall,
        tensor: Any,
        inputs: list[int | None],
        attrs: dict[str, Any],
    ) -> Any:
        """Record an in-place call: the tensor stands for a new value in the same storage from here on."""
        rec = self.recorder
        old = rec.index_of(tensor)
        value = rec.values[old]
        index = len(rec.values)
        rec.add_value(f"{target.kind}_{index}", tuple(tensor.shape), value.dtype, "activation", old)
        rec.add_op(target.kind, inputs, (index,), attrs, True, target.spec is not None)
        if type(tensor) is TracedTensor:
            tensor.token = rec.token(index)
        return tensor

    def _reshape(self, target: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        """`unsqueeze_` and its like: the tensor stands for a view of itself from here on."""
        rec, tensor = self.recorder, args[0]
        if type(tensor) is not TracedTensor:
            raise CaptureError(
                f"the forward pass changes the shape of a tensor of the model ({target.kind}_{where()})"
            )
        inputs, attrs = bind(target, args, kwargs, rec)
        func(*to_meta(args, rec), **to_meta(kwargs, rec))
        tensor.sizes = torch.Tensor.size(tensor)
        index = rec.add_value(
            f"{target.kind}_{len(rec.values)}",
            tuple(tensor.sizes),
            tensor.dtype_name,
            "activation",
            inputs[0],
        )
        rec.add_op(target.kind, inputs, (index,), attrs, False, target.spec is not None)
        tensor.token = rec.token(index)
        return tensor

    def _write_out(
        self,
        target: TorchCall,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[int | None],
        attrs: dict[str, Any],
    ) -> Any:
        """`f(..., out=tensor)`: the result lies in the storage of `out`."""
        rec, out = self.recorder, kwargs["out"]
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        rest = to_meta(rest, rec)
        if isinstance(func, torch._ops.OpOverload):
            rest["out"] = torch.empty(out.shape, dtype=dtype_of(out), device="meta")
        result = func(*to_meta(args, rec), **rest)
        if not (isinstance(result, torch.Tensor) and isinstance(out, torch.Tensor)):
            raise CaptureError(
                f"{target.kind} writes several results with out={where()}, which cannot be captured"
            )
        shared = rec.index_of(out) if tuple(out.shape) == tuple(result.shape) else None
        index = rec.add_value(
            f"{target.kind}_{len(rec.values)}",
            tuple(result.shape),
            DTYPE_NAMES[dtype_of(out)],
            "activation",
            shared,
        )
        rec.add_op(target.kind, inputs, (index,), attrs, False, target.spec is not None)
        if type(out) is not TracedTensor:
            return out
        if shared is None:
            torch.Tensor.resize_(out, tuple(result.shape))
            out.sizes = torch.Tensor.size(out)
        out.token = rec.token(index)
        return out

    def _run_on_meta(
        self,
        target: TorchCall,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[int | None],
        attrs: dict[str, Any],
    ) -> Any:
        """Take shapes and strides from PyTorch's own meta kernel: views, rare and unknown operators."""
        if target.inplace:
            return self._overwrite(target, args[0], inputs, attrs)
        if target.kind in _SPLITS:
            _refuse_batch_loop(target.kind, args, attrs)
        result = self._meta_result(target, func, args, kwargs, inputs)
        return self._collect(target, result, args, inputs, attrs)

    def _meta_result(
        self,
        target: TorchCall,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[int | None],
    ) -> Any:
        meta_args, meta_kwargs = to_meta(args, self.recorder), to_meta(kwargs, self.recorder)
        if "device" in kwargs or (not inputs and target.spec is not None and target.spec.kind == "zeros"):
            meta_kwargs["device"] = "meta"
        try:
            return func(*meta_args, **meta_kwargs)
        except RuntimeError as error:
            if target.kind == "view" and "view size is not compatible" in str(error):
                return _forced_view(*meta_args)
            if not isinstance(error, NotImplementedError):
                raise
            reason = (str(error).splitlines() or ["no message"])[0]
            raise CaptureError(f"{target.kind} has no meta kernel{where()}: {reason}") from error

    def _collect(
        self,
        target: TorchCall,
        result: Any,
        args: Any,
        inputs: list[int | None],
        attrs: dict[str, Any],
    ) -> Any:
        """Turn what the meta kernel returned into values."""
        rec = self.recorder
        many = isinstance(result, (tuple, list))
        tensors = [t for t in (result if many else (result,)) if isinstance(t, torch.Tensor)]
        if not tensors:
            return result
        if not many and type(result) is TracedTensor:
            return result  # a no-op such as contiguous() of a contiguous tensor
        if not many and args and isinstance(args[0], torch.Tensor) and result is rec.meta_of(args[0]):
            return args[0]
        shared = inputs[0] if inputs and inputs[0] is not None and tensors[0]._base is not None else None
        kind = target.kind
        if shared is None and kind in _CASTS:
            kind = "to_copy"
        elif shared is None and kind in _COPIES:
            kind = "clone"
        first = len(rec.values)
        for offset, tensor in enumerate(tensors):
            name = f"{kind}_{first + offset}"
            rec.add_value(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], "activation", shared)
        rec.add_op(kind, inputs, tuple(range(first, len(rec.values))), attrs, False, kind in registry())
        numbers = iter(range(first, len(rec.values)))
        if not many:
            return rec.wrap(result, next(numbers))
        return type(result)(
            [rec.wrap(t, next(numbers)) if isinstance(t, torch.Tensor) else t for t in result]
        )


def _forced_view(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    """Return a view whose strides differ here from those at export: fused kernels choose their own layout."""
    shape = tensor.new_empty(tensor.shape).view(size).shape
    strides = torch.empty(shape, device="meta").stride()
    return tensor.as_strided(shape, strides)


def _refuse_batch_loop(kind: str, args: Any, attrs: dict[str, Any]) -> None:
    """Raise CaptureError where a tensor is taken apart sample by sample."""
    first = args[0]
    if not isinstance(first, torch.Tensor) or not first.dim():
        return
    dim = attrs.get("dim", 0)
    part = attrs.get("chunks", 1) if kind in ("split", "unsafe_split") else 1
    if not isinstance(part, int):
        return
    parts = first.shape[dim if isinstance(dim, int) else 0] // max(part, 1)
    if parts > _MOST_PARTS:
        raise CaptureError(
            f"the forward pass loops over the samples of the batch ({kind}{where()}); capture it for one "
            "batch size with batch_size="
        )
