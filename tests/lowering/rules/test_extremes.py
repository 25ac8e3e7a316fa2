"""Small, huge and missing numbers through OpenCL, mixed within vectors."""

import numpy as np
import pytest
import torch
from oracles.device_checks import run_on_device

pytest.importorskip("pyopencl")
aten = torch.ops.aten
NAN = float("nan")
X = torch.tensor([-1e10, -1e4, -1000, -30, -10, -1, -1e-3, 0, 1e-3, 1, 10, 30, 1000, 1e4, 1e10, NAN]).double()


def on_device(target, *args, **kwargs):
    made = target(*args, **kwargs)
    return run_on_device(target, args, kwargs, [made])[0], made.numpy()


@pytest.mark.parametrize("target", [aten.gelu, aten.gelu_backward], ids=str)
def test_approximate_gelu_vanishes_far_below_zero(target):
    tensors = (torch.ones_like(X), X) if target is aten.gelu_backward else (X,)
    found, exact = on_device(target.default, *tensors, approximate="tanh")
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=1e-6)


def test_the_gradient_of_mish_stays_within_its_bounds():
    found, exact = on_device(aten.mish_backward.default, torch.ones_like(X), X)
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_gradient_of_smooth_l1_keeps_nan(reduction):
    grad = torch.ones_like(X) if reduction == 0 else torch.tensor(1.0).double()
    target = aten.smooth_l1_loss_backward.default
    found, exact = on_device(target, grad, X, torch.zeros_like(X), reduction, 0.5)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_of_every_size_in_one_vector(name):
    x = torch.tensor([1e-3] * 7 + [1e7] + [0.5, -1e5, 3e38, 1e-30, -2.0, 1e9, 0.0, NAN]).float().double()
    found, exact = on_device(getattr(aten, name).default, x)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_the_smallest_whole_number_by_minus_one_stops_no_device(dtype, mode):
    a = torch.tensor([torch.iinfo(dtype).min, 7, -7, 6], dtype=dtype)
    divisors = torch.tensor([-1, -1, 2, -1], dtype=dtype)
    wanted = [torch.iinfo(dtype).min, -7, -3 if mode == "trunc" else -4, -6]
    made = torch.tensor(wanted, dtype=dtype)
    found = run_on_device(aten.div.Tensor_mode, (a, divisors), {"rounding_mode": mode}, [made])[0]
    assert found.tolist() == wanted
