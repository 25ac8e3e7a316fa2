"""The negative log likelihood, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import apply, check

aten = torch.ops.aten
CLASSES = 5
WEIGHT = torch.rand(CLASSES, dtype=torch.float64)
CASES = {
    "samples": ("nll_loss", (4, CLASSES), torch.tensor([1, 4, 2, 0])),
    "sample": ("nll_loss", (CLASSES,), torch.tensor(3)),
    "pictures": ("nll_loss2d", (2, CLASSES, 2, 3), torch.arange(12).reshape(2, 2, 3) % CLASSES),
}


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, reduction, weight, ignored):
    name, shape, target = CASES[case]
    x = torch.randn(shape, dtype=torch.float64)
    forward, backward = getattr(aten, f"{name}_forward").default, getattr(aten, f"{name}_backward").default
    check(forward, x, target, weight, reduction, ignored)
    loss, total = forward(x, target, weight, reduction, ignored)
    gradient = torch.randn_like(loss)
    check(backward, gradient, x, target, weight, reduction, ignored, total)


def test_ignored_samples_need_no_class():
    x, target = torch.randn(3, CLASSES, dtype=torch.float64), torch.tensor([1, -100, 4])
    check(aten.nll_loss_forward.default, x, target, WEIGHT, 1, -100)
    total = aten.nll_loss_forward(x, target, WEIGHT, 1, -100)[1]
    check(aten.nll_loss_backward.default, torch.tensor(2.0).double(), x, target, WEIGHT, 1, -100, total)


def test_what_is_no_class_gives_nan():
    x, target = torch.randn(3, CLASSES, dtype=torch.float64), torch.tensor([1, CLASSES, -7])
    scalar = torch.tensor(0.0, dtype=torch.float64)
    nodes, data = apply(aten.nll_loss_forward.default, (x, target, None, 0, -100), {}, [x[:, 0], scalar])
    assert np.isnan(compute(nodes[0], data)).tolist() == [False, True, True]


def test_a_single_class():
    check(
        aten.nll_loss_forward.default,
        torch.randn(3, 1).double(),
        torch.zeros(3, dtype=torch.int64),
        None,
        1,
        -100,
    )
