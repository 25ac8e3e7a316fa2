"""Prunings as graphs and as modules are the same networks, and compute what masking would."""

import copy

import numpy as np
import pytest
import torch
from oracles.graph_checks import digest as digest_of
from oracles.graph_checks import verify
from torch import nn

import torchedge
from torchedge.errors import InputError
from torchedge.searching.pruning_space import PruningSpace
from torchedge.tracing.sources import load_model
from torchedge.tracing.vision import prepare_torchvision

functional = nn.functional


class Block(nn.Module):
    """Depthwise convolution, squeeze and excitation, a sum with the input."""

    def __init__(self, width):
        super().__init__()
        self.expand, self.depth = (
            nn.Conv2d(width, 2 * width, 1),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1, 1, 2 * width),
        )
        self.norm = nn.BatchNorm2d(2 * width)
        self.squeeze, self.excite = nn.Conv2d(2 * width, 16, 1), nn.Conv2d(16, 2 * width, 1)
        self.project = nn.Conv2d(2 * width, width, 1)

    def forward(self, x):
        y = torch.relu(self.norm(self.depth(torch.relu(self.expand(x)))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1)))))
        return self.project(y * gate) + x


class Everything(nn.Module):
    """All that ties channels: sums, concatenation, depthwise, grouped and shared layers, flattening."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.block = Block(32)
        self.shared = nn.Conv2d(32, 32, 3, padding=1)
        self.side = nn.Conv2d(32, 24, 1)
        self.mixed = nn.BatchNorm2d(56)
        self.before, self.grouped = nn.Conv2d(56, 48, 1), nn.Conv2d(48, 40, 3, padding=1, groups=4)
        self.hidden, self.head = nn.Linear(40 * 9, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.block(functional.relu(self.norm(self.stem(x)), inplace=True))
        x = torch.relu(self.shared(torch.relu(self.shared(x))))
        x = torch.relu(self.mixed(torch.cat([x, self.side(x)], 1)))
        x = torch.relu(self.grouped(torch.relu(self.before(x))))
        x = torch.flatten(functional.adaptive_avg_pool2d(x, 3), 1)
        return self.head(functional.dropout(torch.relu(self.hidden(x)), 0.1, self.training))


def randomised(model):
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


@pytest.fixture(scope="module")
def space():
    return PruningSpace(randomised(Everything()), (3, 32, 32), round_to=1, ratios=(0.3, 0.55, 1))


def encodings(space, count=4):
    rng = np.random.default_rng(0)
    return [*space.landmarks(), *(space.random(rng) for _ in range(count))]


def test_groups_are_what_has_to_be_pruned_together(space):
    assert set(space.choices) == {
        *("stem", "block.expand", "block.squeeze", "side", "hidden")
    }  # shared and block.project follow stem, depth and excite follow expand
    assert set(space.frozen) == {"before", "grouped", "head"}
    assert "grouped conv2d at grouped" in space.frozen["grouped"]
    assert space.choices["stem"] == (10, 18, 32)


def test_graphs_are_those_of_the_pruned_modules(space):
    for encoding in encodings(space):
        module = space.build(encoding)
        for mode in ("train", "infer"):
            graph = space.graph(encoding, mode)
            verify(graph)
            captured = torchedge.capture(module, input_size=space.input_size, mode=mode)
            assert digest_of(graph) == digest_of(captured)
            assert np.array_equal(torchedge.features(graph, 4).values, torchedge.features(captured, 4).values)


class Auxiliary(nn.Module):
    """A second head that only training reads."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.head, self.second = nn.Linear(64, 10), nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        main = self.head(torch.relu(self.body(x)).mean((2, 3)))
        return (main, self.second(x.mean((2, 3)))) if self.training else main


def test_parameters_that_one_mode_does_not_read_are_pruned_too():
    space = PruningSpace(Auxiliary(), (3, 16, 16))
    encoding = {"stem": 16, "body": 24}
    for mode in ("train", "infer"):
        captured = torchedge.capture(space.build(encoding), input_size=space.input_size, mode=mode)
        assert digest_of(space.graph(encoding, mode)) == digest_of(captured)


