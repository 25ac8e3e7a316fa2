"""Windows laid out and summed back: the same as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("size", "step"), [(3, 1), (3, 2), (2, 3), (4, 4), (1, 1)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unfold_backward(size, step, dim):
    shape = (9, 8, 7)
    grad = tensor(*tensor(*shape).unfold(dim, size, step).shape)
    check(aten.unfold_backward.default, grad, list(shape), dim, size, step, device=dim == 1)


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "stride"),
    [
        ([2, 2], [1, 1], [0, 0], [1, 1]),
        ([3, 2], [1, 2], [1, 0], [2, 1]),
        ([2, 3], [3, 1], [2, 1], [3, 2]),
        ([1, 1], [1, 1], [0, 0], [2, 2]),
    ],
)
@pytest.mark.parametrize("lead", [(2,), ()])
def test_columns(kernel, dilation, padding, stride, lead):
    x = tensor(*lead, 3, 7, 6)
    columns = aten.im2col(x, kernel, dilation, padding, stride)
    check(aten.im2col.default, x, kernel, dilation, padding, stride, device=bool(lead))
    check(
        aten.col2im.default,
        tensor(*columns.shape),
        [7, 6],
        kernel,
        dilation,
        padding,
        stride,
        device=bool(lead),
    )
