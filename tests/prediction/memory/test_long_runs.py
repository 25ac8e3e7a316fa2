"""The first step, later ones, and an evaluation between them, in one allocator."""

import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import InputError


def network():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2048), nn.Linear(2048, 512)
    )


def run(evaluate=16, batch_size=16, **options):
    profile = torchedge.simulate(
        network(), batch_size, input_size=(3, 64, 64), optimizer="adamw", evaluate=evaluate, **options
    )
    return profile, {stage.name: stage for stage in profile.stages}


def test_stages_of_a_run():
    profile, stages = run()
    assert [*stages] == ["first step", "second step", "later steps", "evaluation", "step after it"]
    assert stages["first step"].allocated_mib < stages["later steps"].allocated_mib
    assert stages["later steps"].allocated_mib == pytest.approx(profile.allocated_mib, rel=0.02)
    assert stages["evaluation"].allocated_mib < stages["later steps"].allocated_mib
    assert stages["step after it"] == type(stages["later steps"])(
        "step after it",
        *[getattr(stages["later steps"], f) for f in ("allocated_mib", "reserved_mib", "left_mib")],
    )


def test_a_large_evaluation_leaves_segments_that_emptying_the_cache_returns():
    kept, emptied = run(256)[1], run(256, empty_cache=True)[1]
    assert kept["evaluation"].reserved_mib > kept["later steps"].reserved_mib
    assert kept["step after it"].left_mib == kept["evaluation"].left_mib
    assert emptied["evaluation"].reserved_mib <= kept["evaluation"].reserved_mib
    assert emptied["step after it"].left_mib < kept["step after it"].left_mib


def test_weights_are_shared_and_inputs_are_not():
    _, small = run(1)
    _, large = run(64)
    more = large["evaluation"].allocated_mib - small["evaluation"].allocated_mib
    sample = (3 + 3 * 32) * 64 * 64 * 4 / 2**20  # an input and at most three activations
    assert 63 * sample / 2 < more <= 63 * sample
    weights = sum(p.numel() for p in network().parameters()) * 4 / 2**20
    assert small["evaluation"].allocated_mib > 3 * weights  # with the states


def test_captured_graphs_and_inferences_have_no_evaluation():
    graph = torchedge.capture(network(), input_size=(3, 64, 64))
    with pytest.raises(InputError, match="pass that"):
        torchedge.simulate(graph, 4, evaluate=4)
    with pytest.raises(InputError, match="between training steps"):
        torchedge.simulate(network(), 4, input_size=(3, 64, 64), mode="infer", evaluate=4)


def test_frozen_and_unused_parameters():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    model = Unused()
    model.used.bias.requires_grad_(False)
    stages = torchedge.simulate(model, 4, example=torch.zeros(4, 8), optimizer="adam", evaluate=8).stages
    assert len(stages) == 5
