"""Pooling and its gradients: the same as PyTorch's."""

import torch
from oracles.rule_checks import check

from torchedge.lowering.nodes import Rows, nodes_below

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_windows_that_fit_evenly_need_no_guard():
    nodes = check(aten._adaptive_avg_pool2d.default, tensor(1, 2, 6, 8), (3, 2))
    (rows,) = [n for n in nodes_below(nodes) if isinstance(n, Rows)]
    assert [a.extent for a in rows.inner] == [2, 4]
    assert type(rows.stages[0].body).__name__ == "Read"
