"""Tensors without elements: nothing is launched for them, reductions over them give what PyTorch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyopencl")

from oracles.device_checks import run_on_device
from torch import nn

import torchedge

aten = torch.ops.aten
NONE = torch.zeros(0, 3)
CASES = {
    "sum": (aten.sum.dim_IntList, (NONE, [0])),
    "sum of everything": (aten.sum.default, (NONE,)),
    "product": (aten.prod.default, (NONE,)),
    "mean": (aten.mean.dim, (NONE, [0])),
    "variance and mean": (aten.var_mean.correction, (NONE, [0])),
    "largest whole numbers of rows": (aten.amax.default, (torch.zeros(0, 3, dtype=torch.int64), [1])),
    "any": (aten.any.dim, (NONE, 0)),
    "all": (aten.all.dim, (NONE, 0)),
    "product of matrices": (aten.mm.default, (torch.zeros(2, 0), torch.zeros(0, 3))),
    "concatenation": (aten.cat.default, ([NONE, torch.ones(2, 3)],)),
    "group norm": (
        aten.native_group_norm.default,
        (torch.zeros(0, 2), torch.ones(2), torch.ones(2), 0, 2, 1, 1, 1e-5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reductions_over_nothing(case):
    target, args = CASES[case]
    expected = target(*args)
    made = list(expected) if isinstance(expected, tuple) else [expected]
    for found, want in zip(run_on_device(target, args, {}, made), made, strict=True):
        if want.numel():
            np.testing.assert_array_equal(found, want.numpy())


class Messages(nn.Module):
    """Sums along the edges of a graph, whose ends are computed within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, end = edges.flip(0)
        return self.own(x).index_add(0, end, self.sent(x[source]) * (len(x) // (1 + end))[:, None])


def test_a_graph_without_edges_trains():
    model, batch = Messages(), (torch.randn(4, 5), torch.zeros(2, 0, dtype=torch.int64))
    expected = model(*batch).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = torchedge.Trainer(model, batch, loss=lambda y: y.square().mean(), optimizer=optimizer)
    assert trainer.step(batch) == pytest.approx(expected.item(), rel=1e-5)
