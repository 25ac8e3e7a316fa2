"""Reductions, normalization, losses and element-wise operators through OpenCL, at sizes that use every loop.

Long rows, odd rows, rows that lie across memory; kernels for a CPU and those for a GPU, which share a row in
a work-group. Held against PyTorch in float64, norm-wise.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.device_checks import run_on_device

pytest.importorskip("pyopencl")

aten = torch.ops.aten
G = torch.Generator().manual_seed(11)


def normal(*shape, shift=0.0):
    return torch.randn(shape, generator=G).double() + shift


def rate(*shape):
    return torch.rand(shape, generator=G).double() * 0.9 + 0.05


IMAGES, CHANNELS = normal(4, 19, 14, 14, shift=7), [rate(19) for _ in range(4)]
TOKENS, EMBEDDING = normal(9, 5, 768, shift=2), [normal(768) for _ in range(2)]
MEAN, RSTD = aten.native_layer_norm(TOKENS, [768], *EMBEDDING, 1e-6)[1:]
SAVED = [IMAGES.mean((0, 2, 3)), (IMAGES.var((0, 2, 3), correction=0) + 1e-5).rsqrt()]
LOGITS, CLASSES = normal(37, 1001) * 4, torch.randint(0, 1001, (37,), generator=G)
GROUPS = (4, 19 * 2, 196, 19)
PAIRED = normal(4, 38, 14, 14)
CASES = {
    "sum of a long row": (aten.sum.default, (normal(300_001),)),
    "sum of long rows": (aten.sum.dim_IntList, (normal(5, 40_003), [1])),
    "sum of columns": (aten.sum.dim_IntList, (normal(3001, 33), [0])),
    "sum over outer and inner": (aten.sum.dim_IntList, (normal(6, 40, 33), [0, 2])),
    "mean of pictures": (aten.mean.dim, (IMAGES, [2, 3])),
    "largest and where": (aten.max.dim, (normal(7, 5001), 1)),
    "where the smallest is": (aten.argmin.default, (normal(61, 83),)),
    "variance and mean": (aten.var_mean.correction, (normal(7, 4099, shift=50), [1])),
    "norm of rows": (aten.linalg_vector_norm.default, (normal(33, 130), 2, [1], True)),
    "any": (aten.any.dim, (normal(9, 2000) > 3, 1)),
    "log of a sum of exponentials": (aten.logsumexp.default, (LOGITS, [1])),
    "running sum": (aten.cumsum.default, (normal(3, 2500), 1)),
    "softmax": (aten._softmax.default, (LOGITS, 1, False)),
    "softmax of long rows": (aten._softmax.default, (normal(2, 40_007), 1, False)),
    "softmax of columns": (aten._softmax.default, (normal(8, 90, 31), 1, False)),
    "log softmax": (aten._log_softmax.default, (LOGITS, 1, False)),
    "softmax backward": (
        aten._softmax_backward_data.default,
        (normal(37, 1001), LOGITS.softmax(1), 1, torch.float64),
    ),
    "log softmax backward": (
        aten._log_softmax_backward_data.default,
        (normal(37, 1001), LOGITS.log_softmax(1), 1, torch.float64),
    ),
    "batch norm": (aten._native_batch_norm_legit_functional.default, (IMAGES, *CHANNELS, True, 0.1, 1e-5)),
    "batch norm in evaluation": (
        aten._native_batch_norm_legit_no_training.default,
        (IMAGES, *CHANNELS, 0.1, 1e-5),
    ),
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        (normal(4, 19, 14, 14), IMAGES, CHANNELS[0], *CHANNELS[2:], *SAVED, True, 1e-5, [True] * 3),
    ),
    "layer norm": (aten.native_layer_norm.default, (TOKENS, [768], *EMBEDDING, 1e-6)),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (normal(9, 5, 768), TOKENS, [768], MEAN, RSTD, *EMBEDDING, [True] * 3),
    ),
    "group norm": (aten.native_group_norm.default, (PAIRED, rate(38), rate(38), *GROUPS, 1e-5)),
    "negative log likelihood": (
        aten.nll_loss_forward.default,
        (LOGITS.log_softmax(1), CLASSES, rate(1001), 1, -100),
    ),
    "likelihood backward": (
        aten.nll_loss_backward.default,
        (normal(), LOGITS, CLASSES, None, 1, -100, torch.tensor(37.0).double()),
    ),
    "squared distance": (aten.mse_loss.default, (normal(64, 333), normal(64, 333))),
    "gelu backward": (aten.gelu_backward.default, (normal(31, 257), normal(31, 257) * 3)),
    "broadcast product": (aten.mul.Tensor, (normal(17, 1, 29), normal(5, 1))),
    "power": (aten.pow.Tensor_Tensor, (rate(333), normal(333))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
@pytest.mark.parametrize("case", CASES)
def test_close_to_double_precision(case, device_class):
    target, args = CASES[case]
    expected = target(*args)
    made = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    for found, want in zip(run_on_device(target, args, {}, made, device_class), made, strict=True):
        if want.numel():
            error = torch.from_numpy(found.copy()).double() - want.double()
            assert error.norm() <= 2e-6 * want.double().norm() + 1e-12, float(
                error.norm() / want.double().norm()
            )


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
def test_the_same_numbers_from_run_to_run(device_class):
    target, args = CASES["batch norm backward"]
    made = list(target(*args))
    first, second = [run_on_device(target, args, {}, made, device_class) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
def test_one_pass_is_accurate_far_from_zero_and_beside_an_odd_corner(device_class):
    """Sums of x and of x² would lose the variance in single precision."""
    x = (normal(8, 2, 16, 16) + 3000).float().double()
    x[:, :, 0, 0] = 0
    made = [*aten.var_mean.correction(x, [0, 2, 3], correction=0)]
    variance, mean = run_on_device(
        aten.var_mean.correction, (x, [0, 2, 3]), {"correction": 0}, made, device_class
    )
    for found, want in zip((variance, mean), made, strict=True):
        torch.testing.assert_close(torch.from_numpy(found.copy()).double(), want, rtol=1e-6, atol=0)
    x = (normal(8, 2, 16, 16) + 3000).float().double()
    made = [*aten.var_mean.correction(x, [0, 2, 3], correction=0)]
    variance, _ = run_on_device(
        aten.var_mean.correction, (x, [0, 2, 3]), {"correction": 0}, made, device_class
    )
    torch.testing.assert_close(torch.from_numpy(variance.copy()).double(), made[0], rtol=1e-5, atol=0)


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
