"""Means and variances of rows in one pass over them.

The mean is that of the elements themselves. For the variance, distances from the row's middle element and
their squares are summed, so that one pass is as accurate as two unless that element lies far outside the
rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torchedge.expressions.indices import Index, as_index
from torchedge.expressions.scalars import Scalar, apply, cast
from torchedge.lowering.building import RowBuilder, normal_dims, reshaped
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.reductions import Dims, with_dimension
from torchedge.lowering.rules.registry import Result, rule


def moments(builder: RowBuilder, element: Callable[..., Scalar]) -> tuple[Callable[..., Scalar], Scalar]:
    """Add the stages of a row's mean and variance; `element` takes the whole index.

    Returns the mean, a function of the row's index, and the sum of squared distances from it.
    """
    if not builder.count:
        nothing = builder.reduce("sum", element)
        return lambda *_: nothing / 0, nothing

    def middle(*row: Index) -> Scalar:
        kept = iter(row)
        places = [as_index(n // 2) if d in builder.dims else next(kept) for d, n in enumerate(builder.domain)]
        return element(*places)

    def distance(*indices: Index) -> Scalar:
        return element(*indices) - middle(*[i for d, i in enumerate(indices) if d not in builder.dims])

    plain = builder.reduce("sum", element)
    total = builder.reduce("sum", distance)
    squares = builder.reduce("sum", lambda *i: distance(*i) * distance(*i))
    shift = total / builder.count
    return lambda *_: plain / builder.count, apply("maximum", squares - total * shift, 0)


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

    mean, squares = moments(builder, element)
    variance = squares / max(0.0, builder.count - taken)
    spread = apply("sqrt", variance) if root else variance
    made = [builder.row(lambda *_: spread, result.dtype, keepdim)]
    if with_mean:
        made.append(builder.row(mean, result.dtype, keepdim))
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
