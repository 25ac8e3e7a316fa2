"""Arithmetic of single elements, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(5)
SHAPES = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((1,), (4, 1)), ((), (5,)), ((), ())]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
INF, NAN = float("inf"), float("nan")


def numbers(shape, dtype=torch.float64, low=-20, high=20):
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=GENERATOR) * 2
    return torch.randint(0 if dtype == torch.uint8 else low, high, shape, dtype=dtype, generator=GENERATOR)


SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, INF, -INF, NAN, 3.0], dtype=torch.float64)
PAIRS = (SPECIAL[:, None], SPECIAL[None, :])
TWO = ["add", "sub", "mul", "div", "fmod", "remainder", "maximum", "minimum", "fmax", "fmin", "floor_divide"]


def overload(name):
    packet = getattr(aten, name)
    return packet.Tensor if "Tensor" in packet.overloads() else packet.default


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", TWO)
def test_two_operands_broadcast(name, shapes):
    check(overload(name), numbers(shapes[0]), numbers(shapes[1]))


@pytest.mark.parametrize("name", [n for n in TWO if n != "floor_divide"])
def test_infinities_and_nan(name):
    check(overload(name), *PAIRS)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", TWO)
def test_whole_numbers_wrap_and_round_as_theirs(name, dtype):
    a, b = numbers((4, 5), dtype, high=120), numbers((5,), dtype, high=120)
    b = torch.where(b == 0, 3, b).to(dtype) if name in ("div", "fmod", "remainder", "floor_divide") else b
    check(overload(name), a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum"])
def test_bools(name):
    a, b = torch.tensor([[False], [True]]), torch.tensor([False, True])
    check(overload(name), a, b)


@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", [torch.float64, *WHOLE], ids=str)
def test_rounded_quotients(mode, dtype):
    b = torch.where((drawn := numbers((6,), dtype)) == 0, 2, drawn).to(dtype)
    check(aten.div.Tensor_mode, numbers((3, 6), dtype), b, rounding_mode=mode)


def test_mixed_dtypes_and_numbers():
    floating, whole = numbers((3, 2)), numbers((2,), torch.int64)
    check(aten.add.Tensor, floating, whole, alpha=2)
    check(aten.sub.Tensor, whole, numbers((3, 2), torch.int32), alpha=-3)
    check(aten.mul.Tensor, floating, torch.tensor([True, False]))
    check(aten.add.Scalar, floating, 2.5)
    check(aten.mul.Scalar, whole, 3)
    check(aten.rsub.Scalar, floating, 1, 2)
    check(aten.div.Tensor, whole, torch.tensor(7), rtol=1e-6)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 0.5, -0.5, -1, -2, 1.7])
def test_constant_powers(exponent):
    check(aten.pow.Tensor_Scalar, numbers((3, 4)), exponent, rtol=1e-9)
    check(aten.pow.Tensor_Scalar, SPECIAL, exponent)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7])
def test_constant_powers_of_whole_numbers(exponent):
    check(aten.pow.Tensor_Scalar, numbers((3, 4), torch.int64, -4, 4), exponent)


def test_powers_by_tensors():
    check(aten.pow.Tensor_Tensor, numbers((3, 4)).abs(), numbers((4,)))
    check(aten.pow.Scalar, 2.5, numbers((4,)))
    check(aten.pow.Tensor_Tensor, numbers((9, 1), torch.int64, -3, 4), torch.arange(-2, 6))
    check(aten.pow.Scalar, 3, torch.arange(5))


def test_sums_of_products():
    a, b, c = numbers((2, 3)), numbers((3,)), numbers((2, 1))
    check(aten.addcmul.default, a, b, c, value=0.5)
    check(aten.addcdiv.default, a, b, c, value=-2)
    check(aten.lerp.Scalar, a, b, 0.25)  # exact in single precision: the formula itself is held
    check(aten.lerp.Scalar, a, b, 0.75)
    check(aten.lerp.Scalar, a, b, 0.3, rtol=1e-6)  # the decomposition keeps weights in single precision
    check(aten.lerp.Scalar, a, b, 0.8, rtol=1e-6)
    check(aten.lerp.Tensor, a, b.expand(2, 3), c.expand(2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_bounds(dtype):
    x = numbers((4, 5), dtype)
    check(aten.clamp.default, x, -1, 2)
    check(aten.clamp.default, x, None, 2)
    check(aten.clamp.default, x, -1)
    check(aten.clamp.Tensor, x, numbers((5,), dtype), numbers((4, 1), dtype))
    check(aten.clamp_min.default, x, 0)
    check(aten.clamp_max.default, x, 0)


def test_bounds_keep_nan():
    check(aten.clamp.default, SPECIAL, -1, 1)
    check(aten.clamp.default, SPECIAL, 0)
