"""Variances and standard deviations, by the mean first and the squared distances from it then."""

from __future__ import annotations

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, normal_dims, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.reductions import Dims, with_dimension
from torchedge.lowering.rules.registry import Result, rule


def _moments(
    result: Result,
    input: Node,
    dim: Dims,
    unbiased: bool,
    correction: float | None,
    keepdim: bool,
    *,
    root: bool,
    with_mean: bool,
) -> tuple[Node, ...]:
    x = with_dimension(input)
    builder = RowBuilder(x.shape, normal_dims(dim, len(x.shape)), "variance")
    taken = correction if correction is not None else float(unbiased)
    compute = arithmetic_dtype(result.dtype)

    def element(*indices: Index) -> Scalar:
        return cast(x.at(*indices), compute)

    mean = builder.reduce("sum", element) / builder.count

    def squared(*indices: Index) -> Scalar:
        distance = element(*indices) - mean
        return distance * distance

    variance = builder.reduce("sum", squared) / max(0.0, builder.count - taken)
    spread = apply("sqrt", variance) if root else variance
    wanted = (spread, mean) if with_mean else (spread,)
    made = [builder.row(lambda *_, s=s: s, result.dtype, keepdim) for s in wanted]
    builder.close()
    return tuple([reshaped(node, result.shape) for node in made])


@rule("var")
def var(
    result: Result,
    input: Node,
    dim: Dims = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Node, ...]:
    """The variance over dimensions; `correction` is taken from the number of elements."""
    return _moments(result, input, dim, unbiased, correction, keepdim, root=False, with_mean=False)


@rule("std")
def std(
    result: Result,
    input: Node,
    dim: Dims = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Node, ...]:
    """The standard deviation over dimensions."""
    return _moments(result, input, dim, unbiased, correction, keepdim, root=True, with_mean=False)


@rule("var_mean")
def var_mean(
    result: Result,
    input: Node,
    dim: Dims = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Node, ...]:
    """Variance and mean over dimensions."""
    return _moments(result, input, dim, unbiased, correction, keepdim, root=False, with_mean=True)


@rule("std_mean")
def std_mean(
    result: Result,
    input: Node,
    dim: Dims = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Node, ...]:
    """Standard deviation and mean over dimensions."""
    return _moments(result, input, dim, unbiased, correction, keepdim, root=True, with_mean=True)
