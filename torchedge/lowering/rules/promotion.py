"""Dtypes of operators: PyTorch's type promotion, the dtype of the arithmetic, conversions."""

from __future__ import annotations

from collections.abc import Callable

from torchedge.expressions.scalars import Scalar, cast
from torchedge.lowering.building import Operand, elementwise
from torchedge.lowering.nodes import Node, Pointwise
from torchedge.lowering.rules.registry import Result

_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_TOGETHER = {frozenset(("uint8", "int8")): "int16", frozenset(("float16", "bfloat16")): "float32"}
_OF_NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float32"}


def is_floating(dtype: str) -> bool:
    """Return whether a dtype holds fractions."""
    return dtype.startswith(("float", "bfloat"))


def arithmetic_dtype(dtype: str) -> str:
    """Return the dtype in which values of a dtype are computed: narrow ones have too little room."""
    if is_floating(dtype):
        return "float64" if dtype == "float64" else "float32"
    return "int64" if dtype == "int64" else "int32"


def common_dtype(*operands: Operand) -> str:
    """Return the dtype that PyTorch promotes operands to.

    Tensors with dimensions count first; 0-d tensors, then numbers, only where they are of a higher category.
    """
    shaped = _joined([o.dtype for o in operands if isinstance(o, Node) and o.shape])
    single = _joined([o.dtype for o in operands if isinstance(o, Node) and not o.shape])
    numbers = _joined([_OF_NUMBERS[type(o)] for o in operands if not isinstance(o, Node)])
    return _over(_over(shaped, single), numbers)


def _joined(dtypes: list[str]) -> str:
    """Return the promotion of dtypes of one rank; "" of none."""
    promoted = ""
    for dtype in dtypes:
        pair = frozenset((promoted, dtype))
        promoted = _TOGETHER.get(pair) or (max(pair, key=_ORDER.index) if promoted else dtype)
    return promoted


def _over(first: str, second: str) -> str:
    """Return the first one unless the second is of a higher category (bool, whole, floating)."""
    if not first or not second:
        return first or second
    return second if _category(second) > _category(first) else first


def _category(dtype: str) -> int:
    return 0 if dtype == "bool" else 2 if is_floating(dtype) else 1


def computed(body: Callable[..., Scalar], result: Result, *operands: Operand) -> Pointwise:
    """Return `body` of the operands' elements, computed in the result's dtype with room to spare."""
    return elementwise(body, *operands, dtype=result.dtype, compute=arithmetic_dtype(result.dtype))


def converted(x: Node, dtype: str) -> Node:
    """Return a tensor as another dtype; fractions become narrow whole numbers modulo their range."""
    if x.dtype == dtype:
        return x

    def body(a: Scalar) -> Scalar:
        narrow = is_floating(a.dtype) and dtype in ("uint8", "int8", "int16", "int32")
        return cast(cast(a, "int64"), dtype) if narrow else cast(a, dtype)

    return elementwise(body, x, dtype=dtype)
