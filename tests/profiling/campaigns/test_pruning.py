"""Pruning reaches the level asked for on every network of the paper, and leaves the model alone."""

import copy
from itertools import cycle

import numpy as np
import pytest
import torch
from oracles.graph_checks import verify
from torch import nn

from torchedge.errors import InputError
from torchedge.profiling.campaigns.pruning import prune, untrained_norms
from torchedge.profiling.topologies import build_network, recipe_of
from torchedge.tracing.capturing import capture
from torchedge.tracing.vision import prepare_torchvision

SIZE = (3, 224, 224)
GOOGLENET = {"aux_logits": False, "transform_input": True, "init_weights": False}
PAPER = (
    "resnet18", "resnet50", "mobilenet_v2", "squeezenet1_0", "squeezenet1_1", "mnasnet1_0", "googlenet",
    "alexnet",
)  # fmt: skip
OTHERS = ("densenet121", "efficientnet_b0", "shufflenet_v2_x0_5")


def network(name: str) -> nn.Module:
    prepare_torchvision()
    pytest.importorskip("torchvision")
    return build_network(recipe_of(name, GOOGLENET if name == "googlenet" else {}))


def convolutions(model: nn.Module) -> list[int]:
    return [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), zip(PAPER, cycle(["random", "l1"]), strict=False))
def test_levels_are_reached(name, strategy):
    model = network(name)
    before = convolutions(model)
    total = sum(p.numel() for p in model.parameters())
    for level in (5, 50, 90):
        pruned = prune(model, SIZE, level, strategy=strategy, norms=untrained_norms(model, 0), seed=level)
        assert abs(pruned.reached - level) < 0.5
        assert pruned.parameters == sum(p.numel() for p in pruned.model.parameters())
        assert pruned.reached == pytest.approx(100 * (1 - pruned.parameters / total))
        with torch.no_grad():
            assert pruned.model.eval()(torch.zeros(2, *SIZE, device="meta")).shape == (2, 1000)
    assert convolutions(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks(name):
    model = network(name)
    for level in (10, 60, 90):
        assert abs(prune(model, SIZE, level).reached - level) < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regnet_x_400mf", "convnext_tiny"])
def test_grouped_and_channels_last_networks(name):
    model = network(name)
    for strategy in ("random", "l1"):
        pruned = prune(model, SIZE, 90, strategy=strategy, norms=untrained_norms(model, 0))
        assert abs(pruned.reached - 90) < 0.5
        assert pruned.parameters == sum(p.numel() for p in pruned.model.parameters())


@pytest.mark.slow
def test_heads_that_only_train_are_pruned_too():
    model = network("inception_v3")
    pruned = prune(model, (3, 299, 299), 50).model.train()
    outputs = pruned(torch.zeros(2, 3, 299, 299, device="meta"))
    assert [output.shape for output in outputs] == [(2, 1000)] * 2


def test_model_stays_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5)).train()
    before = copy.deepcopy(model.state_dict())
    prune(model, (3, 8, 8), 50, strategy="l1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_weights_of_kept_filters_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    weight = model[0].weight.detach().clone()
    pruned = prune(model, (3, 8, 8), 50, strategy="l1")
    assert torch.equal(model[0].weight, weight)
    kept = pruned.model[0].weight
    order = weight.abs().flatten(1).mean(1).argsort(descending=True)[: len(kept)].sort().values
    assert torch.equal(kept, weight[order])  # those with the largest norms, in their order
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        model[0].weight[[i for i in range(8) if i not in order]] = 0
        model[0].bias[[i for i in range(8) if i not in order]] = 0
        assert torch.allclose(pruned.model(x), model(x), atol=1e-6)


def test_l1_takes_more_from_deeper_layers():
    model = network("resnet18")
    pruned = prune(model, SIZE, 50, strategy="l1", norms=untrained_norms(model, 0))
    share = np.array(convolutions(pruned.model)) / np.array(convolutions(model))
    assert share[:5].mean() > share[5:15].mean() > share[-5:].mean()
    assert min(convolutions(pruned.model)) > 8


def test_random_takes_every_layer_alike():
    model = network("resnet50")
    pruned = prune(model, SIZE, 50)
    share = np.array(convolutions(pruned.model)) / np.array(convolutions(model))
    assert share.std() < 0.06


def test_uniform_takes_the_same_share():
    model = network("resnet18")
    pruned = prune(model, SIZE, 50, scope="uniform")
    share = np.array(convolutions(pruned.model)) / np.array(convolutions(model))
    assert share.max() - share.min() < 0.02


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "resnext50_32x4d"])
def test_round_to(name):
    pruned = prune(network(name), SIZE, 40, round_to=8)
    assert all(channels % 8 == 0 for channels in convolutions(pruned.model))
    assert abs(pruned.reached - 40) < 2


def test_same_seed_same_network():
    model = network("squeezenet1_1")
    first, again, other = (convolutions(prune(model, SIZE, 50, seed=s).model) for s in (1, 1, 2))
    assert first == again != other


def test_modes_and_gradients_stay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5)).train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    pruned = prune(model, (3, 8, 8), 30).model
    assert [m.training for m in pruned] == [True, False, True, True]
    assert not pruned[3].weight.requires_grad and pruned[0].weight.requires_grad
    assert all(p.grad is None for p in pruned.parameters())


def test_what_saturates_says_what_it_reached():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 50))
    pruned = prune(model, (3, 8, 8), 90)
    assert convolutions(pruned.model) == [1] and 40 < pruned.reached < 60


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": 100}, "level 100 is out of range"),
        ({"level": -1}, "out of range"),
        ({"level": 50, "strategy": "l2"}, "expected one of random, l1"),
        ({"level": 50, "scope": "local"}, "expected one of global, uniform"),
        ({"level": 50, "round_to": 0}, "round_to is 0"),
        ({"level": 50, "input_size": (3, 4, 4)}, "does not run on an input"),
    ],
)
def test_what_is_wrong_is_named(options, said):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5))
    with pytest.raises(InputError, match=said):
        prune(model, **{"input_size": (3, 8, 8), **options})


def test_nothing_to_prune():
    with pytest.raises(InputError, match="no channels that may be pruned"):
        prune(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), (3, 8, 8), 50)
    with pytest.raises(InputError, match="has no parameters"):
        prune(nn.ReLU(), (3, 8, 8), 50)


def test_l1_without_weights():
    with pytest.raises(InputError, match="norms="):
        prune(network("alexnet"), SIZE, 50, strategy="l1")
    norms = dict(untrained_norms(network("alexnet"), 0))
    del norms["features.3"]
    with pytest.raises(InputError, match=r"norms= with features\.3\.weight"):
        prune(network("alexnet"), SIZE, 50, strategy="l1", norms=norms)


def test_channels_follow_an_operator_in_place_on_a_view():
    """A flattened feature map is a view: autograd writes the tensor behind it, whose channels stay."""
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Dropout(inplace=True), nn.Linear(32, 10))
    verify(capture(model, input_size=(3, 16, 16), mode="train"))
    assert prune(model, (3, 16, 16), 50).model[0].out_channels < 32
