"""Textures and half precision: which tensors lie so, and that a training step computes the same on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.opencl import choose_device
from torchedge.runtime.executors import Executor
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")
MOBILE = TARGETS["mobile"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def stepped(target, factor=1.0):
    """Return the program, its loss and the weights after one step on `factor` times the loss."""
    model = network()
    x, y = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / factor)
    captured = capture_step(
        model,
        (x,),
        targets=(y,),
        loss=lambda outputs, y: factor * nn.functional.cross_entropy(outputs, y),
        optimizer=optimizer,
        keep=frozenset(all_rules()),
    )
    program = lower(captured.step, target)
    with Executor(program) as executor:
        executor.load(captured.tensors)
        loss = executor.run(x, y)[0]
        weights = {n: executor.read(n) for n, _ in model.named_parameters()}
    return program, float(loss), weights


@pytest.fixture(scope="module")
def plain():
    return stepped(replace(MOBILE, storage="buffer"))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", ["row", "column", "block-4"])
def test_a_step_on_textures_equals_one_on_buffers(plain, pattern):
    program, loss, weights = stepped(replace(MOBILE, pattern=pattern))
    images = [t for t in program.tensors if t.layout.storage == "image"]
    assert len(images) >= 4
    assert all(t.layout.pattern == pattern for t in images)
    assert loss == pytest.approx(plain[1], rel=1e-6)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, plain[2][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_overwritten_or_passed_to_and_fro_stays_in_buffers(plain):
    program, _, _ = stepped(MOBILE)
    for tensor in program.tensors:
        if tensor.role in ("parameter", "state", "input", "output", "buffer"):
            assert tensor.layout.storage == "buffer", tensor.name


def test_half_precision_holds_large_intermediates_alone(plain):
    program, loss, weights = stepped(replace(MOBILE, half=True))
    halves = [t for t in program.tensors if t.dtype == "float16"]
    assert halves
    assert {t.role for t in halves} == {"intermediate"}
    assert loss == pytest.approx(plain[1], rel=2e-3)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, plain[2][name], rtol=2e-2, atol=2e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_gradients_that_half_precision_cannot_hold_are_right(plain, factor):
    program, loss, weights = stepped(replace(MOBILE, half=True), factor)
    assert "float16" in {t.dtype for t in program.tensors}
    assert loss == pytest.approx(factor * plain[1], rel=2e-3)
    for name, start in network().named_parameters():
        step, expected = weights[name] - start.detach().numpy(), plain[2][name] - start.detach().numpy()
        np.testing.assert_allclose(step, expected, rtol=0, atol=max(2e-2 * np.abs(expected).max(), 1e-6))


@pytest.mark.slow
def test_a_small_device_folds_long_lines(plain):
    program, loss, _ = stepped(replace(MOBILE, image_width=3, image_height=4096))
    folds = [t.layout.fold for t in program.tensors if t.layout.storage == "image"]
    assert max(folds) > 1
    assert loss == pytest.approx(plain[1], rel=1e-6)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_pooling_and_its_positions_in_double_precision(name):
    if not choose_device().double:
        pytest.skip("the device has no float64")
    x = torch.randn(2, 16, 9, 9, dtype=torch.float64)
    pool = nn.MaxPool2d(3, 2, 1, return_indices=True)
    program = lower(capture_step(pool, (x,), keep=frozenset(all_rules())).step, name)
    with Executor(program) as executor:
        values, places = executor.run(x)
    wanted, where = pool(x)
    np.testing.assert_array_equal(values, wanted.numpy())
    np.testing.assert_array_equal(places, where.numpy())
