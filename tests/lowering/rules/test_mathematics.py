"""Functions of one number, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, -3.5, INF, -INF, NAN], dtype=torch.float64)
FUNCTIONS = [
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "reciprocal",
    "floor", "ceil", "trunc", "frac", "neg", "abs", "sign", "sgn", "signbit", "square", "isnan", "isinf",
    "isfinite", "isposinf", "isneginf", "sinc", "deg2rad", "rad2deg", "angle", "special_entr",
    "positive", "round", "logit",
]  # fmt: skip
WHOLE = [
    "sqrt", "exp", "sigmoid", "reciprocal", "floor", "ceil", "trunc", "round", "neg", "abs", "sign", "sgn",
    "signbit", "square", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "nan_to_num", "positive",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    check(getattr(aten, name).default, SPECIAL, rtol=1e-9, atol=1e-9)
    check(getattr(aten, name).default, torch.rand(2, 3, 4, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    check(getattr(aten, name).default, torch.tensor(0.4, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name, dtype):
    x = torch.tensor([1, 2, 3, 20] if dtype == torch.uint8 else [1, -2, 3, -20]).to(dtype)
    check(getattr(aten, name).default, x, rtol=1e-6)


@pytest.mark.parametrize("decimals", [0, 2, -1])
def test_rounding_to_decimals(decimals):
    check(
        aten.round.decimals, torch.tensor([0.5, 1.5, 2.346, -123.456], dtype=torch.float64), decimals=decimals
    )


@pytest.mark.parametrize(
    "name", ["atan2", "hypot", "logaddexp", "logaddexp2", "heaviside", "copysign", "ldexp"]
)
def test_two_operands(name):
    packet = getattr(aten, name)
    target = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    check(target, SPECIAL[:, None], SPECIAL[None, :], rtol=1e-9)
    check(target, torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64), rtol=1e-9)


def test_products_with_logarithms():
    check(aten.xlogy.Tensor, SPECIAL[:, None], SPECIAL[None, :])
    check(aten.xlogy.Scalar_Other, SPECIAL, 2.0, rtol=1e-6)  # decomposed: log(2) is a constant in float32
    check(aten.special_xlog1py.default, SPECIAL[:, None], SPECIAL[None, :])


@pytest.mark.parametrize("eps", [None, 0.2])
def test_logit(eps):
    x = torch.rand(3, 4, dtype=torch.float64)
    check(aten.logit.default, x, 2**-6)  # exact in single precision: the formula itself is held
    check(aten.logit.default, x, eps, rtol=1e-6)  # the decomposition keeps bounds in single precision
    check(aten.logit_backward.default, torch.randn(3, 4, dtype=torch.float64), x, eps)
    check(
        aten.logit_backward.default, torch.ones(2, dtype=torch.float64), torch.tensor([-1.0, 2]).double(), eps
    )


def test_lgamma():
    check(aten.lgamma.default, SPECIAL[SPECIAL != -INF], rtol=1e-9)


def test_replaced_numbers():
    check(aten.nan_to_num.default, SPECIAL, 1.5, 9.0, -9.0)
    check(aten.nan_to_num.default, SPECIAL.float(), rtol=1e-6)


def test_neighbours():
    x, y = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, -2.0, 1.0])
    check(aten.nextafter.default, x, y, rtol=0, atol=0)
