"""The negative log likelihood, against PyTorch."""

import numpy as np
import torch
from oracles.nodes import compute
from oracles.rule_checks import apply, check

aten = torch.ops.aten
CLASSES = 5
WEIGHT = torch.rand(CLASSES, dtype=torch.float64)


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
