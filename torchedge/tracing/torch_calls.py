"""The role of each function of PyTorch in a trace: an operator, a query, a read of values, a move."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import wraps
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch._jit_internal
import torch._tensor
import torch.functional
import torch.nn.functional
import torch.overrides

from torchedge.ops import OpSpec, registry
from torchedge.storage.locks import PROCESS
from torchedge.tracing.packed_sequences import PACKED, RECURRENT, dense


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_QUERIES = words(
    """
    dim size stride numel nelement element_size is_contiguous is_floating_point is_complex is_signed data_ptr
    itemsize storage_offset get_device is_same_size has_names is_inference _is_view __len__ __hash__ __repr__
    __format__ __str__ result_type can_cast promote_types is_tensor is_grad_enabled _set_grad_enabled
    get_default_dtype broadcast_shapes is_autocast_enabled get_autocast_dtype is_autocast_cpu_enabled
    register_hook retain_grad storage untyped_storage _typed_storage is_pinned is_shared is_distributed
    ndimension __dir__ __reduce_ex__ is_storage get_rng_state device compile _nested_tensor_size is_nested
    _autocast_supported use_deterministic_algorithms set_default_dtype from_numpy
    are_deterministic_algorithms_enabled __subclasscheck__ __instancecheck__
    _has_compatible_shallow_copy_type version is_vulkan_available finfo iinfo __delete__ _sdp_kernel
    set_autocast_enabled dtype_to_type _fused_sdp_choice _is_any_autocast_enabled get_autocast_gpu_dtype
    is_autocast_cache_enabled __contains__type sym_size sym_stride sym_numel sym_float sym_int sym_max
    sym_min sym_not sym_ite sym_sum sym_storage_offset
    """
)
_VALUE_READS = words(
    """
    item tolist __bool__ __float__ __int__ __index__ __complex__ numpy nonzero unique unique_consecutive
    _unique2 masked_select __contains__ equal allclose is_nonzero __array__ bincount
    _local_scalar_dense argwhere
    """
)
_MOVES = words("cpu cuda xpu pin_memory requires_grad_ __deepcopy__ share_memory_ lift_fresh_copy lift_fresh")
_CHECKS = words(
    """
    _assert _assert_async _assert_scalar _assert_tensor_metadata
    sym_constrain_range sym_constrain_range_for_size
    """
)
_TENSOR_PROPERTIES = words("T mT H mH data real imag")
_TENSOR_SLOTS = words(
    """
    input weight bias running_mean running_var other mat1 mat2 query key value attn_mask mask target tensors
    tensor1 tensor2 offset condition operands
    """
)
_RESHAPING = words(
    "unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_"
)
_DUNDER = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul",
    "__div__": "div", "__truediv__": "div", "__pow__": "pow", "__neg__": "neg", "__abs__": "abs",
    "__getitem__": "getitem", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le",
    "__gt__": "gt", "__ge__": "ge", "__matmul__": "matmul", "__floordiv__": "floor_divide",
    "__mod__": "remainder",
}  # fmt: skip
_INPLACE_DUNDER = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div",
    "__iand__": "__and__", "__ior__": "__or__", "__ixor__": "__xor__", "__ipow__": "pow",
    "__imod__": "remainder", "__ifloordiv__": "floor_divide", "__setitem__": "index_put",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchCall:
    """The role of a function of PyTorch in a trace.

    role: "op", "query", "read", "move", "check", "assign" (to a tensor's attribute), "reshape" (in-place
    change of shape) or "packed" (a call of packed sequences). params: names of its positional parameters;
    slots: those where None stands for an absent tensor. body: runs a function that is written in Python, so
    that its own calls are traced.
    """

    role: str
    kind: str
    inplace: bool = False
    spec: OpSpec | None = None
    params: tuple[str, ...] = ()
    slots: frozenset[str] = _TENSOR_SLOTS
    body: Any = None


_PYTHON_ROOMS = (torch.nn.functional, torch.functional, torch._tensor)
_HANDLES = words("has_torch_function has_torch_function_unary has_torch_function_variadic")
_bodies: dict[int, Any] = {}
_rooms: dict[int, dict[str, Any]] = {}
_originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
"""Globals of modules of PyTorch, and what they held when their functions got plain bodies."""
_resolved: dict[Any, TorchCall] = {}


def plain_body(func: Any) -> Any:
    """Return a Python function of PyTorch without its dispatch to modes, any other object unchanged.

    Its globals and closure hold plain bodies too, so that a mode sees only the C functions that it calls.
    """
    if not isinstance(func, FunctionType):
        return func
    with PROCESS:  # other threads see no body before its globals are complete
        return _plain_body(func)


def _plain_body(func: FunctionType) -> Any:
    if id(func) in _bodies:
        return _bodies[id(func)]
    home, cells = func.__globals__, [(cell, cell_content(cell)) for cell in func.__closure__ or ()]
    if any(home is vars(room) for room in _PYTHON_ROOMS):
        names = _plain_globals(home)
    elif home is vars(torch._jit_internal) and any(plain_body(item) is not item for _, item in cells):
        names = home  # of `boolean_dispatch`
    else:
        return func
    if id(func) not in _bodies:
        fresh = tuple([CellType() if isinstance(item, FunctionType) else cell for cell, item in cells])
        body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, fresh or None)
        body.__kwdefaults__ = func.__kwdefaults__
        _bodies[id(func)] = body
        for new, (_, item) in zip(fresh, cells, strict=True):
            if isinstance(item, FunctionType):  # a function may hold itself
                new.cell_contents = plain_body(item)
    return _bodies[id(func)]


def forget_patched() -> None:
    """Drop the plain bodies where user code has put another function into a module of PyTorch since then."""
    if all(len(home) == len(old) and all(map(is_, home.values(), old.values())) for home, old in _originals):
        return
    with PROCESS:
        for cache in (_rooms, _bodies, _resolved, _originals):
            cache.clear()


def _plain_globals(home: dict[str, Any]) -> dict[str, Any]:
    if id(home) not in _rooms:
        _originals.append((home, dict(home)))
        names = _rooms[id(home)] = {**home, **dict.fromkeys(_HANDLES & home.keys(), lambda *_: False)}
        for name in home:
            names[name] = plain_body(names[name])
    return _rooms[id(home)]


def cell_content(cell: Any) -> Any:
    """Return what a variable of a closure holds, None for one that is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_DISPATCH = torch.overrides.handle_torch_function.__code__