def test_a_pruned_module_computes_what_masking_would(space):
    """An oracle of its own: channels zeroed where they are made, and where they are normalised."""
    images = torch.randn(4, 3, 32, 32)
    makers = {
        "stem": ("stem", "norm", "block.project", "shared"),
        "block.expand": ("block.expand", "block.depth", "block.norm", "block.excite"),
        "block.squeeze": ("block.squeeze",),
        "side": ("side",),
        "hidden": ("hidden",),
    }
    for encoding in encodings(space):
        masked = copy.deepcopy(space.model).eval()
        kept = space.kept(encoding)
        mask = {name: np.setdiff1d(np.arange(space.groups.counts[name]), kept[name]) for name in kept}
        for group, layers in makers.items():
            for layer in layers:
                module = masked.get_submodule(layer)
                for parameter in (module.weight, module.bias):
                    if parameter is not None:
                        parameter.data[mask[group]] = 0
        gone = np.concatenate([mask["stem"], 32 + mask["side"]])
        masked.mixed.weight.data[gone], masked.mixed.bias.data[gone] = 0, 0
        with torch.no_grad():
            found, expected = space.build(encoding).eval()(images), masked(images)
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_model_is_left_as_it_was(space):
    before = {name: p.clone() for name, p in space.model.named_parameters()}
    space.build(space.landmarks()[0])
    assert all(torch.equal(p, before[name]) for name, p in space.model.named_parameters())


def test_a_pruned_module_says_the_sizes_it_has_and_trains(space):
    module = space.build(space.landmarks()[0])
    depth = module.block.depth
    assert depth.groups == depth.in_channels == depth.out_channels == depth.weight.shape[0] < 64
    assert module.hidden.out_features == module.head.in_features and module.mixed.num_features < 56
    module(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_channels_with_the_largest_weights_stay():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    model[0].weight.data = torch.arange(1.0, 17)[:, None, None, None].expand(16, 3, 3, 3).clone()
    space = PruningSpace(model, (3, 16, 16), round_to=1)
    assert space.kept({"0": 4})["0"].tolist() == [12, 13, 14, 15]
    assert space.kept_norm([{"0": 4}]) == [pytest.approx(58 / 136)] and space.kept_norm([{"0": 16}]) == [1.0]
    other = PruningSpace(model, (3, 16, 16), round_to=1, strategy="random", seed=5)
    assert other.kept({"0": 4})["0"].tolist() != [12, 13, 14, 15]


def test_numbers_of_channels_are_rounded():
    model = nn.Sequential(nn.Conv2d(3, 44, 3), nn.ReLU(), nn.Conv2d(44, 4, 3))
    assert PruningSpace(model, (3, 16, 16), round_to=8).choices == {"0": (8, 16, 24, 32, 40, 44)}
    assert PruningSpace(model, (3, 16, 16), round_to=1, ratios=(0.01, 0.5)).choices == {"0": (2, 22)}


def test_what_is_sent_to_workers_holds_no_weights(space):
    state = space.__getstate__()
    assert state["model"] is None and not state["_maps"] and set(state["_families"]) == {"train", "infer"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PruningSpace("resnet18"), "model is a str"),
        (lambda: PruningSpace(nn.Conv2d(3, 8, 3), (3, 8, 8)), "no channels that may be pruned"),
        (lambda: PruningSpace(Everything(), ratios=()), "ratios is"),
        (lambda: PruningSpace(Everything(), ratios=(0, 1)), "ratios is"),
        (lambda: PruningSpace(Everything(), round_to=0), "round_to is 0"),
        (lambda: PruningSpace(Everything(), strategy="best"), "strategy is 'best'"),
    ],
)
def test_wrong_spaces_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("encoding", [{}, {"stem": 32}, None])
def test_wrong_encodings_are_refused(space, encoding):
    with pytest.raises(InputError, match="expected a dict of"):
        space.build(encoding)


def test_numbers_that_a_group_cannot_keep_are_refused(space):
    with pytest.raises(InputError, match="stem is 11; expected one of 10, 18, 32"):
        space.graph({**space.landmarks()[0], "stem": 11})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("resnet18", "mobilenet_v2", "vgg11_bn", "squeezenet1_1", "googlenet", "densenet121"),
        *("efficientnet_b0", "shufflenet_v2_x1_0", "resnext50_32x4d"),
    ],
)
def test_networks_of_torchvision(name):
    prepare_torchvision()
    pytest.importorskip("torchvision")
    model, _ = load_model(name)
    space = PruningSpace(model, (3, 224, 224), name=name)
    for encoding in encodings(space, 2)[-3:]:
        module = space.build(encoding)
        for mode in ("train", "infer"):
            captured = torchedge.capture(module, input_size=space.input_size, mode=mode)
            assert digest_of(space.graph(encoding, mode)) == digest_of(captured)
