"""Pruned modules compute what their kept channels alone would, in grouped and in channels-last layers too."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.pruning.channels import ChannelGroups, ChannelMap, ParameterCount, channel_norms, prune_module

functional = nn.functional


def follow(model, size):
    groups = ChannelGroups()
    maps = [
        ChannelMap(torchedge.capture(model, input_size=size, mode=mode), groups)
        for mode in ("train", "infer")
    ]
    return groups, maps


def size_of(model):
    return sum(p.numel() for p in model.parameters())


def test_groups_of_a_grouped_convolution_keep_the_same_channels():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 1), nn.ReLU(), nn.Conv2d(24, 16, 3, groups=4), nn.ReLU(), nn.Conv2d(16, 5, 1)
    ).eval()
    groups, maps = follow(model, (3, 6, 6))
    assert groups.free() == ["0", "2"] and groups.parts == {"0": 4, "2": 4}
    kept = {
        "0": np.add.outer(6 * np.arange(4), [1, 2, 5]).ravel(),
        "2": np.add.outer(4 * np.arange(4), [0, 3]).ravel(),
    }
    pruned = prune_module(model, maps, kept)
    assert pruned[2].weight.shape == (8, 3, 3, 3) and (pruned[2].in_channels, pruned[2].groups) == (12, 4)
    masked, images = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
    for name, channels in kept.items():
        gone = np.setdiff1d(np.arange(groups.counts[name]), channels)
        masked[int(name)].weight.data[gone] = masked[int(name)].bias.data[gone] = 0
    assert torch.allclose(pruned(images), masked(images), atol=1e-6)
    counts = np.array([len(channels) for channels in kept.values()])
    assert ParameterCount(model, maps, list(kept)).after(counts) == size_of(pruned)


def test_parts_that_meet_are_united():
    model = nn.Sequential(
        nn.Conv2d(3, 24, 1), nn.GroupNorm(3, 24), nn.Conv2d(24, 24, 1, groups=4), nn.Conv2d(24, 5, 1)
    )
    groups, maps = follow(model, (3, 6, 6))
    assert groups.parts == {"0": 12, "2": 4}
    assert groups.rigid["0"].startswith("group_norm") and "grouped conv2d" in groups.rigid["2"]
    pruned = prune_module(model, maps, {"0": np.arange(12) * 2})
    assert pruned[1].num_channels == 12 and pruned(torch.zeros(1, 3, 6, 6)).shape == (1, 5, 6, 6)


class ChannelsLast(nn.Module):
    """A block of ConvNeXt: layer norm and two linear layers over the last dimension, and a layer scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.expand, self.project = nn.LayerNorm(8), nn.Linear(8, 20), nn.Linear(20, 8)
        self.scale, self.head = nn.Parameter(torch.randn(8, 1, 1)), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.project(functional.gelu(self.expand(y)))
        return self.head(x + self.scale * y.permute(0, 3, 1, 2))


def test_channels_are_followed_into_the_last_dimension():
    torch.manual_seed(0)
    model = ChannelsLast().eval()
    nn.init.normal_(model.norm.weight)
    groups, maps = follow(model, (3, 5, 5))
    assert groups.free() == ["stem", "expand"] and groups.rigid["stem"].startswith("layer_norm")
    few, many = np.array([0, 2, 3, 7]), np.arange(1, 20, 2)
    pruned = prune_module(model, maps, {"stem": few, "expand": many})
    assert pruned.norm.normalized_shape == (4,) and pruned.expand.out_features == 10
    assert size_of(pruned) == ParameterCount(model, maps, ["stem", "expand"]).after(np.array([4, 10]))
    images = torch.randn(2, 3, 5, 5)
    x = model.stem(images)[:, few]
    y = functional.conv2d(x, model.depth.weight[few], model.depth.bias[few], padding=1, groups=4)
    y = functional.layer_norm(y.permute(0, 2, 3, 1), (4,), model.norm.weight[few], model.norm.bias[few])
    y = functional.gelu(functional.linear(y, model.expand.weight[many][:, few], model.expand.bias[many]))
    y = functional.linear(y, model.project.weight[few][:, many], model.project.bias[few])
    x = x + model.scale[few] * y.permute(0, 3, 1, 2)
    expected = functional.conv2d(x, model.head.weight[:, few], model.head.bias)
    assert torch.allclose(pruned(images), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "operator"),
    [
        ([nn.Conv2d(3, 8, 1), nn.LayerNorm([8, 6, 6]), nn.Conv2d(8, 4, 1)], "layer_norm"),
        ([nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8, affine=False), nn.Conv2d(8, 4, 1)], "group_norm"),
        ([nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1, groups=8), nn.Conv2d(16, 4, 1)], "grouped conv2d"),
        ([nn.Conv2d(3, 8, 1), nn.Linear(6, 5), nn.Conv2d(8, 4, 1)], "linear"),
    ],
)
def test_channels_that_cannot_be_followed_are_frozen(layers, operator):
    groups, _ = follow(nn.Sequential(*layers), (3, 6, 6))
    assert groups.frozen["0"].startswith(operator)


def test_modules_that_share_a_weight_shrink_together():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1))
    model[2].weight = model[1].weight
    groups, maps = follow(model, (3, 6, 6))
    assert groups.free() == ["0"]
    pruned = prune_module(model, maps, {"0": np.arange(5)})
    assert pruned[2].weight is pruned[1].weight and pruned[2].weight.shape[:2] == (5, 5)
    assert pruned(torch.zeros(1, 3, 6, 6)).shape == (1, 4, 6, 6)


def test_norms_of_filters_can_be_given():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    _, maps = follow(model, (3, 6, 6))
    assert channel_norms(model, maps, ["0"])["0"] == pytest.approx(
        model[0].weight.detach().abs().mean((1, 2, 3)).numpy()
    )
    assert channel_norms(model, maps, ["0"], {"0": np.arange(4.0)})["0"].tolist() == [0, 1, 2, 3]
