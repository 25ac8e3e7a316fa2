"""Operator knowledge: one entry an operator, found by any of its ATen names. No torch.

An entry (`OpSpec`) holds the cost of a forward call, the tensors that autograd keeps, the strides and how
autocast treats it. How it becomes kernels is one function under the same name in `lowering.rules`.
"""

from torchedge.ops.specs import (
    COMPILED_PACE,
    Call,
    LoadClass,
    OpSpec,
    Work,
    call_of,
    registry,
    spec_of,
    unsupported_remark,
)

__all__ = [
    "COMPILED_PACE",
    "Call",
    "LoadClass",
    "OpSpec",
    "Work",
    "call_of",
    "registry",
    "spec_of",
    "unsupported_remark",
]
