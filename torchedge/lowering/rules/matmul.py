"""Products of matrices."""

from __future__ import annotations

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, cast
from torchedge.lowering.building import Operand, contraction, elementwise, reduction
from torchedge.lowering.nodes import ContractionRole, Node
from torchedge.lowering.rules.registry import Result, rule


@rule("mm", "bmm")
def mm(result: Result, input: Node, mat2: Node) -> Node:
    """Matrix product, for every matrix of a batch."""
    return _product(input, mat2, result.dtype)


@rule("addmm")
def addmm(result: Result, input: Node, mat1: Node, mat2: Node, beta: float = 1, alpha: float = 1) -> Node:
    """Beta · input + alpha · (mat1 @ mat2)."""
    return _added(result, input, _product(mat1, mat2, result.dtype), beta, alpha)


@rule("baddbmm")
def baddbmm(
    result: Result, input: Node, batch1: Node, batch2: Node, beta: float = 1, alpha: float = 1
) -> Node:
    """Beta · input + alpha · (batch1 @ batch2)."""
    return _added(result, input, _product(batch1, batch2, result.dtype), beta, alpha)


def _product(a: Node, b: Node, dtype: str) -> Node:
    """Return a @ b for matrices, or batches of them of the same sizes; of whole numbers as sums of rows."""
    *batch, rows, inner = a.shape
    shape = (*batch, rows, b.shape[-1])

    def term(*indices: Index) -> Scalar:
        *out, over = indices
        return a.at(*out[:-1], over) * b.at(*out[:-2], over, out[-1])

    if not dtype.startswith("float"):
        return reduction((*shape, inner), (len(shape),), "matmul", term)
    roles: list[ContractionRole] = [*["batch"] * len(batch), "row", "col"]  # type: ignore[list-item]
    return contraction(
        shape,
        roles,
        (inner,),
        lambda out, over: a.at(*out[:-1], over[0]),
        lambda out, over: b.at(*out[:-2], over[0], out[-1]),
        dtype,
    )


def _added(result: Result, input: Operand, product: Node, beta: float, alpha: float) -> Node:
    """Return beta · input + alpha · product; with beta 0, what input holds does not matter."""
    dtype = result.dtype
    if beta == 0:
        return elementwise(lambda p: cast(p * alpha, dtype), product, dtype=dtype)
    return elementwise(lambda x, p: x * beta + p * alpha, input, product, dtype=dtype, compute=dtype)
