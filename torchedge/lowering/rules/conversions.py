"""Copies and conversions to another dtype."""

from __future__ import annotations

from torchedge.expressions.scalars import Scalar, cast
from torchedge.lowering.building import Operand, elementwise, expanded, full
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import is_floating
from torchedge.lowering.rules.registry import Result, rule


@rule("clone", "alias", "detach", "detach_copy", "alias_copy", "lift_fresh", "lift_fresh_copy", "contiguous")
def same(result: Result, input: Node) -> Node:
    """Input: tensors are never written to in a step."""
    return input


@rule("_to_copy", "to", "convert_element_type")
def to_copy(result: Result, input: Node, dtype: str | None = None) -> Node:
    """Input as another dtype."""
    return converted(input, result.dtype)


@rule("copy")
def copy(result: Result, input: Node, src: Operand) -> Node:
    """The source, with input's shape and dtype."""
    if not isinstance(src, Node):
        return full(result.shape, src, result.dtype)
    return expanded(converted(src, result.dtype), result.shape)


def converted(x: Node, dtype: str) -> Node:
    """Return a tensor as another dtype; fractions become narrow whole numbers modulo their range."""
    if x.dtype == dtype:
        return x

    def body(a: Scalar) -> Scalar:
        narrow = is_floating(a.dtype) and dtype in ("uint8", "int8", "int16", "int32")
        return cast(cast(a, "int64"), dtype) if narrow else cast(a, dtype)

    return elementwise(body, x, dtype=dtype)
