"""Activation functions and their gradients, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
X = torch.cat(
    [
        torch.linspace(-6, 6, 25, dtype=torch.float64),
        torch.tensor(
            [3.0, -3.0, 0.0, 1.0, -1.0, 40.0, -40.0, 0.5, -0.5, float("inf"), -float("inf"), float("nan")]
        ),
    ]
).double()
FINITE = X[:-3]
G = torch.linspace(-1, 2, len(FINITE), dtype=torch.float64)
FORWARD = [
    ("relu",), ("relu6",), ("hardtanh",), ("hardtanh", -0.5, 2), ("threshold", 0.3, -7), ("leaky_relu", 0.2),
    ("elu",), ("elu", 1.5, 0.7, 2.0), ("celu", 1.3), ("selu",), ("gelu",), ("silu",), ("mish",),
    ("softplus",), ("softplus", 2, 5), ("hardsigmoid",), ("hardswish",), ("hardshrink", 0.4),
    ("softshrink", 0.4),
]  # fmt: skip
BACKWARD = [
    ("threshold_backward", 0.3), ("hardtanh_backward", -1, 1), ("leaky_relu_backward", 0.2, False),
    ("gelu_backward",), ("silu_backward",), ("mish_backward",), ("softplus_backward", 2, 5),
    ("hardsigmoid_backward",), ("hardswish_backward",), ("hardshrink_backward", 0.4),
    ("softshrink_backward", 0.4),
]  # fmt: skip


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_activations(case):
    name, *rest = case
    where_finite = name in ("gelu", "silu", "mish", "hardswish")
    check(getattr(aten, name).default, FINITE if where_finite else X, *rest, rtol=1e-9)
    check(getattr(aten, name).default, torch.tensor(0.7, dtype=torch.float64), *rest, rtol=1e-9)


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_gradients(case):
    name, *rest = case
    check(getattr(aten, name).default, G, FINITE, *rest, rtol=1e-7)  # PyTorch rounds 1/6 to float32


def test_approximate_gelu():
    check(aten.gelu.default, FINITE, approximate="tanh", rtol=1e-9)
    check(aten.gelu_backward.default, G, FINITE, approximate="tanh", rtol=1e-9, atol=1e-9)


def test_gradients_from_outputs():
    check(aten.sigmoid_backward.default, G, torch.sigmoid(FINITE))
    check(aten.tanh_backward.default, G, torch.tanh(FINITE))


@pytest.mark.parametrize("from_result", [False, True])
def test_elu_backward(from_result):
    source = aten.elu(FINITE, 1.5, 0.7, 2.0) if from_result else FINITE
    check(aten.elu_backward.default, G, 1.5, 0.7, 2.0, from_result, source)


def test_log_sigmoid():
    check(aten.log_sigmoid_forward.default, FINITE, compare=[0])
    check(aten.log_sigmoid_backward.default, G, FINITE, aten.log_sigmoid_forward(FINITE)[1])


def test_weighted_slope():
    x, w = torch.randn(2, 3, 4, dtype=torch.float64), torch.rand(1, 3, 1, dtype=torch.float64)
    check(aten._prelu_kernel.default, x, w)
    check(aten._prelu_kernel_backward.default, torch.randn_like(x), x, w)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gated_halves(dim):
    x = torch.randn(4, 6, 2, dtype=torch.float64)
    shape = [n // 2 if d == dim % 3 else n for d, n in enumerate(x.shape)]
    check(aten.glu.default, x, dim)
    check(aten.glu_backward.default, torch.randn(shape, dtype=torch.float64), x, dim)


def test_dropout_backward():
    check(aten.native_dropout_backward.default, G, G > 0, 2.0)