_by_code: dict[CodeType, FunctionType] = {}


def called_function(func: Any, caller: FrameType) -> Any:
    """Return the function of PyTorch that a mode receives as `func`, from the frame that calls the mode.

    PyTorch looks the function up by its name, under which user code may have put another one
    (`F.relu = lambda x: relu(x) * 5`). A mode that called that one would apply it once more.
    """
    if isinstance(func, _WRITTEN_IN_C) or (isinstance(func, Hashable) and func in _resolved):
        return func
    if caller.f_code is _DISPATCH and caller.f_back is not None:
        running = caller.f_back
        if getattr(func, "__code__", None) is running.f_code or _room_of(func) == "torch._jit_internal":
            return func
        # The function that runs in the frame.
        code = running.f_code
        if code not in _by_code:
            functions = [
                f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code
            ]
            _by_code[code] = next(f for f in functions if f.__globals__ is running.f_globals)
        return _by_code[code]
    if _room_of(func).partition(".")[0] != "torch":
        for name, item in vars(torch.Tensor).items():
            if item is func:
                return vars(torch._C.TensorBase).get(name, func)
    return func


_OFTEN_PATCHED: tuple[Any, ...] = (torch, torch.Tensor, torch.functional, torch.nn.functional)
_AS_IMPORTED = [
    {**(vars(torch._C.TensorBase) if home is torch.Tensor else {}), **vars(home)} for home in _OFTEN_PATCHED
]


def patches() -> list[tuple[Any, str, Any]]:
    """Return what user code has put in place of functions of PyTorch: where, under which name, and what.

    Classes are PyTorch's own change: `torch.Storage` follows the default dtype.
    """
    return [
        (home, name, item)
        for home, old in zip(_OFTEN_PATCHED, _AS_IMPORTED, strict=True)
        for name, item in vars(home).items()
        if item is not old.get(name, item) and callable(item) and not isinstance(item, type)
    ]


def imported(home: Any, name: str) -> Callable[..., Any]:
    """Return the function of PyTorch in whose place user code has put another one."""
    function: Callable[..., Any] = _AS_IMPORTED[_OFTEN_PATCHED.index(home)][name]
    return function


def for_users_alone(patch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch that PyTorch's own rules of a trace do not see: they call the function that it replaced.

    Eager PyTorch runs no such rule. Its layers, and functions written in Python, call the patch there too.
    """

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        room = str(sys._getframe(1).f_globals.get("__name__"))
        inside = room.startswith(("torch._", "torchedge.", "torch.fx.")) and room != torch._tensor.__name__
        return (original if inside else patch)(*args, **kwargs)

    return call


def _room_of(func: Any) -> str:
    return str(getattr(func, "__globals__", {}).get("__name__", type(func).__module__))


def target_of(func: Callable[..., Any]) -> TorchCall:
    """Return the role of a function of PyTorch, from a cache after the first call."""
    call = _resolved.get(func)
    if call is None:
        call, body = _resolve(func), plain_body(func)
        call = _resolved[func] = call if body is func else replace(call, body=body)
    return call


def _resolve(func: Callable[..., Any]) -> TorchCall:
    name = getattr(func, "__name__", type(func).__name__)
    if isinstance(func, torch._ops.OpOverload):
        name = str(func._schema.name).split("::")[-1]
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__":
            return TorchCall("assign", attribute)
        return _operator(attribute) if attribute in _TENSOR_PROPERTIES else TorchCall("query", attribute)
    if name in _QUERIES or getattr(func, "__objclass__", None) is torch._C.Generator:
        return TorchCall("query", name)
    for role, names in (("read", _VALUE_READS), ("move", _MOVES), ("check", _CHECKS)):
        if name in names:
            return TorchCall(role, name)
    if name in PACKED:
        return TorchCall("packed", name)
    target = _operator(name, "reshape" if name in _RESHAPING else "op")
    if isinstance(func, torch._ops.OpOverload):
        return _with_schema(target, func._schema)
    return replace(target, body=dense(func)) if name in RECURRENT else target


def _operator(name: str, role: str = "op") -> TorchCall:
    inplace = name in _INPLACE_DUNDER or (name.endswith("_") and not name.endswith("__"))
    kind = _INPLACE_DUNDER.get(name) or _DUNDER.get(name) or (name[:-1] if inplace else name)
    spec = registry().get(kind)
    return TorchCall(role, kind, inplace, spec, spec.params if spec is not None else ())


def _with_schema(target: TorchCall, schema: torch._C.FunctionSchema) -> TorchCall:
    """Name the parameters as the ATen operator does; `Tensor?` ones are slots that None may fill."""
    names = ["input" if a.name == "self" else a.name for a in schema.arguments]
    slots = [n for n, a in zip(names, schema.arguments, strict=True) if str(a.type) == "Optional[Tensor]"]
    return TorchCall(target.role, target.kind, target.inplace, target.spec, tuple(names), frozenset(slots))
