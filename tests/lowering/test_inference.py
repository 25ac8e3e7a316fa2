"""One way from a model to the Program of its inference, from real or meta weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.lowering.assembly import lower
from torchedge.lowering.inference import capture_inference_step, lower_inference, target_of_device
from torchedge.lowering.limits import Limits, profile_limits
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step


def small(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_weights_without_values_give_the_same_program(target):
    x = torch.zeros(2, 3, 8, 8)
    real, meta = (
        lower_inference(capture_inference_step(small(device), (x,)), TARGETS[target])
        for device in ("cpu", "meta")
    )
    assert real.digest == meta.digest


def test_a_training_model_is_captured_in_evaluation_mode_and_stays_as_it_is():
    model = small().train()
    captured = capture_inference_step(model, (torch.zeros(2, 3, 8, 8),))
    assert model.training and not captured.step.updates


def test_the_target_of_a_device_has_its_limits_of_images():
    device = torchedge.find_device("adreno-640")
    limits = profile_limits(device)
    target = target_of_device(device, limits, "float16")
    assert target.name == "mobile" and target.half
    assert target.pitch == target.shared_pitch == limits.pitch_texels
    assert target.image_width == limits.image_width
    bare = target_of_device(device, Limits("phone"))
    assert (bare.shared_pitch, bare.half) == (0, False)


class Classifier(nn.Module):
    """An embedding, a product, a convolution, vectors and a number: weights of every kind."""

    def __init__(self):
        super().__init__()
        self.table, self.project = nn.Embedding(64, 32), nn.Linear(32, 48)
        self.conv, self.small = nn.Conv1d(48, 64, 3), nn.Linear(8, 2)
        self.gain, self.long = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(4096))

    def forward(self, tokens):
        x = self.conv(self.project(self.table(tokens)).relu().transpose(1, 2)) * self.gain
        return self.small(x.flatten(1)[:, :8] + self.long[:8])


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_matrices_of_weights_are_stored_in_half_precision(target):
    torch.manual_seed(0)
    model, tokens = Classifier().eval(), torch.randint(64, (2, 12))
    captured = capture_inference_step(model, (tokens,))
    program = lower_inference(captured, replace(TARGETS[target], half=True))
    dtypes = {t.name: t.dtype for t in program.tensors if t.role == "parameter"}
    halves = {"table.weight", "project.weight", "conv.weight"}
    assert {name for name, dtype in dtypes.items() if dtype == "float16"} == halves
    with Executor(program, checks=True) as executor:
        executor.load({name: t.detach().numpy() for name, t in captured.tensors.items()})
        got = executor.run(tokens.numpy())[0]
    expected = model(tokens).detach().numpy()
    np.testing.assert_allclose(got, expected, atol=4e-3 * np.abs(expected).max())
    assert np.abs(got - expected).max() > 0


def test_a_training_step_keeps_its_parameters_in_single_precision():
    model, x = nn.Linear(64, 64), torch.zeros(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture_step(
        model, (x,), loss=torch.Tensor.sum, optimizer=optimizer, keep=frozenset(all_rules())
    )
    program = lower(captured.step, replace(TARGETS["cpu"], half=True))
    assert {t.dtype for t in program.tensors if t.role == "parameter"} == {"float32"}


def test_weights_that_are_updated_stay_in_single_precision():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sums", torch.zeros(64, 64))

        def forward(self, x):
            self.sums += x
            return self.sums * 2

    captured = capture_inference_step(Counting(), (torch.zeros(64, 64),))
    program = lower_inference(captured, replace(TARGETS["cpu"], half=True))
    assert {t.dtype for t in program.tensors if t.role == "buffer"} == {"float32"}


def test_intermediate_images_share_the_arena_where_the_device_makes_images_from_buffers():
    device = torchedge.find_device("adreno-640")
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.Conv2d(256, 64, 3, padding=1))
    captured = capture_inference_step(model, (torch.zeros(1, 64, 64, 64),))
    target = target_of_device(device, profile_limits(device))
    program = lower_inference(captured, target)
    assert {t.layout.storage for t in program.tensors if t.role == "intermediate"} == {"image_buffer"}
    assert not program.arena.slots
