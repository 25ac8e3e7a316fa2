"""Products of matrices."""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import add

from torchedge.expressions.indices import ZERO, Index, flatten, of
from torchedge.expressions.scalars import Read, Scalar, cast, reads_of, substitute
from torchedge.lowering.building import contraction, elementwise, reduction
from torchedge.lowering.nodes import PACKED, ContractionRole, Node, Pointwise, axes
from torchedge.lowering.rules.registry import Result, rule

LEAST_ROW = 32
"""Elements of a sum from which on a product with a vector is computed as a reduction of rows."""
MOST_VIEWS = 16
"""Views and element-wise operators behind one another that are looked through for where a matrix lies."""


@rule("mm", "bmm")
def mm(result: Result, input: Node, mat2: Node) -> Node:
    """Matrix product, for every matrix of a batch."""
    return _product(input, mat2, result.dtype)


@rule("addmm")
def addmm(result: Result, input: Node, mat1: Node, mat2: Node, beta: float = 1, alpha: float = 1) -> Node:
    """Beta · input + alpha · (mat1 @ mat2); with beta 0, what input holds does not matter."""
    dtype, product = result.dtype, _product(mat1, mat2, result.dtype)
    if beta == 0:
        return elementwise(lambda p: cast(p * alpha, dtype), product, dtype=dtype)
    return elementwise(lambda x, p: x * beta + p * alpha, input, product, dtype=dtype, compute=dtype)


def _product(a: Node, b: Node, dtype: str) -> Node:
    """Return a @ b for matrices, or batches of them of the same sizes; of whole numbers as sums of rows."""
    *batch, rows, inner = a.shape
    shape = (*batch, rows, b.shape[-1])

    def term(*indices: Index) -> Scalar:
        *out, over = indices
        return a.at(*out[:-1], over) * b.at(*out[:-2], over, out[-1])

    if not dtype.startswith("float"):
        return reduction((*shape, inner), (len(shape),), "matmul", term)
    if (step := 1 if _is_attention_of_one(a, b) else _step_of_rows(a, b)) is not None:

        def steps(*indices: Index) -> Scalar:
            *out, over = indices
            return reduce(add, [term(*out, over * step + k) for k in range(step)])

        return reduction((*shape, inner // step), (len(shape),), "matmul", steps)
    roles: list[ContractionRole] = [*["batch"] * len(batch), "row", "col"]  # type: ignore[list-item]
    return contraction(
        shape,
        roles,
        (inner,),
        lambda out, over: a.at(*out[:-1], over[0]),
        lambda out, over: b.at(*out[:-2], over[0], out[-1]),
        dtype,
    )


def _is_attention_of_one(a: Node, b: Node) -> bool:
    """Return whether each of several vectors has a matrix of its own: the queries of one token, by head."""
    return prod(a.shape[:-2]) > 1 and a.shape[-2] == 1 and b.shape[-1] > 1 and a.shape[-1] >= LEAST_ROW


def _step_of_rows(a: Node, b: Node) -> int | None:
    """Return the step of the sums of a product with a vector, computed as rows; None: another product.

    Such a product is as fast as its matrix can be read: work-items share each sum, or lanes are neighbouring
    results. The step is the number of elements in one number of memory: two where they are packed. A packed
    matrix whose rows are not summed as they lie stays a contraction, which unpacks each number once.
    """
    inner = a.shape[-1]
    if inner < LEAST_ROW or (a.shape[-2] == 1) == (b.shape[-1] == 1):
        return None
    for step in (1, 2):
        (axis,) = axes((inner // step,), "k")
        over = of(axis) * step
        if a.shape[-2] == 1:
            element = b.at(*[ZERO] * (len(b.shape) - 2), over, ZERO)
        else:
            element = a.at(*[ZERO] * (len(a.shape) - 1), over)
        read = _largest_read(element)
        if read is None or read.tensor.dtype not in PACKED:
            return step if step == 1 else None
        position = flatten(read.indices, read.tensor.shape)
        if inner % step == 0 and position.terms == ((axis, 1),):
            return step
    return None


def _largest_read(element: Scalar) -> Read | None:
    """Return the read of the largest tensor in memory that an element is computed from."""
    reads = reads_of(element)
    for _ in range(MOST_VIEWS):
        below: list[Read] = []
        for read in reads:
            if isinstance(read.tensor, Pointwise):
                moved = dict(zip(read.tensor.axes, read.indices, strict=True))
                below += reads_of(substitute(read.tensor.body, moved))
            else:
                below.append(read)
        if below == reads:
            break
        reads = below
    return max(reads, key=lambda read: read.tensor.numel, default=None)
