"""The torch-function mode that turns each call into PyTorch into an operator of the graph, without running it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchedge.errors import CaptureError
from torchedge.graphs import FLOATING
from torchedge.ops import OpSpec, registry
from torchedge.tracing.recorder import DTYPE_NAMES, Recorder, TracedTensor

_QUERIES = frozenset(
    "dim size stride numel nelement element_size is_contiguous is_floating_point is_complex is_signed data_ptr itemsize "
    "storage_offset get_device is_same_size has_names is_inference _is_view __len__ __hash__ __repr__ __format__ __str__ "
    "result_type can_cast promote_types is_tensor is_grad_enabled _set_grad_enabled get_default_dtype broadcast_shapes "
    "is_autocast_enabled get_autocast_dtype is_autocast_cpu_enabled register_hook retain_grad storage untyped_storage _typed_storage "
    "is_pinned is_shared is_distributed ndimension __dir__ __reduce_ex__ is_storage get_rng_state device compile "
    "numel _nested_tensor_size is_nested _autocast_supported use_deterministic_algorithms are_deterministic_algorithms_enabled "
    "set_default_dtype __subclasscheck__ __instancecheck__ from_numpy _has_compatible_shallow_copy_type version "
    "is_vulkan_available finfo iinfo __set__ __delete__ _sdp_kernel set_autocast_enabled dtype_to_type "
    "_is_any_autocast_enabled get_autocast_gpu_dtype is_autocast_cache_enabled _fused_sdp_choice __contains__type".split()
)
_VALUE_READS = frozenset(
    "item tolist __bool__ __float__ __int__ __index__ __complex__ numpy nonzero unique unique_consecutive _unique2 masked_select __contains__ "
    "equal allclose is_nonzero __array__ bincount histc _local_scalar_dense argwhere".split()
)
_DEVICE_MOVES = frozenset("cpu cuda xpu pin_memory requires_grad_ __deepcopy__ share_memory_".split())
_TENSOR_PROPERTIES = frozenset("T mT H mH data real imag".split())
_TENSOR_SLOTS = frozenset(
    "input weight bias running_mean running_var other mat1 mat2 query key value attn_mask mask target tensors "
    "tensor1 tensor2 offset condition operands".split()
)
_CASTS = frozenset("to type float half double bfloat16 long int bool type_as".split())
_COPIES = frozenset("reshape flatten contiguous reshape_as ravel".split())
_SPLITS = frozenset("unbind split unsafe_split".split())
_MOST_PARTS = 1_000_000
_DUNDER = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__truediv__": "div",
    "__div__": "div", "__pow__": "pow", "__neg__": "neg", "__abs__": "abs", "__getitem__": "getitem", "__eq__": "eq",
    "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__matmul__": "matmul",
    "__setitem__": "index_put", "__floordiv__": "floor_divide", "__mod__": "remainder",
}  # fmt: skip
_INPLACE_DUNDER = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div",
    "__iand__": "__and__", "__ior__": "__or__", "__ixor__": "__xor__", "__ipow__": "pow", "__ifloordiv__": "floor_divide",
    "__imod__": "remainder", "__setitem__": "index_put",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What a function of PyTorch is to the tracer."""

    role: str
    kind: str
    inplace: bool
    spec: OpSpec | None


_resolved: dict[Any, Target] = {}


