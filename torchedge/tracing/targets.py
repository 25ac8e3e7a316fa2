"""What each function of PyTorch is to the tracer: an operator, a question, a read of values, a move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchedge.ops import OpSpec, registry


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUERIES = _names(
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
_VALUE_READS = _names(
    """
    item tolist __bool__ __float__ __int__ __index__ __complex__ numpy nonzero unique unique_consecutive
    _unique2 masked_select __contains__ equal allclose is_nonzero __array__ bincount histc
    _local_scalar_dense argwhere
    """
)
_MOVES = _names(
    "cpu cuda xpu pin_memory requires_grad_ __deepcopy__ share_memory_ lift_fresh_copy lift_fresh"
)
_CHECKS = _names(
    """
    _assert _assert_async _assert_scalar _assert_tensor_metadata
    sym_constrain_range sym_constrain_range_for_size
    """
)
_TENSOR_PROPERTIES = _names("T mT H mH data real imag")
_TENSOR_SLOTS = _names(
    """
    input weight bias running_mean running_var other mat1 mat2 query key value attn_mask mask target tensors
    tensor1 tensor2 offset condition operands
    """
)
_RESHAPING = _names(
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
class Target:
    """What a function of PyTorch is to the tracer.

    role: "op", "query", "read", "move", "check", "assign" (to a tensor's attribute) or "reshape" (in-place
    change of shape). params: names of its positional parameters; slots: those where None stands for an
    absent tensor.
    """

    role: str
    kind: str
    inplace: bool = False
    spec: OpSpec | None = None
    params: tuple[str, ...] = ()
    slots: frozenset[str] = _TENSOR_SLOTS


_resolved: dict[Any, Target] = {}


def target_of(func: Callable[..., Any]) -> Target:
    """Return (and remember) what a function of PyTorch is."""
    found = _resolved.get(func)
    if found is None:
        found = _resolved[func] = _resolve(func)
    return found


def _resolve(func: Callable[..., Any]) -> Target:
    name = getattr(func, "__name__", type(func).__name__)
    if isinstance(func, torch._ops.OpOverload):
        name = str(func._schema.name).split("::")[-1]
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__":
            return Target("assign", attribute)
        return _operator(attribute) if attribute in _TENSOR_PROPERTIES else Target("query", attribute)
    if name in _QUERIES or getattr(func, "__objclass__", None) is torch._C.Generator:
        return Target("query", name)
    for role, names in (("read", _VALUE_READS), ("move", _MOVES), ("check", _CHECKS)):
        if name in names:
            return Target(role, name)
    target = _operator(name, "reshape" if name in _RESHAPING else "op")
    return _with_schema(target, func._schema) if isinstance(func, torch._ops.OpOverload) else target


def _operator(name: str, role: str = "op") -> Target:
    inplace = name in _INPLACE_DUNDER or (name.endswith("_") and not name.endswith("__"))
    kind = _INPLACE_DUNDER.get(name) or _DUNDER.get(name) or (name[:-1] if inplace else name)
    spec = registry().get(kind)
    return Target(role, kind, inplace, spec, spec.params if spec is not None else ())


def _with_schema(target: Target, schema: torch._C.FunctionSchema) -> Target:
    """Name the parameters as the ATen operator does; `Tensor?` ones are slots that None may fill."""
    names = ["input" if a.name == "self" else a.name for a in schema.arguments]
    slots = [n for n, a in zip(names, schema.arguments, strict=True) if str(a.type) == "Optional[Tensor]"]
    return Target(target.role, target.kind, target.inplace, target.spec, tuple(names), frozenset(slots))
