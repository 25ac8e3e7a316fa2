"""Group normalization and its gradients through OpenCL, over shapes, against PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyopencl")

from oracles.device_checks import run_on_device

aten = torch.ops.aten
side = st.integers(1, 40)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 8]), side, side)


def held(operator, args, device):
    """Assert that kernels make what PyTorch makes, to within single precision of its largest number."""
    wanted = [t for t in operator(*args) if t is not None]
    for found, want in zip(run_on_device(operator, args, {}, wanted, device), wanted, strict=True):
        exact = want.numpy()
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=3e-5 * np.abs(exact).max(initial=1e-3))


@pytest.mark.parametrize(
    "device", ["gpu", *[pytest.param(d, marks=pytest.mark.slow) for d in ("cpu", "mobile")]]
)
def test_few_long_groups(device):
    shapes_hold((2, 3, 4, 33, 50), device)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(["cpu", "gpu", "mobile"]))
def test_any_shape(shape, device):
    shapes_hold(shape, device)


def shapes_hold(shape, device):
    """Assert it of both directions."""
    count, groups, each, height, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(count, groups * each, height, width, generator=generator).double() * 3 + 1
    grad = torch.randn(x.shape, generator=generator).double()
    weight, bias = (torch.randn(groups * each, generator=generator).double() for _ in range(2))
    sizes = (count, groups * each, height * width, groups)
    held(aten.native_group_norm.default, (x, weight, bias, *sizes, 1e-5), device)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    if each * height * width > 1:  # the gradient of one element alone is rounding
        saved = (grad, x, mean, rstd, weight, *sizes, [True] * 3)
        held(aten.native_group_norm_backward.default, saved, device)
