"""One way from a model to the Program of its inference, from real or meta weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchedge
from torchedge.lowering.inference import capture_inference_step, lower_inference, target_of_device
from torchedge.lowering.limits import Limits, profile_limits
from torchedge.lowering.targets import TARGETS


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


def test_intermediate_images_share_the_arena_where_the_device_makes_images_from_buffers():
    device = torchedge.find_device("adreno-640")
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.Conv2d(256, 64, 3, padding=1))
    captured = capture_inference_step(model, (torch.zeros(1, 64, 64, 64),))
    target = target_of_device(device, profile_limits(device))
    program = lower_inference(captured, target)
    assert {t.layout.storage for t in program.tensors if t.role == "intermediate"} == {"image_buffer"}
    assert not program.arena.slots