def resolve(func: Callable[..., Any]) -> Target:
    """Return (and remember) what a function of PyTorch is: an operator, a query, a read of values, a move."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        role = "op" if name in _TENSOR_PROPERTIES else "query"
        target = Target(role, name, False, registry().get(name))
    elif name in _QUERIES or getattr(func, "__objclass__", None) is torch._C.Generator:
        target = Target("query", name, False, None)
    elif name in _VALUE_READS:
        target = Target("read", name, False, None)
    elif name in _DEVICE_MOVES:
        target = Target("move", name, False, None)
    else:
        target = _operator(name)
    _resolved[func] = target
    return target


def _operator(name: str) -> Target:
    inplace = name in _INPLACE_DUNDER or (name.endswith("_") and not name.endswith("__"))
    kind = _INPLACE_DUNDER.get(name) or _DUNDER.get(name) or (name[:-1] if inplace else name)
    return Target("op", kind, inplace, registry().get(kind))


class Interceptor(TorchFunctionMode):
    """While active, every call into PyTorch's Python API ends here and is recorded instead of run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Record one call; the mode is off while this runs."""
        target = _resolved.get(func) or resolve(func)
        kwargs = kwargs or {}
        if target.role == "op":
            return self._record(target, func, args, kwargs)
        if target.role == "query":
            return func(*args, **kwargs)
        if target.role == "move":
            return args[0]
        return self._read(target, func, args, kwargs)

    def _read(self, target: Target, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if any(type(t) is TracedTensor or t.device.type == "meta" for t in tensors):
            raise CaptureError(f"the forward pass reads the value of a tensor ({target.kind}{_where()}), which is not known "
                               "before running")  # fmt: skip
        return func(*args, **kwargs)

    def _record(self, target: Target, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        rec, known = self.recorder, target.spec
        inputs, attrs = _bind(known, args, kwargs, rec)
        if target.kind in ("dropout", "feature_dropout", "alpha_dropout", "native_dropout") and not (
            attrs.get("train", attrs.get("training", True)) and attrs.get("p", 0.5)
        ):
            return args[0]
        if known is not None and known.infer is not None and "out" not in kwargs:
            made = self._infer(target, known, inputs, attrs, args)
            if made is not None:
                return made
        return self._run_on_meta(target, func, args, kwargs, inputs, attrs)

    def _infer(self, target: Target, known: OpSpec, inputs: list[int | None], attrs: dict[str, Any],
               args: Any) -> TracedTensor | None:  # noqa: ANN401 # fmt: skip
        """Take the shape from the operator's own rule; None where it does not apply."""
        rec = self.recorder
        tensors = [a for a in args if isinstance(a, torch.Tensor)] if known.params[:1] != ("tensors",) else args[0]
        dtype = _common_dtype(tensors, attrs)
        if dtype is None or None in inputs[:1]:
            return None
        count = len(tensors)
        if count != sum(i is not None for i in inputs):
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

    def _overwrite(self, target: Target, tensor: torch.Tensor, inputs: list[int | None], attrs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Record an in-place call: the tensor stands for a new value in the same storage from here on."""
        rec = self.recorder
        old = rec.index_of(tensor)
        value = rec.values[old]
        index = len(rec.values)
        rec.add_value(f"{target.kind}_{index}", tuple(tensor.shape), value.dtype, "activation", old)
        rec.add_op(target.kind, inputs, (index,), attrs, True, target.spec is not None)
        if type(tensor) is TracedTensor:
            tensor.token = type(tensor.token)(index, rec.released)
        return tensor

    def _run_on_meta(self, target: Target, func: Any, args: Any, kwargs: Any, inputs: list[int | None],
                     attrs: dict[str, Any]) -> Any:  # noqa: ANN401 # fmt: skip
        """Take shapes and strides from PyTorch's own meta kernel: views, rare and unknown operators."""
        rec = self.recorder
        if target.inplace:
            return self._overwrite(target, args[0], inputs, attrs)
        if target.kind in _SPLITS:
            _refuse_batch_loop(target.kind, args, attrs)
        meta_args, meta_kwargs = _to_meta(args, rec), _to_meta(kwargs, rec)
        if "device" in kwargs or (not inputs and target.spec is not None and target.spec.kind == "zeros"):
            meta_kwargs["device"] = "meta"
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            raise CaptureError(f"{target.kind} has no meta kernel{_where()}: {str(error).splitlines()[0]}") from error
        return self._collect(target, result, args, inputs, attrs)

    def _collect(self, target: Target, result: Any, args: Any, inputs: list[int | None], attrs: dict[str, Any]) -> Any:  # noqa: ANN401
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
            rec.add_value(f"{kind}_{first + offset}", tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], "activation", shared)
        rec.add_op(kind, inputs, tuple(range(first, len(rec.values))), attrs, False, kind in registry())
        numbers = iter(range(first, len(rec.values)))
        if not many:
            return rec.wrap(result, next(numbers))
        wrapped = [rec.wrap(t, next(numbers)) if isinstance(t, torch.Tensor) else t for t in result]
        if type(result) in (tuple, list):
            return type(result)(wrapped)
        return type(result)(wrapped)


def _refuse_batch_loop(kind: str, args: Any, attrs: dict[str, Any]) -> None:  # noqa: ANN401
    """Raise CaptureError where a tensor is taken apart sample by sample: the number of parts depends on the batch size."""
    first = args[0]
    if not isinstance(first, torch.Tensor) or not first.dim():
        return
    dim = attrs.get("dim", 0)
    part = attrs.get("chunks", 1) if kind in ("split", "unsafe_split") else 1
    parts = first.shape[dim if isinstance(dim, int) else 0] // (part if isinstance(part, int) and part > 0 else 1)
    if kind != "chunk" and isinstance(part, int) and parts > _MOST_PARTS:
        raise CaptureError(f"the forward pass loops over the samples of the batch ({kind}{_where()})")


def _bind(known: OpSpec | None, args: Any, kwargs: Any, rec: Recorder) -> tuple[list[int | None], dict[str, Any]]:  # noqa: ANN401
    """Split a call's arguments into tensor inputs (indices of values) and named plain attributes."""
    inputs: list[int | None] = []
    attrs: dict[str, Any] = {}
    params = known.params if known is not None else ()
    for position, arg in enumerate(args):
        name = params[position] if position < len(params) else f"arg{position}"
        _place(name, arg, inputs, attrs, rec)
    for name, arg in kwargs.items():
        _place(name, arg, inputs, attrs, rec)
    return inputs, attrs


def _place(name: str, arg: Any, inputs: list[int | None], attrs: dict[str, Any], rec: Recorder) -> None:  # noqa: ANN401
    if isinstance(arg, torch.Tensor):
        inputs.append(rec.index_of(arg))
    elif arg is None:
        if name in _TENSOR_SLOTS:
            inputs.append(None)
    elif isinstance(arg, (tuple, list)) and any(isinstance(a, torch.Tensor) for a in arg):
        inputs.extend(rec.index_of(a) for a in arg if isinstance(a, torch.Tensor))
        rest = tuple(a for a in arg if not isinstance(a, torch.Tensor))
        if rest:
            attrs[name] = rest
    else:
        attrs[name] = arg


def _common_dtype(tensors: Any, attrs: dict[str, Any]) -> torch.dtype | None:  # noqa: ANN401
    """The dtype of the result where all tensors agree and no scalar promotes it, else None."""
    if not tensors:
        return None
    dtype = tensors[0].dtype if type(tensors[0]) is not TracedTensor else _DTYPES[tensors[0].dtype_name]
    name = DTYPE_NAMES[dtype]
    for tensor in tensors[1:]:
        other = tensor.dtype_name if type(tensor) is TracedTensor else DTYPE_NAMES[tensor.dtype]
        if other != name:
            return None
    if attrs.get("dtype") not in (None, dtype):
        return None
    if name not in FLOATING and any(isinstance(a, float) for a in attrs.values()):
        return None
    return dtype


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def _to_meta(item: Any, rec: Recorder) -> Any:  # noqa: ANN401
    """Replace real tensors by meta tensors and devices by the meta device, through nested containers."""
    if isinstance(item, torch.Tensor):
        return rec.meta_of(item)
    if isinstance(item, torch.device):
        return torch.device("meta")
    if type(item) is str and item.split(":")[0] in ("cuda", "cpu", "mps", "xpu"):
        return "meta"
    if type(item) in (tuple, list):
        return type(item)(_to_meta(i, rec) for i in item)
    if type(item) is dict:
        return {k: _to_meta(v, rec) for k, v in item.items()}
    return item


def _where() -> str:
    """Return " at FILE:LINE" of the innermost frame outside torch and torchedge, or nothing."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "torchedge.")) and name != "torch":
            return f" at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
