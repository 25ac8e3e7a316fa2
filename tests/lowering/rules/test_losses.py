"""Losses and their gradients, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
A, B = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
CHANCE, WEIGHT = torch.rand(3, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
LOSSES = [
    ("mse_loss",),
    ("smooth_l1_loss", 0.5),
    ("smooth_l1_loss", 0.0),
    ("huber_loss", 0.7),
    ("soft_margin_loss",),
]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_distances(case, reduction):
    name, *rest = case
    gradient = (
        torch.randn(3, 4, dtype=torch.float64) if reduction == 0 else torch.tensor(1.5, dtype=torch.float64)
    )
    target = B.sign() if name == "soft_margin_loss" else B
    check(getattr(aten, name).default, A, target, reduction, *rest)
    backward = getattr(aten, f"{name}_backward").default
    check(backward, gradient, A, target, reduction, *rest)


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction, weight):
    gradient = (
        torch.randn(3, 4, dtype=torch.float64) if reduction == 0 else torch.tensor(1.5, dtype=torch.float64)
    )
    weights = None if weight is None else weight.expand(3, 4).contiguous()
    target = (B > 0).double()
    check(aten.binary_cross_entropy.default, CHANCE, target, weights, reduction)
    check(aten.binary_cross_entropy_backward.default, gradient, CHANCE, target, weights, reduction)
    check(aten.binary_cross_entropy_with_logits.default, A * 30, target, weights, None, reduction)
    check(aten.binary_cross_entropy_with_logits.default, A, target, weights, WEIGHT * 3, reduction)


def test_binary_cross_entropy_at_its_ends():
    ends = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    check(aten.binary_cross_entropy.default, ends, torch.tensor([0.0, 0, 1, 1], dtype=torch.float64), None, 0)
