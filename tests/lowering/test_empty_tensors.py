"""Tensors without elements: nothing is launched for them, reductions over them give what PyTorch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyopencl")

from oracles.device_checks import run_on_device

aten = torch.ops.aten
NONE = torch.zeros(0, 3)
CASES = {
    "sum": (aten.sum.dim_IntList, (NONE, [0])),
    "sum of everything": (aten.sum.default, (NONE,)),
    "product": (aten.prod.default, (NONE,)),
    "mean": (aten.mean.dim, (NONE, [0])),
    "variance and mean": (aten.var_mean.correction, (NONE, [0])),
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
