"""Products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, cast
from torchedge.lowering.building import Operand, RowBuilder, contraction, elementwise
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


@rule("addbmm")
def addbmm(
    result: Result, input: Node, batch1: Node, batch2: Node, beta: float = 1, alpha: float = 1
) -> Node:
    """Beta · input + alpha · (sum of the batch's products)."""
    batch, _, inner = batch1.shape
    product = contraction(
        result.shape,
        ("row", "col"),
        (batch, inner),
        lambda out, over: batch1.at(over[0], out[0], over[1]),
        lambda out, over: batch2.at(over[0], over[1], out[1]),
        result.dtype,
    )
    return _added(result, input, product, beta, alpha)


@rule("linear")
def linear(result: Result, input: Node, weight: Node, bias: Node | None = None) -> Node:
    """Input @ weight transposed, plus bias."""
    rank = len(result.shape)
    product = contraction(
        result.shape,
        [*["row"] * (rank - 1), "col"],  # type: ignore[list-item]
        weight.shape[1:],
        lambda out, over: input.at(*out[:-1], over[0]),
        lambda out, over: weight.at(out[-1], over[0]),
        result.dtype,
    )
    return product if bias is None else elementwise(lambda a, b: a + b, product, bias, dtype=result.dtype)


@rule("mv")
def mv(result: Result, input: Node, vec: Node) -> Node:
    """Matrix times vector."""
    return _row_sums(input.shape, input, vec, result.dtype)


@rule("addmv")
def addmv(result: Result, input: Node, mat: Node, vec: Node, beta: float = 1, alpha: float = 1) -> Node:
    """Beta · input + alpha · (mat @ vec)."""
    return _added(result, input, mv(result, mat, vec), beta, alpha)


@rule("dot")
def dot(result: Result, input: Node, tensor: Node) -> Node:
    """Sum of the products of two vectors' elements."""
    return _row_sums(input.shape, input, tensor, result.dtype)


@rule("vdot")
def vdot(result: Result, input: Node, other: Node) -> Node:
    """Sum of the products of two real vectors' elements."""
    return _row_sums(input.shape, input, other, result.dtype)


def _product(a: Node, b: Node, dtype: str) -> Node:
    """Return a @ b for matrices, or batches of them of the same sizes."""
    *batch, rows, inner = a.shape
    shape = (*batch, rows, b.shape[-1])
    if not dtype.startswith("float"):
        return _exact_product(a, b, shape)
    roles: list[ContractionRole] = [*["batch"] * len(batch), "row", "col"]  # type: ignore[list-item]
    return contraction(
        shape,
        roles,
        (inner,),
        lambda out, over: a.at(*out[:-1], over[0]),
        lambda out, over: b.at(*out[:-2], over[0], out[-1]),
        dtype,
    )


def _exact_product(a: Node, b: Node, shape: Sequence[int]) -> Node:
    """Return a @ b of whole numbers, as sums of rows."""
    rank = len(shape)
    builder = RowBuilder((*shape, a.shape[-1]), (rank,), "matmul")

    def body(*indices: Index) -> Scalar:
        *batch, row, col, over = indices
        return a.at(*batch, row, over) * b.at(*batch, over, col)

    total = builder.reduce("sum", body)
    made = builder.row(lambda *_: total)
    builder.close()
    return made


def _row_sums(shape: Sequence[int], a: Node, vec: Node, dtype: str) -> Node:
    """Return, for each row of a, the sum of its products with a vector."""
    builder = RowBuilder(shape, (len(shape) - 1,), "matmul")
    total = builder.reduce("sum", lambda *indices: a.at(*indices) * vec.at(indices[-1]))
    made = builder.row(lambda *_: total, dtype)
    builder.close()
    return made


def _added(result: Result, input: Operand, product: Node, beta: float, alpha: float) -> Node:
    """Return beta · input + alpha · product; with beta 0, what input holds does not matter."""
    dtype = result.dtype
    if beta == 0:
        return elementwise(lambda p: cast(p * alpha, dtype), product, dtype=dtype)
    return elementwise(lambda x, p: x * beta + p * alpha, input, product, dtype=dtype, compute=dtype)
