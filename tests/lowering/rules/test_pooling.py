"""Pooling and its gradients: the same as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

from torchedge.lowering.nodes import Rows, nodes_below

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    [
        ([2, 2], [], [0, 0], [1, 1], False),
        ([3, 3], [2, 2], [1, 1], [1, 1], False),
        ([3, 3], [2, 2], [1, 1], [1, 1], True),
        ([3, 2], [1, 3], [1, 0], [2, 1], False),
        ([2, 3], [2, 2], [1, 1], [3, 2], True),
        ([3], [2], [0], [1], True),
        ([1, 1], [2, 2], [0, 0], [1, 1], False),
        ([5, 5], [1, 1], [2, 2], [1, 1], False),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 8, 7), (3, 9, 6)])
def test_max_pool2d(kernel, stride, padding, dilation, ceil_mode, shape):
    x = tensor(*shape)
    given = (kernel, stride, padding, dilation, ceil_mode)
    values, indices = aten.max_pool2d_with_indices(x, *given)
    device = len(shape) == 4
    check(aten.max_pool2d_with_indices.default, x, *given, device=device)
    check(
        aten.max_pool2d_with_indices_backward.default,
        tensor(*values.shape),
        x,
        *given,
        indices,
        device=device,
    )


def test_max_pool_takes_the_first_of_equals():
    x = torch.relu(tensor(1, 2, 6, 6))
    check(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1], [1, 1])


def test_max_pool3d():
    x = tensor(2, 3, 4, 5, 6)
    for given in (
        ([2, 2, 2], [2, 2, 2], [0] * 3, [1] * 3, False),
        ([3, 2, 3], [1, 2, 2], [1, 0, 1], [1] * 3, True),
    ):
        values, indices = aten.max_pool3d_with_indices(x, *given)
        check(aten.max_pool3d_with_indices.default, x, *given)
        check(aten.max_pool3d_with_indices_backward.default, tensor(*values.shape), x, *given, indices)


def test_max_pool_of_whole_numbers():
    check(aten.max_pool2d_with_indices.default, torch.arange(36).view(1, 1, 6, 6) % 7, [3, 3], [2, 2], [1, 1])


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [([2, 2], [], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 3], [1, 0]), ([4, 4], [3, 2], [2, 2])],
)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("divisor", [None, 5])
def test_avg_pool2d(kernel, stride, padding, ceil_mode, count_include_pad, divisor):
    x = tensor(2, 3, 8, 7)
    given = (kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    made = aten.avg_pool2d(x, *given)
    device = divisor is None
    check(aten.avg_pool2d.default, x, *given, device=device)
    check(aten.avg_pool2d_backward.default, tensor(*made.shape), x, *given, device=device)


def test_avg_pool_in_other_dimensions():
    check(aten.avg_pool1d.default, tensor(2, 3, 9), [3], [2], [1], True, False)
    check(aten.avg_pool1d.default, tensor(3, 9), [3])
    given = ([2, 3, 2], [2, 1, 2], [1, 1, 0], True, False)
    x = tensor(2, 3, 4, 5, 5)
    check(aten.avg_pool3d.default, x, *given)
    made = aten.avg_pool3d(x, *given)
    check(aten.avg_pool3d_backward.default, tensor(*made.shape), x, *given, None)


@pytest.mark.parametrize(
    "sizes", [((7, 7), (1, 1)), ((8, 6), (4, 3)), ((7, 5), (3, 4)), ((3, 2), (7, 5)), ((5, 9), (5, 2))]
)
@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_adaptive_pool2d(sizes, lead):
    size, out = sizes
    x, grad = tensor(*lead, *size), tensor(*lead, *out)
    device = len(lead) == 2
    check(aten._adaptive_avg_pool2d.default, x, out, device=device)
    check(aten._adaptive_avg_pool2d_backward.default, grad, x, device=device)
    check(aten.adaptive_max_pool2d.default, x, out)
    check(aten.adaptive_max_pool2d_backward.default, grad, x, aten.adaptive_max_pool2d(x, out)[1])


def test_adaptive_pool3d():
    x, out = tensor(1, 2, 5, 4, 3), (2, 3, 3)
    grad = tensor(1, 2, *out)
    check(aten._adaptive_avg_pool3d.default, x, out)
    check(aten._adaptive_avg_pool3d_backward.default, grad, x)
    check(aten.adaptive_max_pool3d.default, x, out)
    check(aten.adaptive_max_pool3d_backward.default, grad, x, aten.adaptive_max_pool3d(x, out)[1])


def test_windows_that_fit_evenly_need_no_guard():
    nodes = check(aten._adaptive_avg_pool2d.default, tensor(1, 2, 6, 8), (3, 2))
    (rows,) = [n for n in nodes_below(nodes) if isinstance(n, Rows)]
    assert [a.extent for a in rows.inner] == [2, 4]
    assert type(rows.stages[0].body).__name__ == "Read"
