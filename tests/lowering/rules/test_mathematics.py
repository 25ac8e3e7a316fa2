"""Functions of one number, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.registry import Result, apply_rule

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, -3.5, INF, -INF, NAN], dtype=torch.float64)
FUNCTIONS = [
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "reciprocal",
    "floor", "ceil", "trunc", "frac", "neg", "abs", "sign", "sgn", "signbit", "square", "isnan", "isinf",
    "isfinite", "isposinf", "isneginf", "sinc", "deg2rad", "rad2deg", "digamma", "erfinv", "special_entr",
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


@pytest.mark.parametrize("name", ["atan2", "hypot", "logaddexp", "logaddexp2", "heaviside", "copysign"])
def test_two_operands(name):
    packet = getattr(aten, name)
    target = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    check(target, SPECIAL[:, None], SPECIAL[None, :], rtol=1e-9)
    check(target, torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64), rtol=1e-9)


def test_products_with_logarithms():
    check(aten.xlogy.Tensor, SPECIAL[:, None], SPECIAL[None, :])
    check(aten.xlogy.Scalar_Other, SPECIAL, 2.0)
    check(aten.special_xlog1py.default, SPECIAL[:, None], SPECIAL[None, :])


@pytest.mark.parametrize("eps", [None, 0.2])
def test_logit(eps):
    x = torch.rand(3, 4, dtype=torch.float64)
    check(aten.logit.default, x, eps)
    check(aten.logit_backward.default, torch.randn(3, 4, dtype=torch.float64), x, eps)
    check(
        aten.logit_backward.default, torch.ones(2, dtype=torch.float64), torch.tensor([-1.0, 2]).double(), eps
    )


@pytest.mark.parametrize("order", [0, 1])
def test_derivatives_of_digamma(order):
    check(aten.polygamma.default, order, torch.rand(7, dtype=torch.float64) * 4 + 0.1, rtol=1e-8)


def test_lgamma():
    check(aten.lgamma.default, SPECIAL[SPECIAL != -INF], rtol=1e-9)


def test_replaced_numbers():
    check(aten.nan_to_num.default, SPECIAL, 1.5, 9.0, -9.0)
    check(aten.nan_to_num.default, SPECIAL.float(), rtol=1e-6)


def test_orders_without_a_kernel_are_refused():
    with pytest.raises(LoweringError, match="polygamma of order 2"):
        apply_rule(
            "polygamma", Result(((3,),), ("float32",)), {"n": 2, "input": Stored((3,), "float32", "x", 0)}
        )


def test_single_precision_is_said():
    with pytest.raises(LoweringError, match="single precision"):
        apply_rule("erfinv", Result(((3,),), ("float64",)), {"input": Stored((3,), "float64", "x", 0)})
