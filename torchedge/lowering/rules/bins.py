"""Places among sorted boundaries, by counting the boundaries below."""

from __future__ import annotations

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import Operand, RowBuilder, full
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype, common_dtype
from torchedge.lowering.rules.registry import Result, rule


@rule("bucketize")
def bucketize(
    result: Result, input: Operand, boundaries: Node, out_int32: bool = False, right: bool = False
) -> Node:
    """The number of boundaries below each element (`right`: not above it)."""
    return searchsorted(result, boundaries, input, out_int32, right)


@rule("searchsorted")
def searchsorted(
    result: Result,
    sorted_sequence: Node,
    input: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Node | None = None,
) -> Node:
    """The number of elements of a sorted row below each element (`right`: not above it)."""
    if sorter is not None:
        raise LoweringError("aten.searchsorted takes a sorter; expected a sequence that is sorted already")
    compute = arithmetic_dtype(common_dtype(sorted_sequence, input))
    x = input if isinstance(input, Node) else full((), input, compute)
    rank, shared = len(x.shape), len(sorted_sequence.shape) == 1
    builder = RowBuilder((*x.shape, sorted_sequence.shape[-1]), (rank,), "bins")
    function = "le" if right or side == "right" else "lt"

    def below(*i: Index) -> Scalar:
        row = () if shared else i[: rank - 1]
        boundary = cast(sorted_sequence.at(*row, i[-1]), compute)
        return cast(apply(function, boundary, cast(x.at(*i[:-1]), compute)), "int64")

    count = builder.reduce("sum", below)
    made = builder.row(lambda *_: count, result.dtype)
    builder.close()
    return made
