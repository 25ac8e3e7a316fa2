"""Tensors put together from pieces: the same as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


CASES = [
    (aten.cat.default, [tensor(2, 3), tensor(2, 1), tensor(2, 4)], 1),
    (aten.cat.default, [tensor(2, 3)], -1),
    (aten.cat.default, [tensor(2, 3), tensor(0)], 0),
    (aten.cat.default, [tensor(1, 4, 3), tensor(1, 8, 3), tensor(1, 4, 3)], 1),
    (aten.cat.default, [tensor(2), torch.tensor([1, 2])], 0),
    (aten.stack.default, [tensor(2, 3), tensor(2, 3)], -1),
    (aten.stack.default, [tensor(), tensor()], 0),
    (aten.constant_pad_nd.default, tensor(2, 3, 4), [1, 2, 0, 3], 1.5),
    (aten.constant_pad_nd.default, tensor(2, 5, 6), [-1, 2, -2, -1]),
    (aten.constant_pad_nd.default, tensor(2, 5), [-2, 2, 1, 0], -1),
    (aten.slice_scatter.default, tensor(3, 8), tensor(3, 3), 1, 1, 7, 2),
    (aten.slice_scatter.default, tensor(6, 2), tensor(2, 2), 0, -2, 100),
    (aten.select_scatter.default, tensor(3, 4, 2), tensor(3, 2), 1, -2),
    (aten.slice_backward.default, tensor(3, 3), [3, 8], 1, 1, 7, 2),
    (aten.slice_backward.default, tensor(2, 5), [7, 5], 0, -2, 9223372036854775807, 1),
    (aten.select_backward.default, tensor(3, 2), [3, 4, 2], 1, 2),
    (aten.diagonal_scatter.default, tensor(4, 5), tensor(4)),
    (aten.diagonal_scatter.default, tensor(4, 2, 5), tensor(2, 3), -1, 0, 2),
    (aten.diagonal_backward.default, tensor(2, 3), [4, 2, 5], -1, 0, 2),
    (aten.diagonal_backward.default, tensor(2, 3), [4, 2, 5], 2, 0, 2),
    (aten.tril.default, tensor(2, 4, 4)),
    (aten.tril.default, tensor(3, 5), 1),
    (aten.triu.default, tensor(4, 4), -1),
    (aten.triu.default, tensor(1, 4), 2),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{c[2:]}".replace(" ", "")[:60])
def test_movement(case):
    check(*case, atol=0, rtol=0, device=True)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ["reflection", "replication"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", ["mixed", "wide", "negative"])
def test_borders(mode, dims, batched, kind):
    sizes = (5, 4, 6)[:dims]
    pads = {"mixed": [0, 1, 2, 0, 1, 1], "wide": [3, 3, 3, 2, 2, 4], "negative": [-1, 2, 1, -2, -1, -1]}[kind]
    x = tensor(*([2] if batched else []), 3, *sizes)
    forward = getattr(aten, f"{mode}_pad{dims}d")
    backward = getattr(aten, f"{mode}_pad{dims}d_backward")
    if mode == "reflection":  # mirrors at most what is there
        pads = [min(p, sizes[dims - 1 - k // 2] - 1) for k, p in enumerate(pads[: 2 * dims])]
    pad = pads[: 2 * dims]
    device = dims == 2 and batched
    check(forward.default, x, pad, atol=0, rtol=0, device=device)
    check(backward.default, tensor(*forward(x, pad).shape), x, pad, device=device)
